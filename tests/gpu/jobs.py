"""What ranks and other processes of a crew do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def train(config: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Train as the entry script does; its exit code, the error, and what the device needed."""
    import random

    import numpy
    import torch

    from megasdc.pretrain import pretrain

    # A process seeds them by the clock; their states are saved, and compared here with those of another process.
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1234)
    code, error = pretrain(config, overrides or [])
    sys.stderr.flush()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return {"code": code, "error": None if error is None else f"{type(error).__name__}: {error}", "peak_bytes": peak}


def make_data(folder: str) -> str:
    """Write made-up data."""
    from gpu.setting import write_data

    return str(write_data(Path(folder)))


def compare_checkpoints(pairs: list[list[str]]) -> list[Any]:
    """For each pair of checkpoints, how much was compared and what of their state differs, bit by bit."""
    from whole_runs import state_of

    answers = []
    for pair in pairs:
        one, other = (state_of(Path(folder)) for folder in pair)
        names = sorted(one.keys() | other.keys())
        answers.append({"compared": len(names), "differ": [name for name in names if one.get(name) != other.get(name)]})
    return answers
