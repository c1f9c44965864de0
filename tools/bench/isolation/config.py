"""Configuration of runs that can go on without a replica: a tiny model, and checks of all that a step computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.campaign import Layout

BATCH = 12


def write_config(
    folder: Path,
    data: Path,
    layout: Layout,
    steps: int,
    more: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``config.json`` into the folder of a run, which is made.

    Args:
        data: prepared.
        more: sections of megasdc; one that is here, too, is replaced.
        deepspeed: more of DeepSpeed's.
    """
    tensor, pipeline, _ = layout
    checks = {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}
    policy = dict.fromkeys(("persistent", "intermittent", "not_reproduced"), "isolate")
    raw = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "pipeline": {"activation_checkpoint_interval": 1},
        **(deepspeed or {}),
        "megasdc": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_positions": 32},
            "data": {"path": str(data), "sequence_length": 32},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "timeout_s": 120.0},
            "training": {"steps": steps},
            "determinism": {"enabled": True},
            "sdc": {"always_on": checks, "repeats": 2, "policy": policy},
            "checkpoint": {
                "interval": steps,
                "writing": "async",
                "memory": {"interval": 1, "partners": True},
                "other_layout": "convert",
                "require_verified": "never",
            },
            "logging": {"run_dir": str(folder), "interval": 1, "progress_bar": False},
            **more,
        },
    }
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path
