"""A sink: where metrics are shown beside ``metrics.jsonl``, and what becomes of one that fails."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

Values = Mapping[str, float | int | None]
"""Metrics of one line by name, as ``metrics.jsonl`` holds them: None for NaN and Inf."""
OnFailure = Callable[[str, str], None]
"""Called with the name of a sink that failed, and why."""


class Sink(ABC):
    """Shows metrics; a failure in one stops neither the run nor the other sinks."""

    name: str

    @abstractmethod
    def write(self, step: int, at: float, values: Values) -> None:
        """Show the metrics of one line.

        Args:
            step: optimizer step, the first is 1; it never falls.
            at: seconds since the epoch.
            values: by name.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is left; nothing is written afterwards."""


def number_of_value(value: float | int | None) -> float | int:
    """A value of a line as a number: NaN for None, whether it was NaN or Inf."""
    return math.nan if value is None else value


def open_sinks(openers: Mapping[str, Callable[[], Sink]], on_failure: OnFailure) -> list[Sink]:
    """Open sinks by name; those that fail are reported and left out, since all numbers are in ``metrics.jsonl``."""
    opened = []
    for name, opener in openers.items():
        try:
            opened.append(opener())
        except Exception as error:  # whatever a tracker raises: no login, no network, no port
            on_failure(name, describe(error))
    return opened


def describe(error: Exception) -> str:
    """An error in one line."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
