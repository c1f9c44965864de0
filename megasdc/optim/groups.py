"""Which parameters decay? Weight decay is for matrices; norms and biases have none."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the parameters of this rank's stage into those with weight decay and those without.

    Args:
        module: the stage.

    Returns:
        Optimizer groups; one that would be empty is left out. Only the group without decay states its ``weight_decay``,
        the other takes the optimizer's.
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
