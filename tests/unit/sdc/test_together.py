"""Are ranks whose results may be sums over tensor ranks suspects together, unless what one has computed is its own?"""

from __future__ import annotations

import pytest

from megasdc.common.addresses import FORWARD, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.audits import suspect_together
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import MAJORITY, NOT_REPRODUCED, PERSISTENT, RankVerdict, settle, to_repeat
from megasdc.sdc.vote import vote

NAMES = ("up_proj", "down_proj", "norm")
ADDRESSES = [Address(1, 0, FORWARD, name, "output") for name in NAMES]
RIGHT = [1, 2, 3]


def _rulings(
    layout: ParallelDims, wrong: dict[int, list[int]], alone: set[tuple[int, str]] | None = None, *, again: bool = True
) -> tuple[RankVerdict, ...]:
    """Of an audit in which ranks computed these checksums; ``again``: in all repeats, too."""
    traces = {rank: Trace(list(ADDRESSES), list(wrong.get(rank, RIGHT))) for rank in range(layout.world_size)}
    ballot = vote(traces, layout)
    repeats = {
        (rank, place): [traces[rank].checksums[place] if again else RIGHT[place]] * 5
        for rank, place in to_repeat(ballot)
    }
    own = {(rank, ADDRESSES[NAMES.index(name)]) for rank, name in alone or ()}
    return suspect_together(settle(ballot, repeats), layout, own)


def test_of_a_sum_over_tensor_ranks_nobody_is_named() -> None:
    """A tensor rank of the second of three replicas is wrong, and both have the wrong sum: each was named."""
    [ruling] = _rulings(ParallelDims(2, 1, 3), {2: [1, 9, 8], 3: [1, 9, 8]})
    assert (ruling.rank, ruling.suspects, ruling.verdict) == (None, (2, 3), "inconclusive")
    assert (ruling.basis, ruling.address, ruling.expected, ruling.got) == (MAJORITY, ADDRESSES[1], 2, {2: 9, 3: 9})


def test_a_part_that_one_rank_received_is_the_replicas() -> None:
    """The first result that differs is on one tensor rank alone: it may have received it."""
    [ruling] = _rulings(ParallelDims(2, 1, 3), {3: [1, 9, 8]})
    assert (ruling.rank, ruling.suspects) == (None, (2, 3))


def test_what_a_rank_has_computed_alone_is_its_own() -> None:
    """Its operands were alike, and no other rank took part."""
    layout, wrong = ParallelDims(2, 1, 3), {3: [9, 9, 8], 2: [1, 9, 8]}
    [ruling] = _rulings(layout, wrong, {(rank, "up_proj") for rank in (1, 3, 5)})
    assert (ruling.rank, ruling.verdict, ruling.address) == (3, PERSISTENT, ADDRESSES[0])
    [other] = _rulings(layout, wrong, {(rank, "down_proj") for rank in (1, 3, 5)})
    assert other.rank is None, "of another result"


@pytest.mark.parametrize("both", [False, True])
def test_of_two_replicas_all_ranks_are_suspects(both: bool) -> None:
    """One ruling: each tensor rank's was one of its own, with half of the suspects."""
    wrong = {2: [1, 9, 8], 3: [1, 9, 8]} if both else {3: [1, 9, 8]}
    [ruling] = _rulings(ParallelDims(2, 1, 2), wrong)
    assert (ruling.rank, ruling.suspects) == (None, (0, 1, 2, 3))
    alone = _rulings(ParallelDims(2, 1, 2), {3: [9, 9, 8]}, {(rank, "up_proj") for rank in (1, 3)})
    assert [one.suspects for one in alone] == [(1, 3)]


def test_a_sum_that_was_wrong_once_stays_not_reproduced() -> None:
    """So that its policy, not that of what cannot be named, decides."""
    [ruling] = _rulings(ParallelDims(2, 1, 3), {2: [1, 9, 8], 3: [1, 9, 8]}, again=False)
    assert (ruling.rank, ruling.suspects, ruling.verdict) == (None, (2, 3), NOT_REPRODUCED)


def test_without_tensor_ranks_nothing_changes() -> None:
    """The rank is named."""
    [ruling] = _rulings(ParallelDims(1, 1, 3), {1: [1, 9, 8]})
    assert (ruling.rank, ruling.verdict) == (1, PERSISTENT)
