"""DropCompute: the paper's formulas, threshold search, simulation, and the decisions of a run."""
