"""Results of ranks, computed again in fp64: products, the reduction, the optimizer."""
