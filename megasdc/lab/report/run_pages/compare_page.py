"""Page of several runs: how each differs from the healthy one, in numbers and in settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.drift import DriftReport, measure_drift
from megasdc.lab.report.run_pages.compared import LOSS, WORSE, Compared, compare_runs
from megasdc.lab.report.run_pages.facts import checkpoints, differing_settings, places, versions
from megasdc.lab.report.run_pages.figures.compare import compare_figures, drift_figure
from megasdc.lab.report.run_pages.run_page import summary_of
from megasdc.ops.run_folder.marks import FAULT, FINDING, INCIDENT, SKIP, counts_of, marks_of
from megasdc.ops.run_folder.record import RunRecord
from megasdc.ops.run_folder.status import status_of
from megasdc.output.figure import Figure
from megasdc.output.page import Page, Section, State, plain_values
from megasdc.output.table import Cell, Table, number, percent

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
    compared = dict(zip(others, compare_runs(runs[0], runs[1:]), strict=True))
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
            Section("Runs", tables=[_table(names, compared)]),
            Section("Over the steps", figures=[*figures, *drift]),
            Section("Settings that differ", _same_settings(settings), tables=_settings(names, settings)),
            Section("Where and with what", tables=[_places(names)]),
        ],
        summary=_summary(names, compared),
    )


def names_of(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Runs by label: the folder's name, with as many parent folders as make the labels unique."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while len({one[-depth:] for one in parts}) < len(parts):
        depth += 1
    return {"/".join(one[-depth:]): run for one, run in zip(parts, runs, strict=True)}


def _verdict(healthy: str, compared: Mapping[str, Compared]) -> str:
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


def _state(compared: Mapping[str, Compared]) -> State:
    verdicts = {one.verdict for one in compared.values()}
    if verdicts & {"worse", "NaN"}:
        return "different"
    return "unsure" if "not comparable" in verdicts else "same"


def _tiles(compared: Mapping[str, Compared]) -> dict[str, str]:
    found = [one.verdict for one in compared.values()]
    tiles = {"runs compared": str(len(found)), "worse cases": str(found.count("worse")), "NaN": str(found.count("NaN"))}
    increases = [one.increase for one in compared.values() if one.increase is not None]
    return tiles | ({"worst increase": f"{max(increases):+.2%}"} if increases else {})


def _table(names: Mapping[str, RunRecord], compared: Mapping[str, Compared]) -> Table:
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
                number(None if loss is None else float(loss.values[-1]), ".4f"),
                percent(None if one is None else one.increase, WORSE),
                None if one is None else one.at_step,
                number(None if evaluated is None else float(evaluated.values[-1]), ".4f"),
                percent(None if one is None else one.eval_increase, WORSE),
                number(differs, ",d", missing="-" if one is None or one.at_step is None else "never"),
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
    command = f"tools/compare_checkpoints.py --drift {' '.join(map(str, with_steps))} --html drift.html"
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
        told = ", ".join(f"{package} {version}" for package, version in versions(run).items())
        rows.append((name, *(found.get(key, "-") for key in ("layout", "hosts")), told or "-", str(run.path)))
    return Table("places", ("run", "layout", "hosts", "versions", "folder"), rows, searched=False)


def _summary(names: Mapping[str, RunRecord], compared: Mapping[str, Compared]) -> dict[str, object]:
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
