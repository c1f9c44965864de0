"""What does one rank of the training benchmark do? Started by ``megasdc.bench.ranks``, one process a rank.

The first argument is the request as JSON, the second, on rank 0 alone, the file descriptor that messages go to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.bench.loops import (
    DISTINCT_STEPS,
    BoundedLoop,
    DeterministicLoop,
    HuggingFaceLoop,
    Loop,
    MegasdcLoop,
    MemoryStream,
    PlainLoop,
    endless_batches,
    first_difference,
)
from megasdc.bench.options import TrainBenchOptions, run_config
from megasdc.bench.ranks import Messages
from megasdc.bench.statistics import Block, Cost, run_alternating
from megasdc.config import check_layout
from megasdc.errors import MegasdcError
from megasdc.parallel import groups
from megasdc.train.build import prepare_cpu, prepare_run_folder
from megasdc.train.main import set_up_logging

LIBRARY = ("aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_dot_product", "aten::_flash_attention")
"""How the names of matrix products and attention begin."""
WITH = {"determinism": DeterministicLoop, "bounds": BoundedLoop}
"""Our loop with something on, which is compared with itself without."""


def measure_block(block: Block) -> Cost:
    """Run a block on all ranks at once.

    Args:
        block: what to run.

    Returns:
        The cost, the same on all ranks.

    Collective: all ranks of the world.
    """
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    block()
    dist.barrier()
    took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
    slowest = took[:1].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(took)
    return Cost(float(slowest), float(took[1]))


def library_share(block: Block) -> float:
    """Part of a block's time that goes into matrix products and attention, which are the library's on either side.

    Args:
        block: what to run under the profiler.

    Returns:
        Their time, a GPU's where there is one, over that of the block; in (0, 1).
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


def compare(options: TrainBenchOptions, against: str, folder: Path, messages: Messages) -> None:
    """Run our loop and another one in alternating blocks and report what both took.

    Args:
        options: sizes.
        against: one of ``megasdc.bench.train.AGAINST`` but ``launch``.
        folder: where our loop writes.
        messages: where rank 0 reports.

    Raises:
        MegasdcError: the models do not have the same number of parameters.

    Collective: all ranks of the world.
    """
    config = run_config(options, folder)
    layout = check_layout(config, options.ranks)
    prepare_cpu(options.threads)
    groups.init_process_group(config.megasdc.parallel.timeout_s)
    dims = groups.init_model_parallel(1, 1, config.megasdc.parallel.timeout_s)
    distinct = min(DISTINCT_STEPS, options.total_steps) * layout.train_batch_size
    samples = options.total_steps * layout.train_batch_size
    stream = MemoryStream(options.vocab, options.sequence, distinct, samples)
    ours: MegasdcLoop
    other: Loop
    if against in WITH:
        ours = WITH[against](config, layout, dims, options, stream, folder)
        other = MegasdcLoop(config, layout, dims, options, stream, prepare_run_folder(folder / "other"))
    else:
        ours = MegasdcLoop(config, layout, dims, options, stream, folder)
        batches = endless_batches(stream, options, dims)
        if against == "plain":
            other = PlainLoop(config, layout, dims, options, batches)
        else:
            other = HuggingFaceLoop(config, layout, options, batches, compiled=against == "hf-compiled")
    sizes = [sum(p.numel() for p in loop.engine.module.parameters()) for loop in (ours, other)]
    if sizes[0] != sizes[1]:
        raise MegasdcError(f"the compared models have {sizes[0]:,} and {sizes[1]:,} parameters; they must be equal")
    groups.set_all_timeouts(config.megasdc.parallel.timeout_s)
    for loop in (ours, other):
        loop.run(options.warmup_steps)
    messages.send(kind="progress", done=0, total=options.blocks)
    costs = run_alternating(
        lambda: ours.run(options.steps_per_block),
        lambda: other.run(options.steps_per_block),
        options.blocks,
        measure_block,
        lambda done: messages.send(kind="progress", done=done, total=options.blocks),
    )
    shares = [library_share(partial(loop.run, options.steps_per_block)) for loop in (ours, other)]
    if isinstance(other, MegasdcLoop):
        other.close()
    ours.close()
    messages.send(
        kind="result",
        parameters=sizes[0],
        costs=[[asdict(mine), asdict(theirs)] for mine, theirs in costs],
        first_losses=[float(ours.losses[0]), float(other.losses[0])],
        library_shares=shares,
        last_losses=[float(ours.losses[-1]), float(other.losses[-1])],
        difference=_agree_on_difference(ours, other) if against == "plain" else None,
    )


def _agree_on_difference(ours: Loop, other: Loop) -> str | None:
    """The first difference in losses, parameters or optimizer on any rank; None if all bits are equal.

    Collective: all ranks of the world.
    """
    pairs = enumerate(zip(ours.losses, other.losses, strict=True), 1)
    found = next((f"loss of step {step}" for step, (a, b) in pairs if not torch.equal(a, b)), None)
    found = found or first_difference(ours.engine, other.engine)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everywhere) if text), None)


def main() -> None:
    """Run as a rank."""
    request = json.loads(sys.argv[1])
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    compare(TrainBenchOptions(**request["options"]), request["against"], Path(request["folder"]), messages)
    dist.barrier()
    groups.shutdown()


if __name__ == "__main__":
    main()
