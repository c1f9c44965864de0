"""Commands on runs and their data: `prepare-data`, `launch`, `run`, `check-determinism`, `top` and others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megasdc.cli.app import (
    AllowChanged,
    ConfigOption,
    Json,
    LauncherArgs,
    Overrides,
    Script,
    app,
    input_argument,
    input_option,
    output_folder,
    print_outcome,
    print_text,
)
from megasdc.cli.options import option
from megasdc.common.errors import ConfigError, DataError, LaunchError
from megasdc.common.program import echo


@app.command("prepare-data", epilog="Example: megasdc prepare-data --config configs/smoke.json --workers 2")
def prepare_data(
    config: ConfigOption,
    out: Annotated[
        Path | None,
        typer.Option("--out", **output_folder(help="Folder to write; default: megasdc.data.path of the file.")),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Tokenizing processes.")] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Prepare the data again even if the folder holds some.")
    ] = False,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Turn text, or token ids of Megatron's, into token files: corpus to tokenizer to .bin/.idx and a manifest.

    An interrupted call resumes where it stopped.
    """
    from megasdc.config.load import load_config
    from megasdc.data.indexed import describe_ids
    from megasdc.data.manifest import SPLITS
    from megasdc.data.prepare import prepare
    from megasdc.data.sources import describe_skipped

    section = load_config(config, overrides).megasdc.data
    target = out if out is not None else Path(section.path)
    manifest = prepare(section, target, workers, progress=not as_json, force=force)
    if as_json:
        echo(json.dumps({"path": str(target), "manifest": manifest.model_dump(mode="json")}, indent=2))
        return
    tokens = ", ".join(f"{manifest.splits[name].num_tokens:,} {name}" for name in SPLITS if name in manifest.splits)
    echo(
        f"prepared data in {target}; tokens: {tokens}; a token has {manifest.unigram_entropy_nats:.3f} nats by "
        "frequency alone"
    )
    if (kept := manifest.round_trip) is not None:
        echo(
            f"of {kept.num_characters:,} characters from the sources decoding changes {kept.changed_share:.3%}; "
            f"{kept.unknown_share:.3%} are unknown to the tokenizer"
        )
    for source in manifest.sources:
        if source.ids is not None:
            echo("\n".join(describe_ids(source, manifest.tokenizer, section.tokenizer.path, section.bos is True)))
        for reason, count in source.skipped.items():
            echo(f"dropped from {source.source}: {describe_skipped(reason, count, source.skipped_at)}")


@app.command("verify-data", epilog="Example: megasdc verify-data prepared/stdlib")
def verify_data(
    folders: Annotated[list[Path], input_argument(DataError, metavar="FOLDER...", help="Folders of prepared data.")],
    add_checksums: Annotated[
        bool,
        typer.Option(
            "--add-checksums",
            help="Add what data of an earlier version lack: checksums of blocks, which are checked while training, and "
            "of the manifest. Only if nothing is wrong.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare every byte of prepared data with what was written, and name all damaged files and blocks.

    A start checks all but the tokens, and some blocks of those; a block is checked again when training first reads it.
    Exit code 0; 71 if anything is wrong.
    """
    from rich.progress import Progress

    from megasdc.common.program import drawn_bar
    from megasdc.data import manifest as prepared_data

    reports = []
    with drawn_bar(*Progress.get_default_columns(), quiet=as_json) as bar:
        for folder in folders:
            total = sum(file.stat().st_size for file in folder.glob("*.*") if file.is_file())
            task = bar.add_task(str(folder), total=total)
            report = prepared_data.check_folder(folder, partial(bar.advance, task))
            if add_checksums and report.ok and report.note:
                prepared_data.add_checksums(folder)
                report = prepared_data.check_folder(folder)
            reports.append(report)
    print_text(reports, as_json)
    raise typer.Exit(0 if all(report.ok for report in reports) else DataError.exit_code)


@dataclass(frozen=True)
class LaunchOptions:
    """Options of ``megasdc launch``; those of ``LaunchRequest``, where None is its default."""

    config_path: ConfigOption
    launcher_args: LauncherArgs = ()
    hostfile: Path | None = option(
        None, "Lines `NAME slots=N`; without: this host.", make=input_option, reads=LaunchError
    )
    num_gpus: int | None = option(None, "Ranks on each host.", "--num-gpus", "--num-ranks", min=1)
    include: str = option("", "Only these hosts: NAME[:SLOT,...][@NAME...].")
    exclude: str = option("", "All hosts but these; same form.")
    backend: str = option("pdsh", "pdsh, openmpi, slurm, ...: DeepSpeed's backend.", "--launcher")
    script: Script = None
    protect: Literal["off", "standard", "strict"] | None = option(
        None, "Preset that protects the run, in place of the file's `protect`."
    )
    replicas: int | None = option(
        None, "Local-SGD: launches of so many ranks, or of a part of the hosts, each; see `local_sgd`.", min=2
    )
    overrides: Overrides = ()
    allow_changed: AllowChanged = ()


@app.command("launch", epilog="Example: megasdc launch --hostfile launch/hostfile.example --config configs/smoke.json")
def launch_command(
    options: LaunchOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check all hosts, start DeepSpeed's launcher, and return the true exit code, with first failed rank and cause."""
    from megasdc.ops.launch.front import launch_run
    from megasdc.ops.launch.request import LaunchRequest
    from megasdc.train.signals import exiting_on_signals

    given = {name: value for name, value in vars(options).items() if value is not None}
    if word := given.pop("protect", None):
        given["overrides"] = (f"megasdc.protect={word}", *options.overrides)
    replicas = given.pop("replicas", None)
    request = LaunchRequest(**given)
    if replicas is not None:
        _launch_replicas(request, replicas, dry_run=dry_run, as_json=as_json)
    with exiting_on_signals() as signals:
        result = launch_run(request, dry_run=dry_run, quiet=as_json, on_verdict=signals.only_note)
    if as_json:
        print_text(result, as_json)
    else:
        _print_way_on(result, request)
    raise typer.Exit(result.exit_code)


def _launch_replicas(request: Any, replicas: int, *, dry_run: bool, as_json: bool) -> None:
    from megasdc.ops.launch.front import NOTHING_STARTED
    from megasdc.ops.launch.replicas import describe, launch_replicas
    from megasdc.ops.launch.supervision import print_front_message
    from megasdc.train.signals import exiting_on_signals

    with exiting_on_signals(signal.SIGUSR1):
        result = launch_replicas(request, replicas, dry_run=dry_run)
    if as_json:
        print_text(result, as_json)
    else:
        print_front_message(NOTHING_STARTED if dry_run and not result.exit_code else describe(result))
    raise typer.Exit(result.exit_code)


def _print_way_on(result: Any, request: Any) -> None:
    """Print the command that goes on, where a launch was stopped, or ranks were killed, or a host was lost."""
    from megasdc.ops.launch.request import way_on
    from megasdc.ops.launch.supervision import print_front_message
    from megasdc.parallel.rendezvous import TOGETHER_VARIABLE

    if TOGETHER_VARIABLE in os.environ:  # the process that has started it says so for all replicas
        return
    lost = result.exit_code == LaunchError.exit_code and result.failed_host is not None
    is_cut_short = result.ended_by is not None or result.stopped_by is not None or lost
    if is_cut_short and (way := way_on(request, Path(result.run_dir))):
        print_front_message(way)


@app.command("run", epilog="Example: megasdc run --protect standard -- deepspeed --num_gpus 8 train.py --my-option 1")
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- deepspeed ...", help="A command line of DeepSpeed's launcher.")
    ],
    settings: Annotated[
        Path | None,
        input_option("--config", reads=ConfigError, help="JSON file, that of megasdc.attach; without it: defaults."),
    ] = None,
    protect: Annotated[
        Literal["off", "standard", "strict"] | None,
        typer.Option(
            "--protect",
            help="Protect what the script trains, in place of the file's `protect` or its guard's: a script that "
            "attaches no guard gets one.",
        ),
    ] = None,
    overrides: Overrides = (),
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise",
            help="Start it again after failures, on other hosts where some are the cause: the first --num_nodes of the "
            "hostfile are used, the others are spares. The script must go on from its newest checkpoint by itself.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Launch any training with DeepSpeed, its script unchanged: check all hosts before, watch who is stuck, and return
    the true exit code, with first failed rank and cause.
    """
    from megasdc.attached.settings import load_settings
    from megasdc.ops.launch.deepspeed_command import read_command
    from megasdc.ops.launch.front import launch_run
    from megasdc.ops.supervise.command import supervise_program
    from megasdc.train.signals import exiting_on_signals

    if supervise and (dry_run or as_json):
        raise typer.BadParameter("it has neither --dry-run nor --json", param_hint="--supervise")
    read = replace(read_command(command), protect=protect)
    overrides = overrides if protect is None else (f"protect={protect}", *overrides)
    found = load_settings({} if settings is None else settings, overrides, run_dir=f"runs/{read.name}")
    if supervise:
        raise typer.Exit(supervise_program(read, found))
    with exiting_on_signals() as signals:
        request = read.request(found.logging.run_dir, found)
        result = launch_run(request, dry_run=dry_run, quiet=as_json, on_verdict=signals.only_note)
    if as_json:
        print_text(result, as_json)
    else:
        _print_way_on(result, request)
    raise typer.Exit(result.exit_code)


@app.command("check-determinism", epilog="Example: megasdc check-determinism --config configs/smoke.json --steps 3")
def check_determinism_command(
    config: Annotated[
        Path | None,
        input_option(
            "--config", reads=ConfigError, help="The run's JSON file; with a command, that of megasdc.attach."
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- deepspeed ...]", help="Check a script that attaches a guard: a command line of DeepSpeed's."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each run.")] = 3,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks on this machine; default: the fewest that fit.")
    ] = None,
    lint_only: Annotated[bool, typer.Option("--lint-only", help="List causes, run nothing.")] = False,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """List what could make two runs differ, then make two short runs here and compare every loss, gradient norm,
    result, optimizer state and parameter bit by bit; of a script what its guard traces.

    Exit code 0: no cause was found and the runs are equal; 1: they differ, and the first difference is named; 3: they
    are equal, or were not made (--lint-only), but a cause was found that can make others differ.
    """
    from megasdc.common.program import progress_bars

    if command and (lint_only or ranks is not None):
        raise typer.BadParameter("not with a command", param_hint="--ranks, --lint-only")
    if not command and config is None:
        needed = "needed, or a command: megasdc check-determinism -- deepspeed train.py"
        raise typer.BadParameter(needed, param_hint="--config")
    with progress_bars(quiet=as_json) as on_progress:
        if command:
            outcome = _check_script(command, config, overrides, steps, on_progress)
        else:
            options = {"ranks": ranks, "steps": steps, "lint_only": lint_only, "on_progress": on_progress}
            outcome = _check_run(config, overrides, options)
    print_outcome(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


def _check_run(config: Any, overrides: Sequence[str], options: dict[str, Any]) -> Any:
    from megasdc.config.load import load_config
    from megasdc.ops.determinism_check.check import check_determinism

    return check_determinism(load_config(config, overrides), **options)


def _check_script(
    command: list[str], settings: Path | None, overrides: Sequence[str], steps: int, progress: Any
) -> Any:
    from megasdc.attached.settings import load_settings
    from megasdc.ops.determinism_check.program import check_program
    from megasdc.ops.launch.deepspeed_command import read_command
    from megasdc.train.signals import exiting_on_signals

    read = read_command(command)
    found = load_settings({} if settings is None else settings, overrides, run_dir=f"runs/{read.name}")
    with exiting_on_signals():
        return check_program(read, found, steps, progress)


@app.command("summary", epilog="Example: megasdc summary runs/smoke")
def summary(
    run_dir: Annotated[Path, input_argument(DataError, help="Run folder (megasdc.logging.run_dir).")],
    require_finished: Annotated[
        bool,
        typer.Option("--require-finished", help="Exit code 1 if the run has not done all its steps, or has failed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Summarize a run: loss at begin and end, speed, checkpoints; of one that failed exit code, cause, verdict,
    rank and host, incident report, last verified checkpoint.
    """
    from megasdc.ops.run_folder.summary import render, summarize_run

    found = summarize_run(run_dir)
    print_text(found, as_json, render(found))
    raise typer.Exit(int(require_finished and not found.finished))


@app.command("top", epilog="Example: megasdc top runs/smoke")
def top(
    run_dir: Annotated[Path, input_argument(DataError, help="Run folder (megasdc.logging.run_dir).")],
    once: Annotated[
        bool, typer.Option("--once", help="Print the run as it is now, with all ranks, and end; so without a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Seconds between two looks.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Watch a run on a terminal, from any host that sees its folder: what each rank is doing and for how long, who is
    slow, devices, incidents, loss, speed, time left.

    What ranks are doing is known of launched runs, unless megasdc.health.enabled is false. Waits up to 30 s for a run
    that is being started. Ends when the run has, or by Ctrl-C. Exit code 0, however the run ended; 71: the folder holds
    no run; 130: Ctrl-C.
    """
    from megasdc.common.program import output_console
    from megasdc.ops.top.command import wait_for_run, watch_run
    from megasdc.ops.top.replicas import watcher_of
    from megasdc.ops.top.screen import Screen

    console = output_console()
    if as_json:
        print_text(watcher_of(run_dir).read(), as_json)
    elif once or not console.is_terminal:
        console.print(Screen(watcher_of(run_dir).read()))
    else:
        watch_run(wait_for_run(run_dir, console), console, interval)
