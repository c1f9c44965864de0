"""Computation synchronization: each submodule's result is compared with the trusted replica's and replaced by it.

Since a submodule's inputs were replaced before, every mismatch is its own. A submodule that no pattern names is not
compared: its errors propagate to the next one that is.

Mismatches of a result with the trusted one: which elements differ, how far and in which bits. Pure.

Mismatch frequency and severity are those of Ma et al. 2025, Understanding Silent Data Corruption in LLM Training,
https://arxiv.org/abs/2502.12340: the share of elements that differ, and the mean of |u - h| / |h| over those where it
is not zero. Beyond the paper: elements differ if their bits do; the relative difference is computed in fp64, for
elements whose two values are finite and whose trusted value h is not zero; the others are counted separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD, Address
from megasdc.config.sections.study import PAPER_BACKWARD, PAPER_FORWARD, StudySection
from megasdc.lab.studies.replica_link import ReplicaLink
from megasdc.tensors.bits import as_bits, count_flips


@dataclass(frozen=True)
class Mismatch:
    """How one result differs from the trusted one.

    Args:
        elements: of the result.
        mismatches: elements whose bits differ; at least 1.
        severity_count: mismatches that have a relative difference.
        severity_sum: sum of their relative differences.
        severity_max: the largest.
        from_zero: mismatches whose trusted value is zero and whose other value is finite and not zero.
        non_finite: mismatches in which one of the values is NaN or infinite.
        flips: number of mismatches by bit that differs, 0 is the lowest.
        decades: number of relative differences by the floor of their log10.
        samples: (row-major index, trusted value, other value) of some mismatches, evenly chosen.
    """

    elements: int
    mismatches: int
    severity_count: int
    severity_sum: float
    severity_max: float
    from_zero: int
    non_finite: int
    flips: dict[int, int]
    decades: dict[int, int]
    samples: tuple[tuple[int, float, float], ...]

    def fields(self) -> dict[str, Any]:
        """As plain values for a line of JSON; sampled values as text, because JSON has no NaN."""
        return {
            **vars(self),
            "flips": {str(bit): count for bit, count in self.flips.items()},
            "decades": {str(decade): count for decade, count in self.decades.items()},
            "samples": [[place, f"{healthy:.9g}", f"{other:.9g}"] for place, healthy, other in self.samples],
        }


def compare_results(healthy: Tensor, other: Tensor, num_samples: int) -> Mismatch | None:
    """Compares a result with the trusted one; None if all bits are equal.

    Any shape and floating-point dtype, equal for both, on one device. ``num_samples``: maximum of mismatches listed one
    by one.

    Sync: waits for the device.
    """
    places = (as_bits(healthy) != as_bits(other)).flatten().nonzero().flatten()
    if not places.numel():
        return None
    before, after = (tensor.detach().flatten()[places].cpu() for tensor in (healthy, other))
    places = places.cpu()
    reference, value = before.double(), after.double()
    finite = reference.isfinite() & value.isfinite()
    relative = ((value - reference).abs() / reference.abs())[finite & (reference != 0)]
    relative = relative[relative > 0]
    chosen = torch.arange(min(num_samples, places.numel())) * places.numel() // max(1, min(num_samples, places.numel()))
    flips = {bit: count for bit, count in enumerate(count_flips(before, after)) if count}
    return Mismatch(
        elements=healthy.numel(),
        mismatches=places.numel(),
        severity_count=relative.numel(),
        severity_sum=float(relative.sum()),
        severity_max=float(relative.max()) if relative.numel() else 0.0,
        from_zero=int((finite & (reference == 0) & (value != 0)).sum()),
        non_finite=int((~finite).sum()),
        flips=flips,
        decades=dict(sorted(Counter(relative.log10().floor().int().tolist()).items())),
        samples=tuple(zip(places[chosen].tolist(), reference[chosen].tolist(), value[chosen].tolist(), strict=True)),
    )


Tell = Callable[..., None]
"""Writes a line: (kind, step, **fields)."""
_ALWAYS = (WEIGHT_GRAD, REDUCED_GRAD, UPDATE, PARAMETER)
"""Phases compared for every submodule, so that no error enters the weights of the next step."""


class ResultSync:
    """A listener of ``engine.observer.Observer``, to be called after fault injection.

    Args:
        section: patterns, samples.
        bridge: to the other replicas.
        tell: receives every mismatch and, by ``flush``, the numbers compared; not called on the trusted replica.
    """

    def __init__(self, section: StudySection, bridge: ReplicaLink, tell: Tell) -> None:
        self._bridge = bridge
        self._tell = tell
        self._num_samples = section.sampled_elements
        own = section.submodules
        forward = tuple(own) if own else PAPER_FORWARD
        self._patterns = {
            FORWARD: forward,
            RECOMPUTE: forward,
            BACKWARD: tuple(own) if own else PAPER_BACKWARD,
            **dict.fromkeys(_ALWAYS, ("*",)),
        }
        self._wanted: dict[tuple[str, str], bool] = {}
        self._compared: dict[tuple[str, str, str], list[int]] = {}
        self._first_step: int | None = None

    def __call__(self, address: Address, result: Tensor) -> Tensor | None:
        """Compares one result, of any shape and not modified, if a pattern names its submodule.

        Returns:
            The trusted replica's result with the strides of ``result``; None: not compared, equal in every bit, or
            this is the trusted replica.

        Collective: the ranks of equal rank in all replicas.
        Sync: waits for the device.
        """
        if not self._wants(address.phase, address.fqn):
            return None
        healthy = self._bridge.share(result, str(address))
        if self._bridge.is_trusted:
            return None
        self._count(address, result)
        found = compare_results(healthy, result, self._num_samples)
        if found is None:
            return None
        self._tell(
            "mismatch",
            address.step,
            micro_batch=address.micro_batch,
            fqn=address.fqn,
            phase=address.phase,
            slot=address.slot,
            dtype=str(result.dtype).removeprefix("torch."),
            shape=list(result.shape),
            **found.fields(),
        )
        answer = result.detach().clone()
        answer.copy_(healthy)
        return answer

    def flush(self, step: int) -> None:
        """Logs the numbers of results compared since the last flush, at the last step."""
        for (fqn, phase, slot), (results, elements) in self._compared.items():
            steps = step + 1 - (self._first_step or step)
            self._tell(
                "compared", step, steps=steps, fqn=fqn, phase=phase, slot=slot, results=results, elements=elements
            )
        self._compared.clear()
        self._first_step = None

    def _count(self, address: Address, result: Tensor) -> None:
        self._first_step = self._first_step or address.step
        counts = self._compared.setdefault((address.fqn, address.phase, address.slot), [0, 0])
        counts[0] += 1
        counts[1] += result.numel()

    def _wants(self, phase: str, fqn: str) -> bool:
        key = (phase, fqn)
        if key not in self._wanted:
            patterns = self._patterns.get(phase, ())
            self._wanted[key] = any(fnmatchcase(fqn, pattern) for pattern in patterns)
        return self._wanted[key]
