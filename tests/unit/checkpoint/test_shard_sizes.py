"""Which of ZeRO-1's shards hold what another number of replicas owns."""

from __future__ import annotations

import random

import pytest
import torch

from megasdc.checkpoint.files import shards_of
from megasdc.checkpoint.views import shard_fragments


def owned(total: int, replicas: int, dp_rank: int) -> range:
    """Elements of a group that a replica owns, as DeepSpeed lays them out."""
    length, fragments = shard_fragments({"w": torch.Size([total])}, replicas)
    numel = sum(count for _, count in fragments[dp_rank].values())
    return range(dp_rank * length, dp_rank * length + numel)


@pytest.mark.slow
def test_exactly_the_shards_with_a_part_are_named() -> None:
    """Groups of all sizes, small ones too, and any numbers of replicas; one at least, for the settings in its file."""
    chance = random.Random(1)
    for _ in range(2000):
        totals = [chance.randrange(1, chance.choice([8, 60, 5000])) for _ in range(2)]
        saved, now = chance.randrange(1, 20), chance.randrange(1, 20)
        for dp_rank in range(now):
            needed = {
                number
                for total in totals
                for number in range(saved)
                if set(owned(total, saved, number)) & set(owned(total, now, dp_rank))
            }
            assert shards_of(totals, saved, now, dp_rank) == (needed or {min(dp_rank, saved - 1)})
