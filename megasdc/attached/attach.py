"""``megasdc.attach``: a guard of a training with DeepSpeed, whose model and loop stay as they are.

The guard of Hugging Face's ``Trainer`` waits until that has made its engine, when training begins. A finding becomes
events, the incident report and the end of the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megasdc.attached.audit import GuardAudit
from megasdc.attached.bounds import GuardBounds, check_bounds
from megasdc.attached.engine import ZERO3, check_engine, check_environment, dims_of, engine_precision
from megasdc.attached.golden import GuardGolden
from megasdc.attached.nonfinite import GuardNonFinite
from megasdc.attached.record import choose_watched, computing_names, pattern_problems, trained_names
from megasdc.attached.saves import SaveMarks
from megasdc.attached.settings import ReproRun, golden_problems, load_settings
from megasdc.attached.trace import GuardTrace
from megasdc.attached.training import Protection, Training
from megasdc.checkpoint.manifest import installed_versions
from megasdc.common import durable as room
from megasdc.common.errors import ConfigError, CorruptionError, StorageError
from megasdc.common.host import deepspeed_buffer, remove_buffers
from megasdc.common.origin import Origin, count_start
from megasdc.common.versions import GUARD, check_private_names
from megasdc.config.guard import GuardSettings
from megasdc.config.schema import idle_warnings
from megasdc.determinism import set_deterministic
from megasdc.events import EventLog
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.groups import device_uuid
from megasdc.sdc.finding import Finding, Suspects, describe_ruling, gather_places
from megasdc.sdc.incident import Environment, Script, write_incident

COMPILES = (
    "TrainingArguments.torch_compile: got True; allowed: False, since the submodules of a compiled model cannot be "
    "observed. torch_compile_backend and torch_compile_mode set it, too: leave them out."
)


class TrainerGuard:
    """Attaches a guard whenever a ``Trainer`` begins to train, and closes it at the end.

    Args:
        trainer: a ``Trainer`` with ``TrainingArguments(deepspeed=...)``.
        attach: called with the trainer's engine; returns a guard.

    Attributes:
        guard: guard of the running or last training; None: none has begun.
    """

    def __init__(self, trainer: Any, attach: Callable[[Any], Any]) -> None:
        from transformers import TrainerCallback

        self.guard: Any = None
        self._trainer, self._train = trainer, trainer.train
        self._checkpoint: Path | None = None
        """Checkpoint from which the next training goes on, None: none; it is loaded before callbacks are called."""
        trainer.train = self._noting
        owner = self

        class Attaching(TrainerCallback):  # type: ignore[misc]
            """Callback that attaches a guard when training begins, and closes it at the end."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                owner.guard = attach(trainer.model_wrapped)
                if owner._checkpoint is not None:
                    owner.guard.loaded(owner._checkpoint)

            def on_train_end(self, *_: Any, **__: Any) -> None:
                owner._end()

        self._callback = Attaching()
        trainer.add_callback(self._callback)

    def close(self) -> None:
        """Undo everything, also for later trainings; closing again does nothing."""
        self._end()
        vars(self._trainer).pop("train", None)
        self._trainer.remove_callback(self._callback)

    def _noting(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        from transformers.trainer_utils import get_last_checkpoint

        of_trainer = resume_from_checkpoint
        if of_trainer is True:
            of_trainer = get_last_checkpoint(self._trainer.args.output_dir)
        latest = Path(of_trainer) / "latest" if of_trainer else None
        found = None if latest is None or not latest.is_file() else latest.with_name(latest.read_text().strip())
        self._checkpoint = found
        return self._train(resume_from_checkpoint, *args, **options)

    def _end(self) -> None:
        if self.guard is not None:
            self.guard.close()


def is_trainer(value: Any) -> bool:
    """Whether a value is a ``Trainer``, told by its class name, without an import of transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == "transformers.trainer.Trainer" for kind in type(value).__mro__)


def check_trainer(trainer: Any, settings: GuardSettings) -> None:
    """Refuse a trainer that does not train with DeepSpeed.

    Raises:
        ConfigError: the trainer does not use DeepSpeed, or its arguments already show that its engine cannot be
            guarded, or patterns of the settings match nothing in its model.
    """
    if not trainer.is_deepspeed_enabled:
        raise ConfigError(
            "trainer: it trains without DeepSpeed, alone or by DistributedDataParallel or FSDP, which cannot be "
            "guarded yet; give TrainingArguments(deepspeed=...) a DeepSpeed configuration, such as one with ZeRO 0, "
            "whose replicas are those of DistributedDataParallel."
        )
    problems = []
    if trainer.args.torch_compile:
        problems.append(COMPILES)
    if trainer.accelerator.state.deepspeed_plugin.hf_ds_config.is_zero3():
        problems.append(ZERO3)
    problems += pattern_problems(settings, computing_names(trainer.model), trained_names(trainer.model))
    if problems:
        raise ConfigError(problems)


SEVERITY = ("warn", "halt")


class CorruptionExit(CorruptionError, SystemExit):
    """Silent data corruption in a guarded training; where nobody catches it the process ends with its exit code."""

    @property
    def code(self) -> int:  # type: ignore[override]
        """Exit code of the process."""
        return self.exit_code


class Verdicts:
    """Acts on findings as the policy says.

    Args:
        saves: record of the checkpoints that may be trusted.

    Collective: all ranks of the world.
    """

    def __init__(self, training: Training, saves: SaveMarks) -> None:
        self._training, self._saves = training, saves
        self._ranks = gather_places(training.engine.device, training.dims, training.host_group)
        self._agreed: int | None = None

    def agreed(self, step: int) -> None:
        """Note that all ranks have agreed in an audit of a step."""
        self._agreed = step
        self._saves.agreed(step)

    def act(self, step: int, found: Finding) -> None:
        """Report a finding, and end the training if its policy is to halt.

        Raises:
            CorruptionExit: the policy is to halt; on all ranks.

        Collective: all ranks of the world.
        """
        training, policy = self._training, self._training.settings.sdc.policy
        action = max((getattr(policy, one.verdict) for one in found.rulings), key=SEVERITY.index)
        for ruling in found.rulings:
            training.events.emit_on_rank_0(
                "sdc", "verdict", step=step, tier=found.tier, action=action, **describe_ruling(ruling)
            )
        training.suspects.add(one.rank for one in found.rulings if one.rank is not None)
        is_first = training.dims.rank == 0
        page = gather_objects(self._report(step, found, action) if is_first else None, training.host_group)[0]
        what = "golden trace" if found.tier == "golden" else "audit"
        text = f"the {what} of step {step} found silent data corruption: {found.text}. " + (
            f"What to do: {page}" if page else "The incident report could not be written"
        )
        if is_first:
            logger.error("%s; %s", text, "the step is not taken" if action == "halt" else "training goes on")
        if action == "halt":
            training.events.emit_on_rank_0("end", "failed", step=step, exit_code=CorruptionExit.exit_code, message=text)
            raise CorruptionExit(text)

    def _report(self, step: int, found: Finding, action: str) -> str | None:
        training = self._training
        try:
            incident = found.incident(
                *(training.folder, step, action, self._ranks),
                environment=Environment(installed_versions(), training.dims.layout, engine_precision(training.engine)),
                verified_checkpoint=_text(self._saves.verified),
                newest_candidate=_text(self._saves.candidate),
                script=Script(_command(sys.argv), self._agreed),
                attempt=training.events.origin.attempt,
            )
            return str(write_incident(incident)[1])
        except StorageError as error:
            logger.error("%s", error)
        except Exception:  # any error in the evidence: the other ranks wait for the page
            logger.exception("the incident of step %d cannot be reported", step)
        return None


def _command(words: Sequence[str]) -> str:
    """A command line without what the launcher has added on this rank."""
    return shlex.join(word for word in words if not word.startswith(("--local_rank=", "--local-rank=")))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


logger = logging.getLogger(__name__)

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_starts: dict[Path, Origin] = {}
"""Starts that this process has counted, by run folder."""
P = TypeVar("P", bound=Protection)
BuildPart = Callable[[Training], Protection | None]


def check_settings(settings: Path | str | Mapping[str, Any] | GuardSettings) -> GuardSettings:
    """Check what a guard needs and does not depend on the engine: call it first, before data and model are there.

    Args:
        settings: path of a JSON file, or its contents; see ``docs/guides/attach.md``. Or settings that this function
            has returned.

    Returns:
        The complete settings, which ``attach`` takes.

    Raises:
        ConfigError: the settings or a GPU's environment are wrong, with every problem, such as a missing golden file,
            for which ``attach`` raises a ``TraceError``.
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


def attach(
    engine: Any, settings: Path | str | Mapping[str, Any] | GuardSettings, more: Sequence[BuildPart] = ()
) -> Guard | TrainerGuard:
    """Protect a training: call after ``deepspeed.initialize``, on all ranks.

    Args:
        engine: a ``DeepSpeedEngine`` with ZeRO 0, 1 or 2, or a ``PipelineEngine``; or Hugging Face's ``Trainer`` with
            such a configuration, whose engine is guarded once training begins.
        settings: path of a JSON file, or its contents; see ``docs/guides/attach.md``. Or the settings that
            ``check_settings`` has returned.
        more: functions that make further protections, or return None where they are not asked for.

    Returns:
        The guard; its ``close`` undoes everything.

    Raises:
        ConfigError: settings are wrong, with every problem, or the engine cannot be guarded.
        StorageError: the run folder cannot be written.
        LaunchError: a library lacks a private name that is needed.

    Collective: all ranks of the world; with a ``Trainer`` none before training begins.
    """
    check_private_names(GUARD)
    found, trial = _settings_of(settings)
    if is_trainer(engine):
        check_trainer(engine, found)
        hides = bool(engine.args.logging_nan_inf_filter)
        return TrainerGuard(engine, lambda made: _guard(made, found, trial, more, hides_losses=hides))
    return _guard(engine, found, trial, more)


def _settings_of(given: Path | str | Mapping[str, Any] | GuardSettings) -> tuple[GuardSettings, ReproRun | None]:
    """The settings, with the changes of a trial, and the trial; None: it is an ordinary training."""
    found, trial = given if isinstance(given, GuardSettings) else load_settings(given), ReproRun.of(os.environ)
    return (found if trial is None else trial.applied(found)), trial


def _guard(
    engine: Any,
    settings: GuardSettings,
    trial: ReproRun | None,
    more: Sequence[BuildPart],
    *,
    hides_losses: bool = False,
) -> Guard:
    check_engine(engine)
    check_bounds(settings.optimizer_hooks, engine)
    _check_environment(engine.device.type, settings)
    if engine in _guarded:
        raise ConfigError("engine: it has a guard already; close that one first.")
    guard = Guard(engine, settings, trial, more, hides_losses=hides_losses)
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
        self,
        engine: Any,
        settings: GuardSettings,
        trial: ReproRun | None = None,
        more: Sequence[BuildPart] = (),
        *,
        hides_losses: bool = False,
    ) -> None:
        self.dims = dims_of(engine)
        self._undo = ExitStack()
        self._audit: GuardAudit | None = None
        try:
            self._training = training = replace(self._begin(engine, settings), hides_losses=hides_losses)
            self._saves = self._keep(SaveMarks(training, saves=trial is None))
            self._verdicts = Verdicts(training, self._saves)
            self._parts = self._attach(training)
            for build in more:
                if (part := build(training)) is not None:
                    self._parts.append(self._keep(part))
            self._left = None if trial is None else trial.steps
            """Steps until a trial ends."""
            if any(part.acts for part in self._parts):
                engine._take_model_step = partial(self._before, engine._take_model_step)
                self._undo.callback(vars(engine).pop, "_take_model_step")
        except BaseException:
            self._undo.close()
            raise
        if self.dims.rank == 0 and trial is None:  # a trial turns audits off itself
            for warning in idle_warnings(settings, ""):
                logger.warning("guard: %s", warning)
        names = [one.fqn for one in training.watched]
        training.events.emit_on_rank_0(
            "guard", "attached", layout=str(self.dims), interval=settings.audit.interval, watched=names
        )

    @property
    def audits(self) -> int:
        """Number of audits that were made."""
        return 0 if self._audit is None else self._audit.count

    def loaded(self, folder: Path | str) -> None:
        """Say which checkpoint the engine has loaded before the guard was attached, so that an audit can mark it.

        Args:
            folder: folder of the checkpoint, such as ``checkpoints/global_step100``.

        Collective: none; all ranks of the world call it, before their next step.
        """
        self._saves.loaded(Path(folder))

    def close(self) -> None:
        """Undo everything; closing again does nothing."""
        self._undo.close()
        _guarded.discard(self._training.engine)

    def _keep(self, part: P) -> P:
        """Have a part closed with the guard; returns the part."""
        self._undo.callback(part.close)
        return part

    def _attach(self, training: Training) -> list[Protection]:
        """All parts that the settings ask for, in the order in which they act."""
        settings, parts = training.settings, list[Protection]()
        self._undo.callback(set_deterministic(settings.determinism))
        if settings.trace.enabled:
            parts.append(self._keep(GuardTrace(training)))
        if settings.nonfinite.enabled:
            parts.append(self._keep(GuardNonFinite(training)))
        if settings.golden.path is not None:
            parts.append(self._keep(GuardGolden(training)))
        if settings.audit.enabled and self.dims.data == 1 and not settings.audit.permuted:
            reason = "there is one replica, and nothing to compare it with; give audit.permuted or golden.path"
            training.events.emit_on_rank_0("guard", "not_audited", reason=reason)
            if self.dims.rank == 0:
                logger.warning("guard: nothing is audited: %s", reason)
        elif settings.audit.enabled:
            self._audit = self._keep(GuardAudit(training, self._verdicts.agreed))
            parts.append(self._audit)
        if settings.optimizer_hooks:
            parts.append(self._keep(GuardBounds(training)))
        return parts

    def _begin(self, engine: Any, settings: GuardSettings) -> Training:
        """Make groups, open the event log, and choose submodules; an error of one rank is raised on all ranks."""
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
        watched = tuple(choose_watched(model, patterns))
        return Training(engine, settings, self.dims, watched, world, copies, suspects, events)

    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Host groups of all ranks, and of the ranks that hold the same parameters as this one."""
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
        """Have all parts act before and after the step that ``take_step`` takes.

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


def _end_groups() -> None:
    """End all process groups when Python ends: threads of gloo that still run may abort it, with another exit code."""
    if dist.is_initialized():
        dist.destroy_process_group()
