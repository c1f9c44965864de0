"""Parameter synchronization: a replica takes over the trusted one's parameters, optimizer state and schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.lab.studies.bridge import Bridge
from megasdc.optim.zero1 import master_partitions


@torch.no_grad()
def overwrite_training_state(engine: TrainingEngine, bridge: Bridge) -> None:
    """Replaces this replica's state after an optimizer step by the trusted replica's.

    That is: parameters, fp32 masters, optimizer states and parameter groups, learning rate schedule, loss scale, and
    the number of skipped steps.

    Collective: the ranks of equal rank in all replicas.
    """
    for index, parameter in enumerate(engine.module.parameters()):
        bridge.overwrite(parameter.data, f"parameter {index}")
    inner = engine.optimizer.optimizer
    for index, flat in enumerate(master_partitions(engine.optimizer)):
        bridge.overwrite(flat.data, f"master {index}")
        _overwrite_state(inner.state, flat, f"state {index}", bridge)
    _take_plain(engine, bridge.share_object(_plain(engine)))


def _overwrite_state(states: Any, flat: Tensor, name: str, bridge: Bridge) -> None:
    """Overwrites the inner optimizer's state of one partition; missing entries are created, additional ones removed."""
    own = states.get(flat, {})
    trusted = bridge.share_object(
        {
            key: (value.shape, value.dtype, value.device.type) if isinstance(value, Tensor) else value
            for key, value in own.items()
        }
    )
    if not bridge.is_trusted:
        for key in set(own) - set(trusted):
            del own[key]
        if trusted:
            own = states[flat]  # a defaultdict: creates a missing entry
    for key, value in trusted.items():
        if not isinstance(value, tuple):
            own[key] = value
            continue
        if key not in own:
            shape, dtype, device = value
            own[key] = torch.zeros(shape, dtype=dtype, device=flat.device if device != "cpu" else "cpu")
        bridge.overwrite(own[key], f"{name} {key}")


def _plain(engine: TrainingEngine) -> dict[str, Any]:
    """The state that is not tensors."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "groups": [
            {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}
            for group in engine.optimizer.optimizer.param_groups
        ],
        "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else dict(vars(scaler)),
        "skipped_steps": engine.skipped_steps,
    }


def _take_plain(engine: TrainingEngine, plain: dict[str, Any]) -> None:
    for group, values in zip(engine.optimizer.optimizer.param_groups, plain["groups"], strict=True):
        group.update(values)
    if plain["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(plain["schedule"])
    if plain["scaler"] is not None:
        vars(engine.optimizer.loss_scaler).update(plain["scaler"])
    engine.skipped_steps = plain["skipped_steps"]
