"""Are copies that differ between replicas ruled on by their majority, and by nothing less?"""

from __future__ import annotations

from megasdc.attached.copies import judge_copies
from megasdc.common.addresses import PARAMETER, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace

ADDRESSES = [Address(7, None, PARAMETER, name, "weight") for name in ("a", "b", "c")]


def _held(*checksums: int) -> Trace:
    return Trace(list(ADDRESSES), list(checksums))


def test_equal_copies_need_no_ruling() -> None:
    """Of three replicas."""
    copies = {rank: _held(1, 2, 3) for rank in range(3)}
    assert judge_copies(copies, copies, ParallelDims(1, 1, 3)) == ()


def test_the_minority_is_named_at_its_first_copy() -> None:
    """Two ranks at different places; what is right when read again is not reproduced."""
    copies = {0: _held(1, 2, 3), 1: _held(1, 9, 9), 2: _held(1, 2, 3), 3: _held(8, 2, 3), 4: _held(1, 2, 3)}
    again = {**copies, 3: _held(1, 2, 3)}
    found = {one.rank: one for one in judge_copies(copies, again, ParallelDims(1, 1, 5))}
    assert found.keys() == {1, 3}
    assert (found[1].verdict, found[1].address, found[1].expected, found[1].got) == (
        *("persistent", ADDRESSES[1], 2),
        {1: 9},
    )
    assert (found[3].verdict, found[3].address, found[3].wrong) == ("not_reproduced", ADDRESSES[0], 0)


def test_of_two_nobody_is_named() -> None:
    """On the second stage of a pipeline alone: its ranks are 2 and 3."""
    copies = {0: _held(1, 2, 3), 1: _held(1, 2, 3), 2: _held(4, 5, 6), 3: _held(4, 0, 6)}
    (ruling,) = judge_copies(copies, copies, ParallelDims(1, 2, 2))
    assert (ruling.rank, ruling.verdict, ruling.suspects, ruling.got) == (None, "inconclusive", (2, 3), {2: 5, 3: 0})


def test_ranks_of_one_replica_are_suspects_together() -> None:
    """The norm of the gradients is a sum over them; of two replicas all ranks are. One rank alone is named."""
    wrong = {rank: _held(1, 2, 3) for rank in range(6)} | {2: _held(1, 9, 3), 3: _held(1, 2, 8)}
    (ruling,) = judge_copies(wrong, wrong, ParallelDims(2, 1, 3))
    assert (ruling.rank, ruling.suspects, ruling.got) == (None, (2, 3), {2: 9, 3: 8})
    (ruling,) = judge_copies(wrong, {**wrong, 2: _held(1, 2, 3), 3: _held(1, 2, 3)}, ParallelDims(2, 1, 3))
    assert (ruling.suspects, ruling.verdict) == ((2, 3), "not_reproduced")
    half = {rank: wrong[rank] for rank in range(4)}
    (ruling,) = judge_copies(half, half, ParallelDims(2, 1, 2))
    assert (ruling.rank, ruling.suspects) == (None, (0, 1, 2, 3))
    single = {**wrong, 2: _held(1, 2, 3)}
    assert [one.rank for one in judge_copies(single, single, ParallelDims(2, 1, 3))] == [3]
