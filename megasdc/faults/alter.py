"""Changes to the elements that a fault hits: bits on integer views, values by arithmetic in fp64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from megasdc.config import FaultSpec
from megasdc.config.sections.faults import BIT_KINDS
from megasdc.tensors.bits import as_bits, bit_layout, element_bits

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


class UnfitError(ValueError):
    """A spec names bits that the tensor's type does not have; it does not fire there."""


def alter_elements(values: Tensor, spec: FaultSpec, draws: np.random.Generator) -> Tensor:
    """New values of the elements [n] that a fault hits, of the same type and device; no sync.

    ``values``: fp32, bf16, fp16, fp64 or an integer type; ``draws``: source of random bits and noise.

    Raises:
        UnfitError: the type has no such bits.
    """
    if spec.kind in BIT_KINDS:
        return _alter_bits(values, spec, draws)
    if spec.kind == "value":
        assert spec.value is not None, "checked when the spec was taken"
        if not values.dtype.is_floating_point and not math.isfinite(float(spec.value)):
            raise UnfitError(f"{values.dtype} has no {spec.value}")
        value = torch.tensor(float(spec.value), dtype=torch.float64).to(values.dtype)
        return value.to(values.device).expand_as(values).clone()
    if spec.kind == "scale":
        assert spec.factor is not None, "checked when the spec was taken"
        return (values.double() * spec.factor).to(values.dtype)
    assert spec.deviation is not None, "checked when the spec was taken"
    noise = torch.from_numpy(draws.standard_normal(values.numel())).to(values.device)
    return (values.double() * (1.0 + spec.deviation * noise)).to(values.dtype)


def _alter_bits(values: Tensor, spec: FaultSpec, draws: np.random.Generator) -> Tensor:
    masks = torch.from_numpy(bit_masks(values.dtype, values.numel(), spec, draws)).to(values.device)
    bits = as_bits(values) if values.dtype.is_floating_point else values.view(masks.dtype)
    if spec.kind == "bit_flip":
        changed = bits ^ masks
    elif spec.kind == "stuck_at_1":
        changed = bits | masks
    else:
        changed = bits & ~masks
    return changed.view(values.dtype)


def bit_masks(dtype: torch.dtype, count: int, spec: FaultSpec, draws: np.random.Generator) -> np.ndarray:
    """Mask of the bits to change in each element, [count], signed integers as wide as the type.

    Raises:
        UnfitError: the type has no such bits.
    """
    width = element_bits(dtype)
    if isinstance(spec.bits, list):
        if max(spec.bits) >= width:
            raise UnfitError(f"{dtype} has bits 0 to {width - 1}, not {max(spec.bits)}")
        mask = sum(1 << bit for bit in set(spec.bits))
        return np.full(count, mask, _UNSIGNED[width]).view(_SIGNED[width])
    if spec.bits != "any" and not dtype.is_floating_point:
        raise UnfitError(f"{dtype} has no {spec.bits}")
    part = range(width) if spec.bits == "any" else bit_layout(dtype)[spec.bits]
    if spec.num_bits > len(part):
        raise UnfitError(f"{dtype} has {len(part)} bits in {spec.bits}, not {spec.num_bits}")
    if spec.num_bits == 1:
        chosen = draws.integers(part.start, part.stop, (count, 1))
    else:
        chosen = draws.permuted(np.tile(np.array(part), (count, 1)), axis=1)[:, : spec.num_bits]
    one = np.uint64(1)
    return (one << chosen.astype(np.uint64)).sum(axis=1, dtype=np.uint64).astype(_UNSIGNED[width]).view(_SIGNED[width])
