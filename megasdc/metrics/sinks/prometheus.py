"""Prometheus: the last value of each metric as a gauge, on a port of one address or as text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest, start_http_server

from megasdc.common.wire import split_address
from megasdc.metrics.names import METRICS
from megasdc.metrics.sinks.sink import Sink, Values, number_of_value

PREFIX = "megasdc_"


def gauge_name(name: str) -> str:
    """Name of a metric's gauge."""
    return PREFIX + name.replace("/", "_")


class PrometheusSink(Sink):
    """Keeps a gauge for each metric, with the run's id as label.

    Args:
        run: id of the run.
        attempt: number of this start.
        address: ``HOST:PORT`` at which ``/metrics`` is served, by a thread; None: nowhere.

    Raises:
        OSError: the address cannot be bound.
    """

    name = "prometheus"

    def __init__(self, run: str, attempt: int, address: str | None = None) -> None:
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._set(f"{PREFIX}attempt", "number of this start of the run", attempt)
        self._server = None
        if address is not None:
            host, port = split_address(address)
            self._server, self._thread = start_http_server(port, host, self._registry)

    def write(self, step: int, at: float, values: Values) -> None:
        """Set the gauges."""
        for name, value in values.items():
            self._set(gauge_name(name), METRICS[name], number_of_value(value))
        self._set(f"{PREFIX}step", "optimizer step of the last line", step)
        self._set(f"{PREFIX}written_timestamp_seconds", "time of the last line, seconds since the epoch", at)

    def _set(self, name: str, meaning: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, meaning, ["run"], registry=self._registry)
        self._gauges[name].labels(self._run).set(value)

    def text(self) -> bytes:
        """All gauges in Prometheus' text format."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
