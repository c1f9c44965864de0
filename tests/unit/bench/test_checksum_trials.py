"""Do our checksums see every kind of fault, and would the trials notice if they did not?"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megasdc.tensors import checksum
from megasdc.tensors.checksum import ALGORITHMS
from tools.bench.detection.checksum_trials import BLIND_TO, DTYPES, FAULTS, NUM_ELEMENTS, PACKED, XOR, run_trials

CHANGED = {
    "single flip": {1},
    "equal flips in 2 elements": {2},
    "sign flips in 2 elements": {2},
    "equal flips in 2 to 4 adjacent elements": {2, 3, 4},
    "equal flips at a period": {2, 3, 4, 5, 6, 7, 8},
    "swap of 2 elements": {2},
}


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_are_what_they_are_called(fault, width):
    """Each kind changes the stated number of elements at the stated places, and each by the same single bit."""
    rng, counts, bits, gaps = random.Random(0), set(), set(), set()
    for _ in range(400):
        before = np.array([rng.getrandbits(width) for _ in range(NUM_ELEMENTS)], dtype=f"uint{width}")
        words = before.copy()
        FAULTS[fault](words, rng)
        places = np.flatnonzero(words != before)
        counts.add(len(places))
        if fault.startswith("swap"):
            assert words[places].tolist() == before[places[::-1]].tolist()
            continue
        (mask,) = set((words ^ before)[places].tolist())
        assert mask.bit_count() == 1
        bits.add(mask.bit_length() - 1)
        gaps.add(frozenset(np.diff(places).tolist()))
    assert counts == CHANGED[fault]
    if fault.startswith("sign"):
        assert bits == {width - 1}
    elif not fault.startswith("swap"):
        assert bits == set(range(width))
    if "adjacent" in fault:
        assert gaps == {frozenset({1})}
    if "period" in fault:
        assert gaps == {frozenset({period}) for period in (2, 4, 8, 16, 32, 64)}


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.full)])
def test_nothing_is_missed(count):
    """Our algorithms miss no fault of any kind; those for comparison miss the kinds they are known to be blind to."""
    trials = run_trials(count)
    assert len(trials) == (len(ALGORITHMS) + 2) * len(DTYPES) * len(FAULTS)
    assert all(one.count == count for one in trials)
    assert [one for one in trials if one.algorithm in ALGORITHMS and one.misses] == []
    seen = {(one.algorithm, one.dtype, one.fault): one.misses for one in trials}
    for name in DTYPES:
        assert seen[XOR, name, "sign flips in 2 elements"] == seen[XOR, name, "swap of 2 elements"] == count
        assert all(seen[algorithm, name, fault] > 0 for algorithm, faults in BLIND_TO.items() for fault in faults)
        chance = 1 / (8 // DTYPES[name].itemsize) ** 2  # two flips cancel where both are in a word's highest element
        assert chance * count / 2 < seen[PACKED, name, "sign flips in 2 elements"] < chance * count * 2
    assert all(one.passed for one in trials)


def test_a_blind_algorithm_fails(monkeypatch):
    """A checksum of ours that knew no places would fail, and so would comparisons that miss nothing."""

    class Blind:
        name = "blind.v1"

        def start(self, tensor: torch.Tensor) -> int:
            return int(tensor.view(torch.uint8).to(torch.int64).sum())

    monkeypatch.setitem(checksum.ALGORITHMS, "blind.v1", Blind())
    failed = {one.fault for one in run_trials(50) if one.algorithm == "blind.v1" and not one.passed}
    assert "swap of 2 elements" in failed
    monkeypatch.setitem(FAULTS, "sign flips in 2 elements", FAULTS["single flip"])
    weak = {one.algorithm for one in run_trials(50) if not one.passed}
    assert {XOR, PACKED} <= weak
