"""Which ranks measure the links of a run: pairs along data and pipeline rings, between different hosts; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RankPair = tuple[int, int]


def rings(tensor: int, pipeline: int, data: int) -> list[list[int]]:
    """Ranks of each data group and each pipeline, in ring order.

    Ranks are numbered with tensor fastest, then data, then pipeline (``megasdc.parallel.dims``).
    """
    stage = tensor * data
    over_data = [
        [stage * pp + tensor * dp + tp for dp in range(data)] for pp in range(pipeline) for tp in range(tensor)
    ]
    over_stages = [[stage * pp + place for pp in range(pipeline)] for place in range(stage)]
    return [ring for ring in (*over_data, *over_stages) if len(ring) > 1]


def ring_pairs(of: Iterable[Sequence[int]], hosts: Sequence[str]) -> list[RankPair]:
    """The first pair of ranks for each pair of hosts that are neighbours in a ring.

    Args:
        of: rings, each with two ranks or more.
        hosts: of each rank.
    """
    found: dict[frozenset[str], RankPair] = {}
    for ring in of:
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            first, second = min(one, other), max(one, other)
            if hosts[first] != hosts[second]:
                found.setdefault(frozenset((hosts[first], hosts[second])), (first, second))
    return sorted(found.values())


def in_turns(pairs: Iterable[RankPair], hosts: Sequence[str]) -> list[list[RankPair]]:
    """The pairs in sets that can be measured at the same time: in each a host has one pair at most."""
    turns: list[list[RankPair]] = []
    for pair in pairs:
        own = {hosts[rank] for rank in pair}
        turn = next((turn for turn in turns if not own & {hosts[rank] for each in turn for rank in each}), None)
        if turn is None:
            turns.append([pair])
        else:
            turn.append(pair)
    return turns
