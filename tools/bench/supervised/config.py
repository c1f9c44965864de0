"""Configuration of the runs of a campaign: a tiny model, saves in memory and on the disk, quick limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.drills import Layout
from tools.bench.supervised.faults import KINDS
from tools.bench.supervised.target import Target

STEPS, STEP_S = 60, 0.1

Range = tuple[int, int]


def write_config(target: Target, data: Path, layout: Layout, kinds: Sequence[str], skip: Sequence[Range] = ()) -> None:
    """Write the configuration of a run with faults of some kinds.

    With three replicas, which can name one of them, results are audited.

    Args:
        skip: samples that it is not to train on, as positions in the stream.
    """
    tensor, pipeline, replicas = layout
    sections: dict[str, Any] = {
        "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "max_positions": 32},
        "data": {"path": str(data), "sequence_length": 32, "skip": list(skip)},
        "parallel": {"tensor": tensor, "pipeline": pipeline, "timeout_s": 120.0},
        "training": {"steps": STEPS},
        "checkpoint": {
            "interval": 10,
            "keep_last": 2,
            "writing": "async",
            "memory": {"interval": 2, "partners": True, "linger_s": 120.0},
        },
        "logging": {"run_dir": str(target.run), "interval": 1, "progress_bar": False},
        "health": {"enabled": True, "hang_floor_s": 5.0, "slow_floor_s": 15.0},
        "delay": [{"kind": "normal", "mean_s": STEP_S / 2, "std_s": 0.0}],
        "supervise": {
            "num_hosts": target.num_hosts,
            "pause_s": 1.0,
            "test_rounds": 1,
            "retest_s": 5.0,
            "spare_test_s": 0.0,
        },
    }
    if replicas > 2:
        sections["determinism"] = {"enabled": True}
        sections["audit"] = {"enabled": True, "interval": 10, "verify_checkpoints": True}
    for prepare in (KINDS[kind].prepare for kind in kinds):
        if prepare is not None:
            prepare(target, sections)
    raw = {
        "train_batch_size": 2 * replicas,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megasdc": sections,
    }
    target.config.write_text(json.dumps(raw), encoding="utf-8")
