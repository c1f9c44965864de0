"""Snapshots in shared memory, beside training: written to the disk, or kept in memory, by a process of each rank."""
