"""Are exactly the elements bounded that the rules name, to the value they name, and is every sum right?"""

from __future__ import annotations

import itertools
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasdc.tensors import bound
from megasdc.tensors.bound import CHUNK, bound_, bound_formula_, bound_on_host_
from megasdc.tensors.bound_limits import DTYPES, NON_FINITE, SUMS, ElementLimits

INF, NAN = math.inf, math.nan
SIZES = (0, 1, 31, 4097)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTEGERS = {4: torch.int32, 2: torch.int16}
IMPLEMENTATIONS = {"formula": bound_formula_, "host": bound_on_host_}
RULES = {
    "none": ElementLimits(),
    "absolute": ElementLimits(absolute=0.02),
    "spike": ElementLimits(spike=4.0),
    "both": ElementLimits(absolute=0.03, spike=4.0),
    "corrected": ElementLimits(spike=3.0, v_factor=1 / (1 - 0.95**3)),
    "floor": ElementLimits(spike=2.0, floor=1e-4),
    "least floor": ElementLimits(spike=4.0, floor=1e-8**2),
    "scaled": ElementLimits(absolute=0.03, spike=5.0, floor=1e-9, scale=512.0),
}
NEAR = 1e-6
"""Relative distance from its limit within which fp32 may decide otherwise than the oracle."""


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def bits(tensor):
    return tensor.view(INTEGERS[tensor.element_size()])


def heavy_tailed(count, dtype, seed=0, spread=2.0):
    """Gradients about 0.01 with outliers, and a second moment that fits most of them and is 0 in places."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.randn(count, generator=generator).mul(spread).exp() * 0.01
    gradient = torch.randn(count, generator=generator) * width
    history = (torch.rand(count, generator=generator) > 0.05) * width.square()
    return gradient.to(dtype), history * torch.randn(count, generator=generator).exp()


def any_bits(count, dtype, seed=0):
    """Every bit of both random: NaN payloads, Inf, subnormals, the largest numbers, negative second moments."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)
    moment = torch.randint(0, 256, (count * 4,), dtype=torch.uint8, generator=generator).view(torch.float32)
    positive = torch.rand(count, generator=generator) < 0.9
    return raw, torch.where(positive & ~moment.isnan(), moment.abs(), moment)


def run(function, gradient, moment, limits):
    """(what the gradient became, the sums as a dict)."""
    after, sums = gradient.clone(), torch.zeros(len(SUMS), dtype=torch.float64)
    function(after, moment, limits, sums)
    return after, dict(zip(SUMS, sums.tolist(), strict=True))


class Oracle:
    """The rules in NumPy's float64, written from the papers and the stated choices."""

    def __init__(self, gradient, moment, limits):
        self.scale = limits.scale
        self.stored = gradient.to(torch.float64).numpy()
        magnitude = np.abs(self.stored) / self.scale
        self.nan, self.inf, finite = np.isnan(magnitude), np.isinf(magnitude), np.isfinite(magnitude)
        spike, self.ratio = np.full(magnitude.shape, INF), 0.0
        if moment is not None:
            smoothed = np.maximum(moment.to(torch.float64).numpy() * limits.v_factor, limits.floor)
            known = np.isfinite(smoothed) & (smoothed > 0)
            spike[known] = np.sqrt(limits.spike) * np.sqrt(smoothed[known])
            ratios = magnitude[known & finite] ** 2 / smoothed[known & finite]
            self.ratio = max(ratios, default=0.0)
        self.limit = np.minimum(limits.absolute, spike)
        self.over = finite & (magnitude > self.limit)
        with np.errstate(invalid="ignore"):
            near = np.abs(magnitude - self.limit) < NEAR * self.limit
        self.near = finite & np.isfinite(self.limit) & near
        self.by_spike, self.finite, self.magnitude = self.over & (spike < limits.absolute), finite, magnitude


def assert_follows(oracle, limits, before, after, sums):
    """Compare everything with the oracle."""
    stored = after.to(torch.float64).numpy()
    surely = oracle.over & ~oracle.near
    kept = ~oracle.over & ~oracle.near & oracle.finite
    assert np.array_equal(bits(after).numpy()[kept], bits(before).numpy()[kept])
    assert np.array_equal(np.signbit(stored[surely]), np.signbit(oracle.stored[surely]))
    wanted = oracle.limit[surely] * limits.scale
    got = torch.from_numpy(np.abs(stored[surely])).to(after.dtype)
    if after.dtype == torch.float32:
        np.testing.assert_allclose(got.numpy(), wanted, rtol=NEAR, atol=1e-44)
    else:
        above = (bits(got) + 1).view(after.dtype).to(torch.float64).numpy()
        assert np.all(got.to(torch.float64).numpy() <= wanted * (1 + NEAR)) and np.all(above > wanted * (1 - NEAR))
    finite = np.where(np.isfinite(stored), np.abs(stored), 0)
    mass, left = oracle.magnitude[oracle.finite].sum(), np.where(oracle.finite, finite, 0).sum() / limits.scale
    assert sums["squares"] == pytest.approx((finite**2).sum(), rel=1e-6)
    assert sums["mass"] == pytest.approx(mass, rel=1e-6)
    assert sums["removed"] == pytest.approx(mass - left, rel=1e-6, abs=1e-6 * mass)
    near = int(oracle.near.sum())
    assert sums["by_absolute"] == pytest.approx((oracle.over & ~oracle.by_spike).sum(), abs=near)
    assert sums["by_spike"] == pytest.approx(oracle.by_spike.sum(), abs=near)
    assert (sums["nan"], sums["inf"]) == (oracle.nan.sum(), oracle.inf.sum())
    assert sums["largest_ratio"] == pytest.approx(oracle.ratio, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_those_of_the_oracle(implementation, rule, dtype):
    """Each rule in each type bounds what float64 says and nothing else, and all sums agree, at every size."""
    limits = RULES[rule]
    for count in SIZES:
        gradient, moment = heavy_tailed(count, torch.float32, seed=count)
        gradient = (gradient * limits.scale).to(dtype)
        oracle = Oracle(gradient, moment, limits)
        after, sums = run(implementation, gradient, moment, limits)
        assert_follows(oracle, limits, gradient, after, sums)
        if count == 4097 and rule != "none":
            assert 10 < oracle.over.sum() < 3000 and oracle.near.sum() < 5


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("rule", RULES)
def test_any_bits_follow_the_oracle(implementation, rule, dtype):
    """No bit pattern of gradient and second moment overflows, underflows or hides behind a NaN on the way."""
    for count, seed in itertools.product((31, 4097), range(3)):
        gradient, moment = any_bits(count, dtype, seed)
        after, sums = run(implementation, gradient, moment, RULES[rule])
        assert_follows(Oracle(gradient, moment, RULES[rule]), RULES[rule], gradient, after, sums)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([1, 31, 1023, 1024, 1025, 3000, 4097]),
    seed=st.integers(0, 10_000),
    wild=st.booleans(),
    with_moment=st.booleans(),
    offset=st.integers(0, 3),
    absolute=st.one_of(st.just(INF), st.floats(1e-43, 1e30)),
    spike=st.one_of(st.just(INF), st.floats(1e-9, 1e12)),
    floor=st.one_of(st.just(0.0), st.floats(1e-60, 1e3)),
    v_factor=st.floats(0.5, 1000),
    scale=st.sampled_from([1.0, 512.0, 65536.0, 3.7]),
    non_finite=st.sampled_from(NON_FINITE),
)
def test_the_host_follows_the_formula(
    dtype, count, seed, wild, with_moment, offset, absolute, spike, floor, v_factor, scale, non_finite
):
    """The fused pass gives the formula's gradients and counts bit by bit and its sums to 1e-6, at any address."""
    limits = ElementLimits(absolute, spike if with_moment else INF, floor, v_factor, scale, non_finite)
    gradient, moment = (any_bits if wild else heavy_tailed)(count + offset, dtype, seed)
    gradient, moment = gradient[offset:], moment[offset:] if with_moment else None
    expected, wanted = run(bound_formula_, gradient, moment, limits)
    storage = torch.zeros(count + offset, dtype=dtype)
    storage[offset:] = gradient
    bits(storage)[offset:] = bits(gradient)
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    bound_on_host_(storage[offset:], moment, limits, sums)
    assert torch.equal(bits(storage[offset:]), bits(expected)) and storage[:offset].eq(0).all()
    got = dict(zip(SUMS, sums.tolist(), strict=True))
    for name in ("by_absolute", "by_spike", "nan", "inf"):
        assert got[name] == wanted[name], name
    assert got["largest_ratio"] == pytest.approx(wanted["largest_ratio"], rel=1e-12)
    for name in ("squares", "mass", "removed"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-6), name


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86_64")
@pytest.mark.parametrize("instructions", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_other_processors_give_the_same_bits(monkeypatch, tmp_path, instructions):
    """Narrower vectors, and no conversion of fp16 in hardware, change no gradient and no count."""
    needed = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}[instructions]
    if needed not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip(f"this processor has no {needed}")
    options = [f"-march={instructions}" if one == "-march=native" else one for one in bound.OPTIONS]
    monkeypatch.setattr(bound, "OPTIONS", options)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bound, "fused_library", bound.fused_library.__wrapped__)
    limits = [*RULES.values(), *(ElementLimits(0.03, 4.0, scale=3.7, non_finite=name) for name in NON_FINITE)]
    for dtype, make, one in itertools.product(DTYPES, (heavy_tailed, any_bits), limits):
        gradient, moment = make(4097, dtype)
        (expected, wanted), (after, sums) = (
            run(function, gradient, moment, one) for function in IMPLEMENTATIONS.values()
        )
        assert torch.equal(bits(after), bits(expected))
        assert list(sums.values()) == pytest.approx(list(wanted.values()), rel=1e-6)


def test_stated_cases(implementation):
    """Ties and signs stay, V of 0, Inf and NaN bounds nothing, subnormal V and gradients of 1e38 are decided right."""
    limits = ElementLimits(absolute=8.0, spike=4.0)
    tiny = 2.0**-149  # V; its limit is 2^-73.5
    rows = [  # gradient, V, what it becomes
        (2.0, 1.0, 2.0),
        (np.nextafter(np.float32(2), np.float32(3)), 1.0, 2.0),
        (-3.0, 1.0, -2.0),
        (-0.0, 1.0, -0.0),
        (1e-40, 1.0, 1e-40),
        (7.0, 0.0, 7.0),
        (-1e38, 0.0, -8.0),
        (1e38, 1e36, 8.0),
        (5.0, INF, 5.0),
        (5.0, NAN, 5.0),
        (9.0, NAN, 8.0),
        (1.0, -1.0, 1.0),
        (1e-20, tiny, 2 * math.sqrt(tiny)),
        (2.0**-73, tiny, 2 * math.sqrt(tiny)),
        (2.0**-74, tiny, 2.0**-74),
        (16.0, 16.0, 8.0),
    ]
    gradient, moment, wanted = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    after, sums = run(implementation, gradient, moment, limits)
    torch.testing.assert_close(after, wanted, rtol=2e-7, atol=0)
    assert torch.equal(after.signbit(), wanted.signbit()) and after[0] == 2 and after[15] == 8
    assert (sums["by_absolute"], sums["by_spike"]) == (4, 4)  # 16 is over both limits, which are equal
    assert sums["largest_ratio"] == pytest.approx(1e76 / 1e36, rel=1e-6)


@pytest.mark.parametrize(
    ("size", "moment", "limits", "wanted"),
    [
        (1e-36, None, ElementLimits(absolute=1e-38), 1e-38),
        (1e-36, 2.0**-143, ElementLimits(spike=1e-30), math.sqrt(1e-30 * 2.0**-143)),
        (1e-36, 0.0, ElementLimits(spike=1.0, floor=1e-76), 1e-38),
        (1e-36, 1e-20, ElementLimits(spike=1.0), 1e-36),
        (1e-42, None, ElementLimits(absolute=1e-43), 1e-43),
    ],
)
def test_tiny_elements_are_decided_right(implementation, size, moment, limits, wanted):
    """Where squares underflow in fp32, limits and the sum of squares still hold."""
    gradient = torch.full((3000,), size)
    given = None if moment is None else torch.full((3000,), moment)
    gradient[0] = size / 16
    after, sums = run(implementation, gradient, given, limits)
    torch.testing.assert_close(after[1:], torch.full((2999,), wanted), rtol=1e-5, atol=1e-45)
    assert (
        sums["squares"] == pytest.approx(after.double().square().sum().item(), rel=1e-6, abs=0) and sums["squares"] > 0
    )
    if moment:
        assert sums["largest_ratio"] == pytest.approx(size**2 / given[0].item(), rel=1e-4, abs=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_a_neutral_pass_changes_no_bit(implementation, dtype):
    """Without limits every bit stays, payloads of NaN and subnormal numbers included."""
    gradient, moment = any_bits(5000, dtype)
    for given_moment in (moment, None):
        after, sums = run(implementation, gradient, given_moment, ElementLimits())
        assert torch.equal(bits(after), bits(gradient)) and sums["removed"] == 0
        assert (sums["by_absolute"], sums["by_spike"]) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_what_becomes_of_non_finite_elements(implementation, dtype):
    """Kept with their bits, zeroed, or Inf bounded where there is a limit; counted and left out of mass in any case."""
    gradient = torch.tensor([NAN, INF, -INF, -INF, 1.0, INF], dtype=dtype)
    moment = torch.tensor([1.0, 1.0, 4.0, 0.0, 1.0, NAN])
    for non_finite, wanted in (
        ("keep", [NAN, INF, -INF, -INF, 1.0, INF]),
        ("zero", [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        ("bound", [0.0, 2.0, -4.0, 0.0, 1.0, 0.0]),
    ):
        after, sums = run(implementation, gradient, moment, ElementLimits(spike=4.0, non_finite=non_finite))
        assert str(after.tolist()) == str(wanted)  # 0.0 and -0.0 differ as text
        assert (sums["nan"], sums["inf"], sums["mass"], sums["removed"], sums["by_spike"]) == (1, 4, 1, 0, 0)
        assert sums["squares"] == (21 if non_finite == "bound" else 1)
        assert sums["largest_ratio"] == 1
    after, _ = run(implementation, gradient, moment, ElementLimits(absolute=3.0, spike=4.0, non_finite="bound"))
    assert after.tolist() == [0, 2, -3, -3, 1, 3]


def test_sixteen_bit_limits_are_rounded_towards_zero(implementation):
    """What is stored is the largest number of the type that is not above the limit, subnormal and largest included."""
    for dtype, limit, wanted in (
        (torch.bfloat16, 1.00390624, 1.0),
        (torch.bfloat16, 1.0117187, 1.0078125),
        (torch.float16, 0.0009999, 0.00099945068359375),
        (torch.float16, 1e-7, 2.0**-24),
        (torch.float16, 1e-8, 0.0),
        (torch.float16, 70000.0, 65504.0),
    ):
        gradient = torch.tensor([INF if limit > 65504 else 2 * max(limit, 1e-7), -INF], dtype=dtype)
        after, _ = run(implementation, gradient, None, ElementLimits(absolute=limit, non_finite="bound"))
        assert after.tolist() == [wanted, -wanted]


def test_sums_are_added_to(implementation):
    """A second fragment adds to the sums of the first, and the largest ratio is that of both, in either order."""
    parts = [heavy_tailed(3000, torch.float32, seed) for seed in range(2)]
    singles = [run(implementation, *part, ElementLimits(spike=9.0))[1] for part in parts]
    for order in (parts, parts[::-1]):
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        for gradient, moment in order:
            implementation(gradient.clone(), moment, ElementLimits(spike=9.0), sums)
        for name, value in zip(SUMS, sums.tolist(), strict=True):
            both = [one[name] for one in singles]
            assert value == pytest.approx(max(both) if name == "largest_ratio" else sum(both), rel=1e-12), name


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_a_repeated_pass_has_the_same_sums(implementation, dtype):
    """Bits of the squares depend on the fragment alone, not on the largest ratio of fragments before it."""
    gradient, moment = heavy_tailed(20_000, dtype)
    moment = moment.clamp(min=1e-6)  # a V of 0 has every block looked at closely
    for spike in (20.0, INF):
        results = set()
        for before in (0.0, 1.0, 50.0, 1e9):
            sums = torch.zeros(len(SUMS), dtype=torch.float64)
            sums[7] = before
            implementation(gradient.clone(), moment, ElementLimits(spike=spike), sums)
            results.add(tuple(sums[:7].tolist()))
        assert len(results) == 1 and (results.pop()[4] > 0) == (spike < INF)


def test_the_largest_ratio_is_found_anywhere(implementation):
    """One element in any place of a large fragment that is barely above all others, with nothing bounded."""
    moment, limits = torch.full((40_000,), 1e-4), ElementLimits(spike=1e6, scale=8.0)
    for place in (0, 1, 1023, 1024, 20_000, 39_999):
        gradient = torch.full((40_000,), 0.08)
        gradient[place] = 0.08 * (1 + 1e-5)
        _, sums = run(implementation, gradient, moment, limits)
        assert sums["largest_ratio"] == pytest.approx((gradient[place].item() / 8) ** 2 / moment[0].item(), rel=1e-9)


def test_the_formula_goes_on_over_chunks():
    """A fragment longer than a chunk gives the fused pass's gradients and counts."""
    gradient, moment = heavy_tailed(CHUNK + 5, torch.bfloat16)
    gradient[CHUNK + 3], moment[CHUNK + 3] = 1e12, 1.0
    (expected, wanted), (after, sums) = (run(one, gradient, moment, RULES["both"]) for one in IMPLEMENTATIONS.values())
    assert torch.equal(after, expected) and sums["largest_ratio"] == wanted["largest_ratio"] > 9e23
    assert sums["by_spike"] == wanted["by_spike"] > 1000


def test_the_formula_needs_little_memory():
    """What it allocates beside a fragment of any size is bound by the chunk."""
    gradient, moment = torch.zeros(8 * CHUNK, dtype=torch.bfloat16), torch.zeros(8 * CHUNK)
    with torch.profiler.profile(profile_memory=True) as profile:
        run(bound_formula_, gradient, moment, ElementLimits(spike=2.0))
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak < gradient.nbytes + 100 * CHUNK


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"absolute": 0.0}, "absolute must be above 0"),
        ({"spike": -1.0}, "spike must be above 0"),
        ({"spike": NAN}, "spike must be above 0"),
        ({"floor": -1e-9}, "floor must be at least 0"),
        ({"v_factor": INF}, "v_factor must be above 0 and finite"),
        ({"scale": 0.0}, "scale must be above 0 and finite"),
        ({"non_finite": "skip"}, "keep, zero, bound; got 'skip'"),
    ],
)
def test_bad_limits_are_refused(wrong, message):
    """The message names the setting, what it needs and what it got."""
    with pytest.raises(ValueError, match=message):
        ElementLimits(**wrong)


def test_bad_tensors_are_refused():
    """Types, shapes and strides that no implementation reads rightly, and a spike limit without a second moment."""
    good, sums = torch.zeros(4), torch.zeros(8, dtype=torch.float64)
    for gradient, moment, limits, total, message in (
        (good.double(), None, ElementLimits(), sums, "gradient must be .*float64"),
        (torch.zeros(8)[::2], None, ElementLimits(), sums, "gradient must be"),
        (torch.zeros(2, 2), None, ElementLimits(), sums, r"gradient must be .*\[2, 2\]"),
        (good, None, ElementLimits(spike=2.0), sums, "spike limit 2.0 needs a second moment"),
        (good, torch.zeros(5), ElementLimits(), sums, r"second_moment must be .*\[5\]"),
        (good, good.half(), ElementLimits(), sums, "second_moment must be .*float16"),
        (good, torch.zeros(8)[::2], ElementLimits(), sums, "second_moment must be"),
        (good, good, ElementLimits(), sums.float(), r"sums must be \[8\] in fp64"),
        (good, good, ElementLimits(), sums[:7], r"sums must be \[8\] .*\[7\]"),
    ):
        with pytest.raises(ValueError, match=message):
            bound_(gradient, moment, limits, total)


USE = """
import logging, sys, torch
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from megasdc.tensors.bound import bound_
from megasdc.tensors.bound_limits import ElementLimits
for _ in range(2):
    gradient, sums = torch.tensor([1.0, -5.0]), torch.zeros(8, dtype=torch.float64)
    bound_(gradient, None, ElementLimits(absolute=2.0), sums)
print(gradient.tolist(), sums.tolist()[:4])
"""
BOUNDED = "[1.0, -2.0] [5.0, 6.0, 3.0, 1.0]"


def start_python(cache, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", USE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)} | environment,
    )


@pytest.mark.slow
def test_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path):
    """Two start with an empty cache; all get the right result and leave one library and nothing else."""
    running = [start_python(tmp_path) for _ in range(2)]
    outputs = [one.communicate(timeout=300)[0] for one in running]
    assert outputs == [BOUNDED + "\n"] * 2
    (library,) = (tmp_path / "megasdc" / "compiled").iterdir()
    assert library.suffix == ".so"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_formula_takes_over(tmp_path, compiler):
    """The result is the same, and one line of the log, not one a call, says why it is slow and what to do."""
    output = start_python(tmp_path, CC=compiler).communicate(timeout=300)[0].splitlines()
    assert len(output) == 2 and output[1] == BOUNDED
    assert "several times slower" in output[0] and compiler in output[0] and "install gcc" in output[0]
    assert list((tmp_path / "megasdc" / "compiled").iterdir()) == []


KERNEL = """
import math, sys, torch
sys.path.insert(0, "FOLDER")
from test_bound import RULES, any_bits, bits, heavy_tailed, run
from megasdc.tensors.bound import bound_formula_
from megasdc.tensors.bound_limits import DTYPES, NON_FINITE, SUMS, ElementLimits
from megasdc.tensors.bound_kernel import bound_on_gpu_
cases = list(RULES.values()) + [ElementLimits(0.03, 4.0, non_finite=name) for name in NON_FINITE]
for dtype in DTYPES:
    for make in (heavy_tailed, any_bits):
        for count in (0, 1, 31, 4097):
            for place, limits in enumerate(cases):
                gradient, moment = make(count + 1, dtype, seed=place)
                gradient, moment = gradient[1:].to("DEVICE"), moment[1:].to("DEVICE")
                for given in (moment, None) if limits.spike == math.inf else (moment,):
                    case = dtype, make.__name__, count, limits, given is None
                    after, sums = gradient.clone(), torch.zeros(2, len(SUMS), dtype=torch.float64, device="DEVICE")
                    bound_on_gpu_(after, given, limits, sums[0])
                    expected = gradient.clone()
                    bound_formula_(expected, given, limits, sums[1])
                    assert torch.equal(bits(after), bits(expected)), case
                    got, wanted = sums.tolist()
                    assert got[3:7] == wanted[3:7], (case, got, wanted)
                    for name, a, b in zip(SUMS, got, wanted):
                        least = 1e-30 if name == "largest_ratio" else 0.0
                        assert math.isclose(a, b, rel_tol=1e-6, abs_tol=least), (case, got, wanted)
print("equal")
"""


def run_kernel(device, **environment):
    code = KERNEL.replace("DEVICE", device).replace("FOLDER", os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    return done.returncode, done.stdout + done.stderr


def test_the_kernel_follows_the_formula_in_the_interpreter():
    """The Triton kernel, run on the host, gives the formula's gradients and counts bit by bit and its sums to 1e-6."""
    pytest.importorskip("triton", reason="Triton is not installed; CUDA builds of torch bring it")
    assert run_kernel("cpu", TRITON_INTERPRET="1", PYTHONWARNINGS="ignore") == (0, "equal\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_kernel_follows_the_formula_on_a_gpu():
    """The compiled kernel gives the formula's gradients and counts bit by bit and its sums to 1e-6."""
    assert run_kernel("cuda") == (0, "equal\n")
