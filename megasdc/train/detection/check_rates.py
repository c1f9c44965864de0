"""Measurement of a rank's speed at the operations of checks, apart from any step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megasdc.common.addresses import FORWARD, Address
from megasdc.config import TraceSection
from megasdc.engine.engine import TrainingEngine
from megasdc.optim.state_blocks import BLOCK
from megasdc.parallel.agreement import compare_replicas
from megasdc.sdc.check_cost import Rates
from megasdc.sdc.cost import FP32_BYTES
from megasdc.sdc.finite import FiniteRecorder
from megasdc.sdc.trace import digest
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.checksum import default_algorithm, read_back
from megasdc.train.detection.slices.exchange import Exchange, ring_of

RATE_BYTES = 256 << 20
"""Size of the measured tensor, larger than a processor's caches."""
MOST_TOKENS = 4096
"""Largest number of rows of the matrix product that represents a step's arithmetic."""
CALLS, EXCHANGES, READS = 20, 20, 3


def measure_rates(engine: TrainingEngine, num_bytes: int = RATE_BYTES) -> Rates:
    """This rank's rates at the operations of checks, while the others measure too.

    Args:
        num_bytes: of the large tensor.

    Collective: all ranks of the world.
    """
    device, dims = engine.device, engine.dims
    algorithm = default_algorithm(device)
    large, small = torch.ones(num_bytes // 4, device=device), torch.zeros(1, device=device)
    tracer, finite = Tracer(algorithm, TraceSection()), FiniteRecorder()
    address = Address(1, 0, FORWARD, "loss", "output")

    group, place, size = ring_of(engine)
    message, before, after = large.view(torch.int32)[:BLOCK], (place - 1) % size, (place + 1) % size

    def send() -> None:
        sent, sizes = [message[:0]] * size, [0] * size
        sent[after], sizes[before] = message, message.numel()
        int(Exchange(sent, sizes, group).finish()[before][-1])  # waits for the device

    def look() -> None:
        finite(address, large)
        finite.take(dims)

    return Rates(
        checksum_bytes_per_s=num_bytes / _median_s(lambda: read_back([algorithm.start(large)]), READS),
        extremes_bytes_per_s=num_bytes / _median_s(look, READS),
        checksum_s=_recording_s(lambda: tracer(address, small), lambda: digest(tracer.take()), large),
        extremes_s=_recording_s(lambda: finite(address, small), lambda: finite.take(dims), large),
        exchange_s=_median_s(
            lambda: compare_replicas({"a": 1, "b": 2}, dict.fromkeys("abc", False), dims, dist.group.WORLD), EXCHANGES
        ),
        sent_bytes_per_s=FP32_BYTES * message.numel() / _median_s(send, READS),
    )


def measure_products(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> float:
    """FLOP/s of the matrix product of an MLP, for a micro-batch of ``tokens``; a whole step reaches less.

    Sync: waits for the device.
    """
    rows = min(tokens, MOST_TOKENS)
    left = torch.ones(rows, hidden, dtype=dtype, device=device)  # not random, which would advance the run's generators
    right = torch.ones(hidden, 4 * hidden, dtype=dtype, device=device)

    def multiply() -> None:
        float((left @ right)[0, 0])

    multiply()
    return 8 * rows * hidden * hidden / _median_s(multiply, READS)


def _recording_s(record: Callable[[], Any], take: Callable[[], Any], large: torch.Tensor) -> float:
    """Seconds of one record, and its share of taking all.

    In a step, arithmetic uses the caches between records. Without the sum that imitates it here, a call would seem to
    take a twentieth of its time.
    """
    times = []
    for _ in range(CALLS):
        large.sum()
        times.append(_seconds(record))
    return statistics.median(times) + _seconds(take) / CALLS


def _median_s(call: Callable[[], Any], count: int) -> float:
    return statistics.median(_seconds(call) for _ in range(count))


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
