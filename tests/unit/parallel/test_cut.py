"""Is a launch cut into equal runs of neighbouring ranks?"""

from __future__ import annotations

import pytest

from megasdc.parallel.dims import ReplicaWorld


def test_every_rank_has_one_place() -> None:
    """Ranks of a replica are neighbours; the variables are those of a launch of the replica alone."""
    cuts = [ReplicaWorld.from_environment(3, {"RANK": str(rank), "WORLD_SIZE": "6"}) for rank in range(6)]
    assert [(cut.replica, cut.rank) for cut in cuts] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert cuts[3].environment == {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(("replicas", "rank", "size"), [(2, 0, 3), (2, 4, 4), (2, -1, 4)])
def test_what_cannot_be_cut(replicas: int, rank: int, size: int) -> None:
    """Unequal parts and ranks outside are refused."""
    with pytest.raises(ValueError, match="equal parts"):
        ReplicaWorld(replicas, rank, size)
