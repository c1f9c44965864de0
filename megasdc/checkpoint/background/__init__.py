"""Checkpoints that are written beside training: a snapshot in shared memory, and a process that writes it."""
