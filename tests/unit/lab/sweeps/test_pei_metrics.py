"""The metrics of Pei et al. by hand and on the paper's own numbers; when a run has diverged."""

from __future__ import annotations

import math

import pytest

from megasdc.lab.sweeps.outcome import Yardstick, diverged_why, final_mean
from megasdc.lab.sweeps.papers.tables import PAPER_TABLES
from megasdc.lab.sweeps.pei_metrics import RunEnding, relative_increase, score_cell

BY = Yardstick(final_steps=2, diverged_rise=0.1, entropy=6.0)


@pytest.mark.parametrize("table", ["pei_table_1", "pei_table_2", "pei_table_3"])
def test_the_papers_percentages_follow_from_its_losses(table: str) -> None:
    """Each stored increase is the stored worst loss over the stored healthy one, to the digits that were printed."""
    for row in PAPER_TABLES[table].rows.values():
        if row.worst is not None and row.increase is not None:
            assert relative_increase(row.worst, row.healthy) == pytest.approx(row.increase, abs=1.1e-4)


def test_a_row_of_the_papers_kind() -> None:
    """Table 1, LR 5e-3: of losses made up around the paper's healthy one, 5 nodes are worse and one diverged."""
    healthy = 2.6133
    losses = {
        f"n{k}": healthy * (1 + rise) for k, rise in enumerate([0.0051, 0.006, 0.02, 0.03, 0.009, 0.0049, 0, -0.01])
    }
    endings = [
        RunEnding("healthy", 1, "done", healthy),
        RunEnding("d", 1, "diverged", 7.1),
        RunEnding("x", 1, "nan", None),
    ]
    endings += [RunEnding(node, 1, "done", loss) for node, loss in losses.items()] + [RunEnding("f", 1, "failed", None)]
    score = score_cell(endings)
    nodes = score.published
    assert (nodes.worse, nodes.diverged, nodes.nan, nodes.failed) == (5, ("d",), ("x",), ("f",))
    assert (nodes.worst_node, nodes.nodes, score.seeds, score.healthy_failed) == ("n3", 11, 1, 0)
    assert nodes.worst == pytest.approx(2.6917, abs=1e-4) and nodes.worst_increase == pytest.approx(0.03)
    assert score.healthy == healthy and score.healthy_spread is None
    assert (score.made_up.nodes, score.made_up.worst, score.made_up.harmed) == (0, None, False)


def test_made_up_nodes_are_scored_apart() -> None:
    """A made-up node far above all others is neither the worst case nor a worse case of the published ones."""
    endings = [RunEnding("healthy", 1, "done", 2.0), RunEnding("a", 1, "done", 2.002)]
    endings += [RunEnding("b", 1, "done", 3.0, made_up=True), RunEnding("c", 1, "diverged", 9.0, made_up=True)]
    score = score_cell(endings)
    assert (score.published.worst_node, score.published.worse, score.published.harmed) == ("a", 0, False)
    assert (score.made_up.worst_node, score.made_up.worse, score.made_up.diverged) == ("b", 1, ("c",))
    assert score.harmed


def test_over_seeds_each_node_is_compared_with_the_healthy_run_of_its_seed() -> None:
    """Means and standard deviations over seeds; a node that diverged with one seed counts as diverged."""
    endings = [RunEnding("healthy", seed, "done", loss) for seed, loss in ((1, 2.0), (2, 4.0))]
    endings += [RunEnding("a", 1, "done", 2.02), RunEnding("a", 2, "done", 4.12)]  # +1 % and +3 %
    endings += [RunEnding("b", 1, "done", 2.1), RunEnding("b", 2, "diverged", 9.0)]
    endings += [RunEnding("c", 1, "done", 1.9, control=True), RunEnding("c", 2, "done", 4.1, control=True)]
    score = score_cell(endings)
    nodes = score.published
    assert score.chance == pytest.approx(0.05) and nodes.nodes == 2  # -5 %, +2.5 %
    assert nodes.worst_node == "a" and nodes.worst_increase == pytest.approx(0.02)
    assert nodes.worst_spread == pytest.approx(math.sqrt(2) * 0.01)
    assert score.healthy == pytest.approx(3.0) and score.healthy_spread == pytest.approx(math.sqrt(2))
    assert (nodes.worse, nodes.diverged) == (1, ("b",))


def test_without_a_healthy_run_nothing_is_compared() -> None:
    """A healthy run that diverged leaves no worst case, and is counted."""
    score = score_cell([RunEnding("healthy", 1, "diverged", 7.0), RunEnding("a", 1, "done", 2.0)])
    nodes = score.published
    assert (score.healthy, nodes.worst, nodes.worse, score.healthy_failed) == (None, None, 0, 1)


def test_when_a_run_has_diverged() -> None:
    """Above the loss of token frequencies, or a tenth above its lowest mean; a rise that came back is none."""
    falling = [(step, 5.0 - step / 10) for step in range(1, 21)]
    assert final_mean(falling, 2) == pytest.approx(3.05)
    assert diverged_why(falling, final_mean(falling, 2), BY) is None
    bump = [(step, loss + (2.0 if 5 < step < 10 else 0)) for step, loss in falling]
    assert diverged_why(bump, final_mean(bump, 2), BY) is None
    risen = [*falling, (21, 3.3), (22, 3.45)]
    assert "above 3.0500" in (diverged_why(risen, final_mean(risen, 2), BY) or "")
    high = [(step, 6.5) for step in range(1, 9)]
    assert "token frequencies" in (diverged_why(high, 6.5, BY) or "")
    assert diverged_why(high, 6.5, Yardstick(2, 0.1, None)) is None
    assert math.isnan(final_mean([(1, 2.0), (2, math.nan), (3, math.nan)], 3)) and math.isnan(final_mean([], 2))
    assert final_mean([(1, 9.0), (2, 2.0), (3, math.nan), (4, 3.0)], 3) == pytest.approx(2.5)  # a skipped step
