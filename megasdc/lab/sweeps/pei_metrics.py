"""Effect of unhealthy nodes on the final loss: the metrics of Pei et al. for one cell.

Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709: *worst case* is the largest final loss over unhealthy
nodes and its increase over the healthy one's; *number of worse cases* counts nodes with a relative increase above
0.5 %; nodes that diverged or ended with NaN are counted separately.

Differences: with several seeds a node's increase is over the healthy run of the same seed, its mean over seeds decides
whether it is worse, and the worst case is the node with the largest mean increase. A node counts as diverged or NaN
when it was with any seed. Nodes that follow no published figures are scored apart. Added: a control, with one low bit
changed once, shows how far runs diverge by chance alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from megasdc.lab.sweeps.outcome import DIVERGED, DONE, FAILED, NAN
from megasdc.lab.sweeps.sweep_file import HEALTHY

EPSILON = 0.005
"""Relative increase of the final loss above which a node is a worse case."""


@dataclass(frozen=True)
class RunEnding:
    """How one run of a cell ended: done, diverged, nan or failed; ``loss`` is None where it is not finite.

    ``control``, ``made_up``: of its node.
    """

    node: str
    seed: int
    status: str
    loss: float | None
    control: bool = False
    made_up: bool = False


@dataclass(frozen=True)
class NodesScore:
    """The metrics of one cell over some of its unhealthy nodes.

    Args:
        nodes: nodes that were run.
        worst: mean final loss of the worst node, among those that are done with every seed; None: there is none.
        worst_node: its name.
        worst_increase: its mean relative increase.
        worst_spread: standard deviation of that increase over seeds; None with fewer than two.
        worse: nodes whose mean relative increase is above epsilon.
        diverged: nodes that diverged with some seed.
        nan: nodes that ended with NaN with some seed and did not diverge.
        failed: nodes with failed runs that neither diverged nor ended with NaN.
    """

    nodes: int
    worst: float | None
    worst_node: str | None
    worst_increase: float | None
    worst_spread: float | None
    worse: int
    diverged: tuple[str, ...]
    nan: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def harmed(self) -> bool:
        """Whether some node is worse, diverged, or ended with NaN."""
        return bool(self.worse or self.diverged or self.nan)


@dataclass(frozen=True)
class CellScore:
    """The metrics of one cell.

    Args:
        healthy: mean final loss of the done healthy runs; None: there is none.
        healthy_spread: standard deviation over seeds; None with fewer than two.
        healthy_failed: healthy runs that are not done.
        chance: largest absolute relative difference of a control's final loss from the healthy one; None without any.
        seeds: seeds that were run.
        published: of nodes that follow published figures.
        made_up: of nodes that do not.
    """

    healthy: float | None
    healthy_spread: float | None
    healthy_failed: int
    chance: float | None
    seeds: int
    published: NodesScore
    made_up: NodesScore

    @property
    def harmed(self) -> bool:
        """Whether some node of either kind is worse, diverged, or ended with NaN."""
        return self.published.harmed or self.made_up.harmed


def score_cell(endings: Sequence[RunEnding], epsilon: float = EPSILON) -> CellScore:
    """The score of the runs of one cell; endings are of all nodes, including the healthy one."""
    healthy = [one for one in endings if one.node == HEALTHY]
    base = {one.seed: one.loss for one in healthy if one.status == DONE and one.loss is not None}
    controls = [one for one in endings if one.control]
    nodes = [one for one in endings if one.node != HEALTHY and not one.control]
    return CellScore(
        healthy=fmean(base.values()) if base else None,
        healthy_spread=_spread(list(base.values())),
        healthy_failed=sum(one.status != DONE for one in healthy),
        chance=max((abs(rise) for rise in _increases(controls, base)), default=None),
        seeds=len({one.seed for one in (*healthy, *nodes)}),
        published=_score_nodes([one for one in nodes if not one.made_up], base, epsilon),
        made_up=_score_nodes([one for one in nodes if one.made_up], base, epsilon),
    )


def _score_nodes(endings: Sequence[RunEnding], base: Mapping[int, float], epsilon: float) -> NodesScore:
    """The score of some unhealthy nodes; ``base``: the healthy final loss by seed."""
    by_node: dict[str, list[RunEnding]] = {}
    for ending in endings:
        by_node.setdefault(ending.node, []).append(ending)
    lost = {node: _worst_status(runs) for node, runs in by_node.items()}
    rises = {node: _increases(runs, base) for node, runs in by_node.items() if lost[node] == DONE}
    means = {node: fmean(values) for node, values in rises.items() if values}
    worst = max(means, key=means.__getitem__, default=None)
    return NodesScore(
        nodes=len(by_node),
        worst=None if worst is None else fmean(one.loss for one in by_node[worst] if one.loss is not None),
        worst_node=worst,
        worst_increase=None if worst is None else means[worst],
        worst_spread=None if worst is None else _spread(rises[worst]),
        worse=sum(mean > epsilon for mean in means.values()),
        diverged=_with(lost, DIVERGED),
        nan=_with(lost, NAN),
        failed=_with(lost, FAILED),
    )


def score_cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, CellScore]:
    """The scores of every cell of a sweep's results, in the order of the rows.

    Rows have ``cell, node, control, made_up, seed, status, final_loss``.
    """
    cells: dict[str, list[RunEnding]] = {}
    for row in rows:
        kind = (row["control"], row["made_up"])
        ending = RunEnding(row["node"], row["seed"], row["status"], row["final_loss"], *kind)
        cells.setdefault(row["cell"], []).append(ending)
    return {cell: score_cell(endings) for cell, endings in cells.items()}


def relative_increase(loss: float, healthy: float) -> float:
    """Relative increase of a final loss over the healthy one: (loss / healthy - 1)."""
    return loss / healthy - 1


def _increases(runs: Sequence[RunEnding], base: Mapping[int, float]) -> list[float]:
    return [relative_increase(one.loss, base[one.seed]) for one in runs if one.seed in base and one.loss is not None]


def _worst_status(runs: Sequence[RunEnding]) -> str:
    """Worst status of a node's runs, in the order diverged, NaN, failed, done."""
    found = {one.status for one in runs}
    return next((status for status in (DIVERGED, NAN, FAILED) if status in found), DONE)


def _with(lost: Mapping[str, str], status: str) -> tuple[str, ...]:
    return tuple(node for node, found in lost.items() if found == status)


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
