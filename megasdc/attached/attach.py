"""``megasdc.attach``: a guard of a training with DeepSpeed, whose model and loop stay as they are."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megasdc.attached.audit import GuardAudit
from megasdc.attached.bounds import GuardBounds, check_bounds
from megasdc.attached.engine import check_engine, check_environment, dims_of
from megasdc.attached.golden import GuardGolden
from megasdc.attached.nonfinite import GuardNonFinite
from megasdc.attached.record import choose_watched, computing_names, pattern_problems, trained_names
from megasdc.attached.saves import SaveMarks
from megasdc.attached.settings import Trial, golden_problems, load_settings
from megasdc.attached.trace import GuardTrace
from megasdc.attached.trainer import TrainerGuard, check_trainer, is_trainer
from megasdc.attached.training import Part, Training
from megasdc.attached.verdicts import Verdicts
from megasdc.common import room
from megasdc.common.errors import ConfigError, StorageError
from megasdc.common.origin import Origin
from megasdc.common.run_identity import count_start
from megasdc.common.shared_memory import deepspeed_buffer, remove_buffers
from megasdc.common.versions.private_names import GUARD, check_private_names
from megasdc.config.problems.without_effect import idle_warnings
from megasdc.config.sections.guard import GuardSettings
from megasdc.determinism import set_deterministic
from megasdc.events import EventLog
from megasdc.ops.health.attached import GuardPhases, GuardStragglers
from megasdc.ops.health.program_health import current_health
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.devices import device_uuid
from megasdc.sdc.suspects import Suspects

logger = logging.getLogger(__name__)

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_starts: dict[Path, Origin] = {}
"""Starts that this process has counted, by run folder."""
P = TypeVar("P", bound=Part)


def check_settings(settings: Path | str | Mapping[str, Any] | GuardSettings) -> GuardSettings:
    """Check what a guard needs and does not depend on the engine: call it first, before data and model are there.

    Args:
        settings: path of a JSON file, or what it would hold; see ``docs/guides/attach.md``. Or what this function has
            returned.

    Returns:
        The complete settings, which ``attach`` takes.

    Raises:
        ConfigError: with every problem of the settings, such as a golden file that is not there, for which ``attach``
            raises a ``TraceError``; or of a GPU's environment.
        LaunchError: a library lacks a private name that is needed.

    Collective: none.
    """
    from deepspeed.accelerator import get_accelerator

    check_private_names(GUARD)
    found, _ = _settings_of(settings)
    if problems := golden_problems(found, writes=os.environ.get("RANK", "0") == "0"):
        raise ConfigError(problems, str(settings) if isinstance(settings, (str, Path)) else None)
    _check_environment(get_accelerator().device_name(), found)
    return found


def attach(engine: Any, settings: Path | str | Mapping[str, Any] | GuardSettings) -> Guard | TrainerGuard:
    """Protect a training: call after ``deepspeed.initialize``, on all ranks.

    Args:
        engine: a ``DeepSpeedEngine`` with ZeRO 0, 1 or 2, or a ``PipelineEngine``; or Hugging Face's ``Trainer`` with
            such a configuration, whose engine is guarded once training begins.
        settings: path of a JSON file, or what it would hold; see ``docs/guides/attach.md``. Or what
            ``check_settings`` has returned.

    Returns:
        The guard; its ``close`` undoes everything.

    Raises:
        ConfigError: with every problem of the settings, or why the engine cannot be guarded.
        StorageError: the run folder cannot be written.
        LaunchError: a library lacks a private name that is needed.

    Collective: all ranks of the world; with a ``Trainer`` none before training begins.
    """
    check_private_names(GUARD)
    found, trial = _settings_of(settings)
    if is_trainer(engine):
        check_trainer(engine, found)
        hides = bool(engine.args.logging_nan_inf_filter)
        return TrainerGuard(engine, lambda made: _guard(made, found, trial, hides_losses=hides))
    return _guard(engine, found, trial)


def _settings_of(given: Path | str | Mapping[str, Any] | GuardSettings) -> tuple[GuardSettings, Trial | None]:
    """The settings with what a trial has otherwise, and the trial."""
    found, trial = given if isinstance(given, GuardSettings) else load_settings(given), Trial.of(os.environ)
    return (found if trial is None else trial.applied(found)), trial


def _guard(engine: Any, settings: GuardSettings, trial: Trial | None, *, hides_losses: bool = False) -> Guard:
    check_engine(engine)
    check_bounds(settings.optimizer_hooks, engine)
    _check_environment(engine.device.type, settings)
    if engine in _guarded:
        raise ConfigError("engine: it has a guard already; close that one first.")
    guard = Guard(engine, settings, trial, hides_losses=hides_losses)
    _guarded.add(engine)
    return guard


def _check_environment(device: str, settings: GuardSettings) -> None:
    if settings.audit.enabled or settings.golden.path is not None or settings.determinism.enabled:
        check_environment(device, settings.determinism.enabled, os.environ)


class Guard:
    """Protects a training before optimizer steps, until it is closed; made by ``attach``.

    Attributes:
        dims: layout of the training and this rank's place.
    """

    def __init__(
        self, engine: Any, settings: GuardSettings, trial: Trial | None = None, *, hides_losses: bool = False
    ) -> None:
        self.dims = dims_of(engine)
        self._undo = ExitStack()
        self._audit: GuardAudit | None = None
        try:
            self._training = training = replace(self._begin(engine, settings), hides_losses=hides_losses)
            self._saves = self._keep(SaveMarks(training, saves=trial is None))
            self._verdicts = Verdicts(training, self._saves)
            self._parts = self._attach(training)
            self._left = None if trial is None else trial.steps
            """Steps until a trial ends."""
            if self._parts:
                engine._take_model_step = partial(self._before, engine._take_model_step)
                self._undo.callback(vars(engine).pop, "_take_model_step")
            if (health := current_health()) is not None:
                self._keep(GuardPhases(training, health))
        except BaseException:
            self._undo.close()
            raise
        if self.dims.rank == 0 and trial is None:  # a trial turns audits off itself
            for warning in idle_warnings(settings, ""):
                logger.warning("guard: %s", warning)
        names = [one.fqn for one in training.watched]
        training.tell("guard", "attached", layout=str(self.dims), interval=settings.audit.interval, watched=names)

    @property
    def audits(self) -> int:
        """How many were made."""
        return 0 if self._audit is None else self._audit.count

    def loaded(self, folder: Path | str) -> None:
        """Say which checkpoint the engine has loaded before the guard was attached, so that an audit can mark it.

        Args:
            folder: of the checkpoint, such as ``checkpoints/global_step100``.

        Collective: none; all ranks of the world call it, before their next step.
        """
        self._saves.loaded(Path(folder))

    def close(self) -> None:
        """Undo everything; closing again does nothing."""
        self._undo.close()
        _guarded.discard(self._training.engine)

    def _keep(self, part: P) -> P:
        """Close a part with the guard."""
        self._undo.callback(part.close)
        return part

    def _attach(self, training: Training) -> list[Part]:
        """All parts that the settings ask for, in the order in which they act."""
        settings, parts = training.settings, list[Part]()
        self._undo.callback(set_deterministic(settings.determinism))
        if settings.trace.enabled:
            parts.append(self._keep(GuardTrace(training)))
        if settings.nonfinite.enabled:
            parts.append(self._keep(GuardNonFinite(training)))
        if settings.golden.path is not None:
            parts.append(self._keep(GuardGolden(training)))
        if settings.audit.enabled and self.dims.data == 1 and not settings.audit.permuted:
            reason = "there is one replica, and nothing to compare it with; give audit.permuted or golden.path"
            training.tell("guard", "not_audited", reason=reason)
            if self.dims.rank == 0:
                logger.warning("guard: nothing is audited: %s", reason)
        elif settings.audit.enabled:
            self._audit = self._keep(GuardAudit(training, self._verdicts.agreed))
            parts.append(self._audit)
        if settings.optimizer_hooks:
            parts.append(self._keep(GuardBounds(training)))
        if (ratio := settings.health.slow_ratio) is not None and self.dims.data > 1:
            parts.append(self._keep(GuardStragglers(training, ratio)))
        return parts

    def _begin(self, engine: Any, settings: GuardSettings) -> Training:
        """Make groups, open the event log, and choose submodules; errors of a rank are raised on all."""
        folder, error = Path(settings.logging.run_dir), None
        world, copies = self._groups()
        origin = Origin()
        room.set_limit(settings.logging.wait_for_room_s)
        self._undo.callback(room.finish)
        try:
            events = EventLog(folder, self.dims.rank)
            self._undo.callback(events.close)
            origin = _start_of(folder) if self.dims.rank == 0 else origin
        except (OSError, StorageError) as caught:
            error = caught
        model, patterns = engine.module, settings.audit.submodules
        own = computing_names(model), trained_names(model)
        texts, origins, *names = zip(*gather_objects((error and str(error), origin, *own), world), strict=True)
        remove_buffers([deepspeed_buffer(self.dims.rank)])  # all ranks have opened what DeepSpeed has made of it
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise StorageError(f"logging.run_dir: {folder} cannot be written: {failed[0]}") from error
        submodules, parameters = (sorted(set().union(*of_ranks)) for of_ranks in names)
        if problems := pattern_problems(settings, submodules, parameters):
            raise ConfigError(problems)
        events.origin = replace(origins[0], device=device_uuid())
        suspects = Suspects()
        suspects.on_start(engine.device, world)
        watched, tell = tuple(choose_watched(model, patterns)), partial(_tell, events, self.dims.rank)
        return Training(engine, settings, self.dims, watched, world, copies, suspects, tell, events.origin)

    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Host groups of all ranks, and of those that hold the same parameters as this one."""
        dims, own = self.dims, None
        for position in range(dims.tensor * dims.pipeline):
            stage, tensor = divmod(position, dims.tensor)
            ranks = [tensor + dims.tensor * (replica + dims.data * stage) for replica in range(dims.data)]
            group = dist.new_group(ranks, backend="gloo")
            self._undo.callback(dist.destroy_process_group, group)
            own = group if dims.rank in ranks else own
        world = dist.new_group(backend="gloo")
        self._undo.callback(dist.destroy_process_group, world)
        return world, own

    def _before(self, take_step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Have all parts act, and take a step between.

        Raises:
            CorruptionExit: on all ranks, where the policy is to halt; the step is not taken.
            NonFiniteExit: likewise, for NaN or Inf in gradients.
            SystemExit: the last step of a trial was taken.
        """
        step = self._training.step
        try:
            for part in self._parts:
                for found in part.before_step(step):
                    self._verdicts.act(step, found)
            result = take_step(*args, **options)
            for part in (*self._parts, self._saves):
                part.after_step(step)
            room.waiting_s()  # writes what had no room before
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    raise SystemExit(0)
        except SystemExit:
            self.close()
            atexit.register(_end_groups)
            raise
        return result


def _start_of(folder: Path) -> Origin:
    """Run and number of this start in a run folder; counted once, however many guards a process attaches there."""
    if folder not in _starts:
        identity = count_start(folder)
        _starts[folder] = Origin(identity.run, identity.attempt)
    return _starts[folder]


def _tell(events: EventLog, rank: int, kind: str, name: str, /, *, step: int | None = None, **fields: Any) -> None:
    """Write an event on rank 0; one that cannot be written is logged, since other ranks go on."""
    if rank == 0:
        try:
            events.emit(kind, name, step=step, **fields)
        except OSError as error:
            logger.error("the event %s/%s of step %s is not written: %s", kind, name, step, error)


def _end_groups() -> None:
    """End all process groups when Python ends: threads of gloo that still run may abort it, with another exit code."""
    if dist.is_initialized():
        dist.destroy_process_group()
