"""Delay environment: latency of a micro-batch under the sum of several delays; delays from text."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import ConfigError
from megasdc.distributions import BLOCK_REPLICAS, KINDS, Delay, DelayPlace


@dataclass(frozen=True)
class DelayEnvironment:
    """Latency of a micro-batch on one stage: its own latency plus the sum of all delays.

    Args:
        latency_s: latency of an undisturbed micro-batch on one stage, >= 0.
        seed: of every draw, >= 0.
    """

    latency_s: float
    delays: tuple[Delay, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s is {self.latency_s}, needed a finite number of seconds >= 0")

    def draw(self, step: int, first: int, stop: int, micro_batches: int, stages: int) -> NDArray[np.float64]:
        """Latencies of some replicas in one step.

        Args:
            step: first is 1.
            first: first replica.
            stop: replica after the last.
            micro_batches: micro-batches per step, M.
            stages: pipeline stages.

        Returns:
            Seconds, [replica, micro-batch, stage]; those of a replica do not depend on the requested range.
        """
        latencies = np.full((stop - first, micro_batches, stages), float(self.latency_s))
        for block in range(first // BLOCK_REPLICAS, -(-stop // BLOCK_REPLICAS)):
            begin = block * BLOCK_REPLICAS
            low, high = max(first, begin), min(stop, begin + BLOCK_REPLICAS)
            for stream, delay in enumerate(self.delays):
                drawn = delay.draw(DelayPlace(self.seed, stream, step, block, micro_batches, stages))
                latencies[low - first : high - first] += drawn[low - begin : high - begin]
        return latencies

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        delays = [{"kind": delay.kind} | asdict(delay) for delay in self.delays]
        return {"latency_s": self.latency_s, "delays": delays, "seed": self.seed}


def parse_delay(text: str) -> Delay:
    """Reads a delay from text like ``slow_rank:replica=3,delay_s=0.5``.

    Args:
        text: a key of ``KINDS``, a colon, and its fields.

    Raises:
        ConfigError: an unknown kind or field, a missing field, or an invalid value.
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise ConfigError(f"delay: got {name!r}, needed one of {', '.join(KINDS)}")
    kind = KINDS[name]
    known = {field.name: field for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, _, value = part.partition("=")
        if key not in known:
            raise ConfigError(f"delay {name}: got {part!r}, needed KEY=VALUE with {', '.join(known)}")
        values[key] = _value(name, known[key], value)
    missing = [field.name for field in known.values() if field.default is MISSING and field.name not in values]
    if missing:
        raise ConfigError(f"delay {name}: {', '.join(missing)} missing, as in {_example(name, list(known.values()))}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"delay {error}") from error


def _value(name: str, field: Field[Any], text: str) -> Any:
    types = {"float": float, "int": int, "str": str}
    try:
        return types[str(field.type)](text)
    except ValueError as error:
        raise ConfigError(f"delay {name}: {field.name} is {text!r}, needed {field.type}") from error


def _example(name: str, known: list[Field[Any]]) -> str:
    values = {"float": "0.2", "int": "3", "str": "FILE.npy"}
    return f"{name}:" + ",".join(f"{one.name}={values[str(one.type)]}" for one in known if one.default is MISSING)
