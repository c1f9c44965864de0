"""Page of a study: where, when and how far results of the other replicas differ from the trusted replica's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megasdc.config.replica import replica_folder
from megasdc.report.result.figure import Figure
from megasdc.report.result.page import Page, Section, plain_values
from megasdc.report.result.table import Cell, Table, number
from megasdc.report.run_pages.facts import highlights, versions
from megasdc.report.run_pages.figures.study import (
    bits_figure,
    burst_figure,
    distance_figure,
    loss_figures,
    mismatch_map,
    severity_figure,
)
from megasdc.report.run_pages.record import load_run
from megasdc.report.run_pages.status import status_of
from megasdc.study.log import WHOLE, Line, read_study
from megasdc.study.tables import StudySummary, describe, mismatch_rows, summarize_study, torn_note

MODES = {
    "computation_sync": "each submodule's own result is compared element by element and overwritten by the trusted one",
    "parameter_sync": "gradients are compared, and after each step parameters and optimizer state are overwritten by "
    "the trusted ones",
    "free_run": "nothing is overwritten",
}
SPIKES = 20
"""Maximum of steps with a loss spike that are named; the JSON has all."""
SAMPLES = 200
"""Maximum of single elements in the page; the CSV has all."""


def study_page(folder: Path, now: float, title: str | None = None) -> Page:
    """Build the page, also of a study in progress.

    Args:
        folder: of the launch.
        now: seconds since the epoch.
        title: of the page; None: the folder's name.

    Raises:
        DataError: a file of the study is damaged.
    """
    summary = summarize_study(folder)
    told = describe(summary)
    trusted = load_run(replica_folder(folder, summary.trusted))
    status = status_of(trusted, now)
    name = title or f"Study {folder.resolve().name}"
    wrong = sum(row.mismatches for row in summary.mismatches)
    apart = any(row.worst or row.not_finite for row in summary.distances)
    equal = not wrong and not apart
    steps = f"{summary.steps:,}" if status.planned is None else f"{summary.steps:,} of {status.planned:,}"
    tiles = {"replicas": str(summary.replicas), "trusted": str(summary.trusted), "steps": steps}
    if summary.mismatches:
        compared = sum(row.elements for row in summary.mismatches)
        tiles |= {"elements compared": f"{compared:,}", "mismatches": f"{wrong:,}"}
    return Page(
        kind="study",
        title=name,
        verdict=f"{name}: {'no difference in any bit of what was compared' if equal else told[0]}.",
        state="same" if equal else "different",
        sentences=[
            f"Replica {summary.trusted}: {status.text}",
            f"Mode {summary.mode}: {MODES[summary.mode]}. Ma et al. 2025, arXiv 2502.12340.",
            *told[1:],
        ],
        tiles=tiles,
        notes=[*filter(None, [torn_note(summary)]), *trusted.notes],
        sections=[
            *_tables(summary, list(read_study(folder, "mismatch"))),
            Section("Figures", figures=_figures(folder, summary)),
            Section("Settings of the trusted replica", facts={**highlights(trusted), **versions(trusted)}),
        ],
        summary=plain_values(summary.as_dict()),
    )


def _figures(folder: Path, summary: StudySummary) -> list[Figure]:
    mismatches = list(read_study(folder, "mismatch"))
    rows = mismatch_rows([*read_study(folder, "compared"), *mismatches], "submodule")
    found: list[Figure | None] = []
    for replica in range(summary.replicas):
        own = [line for line in mismatches if line["replica"] == replica]
        found.append(mismatch_map(replica, rows))
        if own:
            found += [draw(replica, own) for draw in (burst_figure, severity_figure, bits_figure)]
    for quantity in ("gradient", "parameters"):
        lines: list[Line] = list(read_study(folder, quantity))
        if any(line["ratio"] != 0 for line in lines):
            found.append(distance_figure(quantity, lines))
    if losses := list(read_study(folder, "loss")):
        found += loss_figures(losses)
    return [one for one in found if one is not None]


def _tables(summary: StudySummary, mismatches: Sequence[Line]) -> list[Section]:
    found = {
        "Results compared": _mismatches(summary),
        "Gradients and parameters compared": _distances(summary),
        "Losses": _losses(summary),
        "Evaluation of the end models": _evaluations(summary),
        "Single wrong elements": _samples(mismatches),
    }
    return [Section(heading, tables=[table]) for heading, table in found.items() if table.rows]


def _mismatches(summary: StudySummary) -> Table:
    rows = tuple(
        (
            number(row.replica, "d"),
            Cell(row.name),
            Cell(row.phase),
            number(row.elements, ",d"),
            number(row.mismatches, ",d", look="bad" if row.mismatches else ""),
            number(row.frequency, ".3g"),
            number(row.severity_mean, ".3g"),
            number(row.severity_max, ".3g"),
            number(row.from_zero, ",d"),
            number(row.non_finite, ",d"),
        )
        for row in summary.mismatches
    )
    headings = ("replica", "of", "phase", "elements", "differ", "frequency", "severity", "at most", "from zero")
    return Table("mismatch_table", (*headings, "NaN or Inf"), rows, ("replica", "of", "phase"))


def _distances(summary: StudySummary) -> Table:
    rows = tuple(
        (
            number(row.replica, "d"),
            Cell(row.quantity),
            Cell("whole model" if row.fqn == WHOLE else row.fqn),
            number(row.worst, ".3g"),
            number(row.worst_step, ",d"),
            number(row.last, ".3g"),
            number(row.comparisons, ",d"),
            number(row.not_finite, ",d", look="bad" if row.not_finite else ""),
        )
        for row in sorted(summary.distances, key=lambda row: row.fqn != WHOLE)
    )
    headings = ("replica", "of", "submodule", "worst", "at step", "last", "comparisons", "not finite")
    return Table("distances", headings, rows, ("replica", "of"))


def _losses(summary: StudySummary) -> Table:
    rows = tuple(
        (
            number(row.replica, "d"),
            number(row.last, ".5g"),
            number(row.last_difference, "+.3g"),
            number(row.largest_difference, "+.3g"),
            number(row.largest_step, ",d"),
            number(len(row.spikes), ",d", look="bad" if row.spikes else ""),
            Cell(f"{', '.join(map(str, row.spikes[:SPIKES]))}{', ...' if len(row.spikes) > SPIKES else ''}" or "-"),
            number(row.not_finite, ",d", look="bad" if row.not_finite else ""),
        )
        for row in summary.losses
    )
    headings = ("replica", "last loss", "difference", "largest difference", "at step", "spikes", "spikes at steps")
    return Table("losses", (*headings, "not finite"), rows, searched=False)


def _evaluations(summary: StudySummary) -> Table:
    names: Sequence[str] = ("replica", "step", "loss", "trusted_loss", "accuracy", "disagreement", "tokens")
    rows = tuple(
        tuple(number(one[name], ",d" if name in ("replica", "step", "tokens") else ".5g") for name in names)
        for one in summary.evaluations
    )
    return Table("evaluations", tuple(name.replace("_", " ") for name in names), rows)


def _samples(mismatches: Sequence[Line]) -> Table:
    """The recorded single elements, at most ``megasdc.study.sampled_elements`` of each wrong result."""
    rows = tuple(
        (
            number(line["replica"], "d"),
            number(line["rank"], "d"),
            number(line["step"], ",d"),
            number(line["micro_batch"], "d"),
            Cell(line["fqn"]),
            Cell(line["phase"]),
            number(place, ",d"),
            Cell(trusted),
            Cell(value),
        )
        for line in mismatches
        for place, trusted, value in line["samples"]
    )
    headings = ("replica", "rank", "step", "micro-batch", "of", "phase", "element", "trusted value", "value")
    return Table("samples", headings, rows, ("replica", "rank", "phase"), shown=SAMPLES)
