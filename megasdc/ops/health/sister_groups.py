"""Which of two ranks has left out a collective: what ranks of sister groups have done tells; pure functions.

Where a group has two members, nothing inside it tells which of them is right. Its sisters are groups of as many ranks
of the same stage, along the same axis of the layout, that have had the same collectives until then: where tensor ranks
0 and 1 of a stage have two replicas each, the two groups of replicas. All ranks of a stage run the same program, so
what the members of all sisters have done is usual. Where there are no sisters, or they disagree, nothing is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megasdc.ops.health.rank_state import GroupState, RankState

Shape = tuple[tuple[int, ...], int, int]
"""Stage of each member, number of tensor ranks, number of replicas."""


def usual_collective(states: Sequence[RankState], name: str, number: int) -> str | None:
    """The collective of a number in all sisters of a group; None: they do not tell."""
    said = {text for _, group in _sisters(states, name, number) if (text := group.recent.get(number))}
    return said.pop() if len(said) == 1 else None


def left_out(states: Sequence[RankState], first: RankState, second: RankState) -> tuple[int, str] | None:
    """Of two ranks that wait for each other in two groups, the one that has left out a collective, and which.

    Each has joined what the other has not. Ranks that wait in the same collective as one of the two, and have a sister
    of the other group, show which of both comes first.
    """
    found = {*_left_out(states, first, second), *_left_out(states, second, first)}
    return found.pop() if len(found) == 1 else None


def _left_out(states: Sequence[RankState], absent: RankState, waiting: RankState) -> Iterator[tuple[int, str]]:
    """What each rank that waits for ``absent`` in the same collective as ``waiting`` shows of the two."""
    for name, number in _waits_for(waiting, absent):
        for other, later in _waits_for(absent, waiting):
            collective = absent.groups[other].recent.get(later)
            for witness, group in _sisters(states, other, later):
                if name not in witness.groups or witness.groups[name].waits_in != number:
                    continue
                if group.joined < later:
                    yield absent.rank, f"collective {number} of group {name}"
                elif group.ended >= later and group.recent.get(later) == collective:
                    yield waiting.rank, f"collective {later} of group {other}"


def _waits_for(one: RankState, other: RankState) -> Iterator[tuple[str, int]]:
    """Groups and numbers of collectives in which a rank waits for another."""
    for name, group in one.groups.items():
        if (number := group.waits_in) is not None and other.rank in group.ranks and other.joined(name) < number:
            yield name, number


def _sisters(states: Sequence[RankState], name: str, number: int) -> Iterator[tuple[RankState, GroupState]]:
    """Members of the sisters of a group, with what they know of theirs; collectives from ``number`` on may differ."""
    by_rank = {one.rank: one for one in states}
    members = [one.groups[name] for one in states if name in one.groups]
    ranks = members[0].ranks
    before = {key: text for group in members for key, text in group.recent.items() if key < number}
    if (shape := _shape(by_rank, ranks)) is None:
        return
    for one in states:
        for group in one.groups.values():
            alike = len(group.ranks) == len(ranks) and _same(before, group.recent, number - 1)
            if alike and not set(group.ranks) & set(ranks) and _shape(by_rank, group.ranks) == shape:
                yield one, group


def _shape(by_rank: Mapping[int, RankState], ranks: Sequence[int]) -> Shape | None:
    """Where the members of a group are; None: nothing is known of some."""
    if not all(rank in by_rank for rank in ranks):
        return None
    members = [by_rank[rank] for rank in ranks]
    stages = tuple(sorted(one.pp_rank for one in members))
    return stages, len({one.tp_rank for one in members}), len({one.dp_rank for one in members})


def _same(before: Mapping[int, str], recent: Mapping[int, str], last: int) -> bool:
    """Whether two groups have had the same collectives until ``last``, as far as both still know them."""
    return last in before and last in recent and all(recent.get(key, text) == text for key, text in before.items())
