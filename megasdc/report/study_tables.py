"""Tables of a study: results, gradients, parameters, losses and evaluations beside the trusted replica's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megasdc.report.result.page import Page, Section
from megasdc.report.result.table import Cell, Table, few, number
from megasdc.study.log import WHOLE
from megasdc.study.tables import DistanceRow, StudySummary, torn_note

SPIKES = 20
"""Maximum of steps with a loss spike that are named; the JSON has all."""
WORST = 12
"""Maximum of submodules in the list of distances of a summary, the worst first; the whole model is always shown."""


def summary_page(summary: StudySummary) -> Page:
    """The tables for a terminal: of results only those that differ, of distances only the worst.

    Args:
        summary: of the study.
    """
    wrong, compared = sum(row.mismatches for row in summary.mismatches), sum(row.elements for row in summary.mismatches)
    shown = replace(summary, mismatches=[row for row in summary.mismatches if row.mismatches])
    bursts = [
        f"replica {row.replica}: wrong from step {row.first_step}, in {row.wrong_steps} steps; {row.bursts} bursts, "
        f"the longest of {row.longest_burst} steps"
        for row in summary.bursts
    ]
    counted = [f"{wrong:,} of {compared:,} elements compared differ"] if summary.mismatches else []
    worst = [row for quantity in ("gradient", "parameters") for row in _worst(summary, quantity)]
    return Page(
        title="Study",
        verdict=f"{summary.run_dir}: {summary.mode}, {summary.steps} steps, {summary.replicas} replicas, replica "
        f"{summary.trusted} is trusted",
        sentences=[*counted, *bursts],
        notes=[*filter(None, [torn_note(summary)])],
        sections=[
            Section(tables=[one])
            for one in (mismatches(shown), distances(worst), losses(summary), evaluations(summary))
        ],
    )


def _worst(summary: StudySummary, quantity: str) -> list[DistanceRow]:
    rows = [row for row in summary.distances if row.quantity == quantity]
    apart = sorted((row for row in rows if row.fqn != WHOLE and row.worst), key=lambda row: -(row.worst or 0.0))
    return [*(row for row in rows if row.fqn == WHOLE), *apart[:WORST]]


def mismatches(summary: StudySummary) -> Table:
    """Elements that differ, by replica, group of submodules and phase."""
    of_ranks = any(row.rank is not None for row in summary.mismatches)
    rows = [
        (
            row.replica,
            *([row.rank] if of_ranks else []),
            row.name,
            row.phase,
            row.elements,
            number(row.mismatches, ",d", look="bad" if row.mismatches else ""),
            row.frequency,
            row.severity_mean,
            row.severity_max,
            row.from_zero,
            row.non_finite,
        )
        for row in summary.mismatches
    ]
    headings = ("replica", *(["rank"] if of_ranks else []), "of", "phase", "elements", "differ", "frequency")
    more = ("severity", "at most", "from zero", "NaN or Inf")
    title = "mismatches: share of elements that differ, their mean and largest relative difference"
    return Table("mismatch_table", (*headings, *more), rows, ("replica", "of", "phase"), title=title)


def distances(rows: Sequence[DistanceRow]) -> Table:
    """Gradients and parameters, by replica and submodule."""
    cells = [
        (
            row.replica,
            row.quantity,
            "whole model" if row.fqn == WHOLE else row.fqn,
            row.worst,
            row.worst_step,
            row.last,
            row.comparisons,
            number(row.not_finite, ",d", look="bad" if row.not_finite else ""),
        )
        for row in rows
    ]
    headings = ("replica", "of", "submodule", "worst", "at step", "last", "comparisons", "not finite")
    title = "norm of the difference over the trusted norm"
    return Table("distances", headings, cells, ("replica", "of"), title=title)


def losses(summary: StudySummary) -> Table:
    """Losses, and their differences to the trusted replica's."""
    rows = [
        (
            row.replica,
            row.steps,
            number(row.last, ".5g"),
            number(row.last_difference, "+.3g"),
            number(row.largest_difference, "+.3g"),
            row.largest_step,
            number(len(row.spikes), ",d", look="bad" if row.spikes else ""),
            few(row.spikes, SPIKES),
            number(row.not_finite, ",d", look="bad" if row.not_finite else ""),
        )
        for row in summary.losses
    ]
    headings = ("replica", "steps", "last loss", "difference", "largest difference", "at step", "spikes")
    title = "losses, differences to the trusted replica's"
    return Table("losses", (*headings, "spikes at steps", "not finite"), rows, searched=False, title=title)


def evaluations(summary: StudySummary) -> Table:
    """Evaluations of the end models."""
    names = ("replica", "step", "loss", "trusted_loss", "accuracy", "disagreement", "tokens")
    whole = ("replica", "step", "tokens")
    rows: list[list[Cell]] = [
        [number(one[name], ",d" if name in whole else ".5g") for name in names] for one in summary.evaluations
    ]
    return Table("evaluations", [name.replace("_", " ") for name in names], rows, title="evaluation")
