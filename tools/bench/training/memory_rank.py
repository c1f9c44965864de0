"""One rank of ``python -m tools.bench memory``: some steps and their peak memory.

The first argument is the request as JSON, the second, on rank 0 alone, the file descriptor that messages go to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from megasdc.config import RunConfig, check_layout, parse_config
from megasdc.data.loader import MicroBatchLoader
from megasdc.data.memory_stream import MemoryStream
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.run_ranks import Messages
from megasdc.train.build import prepare_cpu
from megasdc.train.build_engine import build_training_engine
from megasdc.train.main import set_up_logging
from megasdc.train.process.startup import StartClock
from tools.bench.training.memory import STEPS


def measure_peak(config: RunConfig, vocab: int) -> tuple[int, float]:
    """Train some steps on random tokens, from the build of the model on.

    Args:
        config: a checked one.
        vocab: entries of the vocabulary.

    Returns:
        Pipeline stage of this rank, and the most bytes that tensors held at once in the last step.

    Collective: all ranks of the world, whose process group is there.
    """
    layout = check_layout(config, int(os.environ["WORLD_SIZE"]))
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, config.megasdc.parallel.timeout_s)
    samples = STEPS * layout.train_batch_size
    stream = MemoryStream(vocab, config.megasdc.data.sequence_length, layout.train_batch_size, samples)
    loader = MicroBatchLoader(stream, layout.micro_batch_size, dims.dp_rank, dims.data)

    def build() -> Any:
        return build_training_engine(config, layout, dims, vocab, StartClock(time.monotonic()))

    def step(engine: Any) -> None:
        engine.train_step(loader)

    return dims.pp_rank, (_peak_on_gpu if _trains_on_gpu() else _peak_on_host)(build, step)


def _trains_on_gpu() -> bool:
    """Whether DeepSpeed's accelerator is a GPU: DS_ACCELERATOR may choose the processor of a host that has one."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cuda")


def _peak_on_gpu(build: Callable[[], Any], step: Callable[[Any], None]) -> float:
    engine = build()
    for _ in range(STEPS - 1):
        step(engine)
    torch.cuda.reset_peak_memory_stats()
    step(engine)
    return float(torch.cuda.max_memory_allocated())


def _peak_on_host(build: Callable[[], Any], step: Callable[[Any], None]) -> float:
    """From the allocator's events: PyTorch keeps no such count for a CPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = build()
        for _ in range(STEPS - 1):
            step(engine)
        begin = time.time_ns()
        step(engine)
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, held)
    return float(peak)


def main() -> None:
    """Run as a rank."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    config = parse_config(request["config"], source=request["source"])
    prepare_cpu(1)
    parallel = config.megasdc.parallel
    groups.init_process_group(parallel.timeout_s, share_devices=parallel.share_devices)
    messages.send(peaks=gather_objects(measure_peak(config, request["vocab"])), on_gpu=_trains_on_gpu())
    groups.shutdown()


if __name__ == "__main__":
    main()
