"""What makes a run repeatable? The state of every global generator, captured and restored, or seeded anew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
        ``restore_rng``. ``cuda`` holds one state a visible device.

    Sync: copies one small tensor a CUDA device.
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
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to where ``capture_rng`` found it.

    Args:
        state: what ``capture_rng`` returned.

    Raises:
        ValueError: the state holds another number of CUDA devices than this process sees.

    Sync: copies one small tensor a CUDA device.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != devices:
        raise ValueError(
            f"the saved random state is of {len(state['cuda'])} CUDA devices, this process sees {devices}: "
            "resume with as many devices a process as were saved"
        )
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"])
    if devices:
        torch.cuda.set_rng_state_all(state["cuda"])
