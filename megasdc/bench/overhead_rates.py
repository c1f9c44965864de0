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
CALLS, EXCHANGES, READS = 20, 20, 3


def measure_rates(device: torch.device, dims: ParallelDims) -> Rates:
    """How fast this rank is at what checks consist of, while the others do the same.

    Args:
        device: of the tensors.
        dims: layout and place of this rank.

    Collective: all ranks of the world.
    """
    algorithm = default_algorithm(device)
    large, small = torch.ones(RATE_BYTES // 4, device=device), torch.zeros(1, device=device)
    tracer, finite = Tracer(algorithm, TraceSection()), FiniteRecorder()
    address = Address(1, 0, FORWARD, "loss", "output")

    def look() -> None:
        finite(address, large)
        finite.take(dims)

    return Rates(
        checksum_bytes_per_s=RATE_BYTES / _median_s(lambda: read_back([algorithm.start(large)]), READS),
        extremes_bytes_per_s=RATE_BYTES / _median_s(look, READS),
        checksum_s=_recording_s(lambda: tracer(address, small), lambda: digest(tracer.take()), large),
        extremes_s=_recording_s(lambda: finite(address, small), lambda: finite.take(dims), large),
        exchange_s=_median_s(lambda: compare_replicas([1, 2], [False] * 3, dims, dist.group.WORLD), EXCHANGES),
    )


def _recording_s(record: Callable[[], Any], take: Callable[[], Any], large: torch.Tensor) -> float:
    """Of one record, and its share of taking all.

    In a step arithmetic uses the caches from one record to the next. Without what stands for it here a call would seem
    to take a twentieth of its time.
    """
    times = []
    for _ in range(CALLS):
        large.sum()
        times.append(_seconds(record))
    return estimate_median(times).median + _seconds(take) / CALLS


def _median_s(call: Callable[[], Any], count: int) -> float:
    return estimate_median([_seconds(call) for _ in range(count)]).median


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
