"""``tools/compare_checkpoints.py --drift``: how far runs diverge, over the checkpoints that they keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TotalFileSizeColumn

from megasdc.common.errors import MegasdcError
from megasdc.common.program import echo
from megasdc.lab.checkpoints.drift import measure_drift
from megasdc.lab.checkpoints.drift_report import DriftReport
from megasdc.lab.checkpoints.pages.drift_page import drift_page
from megasdc.lab.checkpoints.report import Options
from megasdc.output.html import write_page
from megasdc.output.terminal import print_pages


def compare_runs(folders: Sequence[Path], options: Options, html: Path | None, as_json: bool) -> DriftReport | None:
    """Measures, prints, and writes the page where ``html`` is given.

    None, after an error message, where nothing could be compared or the page not be written.
    """
    quiet = as_json or not sys.stderr.isatty()
    columns = (SpinnerColumn(), TextColumn("comparing"), TotalFileSizeColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
            task = bar.add_task("comparing", total=0)
            seen = 0

            def advance(count: int) -> None:
                nonlocal seen
                seen += count
                bar.update(task, total=seen, completed=seen)

            report = measure_drift(folders, options, advance)
        if html is not None:
            write_page(drift_page(report), html)
    except MegasdcError as error:
        echo(f"compare_checkpoints: error: {error}", err=True)
        if as_json:
            echo(json.dumps({"same": False, "runs": [], "not_compared": [str(error)]}, indent=2))
        return None
    if as_json:
        echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_pages([drift_page(report)])
    for problem in report.problems:
        echo(f"compare_checkpoints: error: {problem}", err=True)
    return report
