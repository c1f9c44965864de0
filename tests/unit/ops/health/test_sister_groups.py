"""Of two ranks in a circle the one is named whose collectives are not those of other groups of its stage.

Evidence is that of a drill with two tensor ranks, two stages and two replicas: rank 3 left out a collective of the
world and waits in the sum of gradients for rank 1, which waits for it with all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megasdc.ops.health.blame import HangCause, find_blame
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_state import GroupState, RankState

ALL = tuple(range(8))
REPLICAS = {"69": (0, 2), "70": (1, 3), "71": (4, 6), "72": (5, 7)}
FIRST = {204: "all_reduce [] Float", 205: "all_gather [10752] Float", 206: "all_gather [304] Float"}
LAST = {241: "all_reduce [] Float", 242: "all_gather [10240] Float", 243: "all_gather [336] Float"}
SUM = "all_reduce [22112] Float"
"""The sum of gradients of the first stage, its collective 207."""
WAITS = GroupState(ALL, 1, 0, {1: "all_reduce [8] Float"})
ABSENT = GroupState(ALL, 0, 0)


def replicas(name: str, *more: str, ended: int | None = None) -> GroupState:
    """A group of replicas; ``more``: collectives after the last one that all have joined."""
    recent = dict(FIRST if name in ("69", "70") else LAST)
    start = max(recent)
    recent |= dict(enumerate(more, start + 1))
    return GroupState(REPLICAS[name], max(recent), start if ended is None else ended, recent)


def rank_of(rank: int, world: GroupState, *more: str, ended: int | None = None) -> RankState:
    """A rank in the phase of reduction, as its answer had it."""
    (name,) = (name for name, ranks in REPLICAS.items() if rank in ranks)
    groups = {name: replicas(name, *more, ended=ended), "85": world}
    place = {"pp_rank": rank // 4, "dp_rank": rank // 2 % 2, "tp_rank": rank % 2}
    return RankState(
        rank=rank, host="vm", **place, step=37, micro_batch=-1, phase=Phase.REDUCTION, stuck_s=4.0, groups=groups
    )


def with_history(one: RankState, recent: Mapping[int, str]) -> RankState:
    """A rank that waits in the world's collective, and whose replicas have had other collectives."""
    (name,) = (name for name in one.groups if name in REPLICAS)
    last = max(recent)
    return replace(one, groups={**one.groups, name: GroupState(REPLICAS[name], last, last, recent)})


def drill() -> dict[int, RankState]:
    """All wait in the world's collective but rank 3, which waits in the sum of gradients."""
    return {rank: rank_of(rank, WAITS) for rank in ALL} | {3: rank_of(3, ABSENT, SUM)}


def blame_of(states: Mapping[int, RankState], without: tuple[int, ...] = ()) -> HangCause:
    """Who is named, where nothing is known of some."""
    return find_blame([one for rank, one in sorted(states.items()) if rank not in without])


def test_the_rank_that_left_out_a_collective_is_named_and_not_its_replica() -> None:
    """Ranks 0 and 2 wait in the world's collective before they have joined the sum of gradients."""
    blame = blame_of(drill())
    assert (blame.kind, blame.ranks) == ("circle", (3,))
    assert (
        "rank 3 on vm (reduction of step 37): it has left out collective 1 of group 85, unlike its peers" in blame.text
    )
    assert blame.waits[3] == "waits for rank 1 in reduction of step 37"


def test_the_replica_is_named_where_it_left_out_what_the_other_waits_in() -> None:
    """All wait for rank 3, but it is right: ranks 0 and 2 have summed their gradients, rank 1 has not."""
    states = drill()
    for rank in (0, 2):
        states[rank] = rank_of(rank, WAITS, SUM, ended=207)
    for rank in (4, 5, 6, 7):
        states[rank] = rank_of(rank, WAITS, "all_reduce [21152] Float", ended=244)
    blame = blame_of(states)
    assert (blame.kind, blame.ranks) == ("circle", (1,))
    assert "it has left out collective 207 of group 70" in blame.text


def test_the_other_stage_is_no_witness() -> None:
    """Its program may be another one, even where it has had the same collectives: both are named."""
    states = drill()
    assert blame_of(states, without=(0, 2)).ranks == (1, 3)
    for rank in (4, 5, 6, 7):
        states[rank] = with_history(states[rank], FIRST)
    assert blame_of(states, without=(0, 2)).ranks == (1, 3)


def test_groups_of_another_history_are_no_sisters() -> None:
    """Ranks 0 and 2 have had another collective before, or another one where rank 1 is said to have left out one."""
    earlier = {rank: with_history(rank_of(rank, WAITS), {**FIRST, 205: "barrier"}) for rank in (0, 2)}
    assert blame_of(drill() | earlier).ranks == (1, 3)
    other = {rank: rank_of(rank, WAITS, "barrier", ended=207) for rank in (0, 2)}
    assert blame_of(drill() | other).ranks == (1, 3)


def test_witnesses_that_disagree_or_have_only_begun_the_collective_tell_nothing() -> None:
    """Rank 0 has not joined the sum, rank 2 has finished it; or both wait in it as well, in whichever order."""
    states = drill() | {2: rank_of(2, WAITS, SUM, ended=207)}
    assert blame_of(states).ranks == (1, 3)
    begun = {rank: rank_of(rank, WAITS, SUM) for rank in (0, 2)}
    assert blame_of(drill() | begun).ranks == (1, 3)


def test_a_witness_in_another_collective_tells_nothing() -> None:
    """Ranks 0 and 2 are already in the world's next collective."""
    ahead = {rank: rank_of(rank, replace(WAITS, joined=2, ended=1)) for rank in (0, 2)}
    assert blame_of(drill() | ahead).ranks == (1, 3)


def test_where_all_have_joined_nobody_is_named() -> None:
    """The same ranks and groups with no collective left out."""
    blame = blame_of({rank: rank_of(rank, WAITS) for rank in ALL})
    assert (blame.kind, blame.ranks) == ("link", ())


def test_of_two_members_with_different_collectives_that_of_the_sisters_is_usual() -> None:
    """Rank 3 left out a sum over its replicas: its next one stands at the number at which the sisters have the sum."""
    later = "all_gather [304] Float"
    states = {rank: rank_of(rank, ABSENT, SUM) for rank in (0, 1, 2)} | {3: rank_of(3, ABSENT, later)}
    blame = blame_of(states)
    assert (blame.kind, blame.ranks) == ("mismatch", (3,))
    assert f"collective 207 of group 70 is {SUM} on most ranks; rank 3: {later}" in blame.text
    alone = blame_of(states, without=(0, 2))
    assert alone.ranks == (1, 3) and "is not the same on all ranks; rank 1" in alone.text
    unlike = {rank: rank_of(rank, ABSENT, "barrier") for rank in (0, 2)}
    assert blame_of(states | unlike).ranks == (1, 3), "sisters with neither of the two"
