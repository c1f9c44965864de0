"""Results of ranks, recomputed in fp64: products, the reduction, the optimizer."""
