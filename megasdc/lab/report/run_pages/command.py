"""``megasdc report``: determines the kind of the paths, reads them, writes the page and its figures.

Kind of a path, from its contents: folder of a run, a study or a sweep, or a result of DropCompute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from megasdc import __version__
from megasdc.common.errors import DataError, StorageError
from megasdc.lab.report.run_pages.compare_page import compare_page
from megasdc.lab.report.run_pages.drop_result_page import drop_result_page
from megasdc.lab.report.run_pages.run_page import run_page
from megasdc.lab.report.run_pages.study_page import study_page
from megasdc.lab.report.run_pages.sweep_page import sweep_page
from megasdc.ops.run_folder.record import CONFIG_FILE, METRICS_FILE, OnProgress, is_run, load_run
from megasdc.ops.run_folder.status import clock
from megasdc.ops.run_folder.study_log import STUDY_FOLDER
from megasdc.output.files import NoPictures, write_pictures, write_tables
from megasdc.output.html import write_page
from megasdc.output.page import Page
from megasdc.output.terminal import say

SWEEP_FILES = ("sweep.json", "results.parquet")
Kind = Literal["run", "runs", "study", "sweep", "drops"]


def is_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (path / SWEEP_FILES[0]).exists()


def is_study(path: Path) -> bool:
    """Whether a folder holds a study: several runs in one launch."""
    return any((path / STUDY_FOLDER).glob("rank_*.jsonl"))


def kind_of(paths: Sequence[Path]) -> Kind:
    """The kind of the report on these paths, at least one.

    Raises:
        DataError: one is of no kind, or they are of different kinds.
    """
    files = [path for path in paths if path.suffix == ".json"]
    if files and len(files) < len(paths):
        raise DataError(f"{files[0]} is a result of DropCompute; folders have pages of their own, leave them out")
    if files:
        return "drops"
    for path in paths:
        if not any(test(path) for test in (is_sweep, is_study, is_run)):
            raise DataError(
                f"{path} {'' if path.is_dir() else 'is no folder, and '}holds no run ({CONFIG_FILE}, {METRICS_FILE} or "
                f"events/), no study (study/) and no sweep ({SWEEP_FILES[0]}); give a folder that "
                "megasdc.logging.run_dir or megasdc sweep --out names, or JSON results of DropCompute"
            )
    kinds: dict[Kind, list[Path]] = {"sweep": [*filter(is_sweep, paths)], "study": [*filter(is_study, paths)]}
    for kind, found in kinds.items():
        if found and len(paths) > 1:
            raise DataError(f"{found[0]} is a {kind}, and {len(paths)} paths were given; a {kind} has its own page")
        if found:
            return kind
    same = [path for place, path in enumerate(paths) if path.resolve() in [one.resolve() for one in paths[:place]]]
    if same:
        raise DataError(f"{same[0]} was given twice; give each run once")
    return "run" if len(paths) == 1 else "runs"


PAGE = "report.html"


@dataclass
class Written:
    """A report, its file, the files of ``--figures``, and why pictures are missing; empty: they are not."""

    page: Page
    path: Path
    files: list[Path] = field(default_factory=list)
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "kind": self.page.kind,
            "page": str(self.path),
            "verdict": self.page.verdict,
            "figures": [one.name for one in self.page.figures],
            "files": [str(one) for one in self.files],
            "problem": self.problem or None,
            "notes": list(self.page.notes),
            **self.page.summary,
        }


def write_report(
    paths: Sequence[Path],
    out: Path | None = None,
    figures: Path | None = None,
    title: str | None = None,
    healthy: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Written:
    """Writes a report on a run, on several compared with the first, on a study, on a sweep, or on DropCompute.

    Args:
        paths: run folders, or one folder of a study or a sweep, or JSON files of DropCompute's results.
        out: the page; None: ``reports/report.html`` in the folder; for several runs or files ``report.html`` here.
        figures: folder for PNG, SVG and CSV of each figure and CSV of each table; None: none are written.
        title: of the page; None: made from its contents.
        healthy: the run that the others are compared with; None: the first.
        on_progress: called with the activity, the amount done and the total.

    Raises:
        DataError: a path holds none of these, or the paths are of different kinds.
        StorageError: a file cannot be written.
    """
    paths = _healthy_first(paths, healthy)
    kind = kind_of(paths)
    out = out or (Path(PAGE) if kind in ("runs", "drops") else paths[0] / "reports" / PAGE)
    now = time.time()
    page = _build(kind, paths, out, now, title, on_progress)
    _write_page(page, out, now)
    written = Written(page, out)
    if figures is not None:
        written.files += write_tables(figures, page.figures, page.tables)
        try:
            written.files += write_pictures(figures, page.figures, page.steps)
        except NoPictures as error:
            written.problem = str(error)
    return written


def _build(
    kind: str, paths: Sequence[Path], out: Path, now: float, title: str | None, on_progress: OnProgress | None
) -> Page:
    if kind == "sweep":
        return sweep_page(paths[0], title)
    if kind == "drops":
        return drop_result_page(paths, title)
    if kind == "study":
        return study_page(paths[0], title)
    runs = [load_run(path, on_progress) for path in paths]
    return run_page(runs[0], out, now, title) if kind == "run" else compare_page(runs, title)


def _healthy_first(paths: Sequence[Path], healthy: Path | None) -> list[Path]:
    if healthy is None:
        return list(paths)
    others = [path for path in paths if path.resolve() != healthy.resolve()]
    if not others:
        raise DataError(f"--healthy {healthy} is the only run; give others that are compared with it")
    return [healthy, *others]


def _write_page(page: Page, out: Path, now: float) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out.parent} cannot be made: {error.strerror}; choose another --out") from error
    write_page(page, out, "--out", f"Made {clock(now)} by megasdc {__version__}.")


def render_report(written: Written, console: Console) -> None:
    """Prints the report's verdict and notes, and the paths written."""
    say(written.page.verdict, console)
    for note in written.page.notes:
        say(f"note: {note}", console)
    say(f"page: {written.path}", console)
    if written.files:
        say(f"figures: {len(written.files)} files in {written.files[0].parent}", console)
