"""What tests of supervision share: checkpoints written without an engine, a run with prepared data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasdc.config.load import parse_config
from megasdc.data.prepare import prepare


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run with prepared data."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} words of text that are repeated. " * 60)
    data = {
        "path": str(tmp_path / "data"),
        "sequence_length": 32,
        "split": [90, 5, 5],
        "sources": [{"kind": "files", "path": str(tmp_path / "text")}],
        "tokenizer": {"vocab_size": 300, "train_characters": 20_000},
    }
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "megasdc": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
            "data": data,
            "protect": "off",
            "training": {"steps": 5},
            "checkpoint": {"memory": {"interval": 1}},
            "logging": {"run_dir": str(tmp_path / "run")},
        },
    }
    prepare(parse_config(raw).megasdc.data, tmp_path / "data", 1, progress=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    return path
