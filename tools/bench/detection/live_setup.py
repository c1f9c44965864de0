"""Model, tokens and checks of a trial of the live campaign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megasdc.config.load import RunConfig, parse_config
from megasdc.model.randomness import mix
from tools.bench.detection.golden_rank import LLAMA_GROUPED
from tools.bench.detection.live_cases import CHECKED, EVERYTHING, GOLDEN, PERMUTED, SUMMED

VOCABULARY, LENGTH, MICRO_BATCHES = 250, 32, 2
MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_positions": LENGTH}
WARN = dict.fromkeys(("persistent", "intermittent", "not_reproduced", "inconclusive"), "warn")
"""Policy with which every trial ends, whatever is found."""
AUDIT = {"enabled": True, "interval": 1, "granularity": "gemm"}
ALWAYS_ON = {"enabled": True, "coverage": "all", "granularity": "gemm"}
ROWS_ONLY = {"enabled": True, "coverage": "one", "recompute": False, "parameters": False, "finite": False, "rows": True}
WHOLE_SHARDS = 1_000_000
"""Elements of a slice, so many that the two groups of the optimizer take turns."""


def live_config(request: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one layout and type, without what detects."""
    tensor, pipeline, _ = request["layout"]
    model = {**MODEL, **({} if request["style"] == "gpt" else LLAMA_GROUPED), "fuse": request["fuse"]}
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megasdc": {
            "model": {**model, "hidden_dropout": request["dropout"], "attention_dropout": request["dropout"]},
            "data": {"path": "unused", "sequence_length": LENGTH},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "threads": 1},
            "training": {"steps": 1000},
            "determinism": {"enabled": True},
            "trace": {"granularity": "gemm"},
            "golden": {"vocab_size": VOCABULARY, "steps": 1, "micro_batches": MICRO_BATCHES},
            "logging": {"run_dir": request["folder"]},
        },
    }
    if request["recompute"]:
        raw["pipeline"] = {"activation_checkpoint_interval": 1}
    if request["precision"] == "bf16":
        raw["bf16"] = {"enabled": True}
    return raw


class RandomTokens:
    """A stream of seeded random tokens, another sample at each position."""

    path = "seeded random tokens"
    vocab_size = VOCABULARY

    def __init__(self, seed: int, num_samples: int) -> None:
        self.identity = f"random {seed}"
        self._seed = seed
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def extend(self, num_samples: int) -> None:
        """Make the stream at least so long."""
        self._num_samples = max(self._num_samples, num_samples)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [s], labels [s], loss mask [s]."""
        generator = torch.Generator().manual_seed(mix(self._seed, position))
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        return tokens[:-1], tokens[1:], torch.ones(LENGTH)

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, drawn anew."""
        return self[position]


def detecting(raw: dict[str, Any], mode: str, golden: Path) -> RunConfig:
    """The configuration of ``live_config`` with the checks of a mode of ``tools.bench.detection.live_cases``."""
    sdc: dict[str, Any] = {"policy": WARN}
    if mode in (CHECKED, EVERYTHING):
        sdc["always_on"] = ALWAYS_ON
    if mode == GOLDEN:
        sdc["golden"] = str(golden)
    if mode == EVERYTHING:
        sdc["always_on"] = {**ALWAYS_ON, "slice_elements": WHOLE_SHARDS}
    if mode == SUMMED:
        sdc["always_on"] = ROWS_ONLY
    audit = {**AUDIT, "permuted": mode in (PERMUTED, EVERYTHING)}
    sections = {**raw["megasdc"], "sdc": sdc} | ({} if mode in (CHECKED, SUMMED) else {"audit": audit})
    return parse_config({**raw, "megasdc": sections})
