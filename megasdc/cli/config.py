"""Commands on the configuration: `megasdc check-config`, `config-table`, `schema`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megasdc.cli.app import Json, Overrides, app, input_argument, input_option, output_option
from megasdc.common.errors import ConfigError, DataError
from megasdc.common.program import echo, write_atomically
from megasdc.common.words import number_of

if TYPE_CHECKING:
    from megasdc.config.checks import BatchLayout
    from megasdc.config.load import RunConfig
    from megasdc.config.local_sgd import PlannedRounds
    from megasdc.train.memory import StepMemory


@app.command("check-config", epilog="Example: megasdc check-config configs/smoke.json --world-size 2")
def check_config(
    file: Annotated[Path, input_argument(ConfigError, help="JSON configuration file.")],
    overrides: Overrides = (),
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Also check layout and batch sizes for so many ranks.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print only the complete configuration, every default filled in.")
    ] = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=1,
            help="Vocabulary entries, to predict the memory of a step; default: of the prepared data, else "
            "data.tokenizer.vocab_size.",
        ),
    ] = None,
    device_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--device-memory-gib", min=0.001, help="Predict for a GPU's buffers; warn where a step needs more."
        ),
    ] = None,
    guard: Annotated[
        bool, typer.Option("--guard", help="The file is that of megasdc.attach or of megasdc run, not of a run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a configuration and report the result; exit code 70 and all problems if it is wrong.

    Relative paths in the file are relative to the folder that the run is started in.
    """
    if guard:
        given = {"--world-size": world_size, "--vocab-size": vocab_size, "--device-memory-gib": device_memory_gib}
        if names := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter("not with --guard, whose model is not known", param_hint=", ".join(names))
        _check_guard(file, overrides, show, as_json)
        return
    with _problems_as_json(file, as_json):
        found = check_config_file(file, overrides, world_size, vocab_size, device_memory_gib)
    if as_json:
        echo(json.dumps({**found.as_dict(), "resolved": found.config.resolved()}, indent=2))
        return
    found.print(show, device_memory_gib)
    if show:
        echo(json.dumps(found.config.resolved(), indent=2))


@dataclass(frozen=True)
class CheckedFile:
    """A file without problems, and what is to be known of it.

    Args:
        layout: of the ranks; None: their number was not given.
        memory: predicted for a rank of each stage; empty: not predicted.
        warnings: of settings that are probably unintended.
        notes: what was not checked, or is missing for a start.
        rounds: of replicas of Local-SGD; None: the file asks for none.
    """

    file: Path
    config: RunConfig
    layout: BatchLayout | None
    memory: list[StepMemory]
    warnings: list[str]
    notes: list[str]
    rounds: PlannedRounds | None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, without the configuration."""
        return {
            "ok": True,
            "source": str(self.file),
            "warnings": self.warnings,
            "notes": self.notes,
            "layout": asdict(self.layout) if self.layout is not None else None,
            "memory": [{**asdict(stage), "total": stage.total} for stage in self.memory] or None,
            "local_sgd": asdict(self.rounds) if self.rounds is not None else None,
        }

    def print(self, show: bool = False, device_memory_gib: float | None = None) -> None:
        """Print it for people; with ``show`` to standard error."""
        from megasdc.train.memory import unpredicted_because

        _print_verdict(self.file, self.warnings, self.notes, show)
        if self.layout is not None:
            echo(_describe(self.layout, self.rounds), err=show)
            echo(_describe_memory(self.memory, device_memory_gib, unpredicted_because(self.config)), err=show)
        if self.rounds is not None:
            echo(self.rounds.render(), err=show)


def check_config_file(
    file: Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    vocab_size: int | None = None,
    device_memory_gib: float | None = None,
) -> CheckedFile:
    """Check a configuration; arguments as of ``megasdc check-config``.

    Raises:
        ConfigError: with every problem.
    """
    from megasdc.config.checks import find_warnings
    from megasdc.config.local_sgd import PlannedRounds
    from megasdc.train.memory import (
        host_memory_bytes,
        memory_of_stages,
        memory_warning,
        predict_step_memory,
        unpredicted_because,
    )

    config, layout = _load(file, overrides, world_size)
    entries = vocab_size or _vocabulary(config)
    data, micro_batch = (layout.data, layout.micro_batch_size) if layout else (None, 1)
    too_large = memory_warning(config, memory_of_stages(config, 1, data, micro_batch), host_memory_bytes())
    parameters = sum(one.parameters for one in memory_of_stages(config, entries, data, micro_batch))
    memory: list[StepMemory] = []
    if layout is not None and unpredicted_because(config) is None:
        memory = predict_step_memory(config, layout, entries, on_gpu=device_memory_gib is not None)
    too_large_step = _step_warning(memory, device_memory_gib) if memory and device_memory_gib is not None else None
    warnings = [*find_warnings(config), *filter(None, (too_large, too_large_step))]
    notes = [*_protection(config, layout), *_notes(file, overrides, config, layout)]
    sections = config.megasdc
    batch = config.deepspeed.get("train_batch_size") if layout is None else layout.train_batch_size
    steps, length = sections.training.steps, sections.data.sequence_length
    rounds = PlannedRounds.of(sections.local_sgd, steps, batch, length, parameters)
    return CheckedFile(file, config, layout, memory, warnings, notes, rounds)


def _vocabulary(config: RunConfig) -> int:
    """Entries of the vocabulary: of the prepared data, or where there are none as the file says."""
    from megasdc.data.manifest import DataManifest

    data = config.megasdc.data
    try:
        return DataManifest.load(data.path).tokenizer.vocab_size
    except DataError:  # what is wrong with data that are there, a start says
        return data.tokenizer.vocab_size


def _check_guard(file: Path, overrides: Sequence[str], show: bool, as_json: bool) -> None:
    """`check-config --guard`."""
    from megasdc.attached.protect import Conditions, expand, guard_start_lines
    from megasdc.attached.settings import golden_problems, load_settings
    from megasdc.config.schema import idle_warnings

    with _problems_as_json(file, as_json):
        settings = expand(load_settings(file, overrides, "runs/SCRIPT", word_needed=True), Conditions())
    warnings, notes = list(idle_warnings(settings, "")), golden_problems(settings, writes=True)
    notes = [*guard_start_lines(settings, Conditions()), *notes]
    if settings.logging.run_dir == "runs/SCRIPT":
        notes.append("logging.run_dir: none is named, so that the folder is runs/ and the name of the script")
    resolved = settings.model_dump(mode="json")
    if as_json:
        result = {"ok": True, "source": str(file), "warnings": warnings, "notes": notes, "resolved": resolved}
        echo(json.dumps(result, indent=2))
        return
    _print_verdict(
        file,
        warnings,
        [*notes, "names of submodules and parameters, and what the engine forbids, not checked: they need the model"],
        show,
    )
    if show:
        echo(json.dumps(resolved, indent=2))


@contextmanager
def _problems_as_json(file: Path, as_json: bool) -> Iterator[None]:
    """Problems of a file that is read in a ``with`` block are the command's result."""
    try:
        yield
    except ConfigError as error:
        if not as_json:
            raise
        echo(json.dumps({"ok": False, "source": str(file), "problems": error.problems}, indent=2))
        raise typer.Exit(error.exit_code) from error


def _print_verdict(file: Path, warnings: Sequence[str], notes: Sequence[str], show: bool) -> None:
    """With ``show`` standard output holds the file alone."""
    verdict = f"OK, with {len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else "OK"
    echo(f"{file}: {verdict}", err=show)
    for warning in warnings:
        echo(f"megasdc: warning: {warning}", err=True)
    for note in notes:
        echo(note, err=show)


def _load(file: Path, overrides: Sequence[str], world_size: int | None) -> tuple[RunConfig, BatchLayout | None]:
    """The configuration, and its layout for a number of ranks; files of delays are read too."""
    from megasdc.config.checks import check_layout, layout_problems
    from megasdc.config.load import load_config

    def of_layout(found: RunConfig) -> list[str]:
        return [] if world_size is None else layout_problems(found, world_size)

    config = load_config(file, overrides, find_more=of_layout)
    layout = check_layout(config, world_size) if world_size is not None else None
    sections = config.megasdc
    if any(spec.path is not None for spec in sections.delay):
        from megasdc.faults.delay import check_delays

        check_delays(sections.delay, layout.accumulation_steps if layout else 1, sections.parallel.pipeline)
    return config, layout


def _notes(file: Path, overrides: Sequence[str], config: RunConfig, layout: BatchLayout | None) -> list[str]:
    """What was not checked, or is missing for a start: nothing wrong with the file."""
    from megasdc.config.checks import disturbances
    from megasdc.data.manifest import MANIFEST_FILE

    data = config.megasdc.data
    command = data.prepare_command(file, overrides)
    notes = [
        f"data: {folder} is not there yet: run {command}"
        for folder in data.folders
        if not (Path(folder) / MANIFEST_FILE).is_file()
    ]
    notes += [*_missing_files(file, overrides, config), *disturbances(config.megasdc)]
    return notes if layout is not None else [*notes, "layout and batch not checked: give --world-size N"]


def _missing_files(file: Path, overrides: Sequence[str], config: RunConfig) -> Iterator[str]:
    """What a start reads besides the data and is not there yet, a sentence each."""
    sections = config.megasdc
    if (golden := sections.sdc.golden) is not None and not Path(golden).is_file():
        yield f"sdc.golden: {golden} is not there yet: run {sections.sdc.record_command(file, overrides)}"
    folders = {"checkpoint.universal": sections.checkpoint.universal}
    folders["model.initial_weights"] = sections.model.initial_weights
    for name, folder in folders.items():
        if folder is not None and not Path(folder).is_dir():
            yield f"{name}: there is no folder {folder}, which a run without a checkpoint starts from"


def _protection(config: RunConfig, layout: BatchLayout | None) -> list[str]:
    """What the word `protect` covers, at which cost, and what not."""
    from megasdc.config.protect import start_lines

    return start_lines(config.megasdc, config.deepspeed, None if layout is None else layout.data)


def _step_warning(memory: list[StepMemory], device_gib: float) -> str | None:
    """A warning if the largest stage needs more memory than a device has."""
    from megasdc.train.memory import MIB

    largest = max(memory, key=lambda stage: stage.total)
    if largest.total <= device_gib * 1024 * MIB:
        return None
    return (
        f"megasdc.model: a step is predicted to need {largest.total / MIB / 1024:,.2f} GiB on stage "
        f"{memory.index(largest)} ({largest.moment}), but a device has {device_gib:,.2f} GiB; make "
        "micro-batches smaller, recompute (pipeline.activation_checkpoint_interval), or use more ranks."
    )


def _describe(layout: BatchLayout, rounds: PlannedRounds | None) -> str:
    apart = "" if rounds is None else f"each of {rounds.replicas} replicas: "
    study = f"{layout.replicas} replicas of a study, each: " if layout.replicas > 1 else ""
    samples = number_of(layout.train_batch_size, "sample")
    batch = f"micro-batch {layout.micro_batch_size} x accumulation {layout.accumulation_steps} x data {layout.data}"
    if layout.is_uneven:
        most = layout.accumulation_steps
        batch = (
            f"{layout.train_batch_size // layout.micro_batch_size} micro-batches of {layout.micro_batch_size} on "
            f"{layout.data} replicas, {most - 1} or {most} each"
        )
    return (
        f"{apart}{study}{number_of(layout.world_size, 'rank')} = tensor {layout.tensor} x pipeline {layout.pipeline} x "
        f"data {layout.data}; {samples} a step = {batch}"
    )


def _describe_memory(memory: list[StepMemory], device_gib: float | None, not_predicted: str | None) -> str:
    from megasdc.train.memory import MIB, memory_table

    if not_predicted is not None:
        return f"peak memory of a step is not predicted with {not_predicted} set"
    kind = "a CPU" if device_gib is None else "a GPU"
    text = f"predicted peak of a step on {kind}, MiB of tensors of a rank:\n{memory_table(memory)}"
    largest = max(stage.total for stage in memory) / MIB / 1024
    if device_gib is None or largest > device_gib:
        return text
    return f"{text}\nlargest rank {largest:,.2f} of {device_gib:,.4g} GiB: fits"


@app.command("config-table", epilog="Example: megasdc config-table --check docs/reference/configuration.md")
def config_table(
    write: Annotated[
        Path | None, input_option("--write", reads=DataError, help="Put the table between the file's markers.")
    ] = None,
    check: Annotated[
        Path | None,
        input_option(
            "--check", reads=DataError, help="Change nothing; exit code 1 if the file's table is out of date."
        ),
    ] = None,
) -> None:
    """Print the markdown table of every configuration field, or keep what is generated in a file up to date.

    In a file: the table of fields between the markers `config-table`, those of versions between `versions-table`, all
    commands between `command-line`.
    """
    from megasdc.common.versions import render_tables
    from megasdc.config.table import render_table

    tables = {"config-table": render_table, "versions-table": render_tables, "command-line": _render_commands}
    if write is None and check is None:
        echo(render_table(), nl=False)
    update_tables(write, check, tables, "megasdc config-table")


def update_tables(
    write: Path | None, check: Path | None, tables: Mapping[str, Callable[[], str]], command: str
) -> None:
    """Write what is generated in a file, or exit with 1 if it is out of date.

    Args:
        write: the file to write; None: none.
        check: the file to check; None: none.
        tables: see ``with_tables``.
        command: that writes it, for the message.
    """
    from megasdc.config.table import with_tables

    try:
        if write is not None:
            text, fresh = with_tables(write, tables)
            if text != fresh:
                write_atomically(write, fresh)
            echo(f"{write}: {'was up to date' if text == fresh else 'table written'}")
        if check is not None and len(set(with_tables(check, tables))) > 1:
            echo(f"{check}: table is out of date; run: {command} --write {check}", err=True)
            raise typer.Exit(1)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _render_commands() -> str:
    """Markdown of every command with its options."""
    return render_commands(app, "megasdc")


def render_commands(program: typer.Typer, name: str) -> str:
    """Markdown of every command of a program with its options.

    Args:
        program: its application.
        name: as people type it.
    """
    from typer.cli import get_docs_for_click

    command = typer.main.get_command(program)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), indent=1, name=name).strip() + "\n"


@app.command("schema", epilog="Example: megasdc schema --out megasdc.schema.json")
def schema(
    out: Annotated[Path | None, output_option("--out", help="Write it to this file instead of printing it.")] = None,
) -> None:
    """Print the JSON Schema of a configuration file, from which editors complete keys and explain them.

    Name it in the file, as in `"$schema": "megasdc.schema.json"`; training ignores that key.
    """
    from megasdc.config.load import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        echo(text, nl=False)
    else:
        write_atomically(out, text)
        echo(f"{out}: written")
