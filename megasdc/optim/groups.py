"""Optimizer groups: weight decay for matrices, none for norms and biases."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the parameters of this rank's stage into those with weight decay and those without.

    Returns:
        Optimizer groups without empty ones. Only the group without decay sets ``weight_decay``; the other uses the
        optimizer's.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (no_decay if parameter.dim() < 2 else decay).append(parameter)
    groups: list[dict[str, Any]] = []
    if decay:
        groups.append({"params": decay, "name": "decay"})
    if no_decay:
        groups.append({"params": no_decay, "name": "no_decay", "weight_decay": 0.0})
    return groups
