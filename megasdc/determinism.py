"""What makes a run repeatable? PyTorch's switches, and the state of every global generator.

The environment's part is in ``megasdc.config.environment``: it must be set before torch is imported. Random numbers
that train - initial weights, dropout - come from neither: they are functions of seed, step, sample and layer
(``megasdc.model.randomness``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megasdc.config import DeterminismSection
from megasdc.errors import CheckpointError


def set_deterministic(section: DeterminismSection) -> Callable[[], None]:
    """Set PyTorch's switches for deterministic mode; without it nothing.

    Deterministic algorithms decide over SDPA as well: flash and memory-efficient attention take their repeatable
    backward pass, and cuDNN's attention is not chosen. A warning instead of an error (``warn_only``) is not offered,
    because both then stay as they are. Filling new memory, which PyTorch does by default in this mode, costs one
    more write of every tensor and only makes wrong programs repeatable, so it is off unless asked for.

    Args:
        section: the `determinism` section.

    Returns:
        A function that puts everything back as it was.

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
        # Whether and how these reduce is the choice of cuBLAS for a shape and a GPU.
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
    """Seed Python's, NumPy's and torch's global generators for a run that goes on at another layout.

    The states of the ranks that saved cannot be dealt to another number of ranks. Nothing in training draws from these
    generators - dropout is a function of seed, step and sample - so this keeps what else draws from them repeatable.

    Args:
        seed: ``training.seed``.
        step: the step that the run goes on from.
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
        Only plain values and tensors, so that ``torch.load(weights_only=True)`` reads it back; pass it to
        ``restore_rng``. ``cuda`` holds the state of this process's own device, on a CPU nothing: what other devices
        a process sees depends on the host it runs on.

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
    """Put every generator back to where ``capture_rng`` found it.

    Args:
        state: what ``capture_rng`` returned.

    Raises:
        CheckpointError: it was saved by a process with a CUDA device and this one has none, or the other way round.

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
