"""Checkpoints of a guarded training: which of them an audit has agreed on since, to go on from.

Whether weights, masters and moments are finite is looked at where they are saved, and after the step that was audited.
"""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.durable import write_durably
from megasdc.guard.training import Part, Training
from megasdc.room import END_S, wait_for_room
from megasdc.tensors.finite import are_finite

logger = logging.getLogger(__name__)

MARK = "megasdc_verified.json"
FORMAT = "megasdc.guard_verified.v1"


class SaveMarks(Part):
    """Notes what ``engine.save_checkpoint`` saves, and marks it once an audit of a later step has agreed.

    The step that was audited must have been taken and have left a finite state: replicas that agree on NaN have not
    computed anything that can be relied on. A state that is not finite is never marked.

    Args:
        saves: false: nothing is saved at all.

    Attributes:
        verified: folder of the newest marked checkpoint; None: there is none.
        candidate: folder of the newest one that is not marked; None: likewise.
    """

    def __init__(self, training: Training, *, saves: bool) -> None:
        self._engine = engine = training.engine
        self._tell, self._writes, self._saves = training.tell, training.dims.rank == 0, saves
        self._world = training.world
        self._agreed: tuple[int, int] | None = None
        """Step of the last audit, whose step is not taken yet, and the steps that were skipped before it."""
        self._save = engine.save_checkpoint
        self._waiting: list[tuple[int, Path]] = []
        self.verified: Path | None = None
        engine.save_checkpoint = self._noting

    def close(self) -> None:
        """Give the engine back its own method."""
        vars(self._engine).pop("save_checkpoint", None)

    @property
    def candidate(self) -> Path | None:
        """See the class."""
        return self._waiting[-1][1] if self._waiting else None

    def _noting(self, save_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        step = int(self._engine.global_steps)
        if not self._saves:
            self._tell("guard", "not_saved", step=step)
            return True
        result = self._save(save_dir, tag, *args, **options)
        folder = Path(save_dir) / (f"global_step{step}" if tag is None else str(tag))
        if self._is_finite():
            self._waiting.append((step, folder))
        else:
            self._tell("warning", "checkpoint_not_finite", step=step, path=str(folder))
            if self._writes:
                logger.warning("guard: %s is saved, but its state is not finite: go back to an earlier one", folder)
        return result

    def _is_finite(self) -> bool:
        """Whether weights, masters and moments of all ranks are finite.

        Collective: all ranks of the world; one reduction of a number.
        Sync: waits for the device.
        """
        inner = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        own = [*self._engine.module.parameters()]
        if inner is not None:
            own += [one for group in inner.param_groups for one in group["params"]]
            states = (value for state in inner.state.values() for value in state.values())
            own += [value for value in states if isinstance(value, torch.Tensor)]
        finite = torch.tensor(float(are_finite(own)))
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self._world)
        return bool(finite)

    def agreed(self, audit_step: int) -> None:
        """All replicas have agreed in an audit before an optimizer step; what follows depends on that step."""
        self._agreed = audit_step, int(self._engine.skipped_steps)

    def after_step(self, step: int) -> None:
        """The optimizer step is done: what holds only steps before one that was audited is verified.

        Collective: all ranks of the world, where the step was audited.
        """
        if self._agreed is None:
            return
        (audit_step, skipped), self._agreed = self._agreed, None
        if int(self._engine.skipped_steps) > skipped or not self._is_finite():
            self._tell(
                "audit", "not_finite", step=audit_step, reason="the step was skipped, or its state is not finite"
            )
            return
        found = [one for one in self._waiting if one[0] < audit_step]
        self._waiting = self._waiting[len(found) :]
        for saved, folder in found:
            self.verified = folder
            if self._writes:
                self._mark(folder, saved, audit_step)

    def _mark(self, folder: Path, step: int, audit_step: int) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {"format": FORMAT, "step": step, "audit_step": audit_step, "time": now}
        try:
            text, path = json.dumps(content) + "\n", folder / MARK
            wait_for_room(lambda: write_durably(path, text), path, logger.warning, at_most_s=END_S)
        except OSError as error:  # it was removed, or the disk stays full: training goes on
            logger.warning("%s is not marked as verified: %s", folder, error)
            self._tell("warning", "checkpoint_not_marked", step=step, message=str(error))
            return
        self._tell("verify", "checkpoint", step=step, path=str(folder), audit_step=audit_step)
