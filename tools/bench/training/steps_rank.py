"""A rank of the training benchmark: both loops in one process, or one loop that waits for its turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megasdc.config.checks import BatchLayout, check_layout
from megasdc.config.load import RunConfig
from megasdc.data.loader import MemoryStream
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.local_ranks import count_accelerators
from megasdc.train.build import prepare_run_folder
from megasdc.train.process import prepare_cpu
from tools.bench.rank import Messages
from tools.bench.statistics import Block, Cost, run_alternating
from tools.bench.training.loops import (
    DISTINCT_STEPS,
    BoundedLoop,
    DeterministicLoop,
    HuggingFaceLoop,
    Loop,
    MegasdcLoop,
    PlainLoop,
    endless_batches,
    first_difference,
)
from tools.bench.training.options import TrainBenchOptions, run_config

LIBRARY = (
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_dot_product"),
    *("aten::_flash_attention", "aten::_efficient_attention", "aten::_cudnn_attention"),
)
"""Beginnings of the names of matrix products and attention."""
LONGEST_TURN = timedelta(hours=1)
OURS = "ours"
"""Name of our loop as a default run has it."""
WITH = {"determinism": DeterministicLoop, "bounds": BoundedLoop}
"""Our loop with something on, which is compared with itself without."""


def measure_block(block: Block) -> Cost:
    """Run a block on all ranks at once; returns the cost, the same on all ranks.

    Collective: all ranks of the world.
    """
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    block()
    dist.barrier()
    costs = [time.perf_counter() - wall, time.process_time() - cpu]
    took = torch.tensor(costs, dtype=torch.float64, device=get_accelerator().current_device_name())
    slowest = took[:1].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(took)
    return Cost(float(slowest), float(took[1]))


def library_share(block: Block) -> float:
    """Part of a block's time in matrix products and attention, which are the library's on either side; in (0, 1).

    The block runs under the profiler; the time is a GPU's where there is one.
    """
    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile() as profile:
        begin = time.perf_counter()
        block()
        if on_gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - begin
    operators = [one for one in profile.key_averages() if one.key.startswith(LIBRARY)]
    return sum(one.self_device_time_total if on_gpu else one.self_cpu_time_total for one in operators) * 1e-6 / took


@dataclass(frozen=True)
class Setting:
    """Parts from which a loop is built on a rank; ``folder`` is where our loop writes."""

    options: TrainBenchOptions
    folder: Path
    config: RunConfig
    layout: BatchLayout
    dims: ParallelDims
    stream: MemoryStream

    def build(self, name: str, folder: Path | None = None) -> Loop:
        """Build a loop, ``OURS`` or one of ``tools.bench.training.steps.AGAINST`` but ``launch``.

        ``folder`` is where a second one of ours writes.

        Collective: all ranks of the world.
        """
        if name == OURS or name in WITH:
            kind = WITH.get(name, MegasdcLoop)
            return kind(self.config, self.layout, self.dims, self.options, self.stream, folder or self.folder)
        batches = endless_batches(self.stream, self.options, self.dims)
        if name == "plain":
            return PlainLoop(self.config, self.layout, self.dims, self.options, batches)
        return HuggingFaceLoop(self.config, self.layout, self.options, batches, compiled=name == "hf-compiled")


def join_ranks(options: TrainBenchOptions, folder: Path) -> Setting:
    """Join the other ranks.

    Collective: all ranks of the world.
    """
    config = run_config(options, folder, count_accelerators())
    layout = check_layout(config, options.ranks)
    parallel = config.megasdc.parallel
    groups.init_process_group(parallel.timeout_s, share_devices=parallel.share_devices)
    dims = groups.init_model_parallel(1, 1, parallel.timeout_s)
    distinct = min(DISTINCT_STEPS, options.total_steps) * layout.train_batch_size
    samples = options.total_steps * layout.train_batch_size
    return Setting(
        options, folder, config, layout, dims, MemoryStream(options.vocab, options.sequence, distinct, samples)
    )


def compare(messages: Messages, options: TrainBenchOptions, against: str, folder: Path) -> None:
    """Run our loop and another one in alternating blocks of one process; rank 0 reports what both took.

    ``against`` is one of ``tools.bench.training.steps.AGAINST`` but ``launch`` and ``APART``.

    Collective: all ranks of the world.
    """
    prepare_cpu(options.threads)
    setting = join_ranks(options, folder)
    if against in WITH:
        names, other_folder = (against, OURS), prepare_run_folder(folder / "other")
    else:
        names, other_folder = (OURS, against), folder
    ours, other = setting.build(names[0]), setting.build(names[1], other_folder)
    groups.set_all_timeouts(setting.config.megasdc.parallel.timeout_s)
    for loop in (ours, other):
        loop.run(options.warmup_steps)
    costs = run_alternating(
        lambda: ours.run(options.steps_per_block),
        lambda: other.run(options.steps_per_block),
        options.blocks,
        measure_block,
        lambda done: messages.progress(f"against {against}", done, options.blocks),
    )
    sides = [_side(loop, options, [pair[number] for pair in costs]) for number, loop in enumerate((ours, other))]
    messages.send(sides=sides, difference=_agree_on_difference(ours, other) if against == "plain" else None)


def run_apart(messages: Messages, options: TrainBenchOptions, name: str, folder: Path) -> None:
    """Run ``OURS`` or one of ``APART`` in blocks, each when it is its turn; rank 0 reports what they took.

    What our run sets in its process, such as how memory is kept, is not set here for another loop.

    Collective: all ranks of the world.
    """
    if name == OURS:
        prepare_cpu(options.threads)
    setting = join_ranks(options, folder)
    loop = setting.build(name)
    groups.set_all_timeouts(setting.config.megasdc.parallel.timeout_s)
    loop.run(options.warmup_steps)
    # A wait through NCCL would keep the GPU busy, and end when a block of the other loop takes longer than a timeout.
    waiting = dist.new_group(backend="gloo", timeout=LONGEST_TURN)

    def wait_for_turn() -> None:
        messages.send_and_wait()
        dist.barrier(group=waiting)

    costs = []
    for _ in range(options.blocks):
        wait_for_turn()
        costs.append(measure_block(lambda: loop.run(options.steps_per_block)))
    wait_for_turn()
    messages.send(side=_side(loop, options, costs))


def _side(loop: Loop, options: TrainBenchOptions, costs: list[Cost]) -> dict[str, Any]:
    """Costs, losses and profile of a loop after its blocks; one more is profiled, and one of ours closed.

    Collective: all ranks of the world.
    """
    share = library_share(partial(loop.run, options.steps_per_block))
    if isinstance(loop, MegasdcLoop):
        loop.close()
    return {
        "costs": costs,
        "parameters": sum(p.numel() for p in loop.engine.module.parameters()),
        "library_share": share,
        "first_loss": float(loop.losses[0]),
        "last_loss": float(loop.losses[-1]),
    }


def _agree_on_difference(ours: Loop, other: Loop) -> str | None:
    """The first difference in losses, parameters or optimizer on any rank; None if all bits are equal.

    Collective: all ranks of the world.
    """
    pairs = enumerate(zip(ours.losses, other.losses, strict=True), 1)
    found = next((f"loss of step {step}" for step, (a, b) in pairs if not torch.equal(a, b)), None)
    found = found or first_difference(ours.engine, other.engine)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(gather_objects(found)) if text), None)
