"""Resuming with a changed configuration: a change is refused, or applied from the next step on and reported.

DeepSpeed and torch restore the optimizer's saved settings: rates, decays, the clip, the loss scaler (DeepSpeed 0.19,
torch 2.13). So the settings of the new engine are recorded before the load, and those that the user changed are put
back after it; all others stay as saved, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megasdc.checkpoint.load_universal import place_steps
from megasdc.checkpoint.places import RankProblem
from megasdc.common.errors import CheckpointError
from megasdc.config.changes import ChangedField, explain_refusal, find_changes, may_change
from megasdc.config.load import RunConfig
from megasdc.config.sections.study import StudySection
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run

logger = logging.getLogger(__name__)

_PARAMS = "optimizer.params."
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_UNMEASURED: dict[str, Any] = {"tau_s": None, "tuned_at": None, "chosen": None, "aims": [], "owed": 0}
"""State of DropCompute before the choice of a threshold."""


class ChangedSettings:
    """Finds settings changed since a checkpoint was saved, and applies them to a new engine with nothing loaded."""

    def __init__(self, engine: TrainingEngine, config: RunConfig, study: StudySection | None) -> None:
        self._config = config
        if study is not None:
            self._config = replace(config, megasdc=config.megasdc.model_copy(update={"study": study}))
        self._in_study = study is not None
        self._data = engine.dims.data
        optimizer = engine.optimizer
        self._groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._clip = optimizer.clip_grad
        self._scaler: Any = getattr(optimizer, "loss_scaler", None)
        self.changes: list[ChangedField] = []

    def check(self, saved: Mapping[str, Any], data: int, *, universal: bool = False) -> None:
        """Find changes since the state ``saved`` for all ranks by ``data`` replicas; refuse those that are not allowed.

        ``universal``: a new run begins from a universal checkpoint.

        Raises:
            CheckpointError: some are not allowed; all are named, with the remedy.
        """
        file = dict(saved["config"])
        if self._in_study and saved.get("study") is not None:
            file["megasdc"] = {**file["megasdc"], "study": saved["study"]}
        changes = find_changes(file, self._config, data, self._data)
        if self._in_study and saved.get("study") is None:  # saved by a version that did not store it
            changes = [change for change in changes if not change.path.startswith("megasdc.study.")]
        if refused := [change for change in changes if not may_change(change, self._config.allow_changed, universal)]:
            raise CheckpointError(explain_refusal(refused))
        self.changes = changes

    def problem_of(self, saved: Mapping[str, Any], data: int) -> RankProblem | None:
        """The changes that `check` refuses of a universal checkpoint; None: none."""
        try:
            self.check(saved, data, universal=True)
        except CheckpointError as error:
            return RankProblem(str(error), storage=False)
        return None

    def apply(self, run: Run) -> None:
        """Apply the changes from the next step on, and report them; call when the checkpoint is loaded."""
        paths = {change.path for change in self.changes}
        optimizer = run.engine.optimizer
        for name in (path.removeprefix(_PARAMS) for path in paths if path.startswith(_PARAMS)):
            for group, fresh in zip(optimizer.param_groups, self._groups, strict=True):
                if name in fresh and name != "lr":
                    group[name] = fresh[name]
        if f"{_PARAMS}fused" in paths:
            place_steps(optimizer.optimizer)
        if "gradient_clipping" in paths:
            optimizer.clip_grad = self._clip
        if any(path.startswith("fp16.") for path in paths):
            rescale(optimizer, self._scaler)
        if f"{_PARAMS}lr" in paths or any(path.startswith("scheduler.") for path in paths):
            _set_rates(run.engine)
        if run.dims.rank == 0:
            self._tell(run)

    def _tell(self, run: Run) -> None:
        for change in self.changes:
            flagged = change.at_resume == "flag"
            say: Callable[..., None] = logger.warning if flagged else logger.info
            say("%s, from step %d on", change, run.step + 1)
            run.events.emit(
                "resume", "changed", step=run.step, path=change.path, old=change.old, new=change.new, flag=flagged
            )

    def hook_states(self, states: dict[str, Any]) -> dict[str, Any]:
        """Hooks' states to load, by their names; DropCompute's threshold is chosen anew if settings for it changed."""
        paths = {change.path for change in self.changes}
        drops = {path for path in paths if path.startswith("megasdc.drop_compute.")}
        told_only = {"megasdc.drop_compute.record_times", "megasdc.drop_compute.check_agreement"}
        if "DropCompute" not in states or not (drops - told_only or paths & set(_BATCH)):
            return states
        return {**states, "DropCompute": {**states["DropCompute"], **_UNMEASURED}}


def rescale(optimizer: Any, fresh: Any) -> None:
    """Give the loss scaler that was loaded the settings of a fresh one; the scale is kept where both are dynamic."""
    loaded = optimizer.loss_scaler
    if not (loaded.dynamic and fresh.dynamic):
        optimizer.loss_scaler, optimizer.dynamic_loss_scale = fresh, fresh.dynamic
        return
    for name in ("scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"):
        setattr(loaded, name, getattr(fresh, name))
    loaded.cur_hysteresis = min(loaded.cur_hysteresis, loaded.delayed_shift)
    loaded.cur_scale = max(loaded.cur_scale, loaded.min_scale)


def _set_rates(engine: TrainingEngine) -> None:
    """Set the next step's learning rate from the new schedule; the saved one is of the saved schedule."""
    scheduler = engine.lr_scheduler
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_lr(), strict=True):
        group["lr"] = rate
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
