"""Sweeps of many runs: `megasdc sweep`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc.cli.app import Json, app, input_argument, output_folder
from megasdc.errors import ConfigError


@app.command("sweep", epilog="Example: megasdc sweep configs/sweeps/pei_table_1.json --size smoke")
def sweep(
    file: Annotated[Path, input_argument(ConfigError, help="JSON file of the sweep.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", **output_folder(help="Folder of the results; default: runs/sweeps/NAME-SIZE.")),
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Variant of the sweep, such as smoke, cpu, paper; default: its first.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CELL", help="Run only this cell; may be repeated.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Concurrent runs; default: as cores and devices allow.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and list the runs; start none.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Show the table of what has finished; start nothing.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Repeat runs that ended as failed.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write an array job instead of running.")] = False,
    task: Annotated[int | None, typer.Option("--task", min=0, help="Run one run: a task of the array job.")] = None,
    as_json: Json = False,
) -> None:
    """Run the experiments of a file, and show the results beside the paper's numbers.

    Every run is checked before the first one starts. The same command resumes an interrupted sweep; finished
    runs are not repeated. Runs that diverge, end with NaN or fail are results.
    """
    from rich.console import Console

    from megasdc.cli.app import stdout_kept_clean
    from megasdc.experiments import sweep as sweeps
    from megasdc.experiments.table import render_table

    if only and (slurm or table or task is not None):
        raise typer.BadParameter("--only chooses what is run here; leave it out with --slurm, --task and --table")
    opened = sweeps.open_sweep(file, size, out, only or (), to_run=not table)
    console = Console(stderr=True, quiet=as_json)
    if dry_run:
        _print(_plan_dict(opened), _plan_text(opened), as_json)
        return
    if slurm:
        chosen = [str(file), "--out", str(opened.out)] + (["--size", opened.size] if opened.size else [])
        path = sweeps.write_slurm(opened, chosen)
        _print({"submit": str(path), "runs": len(opened.plan.runs)}, f"submit with: bash {path}", as_json)
        return
    if task is not None:
        with stdout_kept_clean():
            run = sweeps.run_task(opened, task)
        _print({"run_id": run.run_id, "label": run.label}, f"finished {run.run_id}: {run.label}", as_json)
        return
    if table:
        result = sweeps.gather(opened)
    else:
        from megasdc.progress import progress_bars

        with stdout_kept_clean(), progress_bars(console=console) as on_progress:
            result = sweeps.run_sweep(
                opened,
                workers,
                progress=not as_json,
                retry_failed=retry_failed,
                on_progress=on_progress,
                on_estimate=lambda seconds, left, at_once: console.print(
                    f"{left} runs are left, {at_once} at a time: about {_duration(seconds)}"
                ),
            )
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        render_table(result, Console())


def _print(result: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(result, indent=2) if as_json else text)


def _plan_dict(opened: Any) -> dict[str, Any]:
    runs = [{"run_id": run.run_id, "label": run.label, "steps": run.last_step} for run in opened.chosen.values()]
    return {"out": str(opened.out), "size": opened.size, "rows": len(opened.plan.places), "runs": runs}


def _plan_text(opened: Any) -> str:
    plan = opened.plan
    lines = [
        f"{number:4d}  {run.run_id}  to step {run.last_step}  {run.label}"
        for number, run in enumerate(plan.runs.values())
        if run.run_id in opened.chosen
    ]
    return "\n".join([*lines, f"{len(plan.places)} rows from {len(plan.runs)} runs, into {opened.out}"])


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time, because the first steps of a run failed"
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"
