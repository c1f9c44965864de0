"""How fast is a rank at what checks consist of? Measured apart from any step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megasdc.addresses import FORWARD, Address
from megasdc.bench.overhead_model import Rates
from megasdc.bench.statistics import estimate_median
from megasdc.config import TraceSection
from megasdc.parallel.agreement import compare_replicas
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finite import FiniteRecorder
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.checksum import default_algorithm, read_back
from megasdc.train.detection import digest

RATE_BYTES = 256 << 20
"""Larger than the caches of a processor."""
CALLS, EXCHANGES, READS = 2000, 100, 5


def measure_rates(device: torch.device, dims: ParallelDims) -> Rates:
    """How fast this rank is at what checks consist of, while the others do the same.

    Args:
        device: of the tensors.
        dims: layout and place of this rank.

    Collective: all ranks of the world.
    """
    algorithm = default_algorithm(device)
    large, small = torch.randn(RATE_BYTES // 4, device=device), torch.zeros(1, device=device)
    tracer, finite = Tracer(algorithm, TraceSection()), FiniteRecorder()
    address = Address(1, 0, FORWARD, "loss", "output")

    def look(result: torch.Tensor) -> None:
        finite(address, result)
        finite.take(dims)

    def record() -> None:
        for _ in range(CALLS):
            tracer(address, small)
        digest(tracer.take())

    def record_extremes() -> None:
        for _ in range(CALLS):
            finite(address, small)
        finite.take(dims)

    return Rates(
        checksum_bytes_per_s=RATE_BYTES / _median_s(lambda: read_back([algorithm.start(large)]), READS),
        extremes_bytes_per_s=RATE_BYTES / _median_s(lambda: look(large), READS),
        checksum_s=_median_s(record, READS) / CALLS,
        extremes_s=_median_s(record_extremes, READS) / CALLS,
        exchange_s=_median_s(lambda: compare_replicas([1, 2], [False] * 3, dims, dist.group.WORLD), EXCHANGES),
    )


def _median_s(call: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return estimate_median(times).median
