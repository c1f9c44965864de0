"""``megasdc.attach``: a guard with the protections of all storeys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasdc.attached import attach as attached
from megasdc.attached.attach import Guard
from megasdc.attached.trainer import TrainerGuard
from megasdc.config.guard import GuardSettings
from megasdc.ops.health.attached import build_phases, build_stragglers


def attach(engine: Any, settings: Path | str | Mapping[str, Any] | GuardSettings) -> Guard | TrainerGuard:
    """Protect a training: call after ``deepspeed.initialize``, on all ranks.

    Arguments, result and errors are those of ``megasdc.attached.attach.attach``.

    Collective: all ranks of the world; with a ``Trainer`` none before training begins.
    """
    return attached.attach(engine, settings, [build_stragglers, build_phases])
