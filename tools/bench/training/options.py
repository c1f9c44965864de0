"""Model, batch and layout of the training benchmark: options, and the configuration they mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.config import RunConfig, parse_config
from megasdc.errors import ConfigError

HEAD_WIDTH = 64


@dataclass(frozen=True)
class TrainBenchOptions:
    """Sizes of a measurement.

    Args:
        blocks: blocks of each loop, that is pairs.
        steps_per_block: optimizer steps of a block.
        hidden: width h.
        layers: transformer layers.
        sequence: tokens s of a sample.
        vocab: entries of the vocabulary.
        micro_batch: samples b of a micro-batch.
        accumulation: micro-batches of a step.
        ranks: ranks, all of them data parallel.
        threads: CPU threads of a rank.
        precision: fp32 or bf16.
        fuse: whether our loop has ``model.fuse``; the bare loop has it too.
    """

    blocks: int = 30
    steps_per_block: int = 10
    hidden: int = 256
    layers: int = 8
    sequence: int = 256
    vocab: int = 12032
    micro_batch: int = 2
    accumulation: int = 2
    ranks: int = 2
    threads: int = 1
    precision: str = "fp32"
    fuse: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')}: {value} must be at least 1"
            for name, value in vars(self).items()
            if isinstance(value, int) and not isinstance(value, bool) and value < 1
        ]
        if self.hidden % HEAD_WIDTH:
            problems.append(f"--hidden: {self.hidden} must be a multiple of {HEAD_WIDTH}, the width of a head")
        if self.precision not in ("fp32", "bf16"):
            problems.append(f"--precision: {self.precision} must be fp32 or bf16")
        if problems:
            raise ConfigError(problems, source="the benchmark's options")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.ranks * self.accumulation * self.micro_batch * self.sequence

    @property
    def warmup_steps(self) -> int:
        """Steps of each loop before the first block: a block, so that reports every ten steps stay in step."""
        return self.steps_per_block

    @property
    def total_steps(self) -> int:
        """Steps that each loop takes in all: a block to warm up, the measured ones, and a profiled one."""
        return self.warmup_steps + (self.blocks + 1) * self.steps_per_block


def run_config(options: TrainBenchOptions, folder: Path, devices: int = 0) -> RunConfig:
    """A Llama-like model with every setting that is not a size at its default.

    Args:
        options: the sizes.
        folder: where the run writes; also stands for the data, which are in memory.
        devices: GPUs of this host, which the ranks share where there are fewer; 0: ranks compute on its processor.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megasdc": {
            "model": {
                "num_layers": options.layers,
                "hidden_size": options.hidden,
                "num_attention_heads": options.hidden // HEAD_WIDTH,
                "max_positions": options.sequence,
                "position_embedding": "rope",
                "normalization": "RMSNorm",
                "activation": "silu",
                "gated_mlp": True,
                "bias": False,
                "tie_embeddings": False,
                "fuse": options.fuse,
            },
            "data": {"path": str(folder), "sequence_length": options.sequence},
            "parallel": {
                "threads": options.threads,
                "timeout_s": 600.0,
                "share_devices": 0 < devices < options.ranks,
            },
            "training": {"steps": options.total_steps},
            "logging": {"run_dir": str(folder)},
        },
    }
    if options.precision == "bf16":
        config["bf16"] = {"enabled": True}
    return parse_config(config, source="the benchmark's options")
