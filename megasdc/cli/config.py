"""Commands on the configuration: `megasdc check-config`, `config-table`, `schema`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, Overrides, app, input_argument, input_option, output_option
from megasdc.errors import ConfigError, DataError
from megasdc.program import write_whole


@app.command("check-config", epilog="Example: megasdc check-config configs/smoke.json --world-size 2")
def check_config(
    file: Annotated[Path, input_argument(ConfigError, help="JSON configuration file.")],
    overrides: Overrides = None,
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
            help="Vocabulary entries, to predict the memory of a step; default: data.tokenizer.vocab_size.",
        ),
    ] = None,
    device_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--device-memory-gib", min=0.001, help="Predict for a GPU's buffers; warn where a step needs more."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a configuration and report the result; exit code 70 and all problems if it is wrong.

    Relative paths in the file are relative to the folder that the run is started in.
    """
    from megasdc.config import check_layout, find_warnings, load_config
    from megasdc.train.memory import host_memory_bytes, memory_of_stages, memory_warning
    from megasdc.train.memory_step import MIB, memory_table, predict_step_memory, unpredicted_because

    try:
        config = load_config(file, overrides or ())
        layout = check_layout(config, world_size) if world_size is not None else None
        if any(spec.path is not None for spec in config.megasdc.delay):
            from megasdc.faults.delay import check_delays

            sections = config.megasdc
            check_delays(sections.delay, layout.accumulation_steps if layout else 1, sections.parallel.pipeline)
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"ok": False, "source": str(file), "problems": error.problems}, indent=2))
        raise typer.Exit(error.exit_code) from error
    warnings = find_warnings(config)
    data, micro_batch = (layout.data, layout.micro_batch_size) if layout else (None, 1)
    stages = memory_of_stages(config, 1, data, micro_batch)
    if (too_large := memory_warning(config, stages, host_memory_bytes())) is not None:
        warnings.append(too_large)
    memory = None
    if layout is not None and (not_predicted := unpredicted_because(config)) is None:
        entries = vocab_size or config.megasdc.data.tokenizer.vocab_size
        memory = predict_step_memory(config, layout, entries, on_gpu=device_memory_gib is not None)
        largest = max(memory, key=lambda stage: stage.total)
        if device_memory_gib is not None and largest.total > device_memory_gib * 1024 * MIB:
            warnings.append(
                f"megasdc.model: a step is predicted to need {largest.total / MIB / 1024:,.2f} GiB on stage "
                f"{memory.index(largest)} ({largest.moment}), but a device has {device_memory_gib:,.2f} GiB; make "
                "micro-batches smaller, recompute (pipeline.activation_checkpoint_interval), or use more ranks."
            )
    if as_json:
        result = {
            "ok": True,
            "source": str(file),
            "warnings": warnings,
            "layout": asdict(layout) if layout is not None else None,
            "memory": [{**asdict(stage), "total": stage.total} for stage in memory] if memory is not None else None,
            "resolved": config.resolved(),
        }
        typer.echo(json.dumps(result, indent=2))
        return
    # With --show standard output holds the file alone.
    count = len(warnings)
    verdict = "OK" if count == 0 else f"OK, with {count} warning{'s' if count > 1 else ''}"
    typer.echo(f"{file}: {verdict}", err=show)
    for warning in warnings:
        typer.echo(f"megasdc: warning: {warning}", err=True)
    if layout is not None:
        study = f"{layout.replicas} replicas of a study, each: " if layout.replicas > 1 else ""
        typer.echo(
            f"{study}{layout.world_size} ranks = tensor {layout.tensor} x pipeline {layout.pipeline} x data "
            f"{layout.data}; {layout.train_batch_size} samples a step = micro-batch {layout.micro_batch_size} x "
            f"accumulation {layout.accumulation_steps} x data {layout.data}",
            err=show,
        )
        if memory is not None:
            kind = "a CPU" if device_memory_gib is None else "a GPU"
            typer.echo(
                f"predicted peak of a step on {kind}, MiB of tensors of a rank:\n{memory_table(memory)}", err=show
            )
        else:
            typer.echo(f"peak memory of a step is not predicted with {not_predicted} set", err=show)
    if show:
        typer.echo(json.dumps(config.resolved(), indent=2))


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
    from megasdc.config.table import render_table
    from megasdc.versions.tested import render_tables

    tables = {"config-table": render_table, "versions-table": render_tables, "command-line": _render_commands}
    if write is None and check is None:
        typer.echo(render_table(), nl=False)
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
                write_whole(write, fresh)
            typer.echo(f"{write}: {'was up to date' if text == fresh else 'table written'}")
        if check is not None and len(set(with_tables(check, tables))) > 1:
            typer.echo(f"{check}: table is out of date; run: {command} --write {check}", err=True)
            raise typer.Exit(1)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _render_commands() -> str:
    """Markdown of every command with its options: those of ``megasdc`` and the scripts of ``tools/``."""
    from megasdc.report import checkpoint_command, trace_command

    return "\n".join(
        render_commands(program, name)
        for name, program in {
            "megasdc": app,
            "python tools/compare_checkpoints.py": checkpoint_command.app,
            "python tools/compare_traces.py": trace_command.app,
        }.items()
    )


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
        typer.echo(text, nl=False)
    else:
        write_whole(out, text)
        typer.echo(f"{out}: written")
