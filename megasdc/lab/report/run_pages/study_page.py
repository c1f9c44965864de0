"""Page of a study: where, when and how far results of the other replicas differ from the trusted replica's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megasdc.config.replica import replica_folder
from megasdc.lab.report import study_tables
from megasdc.lab.report.run_pages.facts import highlights, versions
from megasdc.lab.report.run_pages.figures.study import (
    bits_figure,
    burst_figure,
    distance_figure,
    loss_figures,
    mismatch_map,
    severity_figure,
)
from megasdc.lab.studies.tables import StudySummary, describe, mismatch_rows, summarize_study, torn_note
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.status import status_of
from megasdc.ops.run_folder.study_log import WHOLE, Line, read_study
from megasdc.output.figure import Figure
from megasdc.output.page import Page, Section, plain_values
from megasdc.output.table import Table

MODES = {
    "computation_sync": "each submodule's own result is compared element by element and overwritten by the trusted one",
    "parameter_sync": "gradients are compared, and after each step parameters and optimizer state are overwritten by "
    "the trusted ones",
    "free_run": "nothing is overwritten",
}
SAMPLES = 200
"""Maximum of single elements in the page; the CSV has all."""


def study_page(folder: Path, title: str | None = None) -> Page:
    """The page of a study, also of one in progress.

    Raises ``DataError`` where a file of the study is damaged.
    """
    summary = summarize_study(folder)
    told = describe(summary)
    trusted = load_run(replica_folder(folder, summary.trusted))
    status = status_of(trusted)
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
    whole_first = sorted(summary.distances, key=lambda row: row.fqn != WHOLE)
    found = {
        "Results compared": study_tables.mismatches(summary),
        "Gradients and parameters compared": study_tables.distances(whole_first),
        "Losses": study_tables.losses(summary),
        "Evaluation of the end models": study_tables.evaluations(summary),
        "Single wrong elements": _samples(mismatches),
    }
    return [Section(heading, tables=[table]) for heading, table in found.items() if table.rows]


def _samples(mismatches: Sequence[Line]) -> Table:
    """The recorded single elements, at most ``megasdc.study.sampled_elements`` of each wrong result."""
    names = ("replica", "rank", "step", "micro_batch", "fqn", "phase")
    rows = [
        (*(line[name] for name in names), place, trusted, value)
        for line in mismatches
        for place, trusted, value in line["samples"]
    ]
    headings = ("replica", "rank", "step", "micro-batch", "of", "phase", "element", "trusted value", "value")
    return Table("samples", headings, rows, ("replica", "rank", "phase"), shown=SAMPLES)
