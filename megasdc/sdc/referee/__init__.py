"""What ranks have computed, computed again in fp64: products, the reduction, the optimizer."""
