"""The mixed sum on a GPU: one Triton kernel that reads every element once.

Each program sums its blocks in registers and adds the result to the total with one atomic addition of integers, whose
order does not matter. `megasdc.tensors.mixed_sum` has the formula that the kernel follows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megasdc.common.errors import LaunchError
from megasdc.tensors import mixed_sum

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LaunchError(
        "checksums mixed_sum_64 of tensors on a GPU need Triton, which cannot be imported: "
        f"{error}; install a CUDA build of torch, which has it, or choose the checksum algorithm xxh3_64.v1"
    ) from error

_WEYL = tl.constexpr(mixed_sum.WEYL)
_MULTIPLIER = tl.constexpr(mixed_sum.MULTIPLIER)
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_BLOCK_BYTES = 4096
_LARGEST_BLOCK = 2048
_PROGRAMS_PER_PROCESSOR = 8


def fused_mixed_sum(bits: Tensor) -> Tensor:
    """The mixed sum by one kernel, on a GPU or anywhere in Triton's interpreter; it does not wait for the device.

    ``bits`` is [n], contiguous, signed integers of the elements' width; the result, [] int64 on the same device, has
    the bits of the unsigned value.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if bits.numel() == 0:
        return total
    block = min(_BLOCK_BYTES // bits.element_size(), _LARGEST_BLOCK)
    programs = min(triton.cdiv(bits.numel(), block), _PROGRAMS_PER_PROCESSOR * _num_processors(bits.device))
    unsigned = bits.view(_UNSIGNED[bits.element_size()])
    with torch.cuda.device_of(bits):
        _mixed_sum_kernel[(programs,)](unsigned, total, bits.numel(), BLOCK=block)
    return total


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _mix(argument):  # type: ignore[no-untyped-def]
    argument ^= argument >> 32
    argument *= _MULTIPLIER
    argument ^= argument >> 32
    argument *= _MULTIPLIER
    return argument ^ (argument >> 32)


@triton.jit(do_not_specialize=["num_elements"])  # a literal 1 would be a constant without a type
def _mixed_sum_kernel(bits, total, num_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    steps = (lanes + 1).to(tl.uint64) * _WEYL
    full_blocks = num_elements // BLOCK
    sums = tl.zeros([BLOCK], dtype=tl.uint64)
    for number in range(program, full_blocks, programs):  # no mask, so that loads are vectorized
        begin = tl.cast(number, tl.int64) * BLOCK
        elements = tl.load(bits + begin + lanes).to(tl.uint64)
        sums += _mix(elements + steps + begin.to(tl.uint64) * _WEYL)
    if program == full_blocks % programs:
        begin = tl.cast(full_blocks, tl.int64) * BLOCK
        inside = lanes < num_elements - begin
        elements = tl.load(bits + begin + lanes, mask=inside, other=0).to(tl.uint64)
        sums += tl.where(inside, _mix(elements + steps + begin.to(tl.uint64) * _WEYL), 0)
    tl.atomic_add(total, tl.sum(sums).to(tl.int64, bitcast=True))
