"""The small GPT that campaigns train: its sizes, text, and the configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.config.data import DataSection
from tools.bench.options import option

HEAD_WIDTH = 32


@dataclass(frozen=True)
class SmallGpt:
    """Sizes of the model and of its micro-batches.

    Args:
        hidden: width h; a multiple of 32.
        sequence: tokens of a sample.
        micro_batch: samples b of a micro-batch.
    """

    hidden: int = 32
    layers: int = 1
    sequence: int = 16
    vocab: int = 128
    micro_batch: int = 1
    micro_batches: int = option(8, "Of a replica's step.")

    def __str__(self) -> str:
        return (
            f"GPT H={self.hidden} L={self.layers} S={self.sequence} vocabulary {self.vocab}, {self.micro_batches} "
            f"micro-batches of {self.micro_batch} a replica's step"
        )

    def problems(self, least_micro_batches: int = 1) -> list[str]:
        """The fields that are out of range, one sentence each."""
        found = []
        if self.hidden % HEAD_WIDTH:
            found.append(f"--hidden: {self.hidden} must be a multiple of {HEAD_WIDTH}, the width of a head")
        if self.micro_batches < least_micro_batches:
            found.append(f"--micro-batches: {self.micro_batches} must be at least 2, since the first always runs")
        return found


def raw_config(
    folder: Path | str,
    data: Path,
    model: Mapping[str, Any],
    sequence: int,
    steps: int,
    sections: Mapping[str, Mapping[str, Any] | Sequence[Any]],
    deepspeed: Mapping[str, Any],
) -> dict[str, Any]:
    """The configuration of a run of a benchmark, as JSON holds it.

    Args:
        folder: where the run writes.
        data: prepared.
        model: that section, without what follows from the tokens of a sample.
        sections: of megasdc; of those that are here, too, their fields come first.
        deepspeed: more of DeepSpeed's.
    """
    own: dict[str, Any] = {
        "protect": "off",
        "model": {**model, "max_positions": sequence},
        "data": {"path": str(data), "sequence_length": sequence},
        "training": {"steps": steps},
        "logging": {"run_dir": str(folder)},
    }
    for name, values in sections.items():
        own[name] = {**own[name], **values} if name in own and isinstance(values, Mapping) else values
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **deepspeed,
        "megasdc": own,
    }


def small_config(
    gpt: SmallGpt,
    folder: Path,
    steps: int,
    sections: dict[str, Any],
    *,
    layout: tuple[int, int] = (1, 1),
    training: dict[str, Any] | None = None,
    learning_rate: float = 1e-3,
    data: Path | None = None,
) -> dict[str, Any]:
    """The configuration of one run, as JSON holds it.

    Args:
        folder: where the run writes.
        sections: further ones of megasdc.
        layout: (tensor, pipeline).
        training: more of that section.
        learning_rate: largest one of a cosine schedule over ``steps``.
        data: folder of prepared data; None: tokens are in memory.
    """
    tensor, pipeline = layout
    own = {
        "parallel": {"tensor": tensor, "pipeline": pipeline, "threads": 1, "timeout_s": 600.0},
        "training": training or {},
        "logging": {"interval": steps, "progress_bar": False},
    }
    model = {"num_layers": gpt.layers, "hidden_size": gpt.hidden, "num_attention_heads": gpt.hidden // HEAD_WIDTH}
    schedule = {
        "warmup_num_steps": max(2, steps // 10),
        "total_num_steps": steps,
        "warmup_type": "linear",
        "cos_min_ratio": 0.1,
    }
    more = {
        "train_micro_batch_size_per_gpu": gpt.micro_batch,
        "gradient_accumulation_steps": gpt.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }
    return raw_config(folder, data or folder, model, gpt.sequence, steps, {**own, **sections}, more)


def prepare_library(folder: Path, vocab: int, pattern: str = "*.py", characters: int = 1_000_000) -> Path:
    """Prepare modules of the standard library as data, eight parts in ten for training.

    Args:
        folder: where; returned.
        pattern: of the modules' names.
        characters: that the tokenizer is trained on.
    """
    from megasdc.data.prepare import prepare

    section = {
        "path": str(folder),
        "split": [8, 1, 1],
        "sources": [{"kind": "stdlib", "pattern": pattern}],
        "tokenizer": {"vocab_size": vocab, "train_characters": characters},
    }
    workers = len(os.sched_getaffinity(0)) if pattern == "*.py" else 1  # starting more takes longer than a few files
    prepare(DataSection.model_validate(section), workers=workers, progress=False)
    return folder
