"""Is a host healthy? Repeated collectives, matrix products and a small training run, and a verdict for each host."""
