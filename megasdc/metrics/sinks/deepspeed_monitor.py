"""DeepSpeed's monitor, for Comet alone: the other trackers have sinks of ours."""

from __future__ import annotations

from typing import Any

from megasdc.metrics.sinks.sink import Sink, Values, number_of_value


class DeepSpeedMonitorSink(Sink):
    """Hands metrics to the monitor of DeepSpeed's engine.

    Args:
        monitor: DeepSpeed's, enabled.
    """

    name = "comet"

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def write(self, step: int, at: float, values: Values) -> None:
        """Write the values as events."""
        self._monitor.write_events([(name, number_of_value(value), step) for name, value in values.items()])

    def close(self) -> None:
        """DeepSpeed's monitor has no end."""
