"""Comparisons of checkpoints, of manifests, and of runs over their steps, each with its page.

Manifests are compared without the files that they describe, with extracts of blocks that differ. Drift shows how far
runs diverge over the checkpoints that they keep: verdicts, curves, a table of each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn, TotalFileSizeColumn

from megasdc.checkpoint.views import with_derived_weights
from megasdc.common.program import bytes_bar, drawn_bar
from megasdc.common.words import few
from megasdc.lab.checkpoints.checkpoints import Options, compare_checkpoints, tensors_to_compare
from megasdc.lab.checkpoints.digest import Digest, count_bytes, digest_path, is_digest, read_digest
from megasdc.lab.checkpoints.digest_report import WHATS, DigestReport, FileDifference
from megasdc.lab.checkpoints.digests import compare_digests
from megasdc.lab.checkpoints.drift import measure_drift
from megasdc.lab.checkpoints.drift_report import DriftReport, StepDrift, divergent
from megasdc.lab.checkpoints.extract import write_extracts
from megasdc.lab.checkpoints.extract_views import is_extract, open_extract_views
from megasdc.lab.checkpoints.outcome import ComparisonOutcome
from megasdc.lab.checkpoints.pages.checkpoint_page import comparison_page
from megasdc.lab.checkpoints.views.open import open_view
from megasdc.output.figure import COLOURS, DASHES, Figure, Version, layout, scatter
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell
from megasdc.tensors.bits import Distance

GROUPS = ("embedding", "attention", "mlp", "norm", "head", "other")
"""Kinds of submodules, in the order of columns and curves."""
LISTED = 4
"""Maximum of submodules named in a sentence."""
WHOLE = "the whole model and kinds of submodules"

Lines = Mapping[str, Sequence[float | None]]
"""By name of a submodule or a kind: relative difference at each step; None: none that is finite."""


def drift_page(report: DriftReport) -> Page:
    """The page of a measurement."""
    verdicts = [drift_verdict(report, run) for run in report.runs]
    unsure = report.same and bool(report.problems)
    definition = (
        f"Reference: {report.reference}. A run's parameter difference at a step is ||theta - theta_ref|| / "
        '||theta_ref||, Euclidean, as Ma et al. 2025 (arXiv 2502.12340) follow it. "equal": every bit is.'
    )
    return Page(
        title="Drift of checkpoints",
        verdict=verdicts[0] if len(verdicts) == 1 else _headline(report),
        state="unsure" if unsure else "same" if report.same else "different",
        sentences=[definition, *(verdicts if len(verdicts) > 1 else [])],
        notes=notes_of(report),
        sections=[
            *([PageSection("Not compared", items=report.problems)] if report.problems else []),
            PageSection("Over the steps", figures=[_curves(report)]),
            *(
                PageSection(run, tables=[_table(report, run, place)])
                for place, run in enumerate(report.runs)
                if report.of(run)
            ),
        ],
    )


def _table(report: DriftReport, run: str, place: int) -> Table:
    groups = [name for name in GROUPS if any(name in one.groups for one in report.of(run))]
    rows = []
    for one in report.of(run):
        found = [one.whole, *(one.groups.get(name) for name in groups)]
        share = number_cell(
            one.whole.num_different, ",d", more=f" of {one.whole.numel:,}{', copies differ' * bool(one.torn)}"
        )
        torn = (f"copies differ: {', '.join(one.torn)}",) if one.torn else ()
        rows.append((one.step, *map(_cell, found), Cell(share.text, share.value, more=torn)))
    return Table(f"drift_{place}", ("step", "whole", *groups, "elements that differ"), rows, searched=False)


def notes_of(report: DriftReport) -> list[str]:
    """Notes of a report, including steps that a folder lacks."""
    return [
        *(f"{folder} does not keep step {', '.join(map(str, steps))}" for folder, steps in report.lacking.items()),
        *report.notes,
    ]


def drift_verdict(report: DriftReport, run: str) -> str:
    """The verdict on one run, in a sentence or two."""
    steps, first = report.of(run), report.first_divergent(run)
    if not steps:
        return f"{run}: no step could be compared."
    if first is None:
        count = f"all {len(steps)} steps" if len(steps) > 1 else f"step {steps[0].step}, the only one"
        return f"{run}: equal in every bit at {count} that could be compared."
    before = report.last_equal_before(run)
    since = f"; step {before} is equal in every bit" if before is not None else "; it is the first that both keep"
    names = divergent(first)
    where = f"in {few(names, LISTED)}"
    last = steps[-1]
    later = "" if last is first else f" At step {last.step}: {_words(last)}."
    return f"{run}: first divergent step {first.step}, {_words(first)}, {where}{since}.{later}"


def _words(one: StepDrift) -> str:
    whole = one.whole
    if one.equal:
        return "equal in every bit"
    if whole.equal:
        return "copies within one checkpoint differ"
    return f"relative difference {whole.relative:.3g}"


def _cell(one: Distance | None) -> Cell:
    if one is None:
        return Cell("-")
    return Cell("equal", 0.0) if one.equal else number_cell(one.relative, ".3g")


def _curves(report: DriftReport) -> Figure:
    groups = [name for name in GROUPS if any(name in one.groups for one in report.steps)]
    submodules = list(dict.fromkeys(name for one in report.steps for name in one.submodules))
    drawn: dict[str, tuple[list[int], Lines]] = {}
    for run in report.runs:
        found = [{"whole": one.whole, **one.groups, **one.submodules} for one in report.of(run)]
        lines = {
            name: [_drawn(one[name]) if name in one else None for one in found]
            for name in ("whole", *groups, *submodules)
        }
        drawn[run] = [one.step for one in report.of(run)], lines
    versions = [_version(WHOLE, ["whole", *groups], drawn), *(_version(name, [name], drawn) for name in submodules)]
    caption = (
        "Logarithmic. A triangle at the foot: equal in every bit, or a difference of zeros of both signs; a gap: NaN "
        "or infinities, or nothing to compare."
    )
    points = [
        (run, name, step, value)
        for run, (steps, lines) in drawn.items()
        for name, own in lines.items()
        for step, value in zip(steps, own, strict=True)
    ]
    headings = ("run", "of", "step", "relative_difference")
    columns = {heading: [point[place] for point in points] for place, heading in enumerate(headings)}
    first = versions[0]
    title = "Parameter difference"
    return Figure("curves", title, caption, first.traces, first.layout, columns, False, ("Of",), versions)


def _version(chosen: str, names: Sequence[str], drawn: Mapping[str, tuple[list[int], Lines]]) -> Version:
    """Curves of some names, of all runs: by kind in colours, and where only one is shown by run."""
    values = [value for _, lines in drawn.values() for name in names for value in lines[name] if value]
    low = math.floor(math.log10(min(values))) - 1 if values else -8
    high = math.ceil(math.log10(max(values)) + 0.2) if values else 0
    traces: list[dict[str, Any]] = []
    for run, (steps, lines) in enumerate(drawn.values()):
        for place, name in enumerate(names):
            label = f"{name}, run {run + 1}" if len(drawn) > 1 else name
            colour = COLOURS[(place if len(names) > 1 else run) % len(COLOURS)]
            line = {"dash": DASHES[run % len(DASHES)], "width": 3 if name == "whole" else 1.5}
            own, mode = lines[name], "lines+markers"
            shown = [value or None for value in own]
            hover = "step %{x}: %{y:.3g}"
            traces.append(scatter(label, steps, shown, colour, hover, mode=mode, line=line, legendgroup=label))
            equal = [step for step, value in zip(steps, own, strict=True) if value == 0]
            marks = {"marker": {"symbol": "triangle-down", "size": 10}, "mode": "markers", "cliponaxis": False}
            foot = scatter(label, equal, [10.0**low] * len(equal), colour, "step %{x}: equal", **marks)
            traces.append({**foot, "legendgroup": label, "showlegend": False})
    yaxis = {"type": "log", "range": [low, high], "exponentformat": "power", "dtick": 1}
    num_steps = len({step for steps, _ in drawn.values() for step in steps})
    xaxis = {"tickformat": ",d", "nticks": min(12, 1 + num_steps)}
    return Version((chosen,), traces, layout(460, "step", "relative difference", legend=True, xaxis=xaxis, yaxis=yaxis))


def _drawn(one: Distance) -> float | None:
    """A relative difference, or None where it is not finite."""
    return one.relative if math.isfinite(one.relative) else None


def _headline(report: DriftReport) -> str:
    apart = {run: first.step for run in report.runs if (first := report.first_divergent(run)) is not None}
    if not apart:
        return (
            f"All {len(report.runs)} runs are equal to {report.reference} in every bit at every step that was compared."
        )
    run = min(apart, key=lambda name: apart[name])
    return f"{len(apart)} of {len(report.runs)} runs part from {report.reference}, {run} first, by step {apart[run]}."


def _measure(folders: Sequence[Path], options: Options, quiet: bool) -> DriftReport:
    """Measures, with the bytes read so far unless quiet."""
    columns = (SpinnerColumn(), TextColumn("comparing"), TotalFileSizeColumn(), TimeElapsedColumn())
    with drawn_bar(*columns, quiet=quiet) as bar:
        task = bar.add_task("comparing", total=0)
        seen = 0

        def advance(count: int) -> None:
            nonlocal seen
            seen += count
            bar.update(task, total=seen, completed=seen)

        return measure_drift(folders, options, advance)


def digest_page(report: DigestReport, limit: int) -> Page:
    """The page of a comparison, with at most ``limit`` differences on a terminal."""
    first = f", {report.first_different} first" if report.first_different else ""
    different = f"Different: {len(report.differences):,} tensors, values and files{first}"
    odd = [
        f"{label} is not what is expected: "
        + "; ".join(dict.fromkeys(one.basis for one in report.differences if one.digest == label and one.basis))
        for label in report.odd
    ]
    kinds = dict.fromkeys(one.what for one in report.differences)
    headings = ("on", "file", "tensor or value", "what", "blocks", "bytes", "elements", "holds", "writer", "detail")
    return Page(
        title="Comparison of manifests",
        verdict="Same" if report.same else different,
        state="same" if report.same else "different",
        sentences=[*_digests(report), f"{report.num_files:,} files compared by digest"],
        notes=report.notes,
        sections=[
            PageSection(
                facts={name: "same" if same else "different" for name, same in report.checkpoints.items() if name},
                tables=[Table("differences", headings, [_row(one) for one in report.differences], listed=limit)],
            ),
            PageSection(facts={what: WHATS[what] for what in kinds}),
            PageSection(sentences=odd or ([] if report.same else ["nothing tells which side is wrong"])),
        ],
    )


def _digests(report: DigestReport) -> list[str]:
    said = []
    for label, digest in zip(report.labels, report.digests, strict=True):
        when = datetime.fromtimestamp(digest.time, UTC).isoformat(timespec="seconds")
        how = "as it was saved" if digest.as_saved else "as it was read"
        said.append(f"{label}: {len(digest.files):,} files, {digest.size_bytes / 1e9:.3f} GB, {how} at {when}")
    return said


def _row(one: FileDifference) -> tuple[str | int | None, ...]:
    holds = list(dict.fromkeys(name for part in one.ranges for name in part.parameters))
    since = {True: "as it was saved", False: "changed since it was saved", None: ""}[one.unchanged]
    return (
        one.digest,
        f"{one.checkpoint}/{one.file}" if one.checkpoint else one.file,
        one.name,
        one.what,
        one.num_blocks or None,
        few([f"{part.bytes[0]}-{part.bytes[1]}" for part in one.ranges]),
        few([f"{part.elements[0]}-{part.elements[1]}" for part in one.ranges if part.elements]),
        few(holds),
        "-" if one.rank is None else f"rank {one.rank} on {one.node}",
        "; ".join(filter(None, (one.detail, since))),
    )


def _compare_by_digest(paths: Sequence[Path], extract: Path | None, quiet: bool) -> tuple[DigestReport, list[Path]]:
    """Compares manifests, and folders by manifests computed here; also the files of blocks that were written.

    ``extract``: folder for the blocks that differ, of each path that is not a manifest; None: none are written.

    Raises:
        CheckpointError: one cannot be read, or they have nothing in common.
        StorageError: blocks cannot be written.
    """
    here = {place: path for place, path in enumerate(paths) if not is_digest(path)}
    with bytes_bar("reading", sum(map(count_bytes, here.values())), quiet=quiet) as advance:
        report = compare_digests([_digest(path, advance) for path in paths])
    return report, [] if extract is None or report.same else write_extracts(report, here, extract)


def _digest(path: Path, advance: Callable[[int], None]) -> Digest:
    return read_digest(path) if is_digest(path) else digest_path(path, progress=advance)


@dataclass(frozen=True)
class CheckpointComparison:
    """What a comparison found.

    Attributes:
        report: of checkpoints, of manifests, or of runs over their steps.
        build: makes its page.
        written: files with blocks that differ.
    """

    report: ComparisonOutcome
    build: Callable[[], Page]
    written: Sequence[Path] = ()


def usage_problem(
    paths: Sequence[Path], options: Options, *, drift: bool = False, extract: Path | None = None, page: bool = False
) -> str | None:
    """What contradicts in the arguments of a comparison, in a sentence; None: nothing.

    Args:
        page: whether a web page is to be written; the others are those of ``compare_paths``.
    """
    if len(paths) < 2:
        return "two or more checkpoints are needed"
    if drift and (options.ulp or options.rtol or extract is not None):
        return "--drift measures differences: remove --ulp, --rtol and --extract"
    if _is_by_digest(paths, drift, extract) and (options != Options() or page):
        return "--only, --ignore, --weights-only, --ulp, --rtol and --html need the tensors themselves"
    if extract is not None and all(map(is_digest, paths)):
        return (
            "--extract: blocks are read from folders, but all that is given are manifests: give the folder of this "
            "machine in place of its manifest"
        )
    return None


def _is_by_digest(paths: Sequence[Path], drift: bool, extract: Path | None) -> bool:
    return not drift and (extract is not None or any(map(is_digest, paths)))


def compare_paths(
    paths: Sequence[Path],
    options: Options,
    *,
    drift: bool = False,
    extract: Path | None = None,
    limit: int = 40,
    jobs: int | None = None,
    quiet: bool = True,
) -> CheckpointComparison:
    """Compare checkpoints, manifests and extracts of them, or runs over the steps that they keep.

    Args:
        paths: two or more of any format that ``megasdc compare`` takes.
        options: what of them, with which tolerance.
        drift: they are folders of checkpoints, whose distance from the first is measured at each step.
        extract: folder for the blocks that differ, of each path that is not a manifest; None: none are written.
        limit: findings that the page lists.
        jobs: threads that read; None: one per core.
        quiet: whether no progress is shown.

    Raises:
        CheckpointError: one cannot be read, or they have nothing in common.
        StorageError: blocks cannot be written.
    """
    if drift:
        measured = _measure(list(paths), options, quiet)
        return CheckpointComparison(measured, partial(drift_page, measured))
    if _is_by_digest(paths, drift, extract):
        digests, written = _compare_by_digest(paths, extract, quiet)
        return CheckpointComparison(digests, partial(digest_page, digests, limit), written)
    views = open_extract_views(paths) if any(map(is_extract, paths)) else [open_view(path) for path in paths]
    views = with_derived_weights(views)
    keys = tensors_to_compare(views, options)
    total = sum(view.entries[key].num_bytes for view in views for key in keys if key in view.entries)
    with bytes_bar("comparing", total, quiet=quiet) as advance:
        report = compare_checkpoints(views, options, advance, jobs)
    return CheckpointComparison(report, partial(comparison_page, report, keys, options, limit))
