"""Checkpoints of a guarded training: which of them an audit has agreed on since, to go on from.

Whether weights, masters and moments are finite is looked at where they are saved, and after the step that was audited.
"""

from __future__ import annotations

import datetime
import inspect
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
    """Notes what ``engine`` saves and loads, and marks it once an audit of a later step has agreed.

    What was saved before a checkpoint was loaded is not marked any more: the steps that follow do not depend on it. The
    step that was audited must have been taken and have left a finite state: replicas that agree on NaN have not
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
        self._save, self._load = engine.save_checkpoint, engine.load_checkpoint
        self._waiting: list[tuple[int, Path]] = []
        self._loaded: tuple[int, Path, bool] | None = None
        """What this training goes on from, by step, folder and whether the state was finite then, on this rank."""
        self._loaded_before = getattr(engine, "loaded_checkpoint_dp_world_size", None) is not None
        """Whether a checkpoint was loaded of which nothing else is known."""
        self.verified: Path | None = None
        engine.save_checkpoint, engine.load_checkpoint = self._noting, self._loading

    def close(self) -> None:
        """Give the engine back its own methods."""
        vars(self._engine).pop("save_checkpoint", None)
        vars(self._engine).pop("load_checkpoint", None)

    @property
    def candidate(self) -> Path | None:
        """See the class."""
        newest = [*([] if self._loaded is None else [self._loaded[:2]]), *self._waiting]
        return newest[-1][1] if newest else None

    def _noting(self, save_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        step = int(self._engine.global_steps)
        if not self._saves:
            self._tell("guard", "not_saved", step=step)
            return True
        result = self._save(save_dir, tag, *args, **options)
        folder = Path(save_dir) / (f"global_step{step}" if tag is None else str(tag))
        if self._on_all(are_finite(self._state()))[0]:
            self._waiting.append((step, folder))
        else:
            self._tell("warning", "checkpoint_not_finite", step=step, path=str(folder))
            if self._writes:
                logger.warning("guard: %s is saved, but its state is not finite: go back to an earlier one", folder)
        return result

    def _loading(self, load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        self._waiting, self._loaded, self._loaded_before = [], None, False
        path, state = self._load(load_dir, tag, *args, **options)
        given = inspect.signature(self._load).bind(load_dir, tag, *args, **options).arguments
        whole = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
        if path is not None and whole and given.get("custom_load_fn") is None:
            self.loaded(Path(path).parent)
        return path, state

    def loaded(self, folder: Path) -> None:
        """The training goes on from a checkpoint, whose state all ranks have now, and have not trained on yet."""
        self._waiting, self._loaded, self._loaded_before = [], None, False
        if (folder / MARK).is_file():
            self.verified = folder
        else:
            self._loaded = int(self._engine.global_steps), folder, are_finite(self._state())

    def _state(self) -> list[torch.Tensor]:
        """Weights, masters and moments of this rank."""
        inner = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        own = [*self._engine.module.parameters()]
        if inner is not None:
            own += [one for group in inner.param_groups for one in group["params"]]
            states = (value for state in inner.state.values() for value in state.values())
            own += [value for value in states if isinstance(value, torch.Tensor)]
        return own

    def _on_all(self, *flags: bool) -> list[bool]:
        """Whether each holds on all ranks.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device.
        """
        found = torch.tensor([float(one) for one in flags])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._world)
        return [bool(one) for one in found]

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
        loaded, self._loaded_before = self._loaded, self._loaded_before and self._tell_unknown(audit_step)
        finite, goes_on = self._on_all(are_finite(self._state()), loaded is not None and loaded[2])
        if int(self._engine.skipped_steps) > skipped or not finite:
            self._tell(
                "audit", "not_finite", step=audit_step, reason="the step was skipped, or its state is not finite"
            )
            return
        found = [one for one in self._waiting if one[0] < audit_step]
        self._waiting, self._loaded = self._waiting[len(found) :], None
        if loaded is not None and goes_on:
            found.insert(0, loaded[:2])
        for saved, folder in found:
            self.verified = folder
            if self._writes:
                self._mark(folder, saved, audit_step)

    def _tell_unknown(self, step: int) -> bool:
        """Say once why what this training went on from is not marked; false: it is told."""
        reason = "a checkpoint was loaded before the guard was attached, so that its folder is not known: attach first"
        self._tell("guard", "not_marked", step=step, reason=reason)
        if self._writes:
            logger.warning("guard: %s, or give it to guard.loaded", reason)
        return False

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
