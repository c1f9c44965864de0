"""Tables of unhealthy nodes: mismatches and their effect on training, a row per node, from a sweep's studies.

The research questions of Ma, Pei, Lausen, Karypis 2025, Understanding Silent Data Corruption in LLM Training
(https://arxiv.org/abs/2502.12340): RQ1, submodules, with computation synchronization; RQ2, gradients of a step, with
parameter synchronization; RQ3, a whole training, with neither. Published figures are those of the node's profile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasdc.config.sections import COMPUTATION_SYNC, FREE_RUN, PARAMETER_SYNC
from megasdc.lab.studies.tables import MismatchRow, StudySummary, summarize_study
from megasdc.lab.sweeps.results import SweepResults
from megasdc.ops.run_folder.study_log import WHOLE
from megasdc.output.page import Cell, Table, number_cell

PLACES = {
    (part, phase): f"mismatch_frequency_{phase}_{part}"
    for phase in ("forward", "backward")
    for part in ("attention", "ffn")
}
"""Columns of RQ1, (part, phase), and the names of their frequencies in profiles."""
NOISE = "worst_gradient_noise_to_signal"


@dataclass(frozen=True)
class StudiedNode:
    """One node in one study.

    Args:
        node: its name, with the seed of the run where its cell has several.
        control: whether it is a control, which shows the effect of chance.
        published: figures of its profile by name.
        mode: of the study.
        mismatches: by part and phase; computation_sync.
        wrong_steps: steps with a mismatch; computation_sync.
        noise: worst ||g_u - g_h|| / ||g_h|| of a step; parameter_sync. None: it was never finite.
        noise_step: its step.
        parameters: ||p_u - p_h|| / ||p_h|| at the end; free_run. None: not finite.
        loss_difference: of the last step.
        largest_loss_difference: of any step.
        spikes: of the unhealthy replica's loss.
        disagreement: share of validation tokens with another prediction; free_run.
    """

    cell: str
    run_id: str
    node: str
    control: bool
    published: Mapping[str, float]
    mode: str
    mismatches: Mapping[tuple[str, str], MismatchRow] = field(default_factory=dict)
    wrong_steps: int = 0
    noise: float | None = None
    noise_step: int | None = None
    parameters: float | None = None
    loss_difference: float | None = None
    largest_loss_difference: float | None = None
    spikes: int = 0
    disagreement: float | None = None

    @property
    def label(self) -> str:
        """Its name; a control is marked as chance."""
        return f"{self.node} (chance)" if self.control else self.node

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        rows = {f"{phase} {part}": row.as_dict() for (part, phase), row in self.mismatches.items()}
        return {**vars(self), "published": dict(self.published), "mismatches": rows}


def studied_nodes(results: SweepResults) -> list[StudiedNode]:
    """Reads the studies of a sweep; runs that are no study, or ended without losses, are ignored.

    Raises:
        DataError: a study's files are damaged.
    """
    found = []
    for row, name in zip(results.rows, name_runs(results.rows), strict=True):
        folder = results.run_folder(row["run_id"])
        if row["steps"] and (folder / "study").is_dir():
            profile = results.sweep["profiles"].get(row["profile"], {})
            found.append(_node(row, name, summarize_study(folder), profile.get("published", {})))
    return found


def name_runs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the nodes of rows with ``cell``, ``node`` and ``seed``; with the seed where a cell has several."""
    seeds: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        seeds[row["cell"]].add(row["seed"])
    several = {cell for cell, found in seeds.items() if len(found) > 1}
    return [f"{row['node']}, seed {row['seed']}" if row["cell"] in several else row["node"] for row in rows]


def _node(row: Mapping[str, Any], name: str, study: StudySummary, published: Mapping[str, float]) -> StudiedNode:
    replica = next(number for number in range(study.replicas) if number != study.trusted)
    losses = next(one for one in study.losses if one.replica == replica)
    noise = _distance(study, "gradient", replica)
    parameters = _distance(study, "parameters", replica)
    return StudiedNode(
        cell=row["cell"],
        run_id=row["run_id"],
        node=name,
        control=row["control"],
        published=published,
        mode=study.mode,
        mismatches={(one.name, one.phase): one for one in study.mismatches if (one.name, one.phase) in PLACES},
        wrong_steps=sum(one.wrong_steps for one in study.bursts),
        noise=None if noise is None else noise.worst,
        noise_step=None if noise is None else noise.worst_step,
        parameters=None if parameters is None else parameters.last,
        loss_difference=losses.last_difference,
        largest_loss_difference=losses.largest_difference,
        spikes=len(losses.spikes),
        disagreement=next((one["disagreement"] for one in study.evaluations if one["replica"] == replica), None),
    )


def _distance(study: StudySummary, quantity: str, replica: int) -> Any:
    rows = (one for one in study.distances if one.quantity == quantity and one.replica == replica)
    return next((one for one in rows if one.fqn == WHOLE), None)


def node_tables(nodes: Sequence[StudiedNode]) -> list[Table]:
    """The tables of the modes that were run, in the order of the research questions."""
    made = {COMPUTATION_SYNC: _submodules, PARAMETER_SYNC: _gradients, FREE_RUN: _trainings}
    return [make(chosen) for mode, make in made.items() if (chosen := [one for one in nodes if one.mode == mode])]


def _submodules(nodes: Sequence[StudiedNode]) -> Table:
    columns = ("node", *(f"{part}, {phase}" for part, phase in PLACES), "wrong steps")
    note = (
        "Mismatch frequency; in brackets what was published of the node that is imitated; then the mean severity, and "
        "the largest in brackets."
    )
    rows = tuple((Cell(one.label), *(_place(one, *place) for place in PLACES), one.wrong_steps) for one in nodes)
    return Table("rq1_submodules", columns, rows, searched=False, title="RQ1, submodules", note=note)


def _gradients(nodes: Sequence[StudiedNode]) -> Table:
    columns = ("node", "noise-to-signal", "at step", "difference of loss")
    note = "Worst ||g_u - g_h|| / ||g_h|| of a step, with what was published; largest difference of loss."
    rows = tuple(
        (
            Cell(one.label),
            _number(one.noise, one.published.get(NOISE)),
            one.noise_step,
            _number(one.largest_loss_difference),
        )
        for one in nodes
    )
    return Table("rq2_gradients", columns, rows, searched=False, title="RQ2, gradients of a step", note=note)


def _trainings(nodes: Sequence[StudiedNode]) -> Table:
    columns = ("node", "parameters", "difference of loss", "spikes of loss", "disagreement")
    note = (
        "At the end: ||p_u - p_h|| / ||p_h||, difference of training loss, and validation tokens whose most likely "
        "prediction is another; spikes over all steps."
    )
    rows = tuple(
        (
            Cell(one.label),
            _number(one.parameters),
            _number(one.loss_difference),
            one.spikes,
            number_cell(one.disagreement, ".2%"),
        )
        for one in nodes
    )
    return Table("rq3_training", columns, rows, searched=False, title="RQ3, a training", note=note)


def _place(one: StudiedNode, part: str, phase: str) -> Cell:
    row = one.mismatches.get((part, phase))
    frequency = _number(0.0 if row is None else row.frequency, one.published.get(PLACES[part, phase]))
    if row is None or row.severity_mean is None or row.severity_max is None:
        return frequency
    return Cell(f"{frequency.text}; {row.severity_mean:.2g} ({row.severity_max:.2g})", frequency.value)


def _number(value: float | None, published: float | None = None) -> Cell:
    text = "-" if value is None else f"{value:.3g}"
    return Cell(text + ("" if published is None else f" [{published:.3g}]"), value)
