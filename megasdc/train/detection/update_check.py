"""Check of the optimizer: a slice of each shard's update is recomputed by the formula, another slice at every step.

The formula gets the optimizer's inputs: a moment or gradient that was wrong before is not detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.sdc.fp64.adam import AdamSettings, AdamSlice, adam_step, roundings

SLICE = 16384
"""Elements of each shard that are recomputed at a step."""
KEPT = ("weights", "exp_avg", "exp_avg_sq")


class UpdateCheck:
    """Recomputes a slice of every shard's update; ``close`` removes its hook."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self._before: list[tuple[Tensor, slice, AdamSlice, AdamSlice]] = []
        self._hook = engine.optimizer.optimizer.register_step_pre_hook(lambda inner, *_: self._take(inner))

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _take(self, inner: Any) -> None:
        """Compute the expected result for a slice of each shard that is about to be stepped."""
        for group in inner.param_groups:
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                state = inner.state.get(flat, {})
                part = slice_of(flat.numel(), self._engine.step_number)
                zeros = torch.zeros_like(flat[part])
                before = AdamSlice(
                    flat.detach()[part],
                    state["exp_avg"][part] if state else zeros,
                    state["exp_avg_sq"][part] if state else zeros,
                )
                step = state["step"].double() + 1 if state else 1.0
                expected, magnitude = adam_step(before, flat.grad[part], step, settings_of(type(inner), group))
                self._before.append((flat, part, expected, magnitude))

    def finish(self) -> tuple[float, str]:
        """The largest difference in units of rounding, and the name of its tensor; call after the optimizer step.

        Sync: waits for the device.
        """
        inner = self._engine.optimizer.optimizer
        taken, self._before = self._before, []
        found = []
        for flat, part, expected, magnitude in taken:
            state = inner.state[flat]
            actual = AdamSlice(flat.detach()[part], state["exp_avg"][part], state["exp_avg_sq"][part])
            found.append(roundings(expected, magnitude, actual))
        worst = torch.stack(found).amax(0)
        place = int(worst.argmax())
        return float(worst[place]), f"{KEPT[place]} after the update"

    def drop(self) -> None:
        """Discard a step that the optimizer skipped."""
        self._before = []


def slice_of(numel: int, step: int) -> slice:
    """The elements of a shard that are recomputed at a step: all of them in turn."""
    parts = max(1, -(-numel // SLICE))
    first = step % parts * SLICE
    return slice(first, min(first + SLICE, numel))


def settings_of(kind: type, group: dict[str, Any]) -> AdamSettings:
    """Hyper-parameters of a group of PyTorch's Adam or AdamW, which ``kind`` is."""
    return AdamSettings(
        learning_rate=group["lr"],
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=issubclass(kind, torch.optim.AdamW),
    )
