"""Drill of the stress test: a node profile injects faults on one host; reports whether they are found, or why not.

Faults of the phases forward, backward and weight_grad are injected into matrix products and the training run, those of
whole steps into the training run alone, collective and reduced_grad into a host's contributions to collectives and
into its results. Steps are those of the training run; for products, passes over all rounds; for collectives, rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.common.errors import ConfigError
from megasdc.config.faults import CHECKPOINT, TOKENS, FaultSpec, expand_faults, fault_spec_problems, place_problems
from megasdc.faults.injector import Injector, Tally, in_steps, why_unfired
from megasdc.parallel.dims import ParallelDims

ALONE = ParallelDims(1, 1, 1)
"""The layout of a device that is tested alone."""


@dataclass(frozen=True)
class DrillRequest:
    """A drill: a node profile by name or path of its JSON file, a host as in the hostfile, and the profile's faults."""

    profile: str
    host: str
    faults: list[dict[str, Any]]


def read_drill(text: str, hosts: Sequence[str]) -> DrillRequest:
    """Reads ``PROFILE[@HOST]``.

    Raises:
        ConfigError: there is no such profile or host, no host is named among several, or a fault cannot be injected
            into this workload.
    """
    profile, _, host = text.partition("@")
    if not host and len(hosts) > 1:
        raise ConfigError(f"--drill {text} names no host; give {text}@HOST with one of {', '.join(hosts)}")
    host = host or hosts[0]
    if host not in hosts:
        raise ConfigError(f"--drill {text}: there is no host {host!r}; there are {', '.join(hosts)}")
    faults = expand_faults([FaultSpec(profile=profile)])
    problems = [
        f"faults.{index}.{name}: {said}"
        for index, spec in enumerate(faults)
        for name, said in [*fault_spec_problems(spec), *place_problems(spec, 1, 1, 1), *_unfit(spec)]
    ]
    if problems:
        raise ConfigError(problems, source=f"--drill {profile}")
    return DrillRequest(profile, host, [spec.model_dump(mode="json") for spec in faults])


def _unfit(spec: FaultSpec) -> list[tuple[str, str]]:
    if spec.phase not in (CHECKPOINT, TOKENS):
        return []
    return [("phase", f"{spec.phase}; a stress test reads no corpus and saves nothing")]


class Expectation:
    """A listener that adds the expected number of results with injected faults to ``totals``; changes no result.

    Faults that need a wider model than ``hidden`` are ignored.
    """

    def __init__(self, specs: Sequence[FaultSpec], hidden: int, totals: list[float]) -> None:
        self._specs = [
            (index, spec)
            for index, spec in enumerate(specs)
            if spec.min_hidden_size is None or hidden >= spec.min_hidden_size
        ]
        self._totals = totals

    def __call__(self, address: Address, result: Tensor) -> None:
        """Counts one result."""
        for index, spec in self._specs:
            if _means(spec, address):
                self._totals[index] += chance(spec, result.numel())


def _means(spec: FaultSpec, address: Address) -> bool:
    return (
        spec.phase == address.phase
        and fnmatchcase(address.fqn, spec.submodule)
        and (spec.slot is None or fnmatchcase(address.slot, spec.slot))
        and in_steps(spec, address.step, address.micro_batch)
    )


def chance(spec: FaultSpec, elements: int) -> float:
    """Probability that a fault is injected into a matching result of so many elements, in one of its steps.

    Its ranges of values, and stuck bits that already have that value, are not considered.
    """
    some = 1.0 if spec.element_probability is None else 1.0 - (1.0 - spec.element_probability) ** elements
    burst = 1.0 if spec.burst is None else 1.0 - (1.0 - spec.burst.probability) ** spec.burst.length
    return spec.probability * burst * some


class SlotDrill:
    """The faults of one process; ``host``: None: the system's host name."""

    def __init__(self, faults: list[dict[str, Any]], host: str | None = None) -> None:
        self.faults = faults
        self._specs = [FaultSpec.model_validate(fault) for fault in faults]
        self._host = host
        self._injectors: dict[int, Injector] = {}
        self.expected = [0.0] * len(faults)
        self._past = [Tally() for _ in faults]

    def injector_of(self, hidden: int) -> Injector | None:
        """The injector for results of a model of this width; None without faults."""
        if not self._specs:
            return None
        if hidden not in self._injectors:
            self._injectors[hidden] = _Counted(self._specs, hidden, self.expected, self._host)
        return self._injectors[hidden]

    def watch(self, hidden: int) -> list[Expectation]:
        """Listeners that count the results of a training run, which has an injector of its own."""
        return [Expectation(self._specs, hidden, self.expected)] if self._specs else []

    def collect_tallies(self, injectors: Sequence[Any]) -> None:
        """Adds the tallies of injectors that will be discarded."""
        for injector in injectors:
            self._past = [add_tallies(a, b) for a, b in zip(self._past, injector.tallies, strict=True)]

    def summary(self) -> dict[str, Any]:
        """For ``summarize``: the ``expected`` number of injections by fault, and the injectors' ``tallies``."""
        tallies = self._past
        for injector in self._injectors.values():
            tallies = [add_tallies(a, b) for a, b in zip(tallies, injector.tallies, strict=True)]
        return {"expected": self.expected, "tallies": [{**vars(one), "reasons": dict(one.reasons)} for one in tallies]}


def summarize_drills(faults: Sequence[dict[str, Any]], said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Effect of each fault on its host; ``said``: of all of its processes, from ``SlotDrill.summary``.

    For each fault: numbers of results ``expected`` to change and ``changed``, and ``unfired``: why none changed.
    """
    found = []
    for place, fault in enumerate(faults):
        tallies = [
            Tally(**{**one["tallies"][place], "reasons": Counter(one["tallies"][place]["reasons"])}) for one in said
        ]
        found.append(
            {
                "expected": sum(one["expected"][place] for one in said),
                "changed": sum(tally.changed for tally in tallies),
                "unfired": why_unfired(FaultSpec.model_validate(fault), tallies),
            }
        )
    return found


class _Counted(Injector):
    """An injector that sums its expected injections, and stores no firing."""

    def __init__(self, specs: Sequence[FaultSpec], hidden: int, totals: list[float], host: str | None) -> None:
        super().__init__(specs, ALONE, hidden, host=host)
        self._expectation = Expectation(specs, hidden, totals)

    def __call__(self, address: Address, result: Tensor) -> Tensor | None:
        self._expectation(address, result)
        answer = super().__call__(address, result)
        self.firings.clear()  # they would accumulate in a long test
        return answer


def add_tallies(a: Tally, b: Tally) -> Tally:
    """Sum of two injectors' tallies of one fault."""
    sums: dict[str, Any] = {
        field.name: getattr(a, field.name) + getattr(b, field.name)
        for field in fields(Tally)
        if field.name in ("seen", "due", "fired", "changed")
    }
    wide = (a.wide and a.here) or (b.wide and b.here)
    return Tally(here=a.here or b.here, wide=wide, reasons=Counter(a.reasons) + Counter(b.reasons), **sums)
