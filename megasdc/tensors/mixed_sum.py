"""The checksum ``mixed_sum_64``: its formula in torch's integer operations, for every device.

The sum over all elements, modulo 2^64, of mix(x_i + (i + 1) w), where x_i is the bit pattern of element i zero-extended
to 64 bits and w is the odd integer nearest to 2^64 over the golden ratio. mix is a bijection, so a single wrong element
always changes the sum. Several wrong ones cancel only by chance, with probability 2^-64: for elements of up to 32 bits
no two pairs of pattern and index (below 2^31) give mix the same argument. 64-bit elements that differ by multiples of w
could be exchanged undetected; no fault causes that.

A sum does not depend on the order of its terms, so any kernel gives this value. All shifts of the mixer are by 32
bits, which costs one instruction on a GPU, whose registers have 32 bits; an element takes two multiplications.

Source: Lea's mixer, in Steele and Vigna 2021, LXM: Better Splittable Pseudorandom Number Generators (and Almost as
Fast), OOPSLA, https://doi.org/10.1145/3485525; the steps of w are those of Steele, Lea, Flood 2014, Fast Splittable
Pseudorandom Number Generators, OOPSLA. They draw random numbers; adding an element to the argument is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEYL = 0x9E3779B97F4A7C15
MULTIPLIER = 0xDABA0B6EB09322E3
CHUNK = 1 << 16
"""Elements processed at once, to save memory and stay in a CPU's cache."""


def mixed_sum_formula(bits: Tensor) -> Tensor:
    """The mixed sum in torch's integer operations (int64 wraps modulo 2^64); the reference for every kernel.

    ``bits`` is [n], contiguous, signed integers of the elements' width; the result, [] int64 on the same device, has
    the bits of the unsigned value.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    steps = torch.arange(1, min(CHUNK, bits.numel()) + 1, device=bits.device).mul_(_signed(WEYL))
    low = (1 << 8 * bits.element_size()) - 1
    for begin in range(0, bits.numel(), CHUNK):
        mixed = bits[begin : begin + CHUNK].to(torch.int64, copy=True)
        if bits.element_size() < mixed.element_size():
            mixed &= low  # zero-extends
        mixed += steps[: mixed.numel()]
        mixed += _signed(begin * WEYL)
        for _ in range(2):
            mixed ^= (mixed >> 32) & 0xFFFFFFFF  # a shift of int64 copies the sign
            mixed *= _signed(MULTIPLIER)
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        total += mixed.sum()
    return total


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of an integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
