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

from megasdc.common.errors import LaunchError
from megasdc.tensors.bound_limits import SUMS, ElementLimits, limit_factors

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LaunchError(f"Triton cannot be imported: {error}; install a CUDA build of torch, which has it") from error

_BLOCK, _WARPS, _REGISTERS = 1024, 8, 64
"""Elements of a block, warps that share it, registers of a thread: so many that four programs fit on a processor."""
_RUN = tl.constexpr(4)
"""Elements in a row that a thread adds up before it adds to its sums: more sums would take registers from others."""
_PROGRAMS_PER_PROCESSOR, _MOST_PROGRAMS = 4, 1024
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_UP, _DOWN = tl.constexpr(2.0**60), tl.constexpr(2.0**-16)
"""Scale factors that keep the quotient of any gradient and any root of V in the range of fp32."""
_NEAR = tl.constexpr(0.999)
"""Share of a limit from which on an element needs the exact one; fast roots and quotients are right to 1e-6."""
_LARGEST = tl.constexpr(SUMS.index("largest_ratio"))
_MASS, _REMOVED = tl.constexpr(SUMS.index("mass")), tl.constexpr(SUMS.index("removed"))


def bound_on_gpu_(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    """`megasdc.tensors.bound.bound_` on a GPU (or in Triton's interpreter), by one kernel and a reduction of its sums.

    ``largest_ratio`` is computed from fp32 quotients, of which those under 1e-15 may be 0. It does not wait for the
    device.
    """
    count = gradient.numel()
    if count == 0:
        return
    most = min(_PROGRAMS_PER_PROCESSOR * _num_processors(gradient.device), _MOST_PROGRAMS)
    programs = min(triton.cdiv(count, _BLOCK), most)
    partial = torch.empty(len(SUMS), programs, dtype=torch.float64, device=gradient.device)
    numbers = limit_factors(limits)
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
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
        )
        scale = torch.tensor(limits.scale).item()  # as fp32, in which Triton takes numbers
        _add_up[(1,)](partial, sums, programs, scale, limits.scale - scale, MOST=_MOST_PROGRAMS)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _load(begin, lanes, left, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block, several elements at a time but for the last one, of which ``left`` are there and the others are 0."""
    if left >= BLOCK:  # noqa: SIM108 - Triton computes both sides of an expression
        found = tl.load(begin + lanes)
    else:
        found = tl.load(begin + lanes, mask=lanes < left, other=0)
    return found


@triton.jit
def _limit(magnitude, moment, absolute, spike, root_factor, root_floor, HAS_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """The limit of each element, whether it is that of a spike, and the element over its root."""
    limit = tl.zeros_like(magnitude) + absolute
    of_spike = limit < 0
    ratio = tl.zeros_like(magnitude)
    if HAS_V:
        root = tl.sqrt_rn(tl.where(moment < 0, 0.0, moment)) * root_factor
        root = tl.where(root < root_floor, root_floor, root)
        known = (root > 0) & (root < float("inf"))
        spike_limit = tl.where(known, root * spike, float("inf"))
        of_spike = spike_limit < limit
        limit = tl.where(of_spike, spike_limit, limit)
        ratio = tl.where(known, tl.div_rn(magnitude * _DOWN, tl.where(known, root, 1.0) * _UP), 0.0)
    return limit, of_spike, ratio


@triton.jit
def _stored(bits, new, to_limit, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A magnitude as the gradient's type holds it, rounded towards zero, and its bits with the gradient's sign."""
    narrow = new.to(TYPE)
    down = narrow.to(bits.dtype, bitcast=True) - (narrow.to(tl.float32) > new).to(bits.dtype)
    new = down.to(TYPE, bitcast=True).to(tl.float32)
    # Triton computes -new as 0 - new: a limit of 0 would lose its sign.
    signed = tl.where((bits < 0) & to_limit, new * -1.0, new)
    return new, signed.to(TYPE).to(bits.dtype, bitcast=True)


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
    rows: tl.constexpr = BLOCK // _RUN
    lanes = tl.arange(0, rows)[:, None] * _RUN + tl.arange(0, _RUN)[None, :]
    infinity = float("inf")
    squares = tl.zeros([rows], dtype=tl.float64)
    mass = tl.zeros([rows], dtype=tl.float64)
    removed = tl.sum(squares)
    by_absolute = tl.sum(tl.zeros([rows], dtype=tl.int32))
    by_spike, nans, infinities = by_absolute, by_absolute, by_absolute
    largest = tl.sum(tl.zeros([rows], dtype=tl.float32))
    for number in range(program, tl.cdiv(num_elements, BLOCK), programs):
        start = tl.cast(number, tl.int64) * BLOCK
        bits = _load(gradient + start, lanes, num_elements - start, BLOCK)
        magnitude = tl.abs(bits.to(TYPE, bitcast=True).to(tl.float32))
        moment = tl.zeros_like(magnitude)
        near = moment + absolute
        score = tl.zeros_like(magnitude)
        if HAS_V:
            moment = _load(second_moment + start, lanes, num_elements - start, BLOCK)
            fast_root = tl.sqrt(moment) * root_factor
            fast_root = tl.where(fast_root < root_floor, root_floor, fast_root)
            near = tl.where(fast_root * spike < near, fast_root * spike, near)
            near = tl.where(moment >= 0, near, 0.0)
            score = (magnitude * _DOWN) / (tl.where(fast_root > 0, fast_root, 1.0) * _UP)
        calm = (magnitude <= near * _NEAR) & (magnitude < infinity)
        score = tl.where(calm, score, infinity)
        exact = tl.where(magnitude < infinity, magnitude, 0.0).to(tl.float64)
        mass += tl.sum(exact, axis=1)
        if tl.max(score) * (1 / _NEAR) <= largest:
            squares += tl.sum(exact * exact, axis=1)
        else:
            finite = magnitude < infinity
            infinite = magnitude == infinity
            nan = (finite | infinite) == 0
            limit, of_spike, ratio = _limit(magnitude, moment, absolute, spike, root_factor, root_floor, HAS_V)
            largest = tl.maximum(largest, tl.max(tl.where(finite, ratio, 0.0)))
            over = finite & (magnitude > limit)
            to_limit = over
            changed = over
            if NON_FINITE != "keep":
                changed = over | nan | infinite
            if NON_FINITE == "bound":
                to_limit = over | (infinite & (limit < infinity))
            new, stored = _stored(bits, tl.where(to_limit, limit, 0.0), to_limit, TYPE)
            tl.store(gradient + start + lanes, stored, mask=changed)

            after = tl.where(changed, new, tl.where(finite, magnitude, 0.0)).to(tl.float64)
            squares += tl.sum(after * after, axis=1)
            removed += tl.sum(tl.where(over, exact - after, 0.0))
            by_absolute += tl.sum((over & (of_spike == 0)).to(tl.int32))
            by_spike += tl.sum((over & of_spike).to(tl.int32))
            nans += tl.sum(nan.to(tl.int32))
            infinities += tl.sum(infinite.to(tl.int32))
    tl.store(partial + program, tl.sum(squares))
    tl.store(partial + programs + program, tl.sum(mass))
    tl.store(partial + 2 * programs + program, removed)
    tl.store(partial + 3 * programs + program, by_absolute.to(tl.float64))
    tl.store(partial + 4 * programs + program, by_spike.to(tl.float64))
    tl.store(partial + 5 * programs + program, nans.to(tl.float64))
    tl.store(partial + 6 * programs + program, infinities.to(tl.float64))
    tl.store(partial + 7 * programs + program, largest.to(tl.float64))


@triton.jit
def _add_up(partial, sums, programs, scale, rest_of_scale, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add what each program found, [len(SUMS), programs], to the sums, [len(SUMS)]; of ratios the largest."""
    lanes = tl.arange(0, MOST)
    whole = tl.zeros([MOST], dtype=tl.float64) + scale + rest_of_scale
    for row in tl.static_range(_LARGEST + 1):
        found = tl.load(partial + row * programs + lanes, mask=lanes < programs, other=0.0)
        if (row == _MASS) | (row == _REMOVED):
            found /= whole
        if row == _LARGEST:
            ratio = tl.max(found / whole * (_UP / _DOWN))
            tl.store(sums + row, tl.maximum(tl.load(sums + row), ratio * ratio))
        else:
            tl.store(sums + row, tl.load(sums + row) + tl.sum(found))
