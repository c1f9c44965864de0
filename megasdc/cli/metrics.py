"""`megasdc export-metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megasdc.cli.app import Json, app, input_argument, output_folder, print_text
from megasdc.common.errors import DataError
from megasdc.common.program import progress_bars


@app.command("export-metrics", epilog="Example: megasdc export-metrics runs/smoke --to tensorboard --out board")
def export_metrics_command(
    run_dir: Annotated[Path, input_argument(DataError, help="Run folder (megasdc.logging.run_dir).", missing=True)],
    to: Annotated[
        Literal["tensorboard", "wandb", "csv", "prometheus"],
        typer.Option(
            "--to",
            help="What to write: event files, an offline run for `wandb sync`, a file a metric, or Prometheus text of "
            "the last values.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            **output_folder(help="Folder to write, absent or empty. Default: exported/KIND in the run folder."),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rebuild a tracker's files from `metrics.jsonl`, which has every number of a run once, also after resumes."""
    from megasdc.metrics import export

    with progress_bars(quiet=as_json) as on_progress:
        done = export.export_metrics(run_dir, to, out or run_dir / "exported" / to, on_progress)
    print_text(done, as_json, f"{done.lines} lines, {done.values} values in {done.out}")
