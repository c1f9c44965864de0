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


def train_guarded(folder: str, word: str | None, *, bf16: bool, broken: bool) -> dict[str, Any]:
    """Train a model with DeepSpeed alone for six steps, protected by a word; None: by nothing.

    Args:
        broken: whether one element of each product of the first layer is wrong, always at the same place.

    Returns:
        ``exit``: code with which the guard ends it, 0: it did not; ``digest``: of all parameters at the end;
        ``audits``; ``named``: step and ranks of each incident; ``moved``: operations computed with elements elsewhere.
    """
    import contextlib
    import hashlib

    import deepspeed
    import torch
    import torch.distributed as dist

    import megasdc
    from megasdc.events import read_events
    from megasdc.sdc.incident import load_incidents
    from tools.trainings.broken_unit import BrokenUnit

    Path(folder).mkdir(parents=True)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    settings = {"logging": {"run_dir": folder}, "audit": {"interval": 2}, "sdc": {"budget": 1.0}}
    guard = megasdc.attach(engine, settings, protect=word) if word else None
    ended = 0
    with BrokenUnit((None, 64, 256), (3, 5), 64.0) if broken else contextlib.nullcontext():
        try:
            for step in range(6):
                draw = torch.Generator().manual_seed(step)
                batch = torch.randn(32, 64, generator=draw).to(engine.device, torch.bfloat16 if bf16 else torch.float32)
                engine.backward(engine(batch).float().pow(2).mean())
                engine.step()
        except SystemExit as error:
            ended = int(str(error.code))
    audits = 0
    if guard is not None:
        audits = guard.audits
        guard.close()
    found = [incident for _, incident in load_incidents(Path(folder, "reports"), [])]
    return {
        "exit": ended,
        "digest": hashlib.sha256(
            b"".join(one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for one in model.parameters())
        ).hexdigest(),
        "audits": audits,
        "named": [[one.step, [rank.rank for rank in one.flagged]] for one in found],
        "moved": [one.fields["moved"] for one in read_events(folder, kind="audit", name="permuted")][:1],
    }
