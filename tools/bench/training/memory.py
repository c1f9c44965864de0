"""Predicted against measured peak memory of a step: ``python -m tools.bench memory``.

Each configuration is trained for three steps; the peak of the third on each pipeline stage is compared with what
`check-config` predicts. On a CPU the peak is summed from the allocator's events of torch.profiler; on a GPU it is
``torch.cuda.max_memory_allocated``, though the prediction is for a CPU's modules.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.config import Layout, RunConfig, check_layout, parse_config
from megasdc.parallel.run_ranks import run_ranks
from megasdc.train.memory_step import MIB, predict_step_memory, unpredicted_because
from tools.bench.machine import describe_machine
from tools.bench.result import Progress

STEPS = 3
"""Steps of a measurement; moments and buffers are made in the first."""
BAR = 0.1
"""Largest relative error of a prediction."""
LLAMA: dict[str, Any] = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
    "tie_embeddings": False,
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FOUR: dict[str, Any] = {"gradient_accumulation_steps": 4}
FUSED: dict[str, Any] = {"fuse": True}


@dataclass(frozen=True)
class MemoryCase:
    """A configuration, and how many ranks it runs on.

    Args:
        ranks: how many.
        model: fields of the model beside the sizes that all have.
        deepspeed: fields outside section megasdc.
        parallel: that section.
        vocab: entries of the vocabulary.
        sequence: tokens of a sample.
    """

    ranks: int
    model: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    vocab: int = 8192
    sequence: int = 256

    def config(self, devices: int = 0) -> RunConfig:
        """The checked configuration.

        Args:
            devices: GPUs of this host, which the ranks share where there are fewer; 0: ranks compute on its processor.
        """
        share = {"share_devices": True} if 0 < devices < self.ranks else {}
        sizes = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "max_positions": 512}
        own = {
            "model": {**sizes, **self.model},
            "data": {"path": "unused", "sequence_length": self.sequence},
            "parallel": {**self.parallel, **share},
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


@dataclass(frozen=True)
class StagePeak:
    """One stage of one configuration.

    Args:
        name: of the configuration.
        ranks: how many it ran on.
        stage: pipeline stage.
        predicted: bytes, or None.
        unpredicted: the setting because of which nothing is predicted, or None.
        measured: bytes, the largest over the stage's ranks.
    """

    name: str
    ranks: int
    stage: int
    predicted: float | None
    unpredicted: str | None
    measured: float

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.predicted is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class MemoryResult:
    """Everything that was measured.

    Args:
        machine: date, processor, versions.
        stages: of all configurations.
    """

    machine: dict[str, Any]
    stages: Sequence[StagePeak]

    @property
    def passed(self) -> bool:
        """Whether something was predicted, and every prediction is within the bar."""
        errors = [stage.error for stage in self.stages if stage.error is not None]
        return bool(errors) and all(abs(error) <= BAR for error in errors)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it."""
        stages = [{**asdict(stage), "error": stage.error} for stage in self.stages]
        return {"passed": self.passed, "bar": BAR, "machine": self.machine, "stages": stages}

    def render(self) -> str:
        """A line for each stage of each configuration."""
        lines = [f"{'configuration':<28}{'ranks':>6}{'stage':>6}{'predicted MiB':>15}{'measured MiB':>14}  error"]
        for one in self.stages:
            told = "-" if one.predicted is None else f"{one.predicted / MIB:,.1f}"
            last = f"not predicted: {one.unpredicted}" if one.error is None else f"{one.error:+.1%}"
            lines.append(f"{one.name:<28}{one.ranks:>6}{one.stage:>6}{told:>15}{one.measured / MIB:>14,.1f}  {last}")
        return "\n".join([*lines, f"bar {BAR:.0%}: {'pass' if self.passed else 'FAIL'}"])


def compare_memory(
    name: str, config: RunConfig, layout: Layout, vocab: int, peaks: Mapping[int, float], on_gpu: bool
) -> list[StagePeak]:
    """Measured beside predicted.

    Args:
        name: of the configuration.
        config: a checked one.
        layout: that was trained.
        vocab: entries of the vocabulary.
        peaks: largest measured bytes of each stage.
        on_gpu: where they were measured.
    """
    because = unpredicted_because(config)
    predicted = [] if because else predict_step_memory(config, layout, vocab, on_gpu)
    totals = {stage: one.total for stage, one in enumerate(predicted)}
    return [
        StagePeak(name, layout.world_size, stage, totals.get(stage), because, peak)
        for stage, peak in sorted(peaks.items())
    ]


def bench_memory(
    cases: Mapping[str, tuple[RunConfig, int, int]], on_progress: Progress = lambda what, done, total: None
) -> MemoryResult:
    """Train each configuration for some steps with all ranks on this machine.

    Args:
        cases: configuration, ranks and entries of the vocabulary, by name.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: a layout does not fit, or a rank failed.
    """
    stages: list[StagePeak] = []
    for name, (config, ranks, vocab) in cases.items():
        layout = check_layout(config, ranks)
        on_progress(name, 0, 1)
        peaks: dict[int, float] = {}
        with tempfile.TemporaryDirectory(prefix="megasdc_memory_") as scratch:
            request = {"config": config.resolved(), "source": config.source, "vocab": vocab}
            messages: list[dict[str, Any]] = []
            run_ranks("tools.bench.training.memory_rank", request, ranks, 1, Path(scratch), messages.append)
        for stage, peak in messages[-1]["peaks"]:
            peaks[stage] = max(peaks.get(stage, 0), peak)
        stages += compare_memory(name, config, layout, vocab, peaks, messages[-1]["on_gpu"])
        on_progress(name, 1, 1)
    return MemoryResult(describe_machine(), stages)


def default_cases(devices: int = 0) -> dict[str, tuple[RunConfig, int, int]]:
    """``CASES`` as ``bench_memory`` takes them.

    Args:
        devices: see ``MemoryCase.config``.
    """
    return {name: (case.config(devices), case.ranks, case.vocab) for name, case in CASES.items()}
