"""What is a run called in the tables of nodes?"""

from __future__ import annotations

from megasdc.lab.sweeps.ma_tables import name_runs


def test_seeds_are_told_where_a_cell_has_several() -> None:
    """A cell of one seed keeps plain names, also beside one of two."""
    runs = [("RQ1", "n", 1), ("RQ2", "n", 1), ("RQ2", "n", 2), ("RQ2", "healthy", 2)]
    rows = [dict(zip(("cell", "node", "seed"), run, strict=True)) for run in runs]
    assert name_runs(rows) == ["n", "n, seed 1", "n, seed 2", "healthy, seed 2"]
