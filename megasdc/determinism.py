"""Deterministic mode: PyTorch's switches, and the state of every global generator.

Environment variables are in ``megasdc.config.environment``: they must be set before torch is imported. Random numbers
of training - initial weights, dropout - use no global generator: they are functions of seed, step, sample and layer
(``megasdc.model.randomness``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megasdc.common.errors import CheckpointError
from megasdc.config.sections import DeterminismSection


def set_deterministic(section: DeterminismSection) -> Callable[[], None]:
    """Set PyTorch's switches for deterministic mode; nothing is changed where it is off.

    Deterministic algorithms affect SDPA as well: flash and memory-efficient attention use their deterministic backward
    pass, and cuDNN's attention is not chosen. ``warn_only`` is not offered, because it leaves both as they are.
    Filling new memory, PyTorch's default in this mode, costs one more write of every tensor and only makes programs
    that read uninitialised memory repeatable, so it is off by default.

    Args:
        section: the `determinism` section.

    Returns:
        A function that restores all switches.

    Sync: none.
    """
    if not section.enabled:
        return lambda: None
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    wanted: list[tuple[Any, str, bool]] = [
        (torch.utils.deterministic, "fill_uninitialized_memory", section.fill_uninitialized_memory),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        (cudnn, "allow_tf32", False),
        # Whether and how a product reduces in lower precision is cuBLAS's choice by shape and GPU.
        (matmul, "allow_fp16_accumulation", False),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in wanted]
    mode, precision = torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()
    for place, name, value in wanted:
        setattr(place, name, value)
    torch.set_float32_matmul_precision("highest")  # TF32 off for matrix products, on GPUs and with oneDNN
    torch.use_deterministic_algorithms(True)

    def undo() -> None:
        torch.set_deterministic_debug_mode(mode)
        torch.set_float32_matmul_precision(precision)
        for place, name, value in before:
            setattr(place, name, value)

    return undo


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's global generators for a run that resumes with another layout.

    Saved generator states cannot be distributed over another number of ranks. Nothing in training draws from these
    generators - dropout is a function of seed, step and sample - so this keeps other users of them repeatable.

    Args:
        seed: ``training.seed``.
        step: the step from which the run resumes.
        rank: global rank; each rank gets a stream of its own.

    Sync: none.
    """
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def capture_rng() -> dict[str, Any]:
    """Copy the state of Python's, NumPy's and torch's global generators of this process.

    Returns:
        Plain values and tensors only, so that ``torch.load(weights_only=True)`` can read them; pass it to
        ``restore_rng``. ``cuda`` holds the state of this process's own device only, since the number of visible
        devices depends on the host; it is empty on a CPU.

    Sync: copies one small tensor on CUDA.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore every generator to the state that ``capture_rng`` returned.

    Args:
        state: the value of ``capture_rng``.

    Raises:
        CheckpointError: of the saving process and this one, only one has a CUDA device.

    Sync: copies one small tensor on CUDA.
    """
    kinds = ["a CUDA device" if on_device else "a CPU" for on_device in (state["cuda"], torch.cuda.is_available())]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"the checkpoint's random state was saved on {kinds[0]} and this rank runs on {kinds[1]}: resume on the "
            "kind that saved it, or convert it with `megasdc convert-checkpoint` and set checkpoint.universal to "
            "the result"
        )
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"])
    for of_device in state["cuda"]:
        torch.cuda.set_rng_state(of_device)
