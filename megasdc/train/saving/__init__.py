"""Checkpoints of a run: on the disk, in memory, and how it goes on from them."""
