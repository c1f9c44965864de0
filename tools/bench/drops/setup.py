"""The small GPT that the benchmarks of DropCompute train: sizes, and the configuration they mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.errors import ConfigError

HEAD_WIDTH = 32


@dataclass(frozen=True)
class SmallGpt:
    """Sizes of the model and of its micro-batches.

    Args:
        hidden: width h.
        layers: transformer layers.
        sequence: tokens s of a sample.
        vocab: entries of the vocabulary.
        micro_batch: samples b of a micro-batch.
        micro_batches: M, of a replica's step.
    """

    hidden: int = 32
    layers: int = 1
    sequence: int = 16
    vocab: int = 128
    micro_batch: int = 1
    micro_batches: int = 8

    def __str__(self) -> str:
        return (
            f"GPT H={self.hidden} L={self.layers} S={self.sequence} vocabulary {self.vocab}, {self.micro_batches} "
            f"micro-batches of {self.micro_batch} a replica's step"
        )

    def problems(self) -> list[str]:
        """What is out of range, one sentence each."""
        found = []
        if self.hidden % HEAD_WIDTH:
            found.append(f"--hidden: {self.hidden} must be a multiple of {HEAD_WIDTH}, the width of a head")
        if self.micro_batches < 2:
            found.append(f"--micro-batches: {self.micro_batches} must be at least 2, since the first always runs")
        return found


def check_options(options: Any, problems: list[str]) -> None:
    """Refuse options of a benchmark that are out of range.

    Args:
        options: a dataclass whose whole numbers must be at least 1, but for ``seed`` and ``warmup``.
        problems: what else is wrong.

    Raises:
        ConfigError: naming all of them.
    """
    found = [
        f"--{name.replace('_', '-')}: {value} must be at least 1"
        for name, value in vars(options).items()
        if isinstance(value, int) and value < 1 and name not in ("seed", "warmup")
    ]
    if found or problems:
        raise ConfigError([*found, *problems], source="the benchmark's options")


def drop_config(
    gpt: SmallGpt,
    folder: Path,
    steps: int,
    drop_compute: dict[str, Any],
    *,
    delay: list[dict[str, Any]] | None = None,
    layout: tuple[int, int] = (1, 1),
    training: dict[str, Any] | None = None,
    learning_rate: float = 1e-3,
    data: str | None = None,
) -> dict[str, Any]:
    """The configuration of one run, as JSON holds it.

    Args:
        gpt: sizes.
        folder: where the run writes.
        steps: of the run.
        drop_compute: the section, without ``enabled``.
        delay: entries of `delay`.
        layout: (tensor, pipeline).
        training: more of that section.
        learning_rate: largest one of a cosine schedule over ``steps``.
        data: folder of prepared data; None: tokens are in memory.
    """
    tensor, pipeline = layout
    return {
        "train_micro_batch_size_per_gpu": gpt.micro_batch,
        "gradient_accumulation_steps": gpt.micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "warmup_num_steps": max(2, steps // 10),
                "total_num_steps": steps,
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
        },
        "megasdc": {
            "model": {
                "num_layers": gpt.layers,
                "hidden_size": gpt.hidden,
                "num_attention_heads": gpt.hidden // HEAD_WIDTH,
                "max_positions": gpt.sequence,
            },
            "data": {"path": data or str(folder), "sequence_length": gpt.sequence},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "threads": 1, "timeout_s": 600.0},
            "training": {"steps": steps, **(training or {})},
            "logging": {"run_dir": str(folder), "interval": steps, "progress_bar": False},
            "drop_compute": {"enabled": True, **drop_compute},
            "delay": delay or [],
        },
    }
