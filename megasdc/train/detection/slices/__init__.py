"""Exact checks of a slice of each shard in every step, another slice each time: its sum, its state, its update."""
