"""The rank of the trace benchmark."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megasdc.addresses import FORWARD, Address
from megasdc.config import TraceSection, check_layout
from megasdc.data.memory_stream import MemoryStream
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.observer import Observer
from megasdc.model.kinds import GRANULARITIES
from megasdc.model.submodules import list_submodules
from megasdc.parallel import groups
from megasdc.parallel.run_ranks import Messages
from megasdc.sdc.trace_file import TraceWriter
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.tensors.checksum import default_algorithm, read_back
from megasdc.train.build import prepare_cpu
from megasdc.train.build_engine import build_training_engine
from megasdc.train.main import set_up_logging
from megasdc.train.process.startup import StartClock
from tools.bench.detection.trace import OFF
from tools.bench.training.loops import DISTINCT_STEPS, endless_batches
from tools.bench.training.options import TrainBenchOptions, run_config

RATE_BYTES = 512 << 20
"""Larger than the caches of a processor: what a trace reads was not read just before."""
CALLS = 2000


class TimedObserver(Observer):
    """An observer that adds up the time inside its own calls, its listeners' included.

    Not in it are the identity nodes that it puts into the graph, which alternating steps see.
    """

    own_s = 0.0

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.own_s += time.perf_counter() - began

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Time it."""
        self._timed(super().before_reduction, engine)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Time it."""
        self._timed(super().before_optimizer_step, engine)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Time it."""
        self._timed(super().after_optimizer_step, engine)

    def _emit_update(self, engine: TrainingEngine) -> None:
        self._timed(super()._emit_update, engine)

    def _emit_local(self, phase: str, fqn: str, slot: str, result: torch.Tensor) -> torch.Tensor | None:
        return self._timed(super()._emit_local, phase, fqn, slot, result)


def measure(options: TrainBenchOptions, folder: Path, messages: Messages) -> None:
    """Take steps without a trace and with each granularity in turn, and report what each took.

    Args:
        options: sizes; a block is one step of each.
        folder: where traces are written.
        messages: where to report.
    """
    config = run_config(options, folder)
    layout = check_layout(config, 1)
    prepare_cpu(options.threads)
    groups.init_process_group(config.megasdc.parallel.timeout_s)
    dims = groups.init_model_parallel(1, 1, config.megasdc.parallel.timeout_s)
    engine = build_training_engine(config, layout, dims, options.vocab, StartClock(time.monotonic()))
    samples = options.total_steps * layout.train_batch_size
    distinct = min(DISTINCT_STEPS, options.total_steps) * layout.train_batch_size
    stream = MemoryStream(options.vocab, options.sequence, distinct, samples)
    batches = endless_batches(stream, options, dims)
    names = [OFF, *GRANULARITIES]
    for name in names:  # not counted: the first time of each is slower
        _step(engine, batches, name, folder)
    for block in range(options.blocks):
        for name in names[block % len(names) :] + names[: block % len(names)]:
            messages.send(kind="step", name=name, **_step(engine, batches, name, folder))
    messages.send(kind="rates", **_rates(engine.device))
    groups.shutdown()


def _step(engine: TrainingEngine, batches: Iterator[Any], name: str, folder: Path) -> dict[str, float]:
    """Wall time of one step, and of it the time inside our calls."""
    if name == OFF:
        began = time.perf_counter()
        engine.train_step(batches)
        return {"wall_s": time.perf_counter() - began, "own_s": 0.0, "checksums": 0}
    chosen = choose_submodules(list_submodules(engine.module), name, None)
    tracer = Tracer(default_algorithm(engine.device), TraceSection())
    observer = TimedObserver(engine, chosen, [tracer])
    writer = TraceWriter(folder / "bench.trace", {})
    began = time.perf_counter()
    engine.train_step(batches)
    taken = time.perf_counter()
    trace = tracer.take()
    writer.append(trace)
    ended = time.perf_counter()
    observer.close()
    writer.close()
    return {"wall_s": ended - began, "own_s": observer.own_s + ended - taken, "checksums": len(trace)}


def _rates(device: torch.device) -> dict[str, float]:
    """Bytes a second of a large checksum, and seconds of recording one that reads next to nothing."""
    checksums = default_algorithm(device)
    tracer = Tracer(checksums, TraceSection())
    large = torch.randn(RATE_BYTES // 4, device=device)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        read_back([checksums.start(large)])
        times.append(time.perf_counter() - began)
    small = torch.zeros(1, device=device)
    began = time.perf_counter()
    for _ in range(CALLS):
        tracer(Address(1, 0, FORWARD, "loss", "output"), small)
    tracer.take()
    call_s = (time.perf_counter() - began) / CALLS
    return {"bytes_per_s": RATE_BYTES / sorted(times)[len(times) // 2], "call_s": call_s}


def main() -> None:
    """Run the request of the command line."""
    request = json.loads(sys.argv[1])
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    measure(TrainBenchOptions(**request["options"]), Path(request["folder"]), messages)


if __name__ == "__main__":
    main()
