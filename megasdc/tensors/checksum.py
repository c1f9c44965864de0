"""64-bit checksums of tensors, by algorithms with a name and a version.

A checksum depends on the bit pattern of every element and on its index in logical row-major order, and on nothing else:
not on strides, device, chunk sizes or the order of a sum. NaN payloads and the sign of zero count. Type and shape are
not part of the value; record both beside it. A value changes only with the version in the name.

There are two algorithms, because none is fast everywhere: ``xxh3_64`` reads raw bytes in order, which a CPU does at the
speed of its memory; ``mixed_sum_64`` is a sum over elements, which a GPU computes in any order. Each can be computed on
any device, so that a CPU can check a GPU's record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from megasdc.common.errors import ConfigError
from megasdc.tensors.bits import as_bits
from megasdc.tensors.mixed_sum import mixed_sum_formula

_MASK = (1 << 64) - 1


class ChecksumAlgorithm(Protocol):
    """One way to compute a checksum, with a name, version included, that traces record and configurations use."""

    name: str

    def start(self, tensor: Tensor) -> int | Tensor:
        """Start a checksum; `read_back` completes it.

        Args:
            tensor: any shape and strides, any real type.

        Returns:
            The finished value on the host, an unsigned 64-bit integer; or an int64 scalar [] on the tensor's device
            with the same bits, which need not be computed yet.

        Raises:
            ValueError: the type is complex.
        """
        ...


class Xxh3:
    """XXH3 with 64 bits and seed 0 over the raw bytes of all elements in row-major order; fast on the host.

    A contiguous tensor in host memory is read in place. Any other is first copied as a whole: into row-major
    order, and from a device to the host.

    Sync: waits for the device.
    Source: Collet, xxHash specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
    """

    name = "xxh3_64.v1"

    def start(self, tensor: Tensor) -> int:
        """The finished value; see `ChecksumAlgorithm.start`."""
        if tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous():  # the same, a microsecond sooner
            return xxhash.xxh3_64_intdigest(tensor.numpy(force=True).data)
        return xxhash.xxh3_64_intdigest(row_major_bits(tensor).cpu().numpy().data)


class MixedSum:
    """Sum over elements, each mixed with its index; fast on a GPU, where the value stays until it is read.

    `megasdc.tensors.mixed_sum` has the formula.

    Sync: none.
    """

    name = "mixed_sum_64.v1"

    def start(self, tensor: Tensor) -> Tensor:
        """The value on the tensor's device; see `ChecksumAlgorithm.start`."""
        bits = row_major_bits(tensor).view(-1)
        if bits.device.type == "cuda":
            from megasdc.tensors.mixed_sum_kernel import fused_mixed_sum  # needs Triton

            return fused_mixed_sum(bits)
        return mixed_sum_formula(bits)


ALGORITHMS: dict[str, ChecksumAlgorithm] = {one.name: one for one in (Xxh3(), MixedSum())}
"""All algorithms by name."""


def algorithm(name: str) -> ChecksumAlgorithm:
    """The algorithm with this name.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"checksum algorithm {name!r} is unknown; known are {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]


def default_algorithm(device: torch.device) -> ChecksumAlgorithm:
    """The fastest algorithm for a device: XXH3 on the host, the mixed sum elsewhere."""
    return algorithm(Xxh3.name if device.type == "cpu" else MixedSum.name)


def read_back(values: Sequence[int | Tensor]) -> list[int]:
    """Complete checksums that `ChecksumAlgorithm.start` began.

    Args:
        values: what it returned, of any algorithms and devices.

    Returns:
        The checksums in the same order, unsigned 64-bit integers.

    Sync: one copy from each device that holds values, whatever their number.
    """
    places = defaultdict(list)
    found = [value if isinstance(value, int) else 0 for value in values]
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            places[value.device].append((place, value))
    for held in places.values():
        signed = torch.stack([value for _, value in held]).tolist()
        for (place, _), value in zip(held, signed, strict=True):
            found[place] = value & _MASK
    return found


def checksum(tensor: Tensor, name: str | None = None) -> int:
    """The checksum of one tensor.

    Args:
        tensor: any shape and strides, any real type.
        name: the algorithm; None: the default of the tensor's device.

    Returns:
        An unsigned 64-bit integer; type and shape are not part of it.

    Raises:
        ConfigError: no algorithm has that name.
        ValueError: the type is complex.

    Sync: waits for the device.
    """
    chosen = default_algorithm(tensor.device) if name is None else algorithm(name)
    value = chosen.start(tensor)
    return value if isinstance(value, int) else read_back([value])[0]


def row_major_bits(tensor: Tensor) -> Tensor:
    """The elements' bit patterns in logical row-major order, as signed integers; copied only where strides require it.

    ValueError if the type is complex.
    """
    return as_bits(tensor.resolve_neg()).contiguous()
