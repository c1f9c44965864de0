"""Steps in which a fault fires, and its random numbers: stateless functions of seeds and addresses."""

from __future__ import annotations

import zlib
from fnmatch import fnmatchcase

import numpy as np

from megasdc.config.sections.faults import FAULT_PHASES, FaultPlace, FaultSpec
from megasdc.model.randomness import mix
from megasdc.parallel.dims import ParallelDims

_FIRE, _BURST, _ELEMENTS, _SAME = range(4)
"""Purpose of a draw, part of its key; keeps draws for different purposes independent."""


def is_here(spec: FaultPlace, dims: ParallelDims, host: str) -> bool:
    """Whether a spec applies to this rank."""
    wanted = (spec.rank, spec.replica, spec.stage, spec.tensor_rank)
    place = (dims.rank, dims.dp_rank, dims.pp_rank, dims.tp_rank)
    return all(want is None or want == here for want, here in zip(wanted, place, strict=True)) and (
        spec.host is None or fnmatchcase(host, spec.host)
    )


def in_steps(spec: FaultPlace, step: int, micro_batch: int | None) -> bool:
    """Whether a spec applies to this step and micro-batch."""
    first, last = spec.steps
    assert first is not None, "checked when the configuration was read"
    if step < first or (last is not None and step > last):
        return False
    return spec.micro_batches is None or micro_batch is None or micro_batch in spec.micro_batches


class Draws:
    """Random draws of one spec on one rank.

    Args:
        index: of the spec in its list.
        rank: global rank.
    """

    def __init__(self, spec: FaultSpec, index: int, rank: int) -> None:
        self._spec = spec
        self._own = (spec.seed, index, rank)
        self._shared = (spec.seed, rank)

    def fires(self, step: int, micro_batch: int | None, name: str, call: int) -> bool:
        """Whether the spec fires at one matching result.

        Args:
            step: optimizer step, first is 1.
            micro_batch: micro-batch in the step, or None.
            name: names the tensor.
            call: how often this address occurred before in this step.
        """
        spec = self._spec
        if spec.burst is not None and not self._in_burst(step):
            return False
        if spec.probability >= 1.0:
            return True
        return _uniform(*self._own, _FIRE, *self._address(step, micro_batch, name), call) < spec.probability

    def _in_burst(self, step: int) -> bool:
        burst, first = self._spec.burst, self._spec.steps[0]
        assert burst is not None and first is not None
        starts = range(max(first, step - burst.length + 1), step + 1)
        return any(_uniform(*self._own, _BURST, start) < burst.probability for start in starts)

    def generator(self, step: int, micro_batch: int | None, name: str, call: int) -> np.random.Generator:
        """Generator of elements, bits and noise of one firing; the same at every firing with ``same_elements``.

        The arguments are those of ``fires``.
        """
        if self._spec.same_elements:
            seed = mix(*self._shared, _SAME, _hash(name))
        else:
            seed = mix(*self._own, _ELEMENTS, *self._address(step, micro_batch, name), call)
        return np.random.Generator(np.random.PCG64(seed))

    def _address(self, step: int, micro_batch: int | None, name: str) -> tuple[int, ...]:
        phase = FAULT_PHASES.index(self._spec.phase)
        return step, -1 if micro_batch is None else micro_batch, phase, _hash(name)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _uniform(*key: int) -> float:
    """A number in [0, 1) that depends on the key only."""
    return mix(*key) / 2**63
