"""``megasdc report``: determines the kind of the paths, reads them, writes the page and its figures.

Kind of a path, from its contents: folder of a run, a study or a sweep, or a result of DropCompute. The page of several
runs shows how each differs from the healthy one, in numbers and in settings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from megasdc import __version__
from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.common.errors import CheckpointError, DataError, StorageError
from megasdc.common.origin import CONFIG_FILE
from megasdc.common.words import clock
from megasdc.lab.checkpoints.drift import DriftReport, measure_drift
from megasdc.lab.report.run_pages.compared import LOSS, WORSE, ComparedRun, compare_with_healthy
from megasdc.lab.report.run_pages.drop_result_page import drop_result_page
from megasdc.lab.report.run_pages.facts import checkpoints, differing_settings, places, run_versions
from megasdc.lab.report.run_pages.figures.compare import compare_figures, drift_figure
from megasdc.lab.report.run_pages.replicas_page import replicas_page
from megasdc.lab.report.run_pages.run_page import rounds_section, run_page, summary_of
from megasdc.lab.report.run_pages.study_page import study_page, sweep_page
from megasdc.ops.run_folder.marks import FAULT, FINDING, INCIDENT, SKIP, counts_of, marks_of
from megasdc.ops.run_folder.record import METRICS_FILE, OnProgress, RunRecord, is_run, load_run
from megasdc.ops.run_folder.replicas import is_of_replicas, summarize_rounds
from megasdc.ops.run_folder.status import status_of
from megasdc.ops.run_folder.study_log import STUDY_FOLDER
from megasdc.output.figure import Figure
from megasdc.output.html import NoPictures, write_page, write_pictures, write_tables
from megasdc.output.page import (
    Cell,
    Page,
    PageSection,
    State,
    Table,
    number_cell,
    percent,
    plain_values,
    print_sentence,
)

MAX_DRIFT_BYTES = 2 << 30
"""Maximum of checkpoint bytes read for a page; more would take too long."""
_COUNTED = (INCIDENT, FINDING, SKIP, FAULT)
_HEADINGS = (
    *("run", "verdict", "state", "step", "loss", "increase", "at step", "evaluation loss", "its increase"),
    *("first differs at", "largest difference", "incidents", "findings", "skipped", "faults injected"),
)


def compare_page(runs: Sequence[RunRecord], title: str | None = None) -> Page:
    """The page of at least two runs, the first the healthy one."""
    names = names_of(runs)
    healthy, *others = names
    compared = dict(zip(others, compare_with_healthy(runs[0], runs[1:]), strict=True))
    drift, told = _drift(names)
    settings = differing_settings(runs)
    figures = compare_figures(names)
    return Page(
        kind="runs",
        title=title or f"{len(others)} runs beside {healthy}"
        if len(others) > 1
        else title or f"{others[0]} beside {healthy}",
        verdict=_verdict(healthy, compared),
        state=_state(compared),
        sentences=[
            f"Compared with {healthy}, at steps that both have reported: (loss / healthy loss - 1). A worse case is a "
            f"run whose last training loss is more than {WORSE:.1%} above, as Pei, Lausen and Karypis 2025 "
            "(10.1109/MM.2025.3642709) count; runs that met NaN or could not be compared are counted apart."
        ],
        tiles=_tiles(compared),
        notes=[*(f"{name}: {note}" for name, run in names.items() for note in run.notes), *told],
        sections=[
            PageSection("Runs", tables=[_table(names, compared)]),
            PageSection("Over the steps", figures=[*figures, *drift]),
            *_rounds_of(names),
            PageSection("Settings that differ", _same_settings(settings), tables=_settings(names, settings)),
            PageSection("Where and with what", tables=[_places(names)]),
        ],
        summary=_summary(names, compared),
    )


def _rounds_of(names: Mapping[str, RunRecord]) -> list[PageSection]:
    """Rounds of Local-SGD, where all runs are replicas of one launch; empty: they are not."""
    folders = {run.path.resolve().parent for run in names.values()}
    folder, *others = folders
    summary = None if others or not is_of_replicas(folder) else summarize_rounds(folder)
    return [] if summary is None else rounds_section(folder, summary, names)


def names_of(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Runs by label: the folder's name, with as many parent folders as make the labels unique."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while len({one[-depth:] for one in parts}) < len(parts):
        depth += 1
    return {"/".join(one[-depth:]): run for one, run in zip(parts, runs, strict=True)}


def _verdict(healthy: str, compared: Mapping[str, ComparedRun]) -> str:
    by: dict[str, list[str]] = {}
    for name, one in compared.items():
        by.setdefault(one.verdict, []).append(name)
    if set(by) == {"equal"}:
        which = "Both runs have" if len(compared) == 1 else f"All {len(compared) + 1} runs have"
        return f"{which} equal losses at every step that was reported."
    parts = [f"{len(found)} of {len(compared)} {what}" for what, found in sorted(by.items())]
    ranked = [(one.increase, name) for name, one in compared.items() if one.increase is not None]
    worst = f"; the worst, {max(ranked)[1]}, by {max(ranked)[0]:+.2%}" if ranked else ""
    return f"Final training loss beside {healthy}: {', '.join(parts)}{worst}."


def _state(compared: Mapping[str, ComparedRun]) -> State:
    verdicts = {one.verdict for one in compared.values()}
    if verdicts & {"worse", "NaN"}:
        return "different"
    return "unsure" if "not comparable" in verdicts else "same"


def _tiles(compared: Mapping[str, ComparedRun]) -> dict[str, str]:
    found = [one.verdict for one in compared.values()]
    tiles = {"runs compared": str(len(found)), "worse cases": str(found.count("worse")), "NaN": str(found.count("NaN"))}
    increases = [one.increase for one in compared.values() if one.increase is not None]
    return tiles | ({"worst increase": f"{max(increases):+.2%}"} if increases else {})


def _table(names: Mapping[str, RunRecord], compared: Mapping[str, ComparedRun]) -> Table:
    rows = []
    for name, run in names.items():
        status, counts = status_of(run), counts_of(marks_of(run))
        one = compared.get(name)
        loss, evaluated = run.series.get(LOSS), run.series.get("eval/loss")
        look = "bad" if one is not None and one.verdict in ("worse", "NaN") else ""
        differs = None if one is None else one.first_difference
        rows.append(
            (
                name,
                Cell("healthy" if one is None else one.verdict, look=look),
                Cell(status.state, look="bad" if status.state == "failed" else ""),
                status.step,
                number_cell(None if loss is None else float(loss.values[-1]), ".4f"),
                percent(None if one is None else one.increase, WORSE),
                None if one is None else one.at_step,
                number_cell(None if evaluated is None else float(evaluated.values[-1]), ".4f"),
                percent(None if one is None else one.eval_increase, WORSE),
                number_cell(differs, ",d", missing="-" if one is None or one.at_step is None else "never"),
                percent(None if one is None or one.largest is None else one.largest[0]),
                *(counts.get(lane, 0) for lane in _COUNTED),
            )
        )
    return Table("runs", _HEADINGS, rows, ("verdict", "state"))


def _drift(names: Mapping[str, RunRecord]) -> tuple[list[Figure], list[str]]:
    """The parameter figure, where runs keep checkpoints of the same steps of at most ``MAX_DRIFT_BYTES``; notes."""
    folders = {checkpoints(run): name for name, run in names.items()}
    kept = {folder: set(list_steps(folder)) for folder in folders}
    first, *others = folders
    with_steps = [first, *(folder for folder in others if kept[folder] & kept[first])]
    if len(with_steps) == 1:
        return [], ["parameters are not compared: no step is kept by the healthy run and another"]
    size = sum(_size(folder / step_folder(step)) for folder in with_steps for step in kept[folder] & kept[first])
    command = f"megasdc compare --drift {' '.join(map(str, with_steps))} --html drift.html"
    if size > MAX_DRIFT_BYTES:
        return [], [f"parameters are not compared: {size / 2**30:.1f} GiB of checkpoints would be read; use {command}"]
    try:
        report = measure_drift(with_steps)
    except CheckpointError as error:
        return [], [f"parameters are not compared: {error}"]
    told = [f"parameters: {problem}" for problem in report.problems]
    return _drawn(report, {str(folder): name for folder, name in folders.items()}), told


def _drawn(report: DriftReport, names: dict[str, str]) -> list[Figure]:
    return [drift_figure(report, names)] if report.steps else []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.pt"))


def _same_settings(settings: Sequence[tuple[str, list[str]]]) -> list[str]:
    return [] if settings else ["None: all runs have the same configuration, but for their folders."]


def _settings(names: Mapping[str, RunRecord], settings: Sequence[tuple[str, list[str]]]) -> list[Table]:
    if not settings:
        return []
    return [Table("settings", ("setting", *names), [(path, *values) for path, values in settings])]


def _places(names: Mapping[str, RunRecord]) -> Table:
    rows = []
    for name, run in names.items():
        found = places(run)
        told = ", ".join(f"{package} {version}" for package, version in run_versions(run).items())
        rows.append((name, *(found.get(key, "-") for key in ("layout", "hosts")), told or "-", str(run.path)))
    return Table("places", ("run", "layout", "hosts", "versions", "folder"), rows, searched=False)


def _summary(names: Mapping[str, RunRecord], compared: Mapping[str, ComparedRun]) -> dict[str, object]:
    found = []
    for name, run in names.items():
        one = compared.get(name)
        own: dict[str, object] = {"name": name, **summary_of(run, status_of(run), marks_of(run))}
        if one is not None:
            own |= {
                "verdict": one.verdict,
                "increase": one.increase,
                "at_step": one.at_step,
                "eval_increase": one.eval_increase,
                "first_difference_at_step": one.first_difference,
            }
        found.append(own)
    return plain_values({"healthy": next(iter(names)), "worse_above": WORSE, "runs": found})


SWEEP_FILES = ("sweep.json", "results.parquet")
Kind = Literal["run", "runs", "study", "sweep", "drops", "replicas"]


def is_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (path / SWEEP_FILES[0]).exists()


def is_study(path: Path) -> bool:
    """Whether a folder holds a study: several runs in one launch."""
    return any((path / STUDY_FOLDER).glob("rank_*.jsonl"))


def report_kind(paths: Sequence[Path]) -> Kind:
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
        if not any(test(path) for test in (is_sweep, is_study, is_of_replicas, is_run)):
            raise DataError(
                f"{path} {'' if path.is_dir() else 'is no folder, and '}holds no run ({CONFIG_FILE}, {METRICS_FILE} or "
                f"events/), no study (study/) and no sweep ({SWEEP_FILES[0]}); give a folder that "
                "megasdc.logging.run_dir or megasdc sweep --out names, or JSON results of DropCompute"
            )
    kinds: dict[Kind, list[Path]] = {
        "sweep": [*filter(is_sweep, paths)],
        "study": [*filter(is_study, paths)],
        "replicas": [*filter(is_of_replicas, paths)],
    }
    for kind, found in kinds.items():
        if found and len(paths) > 1:
            what = "launch of replicas" if kind == "replicas" else kind
            raise DataError(f"{found[0]} is a {what}, and {len(paths)} paths were given; a {what} has its own page")
        if found:
            return kind
    same = [path for place, path in enumerate(paths) if path.resolve() in [one.resolve() for one in paths[:place]]]
    if same:
        raise DataError(f"{same[0]} was given twice; give each run once")
    return "run" if len(paths) == 1 else "runs"


PAGE = "report.html"


@dataclass
class WrittenReport:
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
) -> WrittenReport:
    """Writes a report on a run, on several compared with the first, on a study, on a sweep, or on DropCompute.

    Args:
        paths: run folders, or one folder of a study, a sweep or a launch of replicas, or JSON files of DropCompute.
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
    kind = report_kind(paths)
    out = out or (Path(PAGE) if kind in ("runs", "drops") else paths[0] / "reports" / PAGE)
    now = time.time()
    page = _build(kind, paths, out, now, title, on_progress)
    _write_page(page, out, now)
    written = WrittenReport(page, out)
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
    if kind == "replicas":
        return replicas_page(paths[0], out, title, on_progress)
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


def render_report(written: WrittenReport, console: Console) -> None:
    """Prints the report's verdict and notes, and the paths written."""
    print_sentence(written.page.verdict, console)
    for note in written.page.notes:
        print_sentence(f"note: {note}", console)
    print_sentence(f"page: {written.path}", console)
    if written.files:
        print_sentence(f"figures: {len(written.files)} files in {written.files[0].parent}", console)
