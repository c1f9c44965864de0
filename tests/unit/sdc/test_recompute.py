"""A rank is compared with itself: what was computed twice, and what repeats say of it."""

from __future__ import annotations

import pytest

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, Address
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import Unrepeated, compare_recomputed, judge_recomputed, pair_at


def trace(*results):
    return Trace([Address(3, 0, phase, name, "output") for phase, name, _ in results], [value for *_, value in results])


MIXED = trace(
    (FORWARD, "a", 1),
    (FORWARD, "b", 2),
    (FORWARD, "c", 3),
    (RECOMPUTE, "b", 9),
    (RECOMPUTE, "a", 1),
    (BACKWARD, "a", 5),
)


def test_results_that_differ_from_their_recomputation_are_found():
    """Only pairs are compared; what was not computed again is counted, what belongs to no pair ignored."""
    found = compare_recomputed(MIXED)
    assert (found.compared, found.alone) == (2, 1)
    assert [(one.address.fqn, one.forward, one.recompute) for one in found.unrepeated] == [("b", 2, 9)]
    assert pair_at(MIXED, found.unrepeated[0].address) == (2, 9)
    assert pair_at(MIXED, Address(3, 0, FORWARD, "c", "output")) is None


FOUND = Unrepeated(Address(3, 0, FORWARD, "b", "output"), 2, 9)


@pytest.mark.parametrize(
    ("again", "earlier", "verdict", "wrong"),
    [
        ([(2, 2), (2, 2)], False, "not_reproduced", 0),
        ([(9, 9), (9, 9)], False, "not_reproduced", 0),
        ([(2, 2), (2, 2)], True, "intermittent", 0),
        ([(2, 9), (2, 9)], False, "persistent", 2),
        ([(2, 2), (2, 9)], False, "intermittent", 1),
        ([(2, 2), (9, 9)], False, "intermittent", 0),
        ([(7, 7), (7, 7)], False, "intermittent", 0),
        ([(9, 2), (9, 2)], False, "intermittent", 2),
        ([(2, 2), None], False, "inconclusive", 0),
        ([], False, "inconclusive", 0),
    ],
)
def test_repeats_give_the_verdict(again, earlier, verdict, wrong):
    """Right in all repeats, the same two values in all, anything between, and missing evidence."""
    ruling = judge_recomputed(4, FOUND, again, earlier)
    assert (ruling.rank, ruling.verdict, ruling.wrong, ruling.basis) == (4, verdict, wrong, "own recomputation")
    assert (ruling.rate_bound is not None) == (verdict == "not_reproduced")
