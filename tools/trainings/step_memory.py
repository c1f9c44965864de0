"""Peak memory of a step of small trainings: configurations, and a measurement in one process for each rank.

On a CPU the peak is summed from the allocator's events of torch.profiler; on a GPU it is
``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megasdc.config.checks import check_layout
from megasdc.config.load import RunConfig, parse_config
from megasdc.data.loader import MemoryStream, MicroBatchLoader
from megasdc.parallel import groups
from megasdc.train.build_engine import build_training_engine
from megasdc.train.process import StartClock
from tools.trainings.styles import LLAMA

STEPS = 3
"""Steps of a measurement; moments and buffers are made in the first."""
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FOUR: dict[str, Any] = {"gradient_accumulation_steps": 4}
FUSED: dict[str, Any] = {"fuse": True}


@dataclass(frozen=True)
class MemoryCase:
    """A configuration, and the number of ranks that it runs on.

    ``model`` holds fields beside the sizes that all have; ``deepspeed`` those outside section megasdc.
    """

    ranks: int
    model: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    vocab: int = 8192
    sequence: int = 256

    def config(self, devices: int = 0) -> RunConfig:
        """The checked configuration.

        ``devices``: GPUs of this host, which the ranks share where there are fewer; 0: ranks compute on its processor.
        """
        share = {"share_devices": True} if 0 < devices < self.ranks else {}
        sizes = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "max_positions": 512}
        own = {
            "model": {**sizes, **self.model},
            "data": {"path": "unused", "sequence_length": self.sequence},
            "parallel": {**self.parallel, **share},
            "protect": "off",
            "training": {"steps": STEPS},
            "logging": {"run_dir": "unused"},
        }
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
        return parse_config({**batch, **self.deepspeed, "megasdc": own})


CASES = {
    "fp32": MemoryCase(1),
    "bf16": MemoryCase(1, LLAMA, BF16),
    "bf16 in bf16": MemoryCase(1, deepspeed={**BF16, "data_types": {"grad_accum_dtype": "bf16"}}),
    "bf16, data 2": MemoryCase(2, LLAMA, {**BF16, "gradient_accumulation_steps": 1}, vocab=1024, sequence=64),
    "tensor 2": MemoryCase(2, LLAMA, parallel={"tensor": 2}),
    "data 2": MemoryCase(2, LLAMA),
    "recomputation": MemoryCase(
        1,
        deepspeed={"train_micro_batch_size_per_gpu": 4, "pipeline": {"activation_checkpoint_interval": 1}},
        sequence=512,
    ),
    "2 x 2 x 2": MemoryCase(8, LLAMA, FOUR, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    "vocabulary": MemoryCase(1, deepspeed=BF16, vocab=32768),
    "fused, GPT-2 style": MemoryCase(1, FUSED),
    "fused, Llama style in bf16": MemoryCase(1, {**LLAMA, **FUSED}, BF16),
    "fused, tensor 2": MemoryCase(2, {**LLAMA, **FUSED}, parallel={"tensor": 2}),
    "fused, vocabulary": MemoryCase(1, {**LLAMA, **FUSED}, vocab=32768),
}
"""Precisions, layouts, recomputation, vocabularies, fused modules."""


def measure_peak(config: RunConfig, vocab: int) -> tuple[int, float]:
    """Train some steps on random tokens, from the build of the model on.

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

    return dims.pp_rank, (_peak_on_gpu if trains_on_gpu() else _peak_on_host)(build, step)


def trains_on_gpu() -> bool:
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
