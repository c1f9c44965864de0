"""Is it worth to leave late micro-batches out, and from when on? Formulas, search for a threshold, simulation."""
