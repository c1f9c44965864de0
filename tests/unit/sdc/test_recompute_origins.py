"""Who began it, of ranks that did not compute the same twice? Against causes known by construction."""

from __future__ import annotations

from megasdc.common.addresses import FORWARD, RECOMPUTE, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import Unrepeated, compare_recomputed, origins

LAYOUT = ParallelDims(2, 2, 2)


def _first(micro_batch: int, wrong: set[str]) -> Unrepeated:
    """The first difference of a rank whose forward results in ``wrong`` are not those of the recomputation."""
    names = [(number, name) for number in (0, 1) for name in ("a", "b", "c")]
    forward = [Address(3, number, FORWARD, name, "output") for number, name in names]
    again = [Address(3, number, RECOMPUTE, name, "output") for number, name in names]
    values = [8 if number == micro_batch and name in wrong else 9 for number, name in names]
    found = compare_recomputed(Trace([*forward, *again], values + [9] * len(names)))
    assert (found.compared, found.alone) == (6, 0)
    return found.unrepeated[0]


def test_a_tensor_peer_that_received_a_wrong_result_is_not_named() -> None:
    """Of two ranks of a tensor group the one that begins is named, whichever comes first by number."""
    began, received = _first(0, {"b", "c"}), _first(0, {"c"})
    assert origins({2: began, 3: received}, LAYOUT) == {2: began}
    assert origins({2: received, 3: began}, LAYOUT) == {3: began}


def test_others_are_named_each_by_itself() -> None:
    """Both that begin at one place, other micro-batches, other replicas and other stages receive nothing."""
    early, late, other = _first(0, {"a"}), _first(0, {"c"}), _first(1, {"b"})
    assert origins({0: early, 1: early}, LAYOUT) == {0: early, 1: early}
    assert origins({0: early, 1: other}, LAYOUT) == {0: early, 1: other}
    assert origins({0: early, 2: late, 4: late}, LAYOUT) == {0: early, 2: late, 4: late}
    assert origins({}, LAYOUT) == {}
