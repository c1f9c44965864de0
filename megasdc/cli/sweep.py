"""Sweeps of many runs: `megasdc sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megasdc.cli.app import Json, app, input_argument, output_folder, print_result, print_text, stdout_to_stderr
from megasdc.cli.options import option
from megasdc.common.errors import ConfigError
from megasdc.common.words import duration

if TYPE_CHECKING:
    from megasdc.lab.sweeps.sweep import Sweep
    from megasdc.lab.sweeps.table import SweepTable


@dataclass(frozen=True)
class SweepOptions:
    """Options of ``megasdc sweep``."""

    file: Annotated[Path, input_argument(ConfigError, help="JSON file of the sweep.")]
    out: Path | None = option(None, "Folder of the results; default: runs/sweeps/NAME-SIZE.", **output_folder())
    size: str | None = option(None, "Variant of the sweep, such as smoke, cpu, paper; default: its first.")
    only: tuple[str, ...] = option((), "Run only this cell; may be repeated.", metavar="CELL")
    workers: int | None = option(None, "Concurrent runs; default: as cores and devices allow.", min=1)
    dry_run: bool = option(False, "Check everything and list the runs; start none.")
    table: bool = option(False, "Show the table of what has finished; start nothing.")
    retry_failed: bool = option(False, "Repeat runs that ended as failed.")
    slurm: bool = option(False, "Write an array job instead of running.")
    task: int | None = option(None, "Run one run: a task of the array job.", min=0)


@app.command("sweep", epilog="Example: megasdc sweep configs/sweeps/pei_table_1.json --size smoke")
def sweep(options: SweepOptions, as_json: Json = False) -> None:
    """Run the experiments of a file, and show the results beside the paper's numbers.

    Every run is checked before the first one starts. The same command resumes an interrupted sweep; finished
    runs are not repeated. Runs that diverge, end with NaN or fail are results.
    """
    from megasdc.lab.report.run_pages.study_page import sweep_table_page
    from megasdc.lab.sweeps import sweep as sweeps
    from megasdc.output.page import printer

    if options.only and (options.slurm or options.table or options.task is not None):
        raise typer.BadParameter("--only chooses what is run here; leave it out with --slurm, --task and --table")
    opened = sweeps.open_sweep(options.file, options.size, options.out, options.only, to_run=not options.table)
    if options.dry_run:
        print_text(_plan_dict(opened), as_json, _plan_text(opened))
    elif options.slurm:
        chosen = [str(options.file), "--out", str(opened.out)] + (["--size", opened.size] if opened.size else [])
        path = sweeps.write_slurm(opened, chosen)
        print_text({"submit": str(path), "runs": len(opened.plan.runs)}, as_json, f"submit with: bash {path}")
    elif options.task is not None:
        with stdout_to_stderr():
            run = sweeps.run_task(opened, options.task)
        print_text({"run_id": run.run_id, "label": run.label}, as_json, f"finished {run.run_id}: {run.label}")
    else:
        result = sweeps.gather(opened) if options.table else _run(opened, options, as_json)
        print_result(result, printer(sweep_table_page), out=None, as_json=as_json)


def _run(opened: Sweep, options: SweepOptions, as_json: bool) -> SweepTable:
    """Run what has not finished, with progress and an estimate of the time on standard error."""
    from rich.console import Console

    from megasdc.common.program import progress_bars
    from megasdc.lab.sweeps.sweep import run_sweep

    console = Console(stderr=True, quiet=as_json)
    with stdout_to_stderr(), progress_bars(console=console) as on_progress:
        return run_sweep(
            opened,
            options.workers,
            progress=not as_json,
            retry_failed=options.retry_failed,
            on_progress=on_progress,
            on_estimate=lambda seconds, left, at_once: console.print(
                f"{left} runs are left, {at_once} at a time: about "
                + ("an unknown time, because the first steps of a run failed" if seconds is None else duration(seconds))
            ),
        )


def _plan_dict(opened: Sweep) -> dict[str, Any]:
    runs = [{"run_id": run.run_id, "label": run.label, "steps": run.last_step} for run in opened.chosen.values()]
    return {"out": str(opened.out), "size": opened.size, "rows": len(opened.plan.places), "runs": runs}


def _plan_text(opened: Sweep) -> str:
    plan = opened.plan
    lines = [
        f"{number:4d}  {run.run_id}  to step {run.last_step}  {run.label}"
        for number, run in enumerate(plan.runs.values())
        if run.run_id in opened.chosen
    ]
    return "\n".join([*lines, f"{len(plan.places)} rows from {len(plan.runs)} runs, into {opened.out}"])
