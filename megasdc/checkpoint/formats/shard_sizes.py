"""Sizes of ZeRO-1's shards: which of them hold what another number of replicas owns; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

_ALIGNMENT = 2
"""A group is padded to a multiple of it times the replicas (DeepSpeed 0.19.8, ``nccl_start_alignment_factor``)."""


def shard_elements(total: int, replicas: int) -> int:
    """Elements of each rank's shard of a group, with padding; ``total``: elements of the group."""
    return -(-total // (_ALIGNMENT * replicas)) * _ALIGNMENT


def shards_of(totals: Sequence[int], saved: int, now: int, dp_rank: int) -> set[int]:
    """Numbers of the shards, of ``saved`` replicas, in which a replica of ``now`` finds what it owns; at least one.

    Args:
        totals: elements of each group of a stage's optimizer on one tensor rank.
    """
    found = set()
    for total in totals:
        before, after = (shard_elements(total, replicas) for replicas in (saved, now))
        first, end = dp_rank * after, min((dp_rank + 1) * after, total)
        if first < end:
            found |= set(range(first // before, -(-end // before)))
    return found or {min(dp_rank, saved - 1)}
