"""Tables of a study: results, gradients, parameters, losses and evaluations beside the trusted replica's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megasdc.common.words import few
from megasdc.lab.studies.tables import DistanceRow, StudySummary, torn_note
from megasdc.ops.run_folder.study_log import WHOLE
from megasdc.output.page import Page, PageSection, Table, alarming, table_of

SPIKES = 20
"""Maximum of steps with a loss spike that are named; the JSON has all."""
WORST = 12
"""Maximum of submodules in the list of distances of a summary, the worst first; the whole model is always shown."""


def summary_page(summary: StudySummary) -> Page:
    """The tables for a terminal: of results only those that differ, of distances only the worst."""
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
            PageSection(tables=[one])
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
    columns: dict[str, Any] = {
        "replica": "replica",
        **({"rank": "rank"} if of_ranks else {}),
        "of": "name",
        "phase": "phase",
        "elements": "elements",
        "differ": lambda row: alarming(row.mismatches),
        "frequency": "frequency",
        "severity": "severity_mean",
        "at most": "severity_max",
        "from zero": "from_zero",
        "NaN or Inf": "non_finite",
    }
    title = "mismatches: share of elements that differ, their mean and largest relative difference"
    filters = ("replica", "of", "phase")
    return table_of("mismatch_table", summary.mismatches, columns, filters=filters, title=title)


def distances(rows: Sequence[DistanceRow]) -> Table:
    """Gradients and parameters, by replica and submodule."""
    columns: dict[str, Any] = {
        "replica": "replica",
        "of": "quantity",
        "submodule": lambda row: "whole model" if row.fqn == WHOLE else row.fqn,
        "worst": "worst",
        "at step": "worst_step",
        "last": "last",
        "comparisons": "comparisons",
        "not finite": lambda row: alarming(row.not_finite),
    }
    title = "norm of the difference over the trusted norm"
    return table_of("distances", rows, columns, filters=("replica", "of"), title=title)


def losses(summary: StudySummary) -> Table:
    """Losses, and their differences to the trusted replica's."""
    columns: dict[str, Any] = {
        "replica": "replica",
        "steps": "steps",
        "last loss": "last:.5g",
        "difference": "last_difference:+.3g",
        "largest difference": "largest_difference:+.3g",
        "at step": "largest_step",
        "spikes": lambda row: alarming(len(row.spikes)),
        "spikes at steps": lambda row: few(row.spikes, SPIKES),
        "not finite": lambda row: alarming(row.not_finite),
    }
    title = "losses, differences to the trusted replica's"
    return table_of("losses", summary.losses, columns, searched=False, title=title)


def evaluations(summary: StudySummary) -> Table:
    """Evaluations of the end models."""
    losses_of = {name.replace("_", " "): f"{name}:.5g" for name in ("loss", "trusted_loss", "accuracy", "disagreement")}
    columns = {"replica": "replica", "step": "step", **losses_of, "tokens": "tokens"}
    return table_of("evaluations", summary.evaluations, columns, title="evaluation")
