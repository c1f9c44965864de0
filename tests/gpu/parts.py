"""Every part of ``tests/gpu.sh``, in order of importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        name: for ``--only``.
        title: what it shows.
        share: of the time, relative to the others.
        function: ``module:name``, called with a ``Recorder``.
        needs: packages beyond those of every training rank.
        environment: variables by device, set before anything is imported.
        ahead: processes that import before the part begins.
    """

    name: str
    title: str
    share: float
    function: str
    needs: tuple[str, ...] = ()
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ahead: int = 2


COMMAND = ("typer", "rich")
INTERPRETED = {"cpu": {"TRITON_INTERPRET": "1"}}

PARTS = (
    Part("smoke", "training: one rank, TP2, PP2, DP2; fp32, bf16, fp16", 6, "gpu.part_training:smoke", ahead=16),
    Part("determinism", "deterministic mode: two runs, the same bits", 3, "gpu.part_training:determinism", ahead=14),
    Part(
        "kernels",
        "Triton kernels against their formulas; rates",
        4,
        "gpu.part_kernels:kernels",
        ("triton",),
        environment=INTERPRETED,
    ),
    Part("detection", "recompute check, audit, parameters", 4, "gpu.part_detection:detection"),
    Part("golden", "trace, golden record and verify", 3, "gpu.part_detection:golden", (*COMMAND, "pyarrow")),
    Part("exact", "slices, sums of rows, permuted audits: silent, no bit changes", 4, "gpu.part_exact:exact"),
    Part("chain", "each link from the data to the parameters: faults are named", 3, "gpu.part_exact:chain", ahead=16),
    Part(
        "referee",
        "bounds of rounding against this device's libraries",
        3,
        "gpu.part_bench:referee",
        COMMAND,
        environment={"cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}},
    ),
    Part("cost", "cost of the checks at their defaults", 3, "gpu.part_bench:cost", COMMAND),
    Part("speed", "whole runs: share of the peak, cost of protection", 4, "gpu.part_speed:speed"),
    Part("dropcompute", "DropCompute: decisions, events, device_lag", 3, "gpu.part_dropcompute:dropcompute"),
    Part("checkpoints", "saved, resumed bit for bit", 4, "gpu.part_checkpoints:checkpoints"),
    Part("guard", "a training with DeepSpeed alone, protected by a word", 2, "gpu.part_guard:guard", ahead=6),
    Part("stress", "the host's test", 2, "gpu.part_stress:stress", (*COMMAND, "pyarrow")),
    Part("optimizers", "fused AdamW of PyTorch and DeepSpeed", 2, "gpu.part_optimizers:optimizers"),
    Part("timeouts", "hangs and lost ranks: exit codes", 3, "gpu.part_timeouts:timeouts"),
    Part("profile", "one step: kernels, launches, gaps", 2, "gpu.part_profile:profile"),
    Part("fused", "fused modules against unfused ones", 2, "gpu.part_fused:fused"),
)
BASE = (
    *("torch", "numpy", "deepspeed", "megatron.core", "pydantic", "xxhash", "zstandard", "fsspec", "jinja2", "rich"),
    *("psutil", "einops", "hjson", "msgpack", "tqdm", "cpuinfo", "packaging"),
)
"""Imports without which no training rank starts."""
