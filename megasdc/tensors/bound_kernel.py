"""Gradient bounds on a GPU: one Triton kernel that reads every element once and writes only changed ones.

Programs take blocks in turn and keep sums in registers, in fp64; each writes its own, and a small second
reduction adds them up in a fixed order, so that a repeated step has the same norm, bit by bit. In nearly all blocks
nothing comes near a limit, nor near the largest ratio so far, and all is finite: fast roots and quotients, with a
margin beyond their errors, show that, and only the other blocks compute exact ones.
`megasdc.tensors.bound` has the formula that the kernel follows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megasdc.errors import LaunchError
from megasdc.tensors.bound_limits import SUMS, Limits, factors

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LaunchError(f"Triton cannot be imported: {error}; install a CUDA build of torch, which has it") from error

_BLOCK = 1024
_PROGRAMS_PER_PROCESSOR = 8
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_UP, _DOWN = tl.constexpr(2.0**60), tl.constexpr(2.0**-16)
"""Scale factors that keep the quotient of any gradient and any root of V in the range of fp32."""
_NEAR = tl.constexpr(0.999)
"""Share of a limit from which on an element needs the exact one; fast roots and quotients are right to 1e-6."""
_LARGEST_RATIO = SUMS.index("largest_ratio")


def bound_on_gpu_(gradient: Tensor, second_moment: Tensor | None, limits: Limits, sums: Tensor) -> None:
    """`megasdc.tensors.bound.bound_` on a GPU (or in Triton's interpreter), by one kernel and a reduction of its sums.

    ``largest_ratio`` is computed from fp32 quotients, of which those under 1e-15 may be 0. It does not wait for the
    device.
    """
    count = gradient.numel()
    if count == 0:
        return
    programs = min(triton.cdiv(count, _BLOCK), _PROGRAMS_PER_PROCESSOR * _num_processors(gradient.device))
    partial = torch.empty(len(SUMS), programs, dtype=torch.float64, device=gradient.device)
    numbers = factors(limits)
    with torch.cuda.device_of(gradient):
        _bound_kernel[(programs,)](
            gradient.view(_INTEGERS[gradient.dtype]),
            partial if second_moment is None else second_moment,
            partial,
            count,
            numbers.absolute,
            numbers.spike,
            numbers.root_factor,
            numbers.root_floor,
            HAS_V=second_moment is not None,
            NON_FINITE=limits.non_finite,
            TYPE=_TYPES[gradient.dtype],
            BLOCK=_BLOCK,
        )
    total = partial[:_LARGEST_RATIO].sum(dim=1)
    for name in ("mass", "removed"):
        total[SUMS.index(name)] /= limits.scale
    sums[:_LARGEST_RATIO] += total
    ratio = partial[_LARGEST_RATIO].max().mul(_UP.value / _DOWN.value / limits.scale).square()
    torch.maximum(sums[_LARGEST_RATIO], ratio, out=sums[_LARGEST_RATIO])


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["num_elements"])  # a literal 1 would be a constant without a type
def _bound_kernel(  # type: ignore[no-untyped-def]
    gradient,
    second_moment,
    partial,
    num_elements,
    absolute,
    spike,
    root_factor,
    root_floor,
    HAS_V: tl.constexpr,
    NON_FINITE: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    infinity = float("inf")
    squares = tl.zeros([BLOCK], dtype=tl.float64)
    mass = tl.zeros([BLOCK], dtype=tl.float64)
    removed = tl.zeros([BLOCK], dtype=tl.float64)
    by_absolute = tl.zeros([BLOCK], dtype=tl.int32)
    by_spike = tl.zeros([BLOCK], dtype=tl.int32)
    nans = tl.zeros([BLOCK], dtype=tl.int32)
    infinities = tl.zeros([BLOCK], dtype=tl.int32)
    largest = tl.sum(tl.zeros([BLOCK], dtype=tl.float32))
    for number in range(program, tl.cdiv(num_elements, BLOCK), programs):
        places = tl.cast(number, tl.int64) * BLOCK + lanes
        inside = places < num_elements
        bits = tl.load(gradient + places, mask=inside, other=0)
        magnitude = tl.abs(bits.to(TYPE, bitcast=True).to(tl.float32))
        moment = tl.zeros([BLOCK], dtype=tl.float32)
        near = tl.zeros([BLOCK], dtype=tl.float32) + absolute
        score = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_V:
            moment = tl.load(second_moment + places, mask=inside, other=0.0)
            fast_root = tl.sqrt(moment) * root_factor
            fast_root = tl.where(fast_root < root_floor, root_floor, fast_root)
            near = tl.where(fast_root * spike < near, fast_root * spike, near)
            near = tl.where(moment >= 0, near, 0.0)
            score = (magnitude * _DOWN) / (tl.where(fast_root > 0, fast_root, 1.0) * _UP)
        calm = (magnitude <= near * _NEAR) & (magnitude < infinity)
        score = tl.where(calm | (inside == 0), score, infinity)
        exact = tl.where(magnitude < infinity, magnitude, 0.0).to(tl.float64)
        mass += exact
        if tl.max(score) * (1 / _NEAR) <= largest:
            squares += exact * exact
        else:
            finite = magnitude < infinity
            infinite = magnitude == infinity
            nan = (finite | infinite) == 0
            limit = tl.zeros([BLOCK], dtype=tl.float32) + absolute
            of_spike = limit < 0
            if HAS_V:
                root = tl.sqrt_rn(tl.where(moment < 0, 0.0, moment)) * root_factor
                root = tl.where(root < root_floor, root_floor, root)
                known = (root > 0) & (root < infinity)
                spike_limit = tl.where(known, root * spike, infinity)
                of_spike = spike_limit < limit
                limit = tl.where(of_spike, spike_limit, limit)
                quotient = tl.div_rn(magnitude * _DOWN, tl.where(known, root, 1.0) * _UP)
                largest = tl.maximum(largest, tl.max(tl.where(finite & known, quotient, 0.0)))

            over = finite & (magnitude > limit)
            to_limit = over
            changed = over
            if NON_FINITE != "keep":
                changed = over | nan | infinite
            if NON_FINITE == "bound":
                to_limit = over | (infinite & (limit < infinity))
            new = tl.where(to_limit, limit, 0.0)
            narrow = new.to(TYPE)
            stored = narrow.to(bits.dtype, bitcast=True)
            stored -= (narrow.to(tl.float32) > new).to(bits.dtype)  # rounded towards zero
            new = stored.to(TYPE, bitcast=True).to(tl.float32)
            sign = (bits < 0) & to_limit
            signed = tl.where(sign, new * -1.0, new)  # Triton computes -new as 0 - new: a 0 limit would lose its sign
            tl.store(gradient + places, signed.to(TYPE).to(bits.dtype, bitcast=True), mask=changed)

            after = tl.where(changed, new, tl.where(finite, magnitude, 0.0)).to(tl.float64)
            squares += after * after
            removed += tl.where(over, exact - after, 0.0)
            by_absolute += (over & (of_spike == 0)).to(tl.int32)
            by_spike += (over & of_spike).to(tl.int32)
            nans += nan.to(tl.int32)
            infinities += infinite.to(tl.int32)
    tl.store(partial + program, tl.sum(squares))
    tl.store(partial + programs + program, tl.sum(mass))
    tl.store(partial + 2 * programs + program, tl.sum(removed))
    tl.store(partial + 3 * programs + program, tl.sum(by_absolute).to(tl.float64))
    tl.store(partial + 4 * programs + program, tl.sum(by_spike).to(tl.float64))
    tl.store(partial + 5 * programs + program, tl.sum(nans).to(tl.float64))
    tl.store(partial + 6 * programs + program, tl.sum(infinities).to(tl.float64))
    tl.store(partial + 7 * programs + program, largest.to(tl.float64))
