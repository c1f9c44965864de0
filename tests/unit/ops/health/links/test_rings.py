"""Pairs of ranks that measure links: one for each pair of neighbouring hosts, never two of a host at once."""

from __future__ import annotations

from megasdc.ops.health.links.rings import in_turns, ring_pairs, rings
from megasdc.parallel.dims import ParallelDims


def test_rings_are_the_groups_of_the_layout() -> None:
    """Every ring holds all ranks that differ in one of replica and stage alone."""
    dims = ParallelDims(2, 3, 4)
    found = rings(2, 3, 4)
    assert len(found) == 2 * 3 + 2 * 4
    for ring in found:
        places = [dims.at(rank) for rank in ring]
        assert len({one.tp_rank for one in places}) == 1
        assert [one.dp_rank for one in places] == [0, 1, 2, 3] or [one.pp_rank for one in places] == [0, 1, 2]
    assert rings(2, 1, 1) == [], "tensor ranks share no ring"


def test_one_pair_of_ranks_for_each_pair_of_hosts() -> None:
    """Ranks of one host are left out, and a pair of hosts is measured once, whichever way its rings go."""
    hosts = ["a", "a", "b", "b", "c", "c"]
    assert ring_pairs(rings(1, 1, 6), hosts) == [(0, 5), (1, 2), (3, 4)]
    assert ring_pairs(rings(1, 2, 3), hosts) == [(1, 2), (1, 4), (3, 4)]
    assert ring_pairs(rings(1, 2, 2), ["a"] * 4) == []
    assert ring_pairs(rings(1, 1, 2), ["b", "a"]) == [(0, 1)]


def test_no_host_has_two_pairs_at_once() -> None:
    """All pairs have their turn; rings of an even and an odd number of hosts need two and three."""
    for number, turns in ((4, 2), (5, 3), (2, 1)):
        hosts = [f"node{rank}" for rank in range(number)]
        pairs = ring_pairs(rings(1, 1, number), hosts)
        found = in_turns(pairs, hosts)
        assert sorted(pair for turn in found for pair in turn) == pairs
        assert all(len({rank for pair in turn for rank in pair}) == 2 * len(turn) for turn in found)
        assert len(found) == turns
