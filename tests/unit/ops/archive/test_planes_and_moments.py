"""Do byte planes give every bit back, and are quantized moments as near as their formula says?"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasdc.ops.archive.moments import GROUP, Moment, MomentError, dequantize, quantize, quantized_bytes
from megasdc.ops.archive.planes import WIDTHS, from_planes, to_planes


@given(raw=st.binary(max_size=300), width=st.sampled_from(sorted(set(WIDTHS.values()))))
@settings(max_examples=300, deadline=None)
def test_planes_give_every_bit_back(raw: bytes, width: int) -> None:
    """Any bytes of any length, whole numbers or not."""
    planes = to_planes(raw, width)
    assert len(planes) == len(raw) and from_planes(planes, width) == raw


def test_the_first_plane_holds_the_exponents() -> None:
    """Computed with Python's integers: byte k of the rotated numbers, the most significant first."""
    numbers = [1.0, -2.5, 3e-20, float("inf"), 0.0, -0.0]
    raw = struct.pack("<6f", *numbers)
    bits = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    turned = [(value << 1 | value >> 31) & 0xFFFFFFFF for value in bits]
    assert to_planes(raw, 4) == bytes(value >> shift & 255 for shift in (24, 16, 8, 0) for value in turned)
    assert list(to_planes(raw, 4)[:6]) == [value >> 23 & 255 for value in bits], "the exponents alone"


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@given(seed=st.integers(0, 2**31), count=st.integers(0, 3 * GROUP), spread=st.floats(0, 12))
@settings(max_examples=100, deadline=None)
def test_quantized_moments_are_near(moment: Moment, seed: int, count: int, spread: float) -> None:
    """In the domain of the square root, by float64: half a code, a whole one where a small s is kept from 0."""
    random = np.random.default_rng(seed)
    values = (random.standard_normal(count) * 10 ** random.uniform(-spread, 0, count)).astype("<f4")
    if moment == "exp_avg_sq":
        values = np.square(values)
    codes = quantize(values.tobytes(), moment)
    assert len(codes) == quantized_bytes(count)
    found = np.frombuffer(dequantize(codes, count, moment), "<f4")
    assert quantize(found.tobytes(), moment) == codes or moment == "exp_avg_sq", "again: the same codes"
    largest = 127 if moment == "exp_avg" else 255
    for start in range(0, count, GROUP):
        exact, got = (one[start : start + GROUP].astype(np.float64) for one in (values, found))
        if moment == "exp_avg_sq":
            assert ((got == 0) == (exact == 0)).all() or (exact[exact > 0].min() < 1e-37), "none becomes 0"
            exact, got = np.sqrt(exact), np.sqrt(got)
        top = np.abs(exact).max()
        if top:
            codes_exact, codes_got = (np.sqrt(np.abs(one) / top) * largest for one in (exact, got))
            assert np.abs(codes_exact - codes_got).max() <= (0.51 if moment == "exp_avg" else 1.01)
            assert (np.sign(got) * np.sign(exact) >= 0).all()


def test_quantizing_is_refused_for_what_is_not_finite() -> None:
    """NaN, infinity, a negative square."""
    for number, moment in ((np.nan, "exp_avg"), (np.inf, "exp_avg_sq"), (-1.0, "exp_avg_sq")):
        with pytest.raises(ValueError, match=moment):
            quantize(np.array([1, number], "<f4").tobytes(), moment)  # type: ignore[arg-type]


def test_the_error_is_that_of_numpy() -> None:
    """Largest: over the largest number of its group; mean: over the mean number."""
    exact = np.concatenate([np.full(GROUP, 2.0), np.full(GROUP, 10.0)]).astype("<f4")
    found = exact.copy()
    found[0], found[GROUP] = 1.5, 9.0
    error = MomentError()
    error.add(exact, found)
    assert error.largest == 0.25 and error.mean == pytest.approx(1.5 / exact.sum())
