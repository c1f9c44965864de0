"""``megasdc.attach``: a guard of a training with DeepSpeed, whose model and loop stay as they are.

A finding becomes events, the incident report and the end of the training.
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
from megasdc.attached.budget import GuardBudget
from megasdc.attached.copies import GuardCopies
from megasdc.attached.coverage import guard_coverage
from megasdc.attached.engine import (
    audit_obstacle,
    check_conditions,
    check_engine,
    check_environment_for,
    check_still_plain,
    conditions_of,
    dims_of,
    engine_precision,
    refuse_compiling,
)
from megasdc.attached.golden import GuardGolden
from megasdc.attached.lifetime import Lifetime, say
from megasdc.attached.nonfinite import GuardNonFinite
from megasdc.attached.protect import Conditions, expand, guard_start_lines
from megasdc.attached.record import choose_watched, computing_names, pattern_problems, trained_names
from megasdc.attached.rows import GuardRows
from megasdc.attached.saves import SaveMarks
from megasdc.attached.settings import RankOfRun, ReproRun, golden_problems, load_settings, with_word
from megasdc.attached.slices import GuardSlices
from megasdc.attached.trace import GuardTrace
from megasdc.attached.trainer import TrainerGuard, check_trainer, is_trainer
from megasdc.attached.training import Protection, Training
from megasdc.checkpoint.manifest import installed_versions
from megasdc.common import durable as room
from megasdc.common.errors import ConfigError, CorruptionError, StorageError
from megasdc.common.host import deepspeed_buffer, remove_buffers
from megasdc.common.origin import Origin, count_start
from megasdc.common.versions import GUARD, check_private_names
from megasdc.common.words import number_of
from megasdc.config.guard import GuardSettings
from megasdc.config.schema import idle_warnings
from megasdc.config.sections import OFF
from megasdc.determinism import set_deterministic
from megasdc.events import EventLog
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.groups import device_uuid
from megasdc.sdc.finding import Finding, Suspects
from megasdc.sdc.incident import Environment, Script, StepFate
from megasdc.sdc.policy import choose_action, report_finding, what_to_do


class CorruptionExit(CorruptionError, SystemExit):
    """Silent data corruption in a guarded training; where nobody catches it the process ends with its exit code."""

    @property
    def code(self) -> int:  # type: ignore[override]
        """Exit code of the process."""
        return self.exit_code


def _command(words: Sequence[str]) -> str:
    """A command line without what the launcher has added on this rank."""
    return shlex.join(word for word in words if not word.startswith(("--local_rank=", "--local-rank=")))


logger = logging.getLogger(__name__)

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_giving_way: weakref.WeakKeyDictionary[Any, weakref.ref[Guard]] = weakref.WeakKeyDictionary()
"""Guards that `megasdc run` has attached, by engine; one of the program's own takes their place."""
_starts: dict[Path, Origin] = {}
"""Starts that this process has counted, by run folder."""
ENDS: dict[StepFate, str] = {
    "not taken": "the step is not taken",
    "taken": "the step was taken: go on from a checkpoint before it",
    "skipped": "the optimizer has skipped the step, which has changed no parameter: go on from a checkpoint before it",
}
"""Ends of messages on a finding that halts."""
P = TypeVar("P", bound=Protection)
BuildPart = Callable[[Training], Protection | None]


def check_settings(
    settings: Path | str | Mapping[str, Any] | GuardSettings | None = None, *, protect: str | None = None
) -> GuardSettings:
    """Check what a guard needs and does not depend on the engine: call it first, before data and model are there.

    Args:
        settings: path of a JSON file, or its contents; see ``docs/guides/attach.md``. Or settings that this function
            has returned. None: a file that sets nothing.
        protect: word in place of the file's `protect`; see ``docs/guides/protect.md``.

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
    found, _ = _settings_of(settings, protect)
    if problems := golden_problems(found, writes=os.environ.get("RANK", "0") == "0"):
        raise ConfigError(problems, str(settings) if isinstance(settings, (str, Path)) else None)
    device = get_accelerator().device_name()
    known = Conditions(audits=audit_obstacle(device, os.environ))
    check_environment_for(expand(found, known), device, os.environ)
    return found


def attach(
    engine: Any,
    settings: Path | str | Mapping[str, Any] | GuardSettings | None = None,
    more: Sequence[BuildPart] = (),
    *,
    protect: str | None = None,
    gives_way: bool = False,
) -> Guard | TrainerGuard:
    """Protect a training: call after ``deepspeed.initialize``, on all ranks.

    Args:
        engine: a ``DeepSpeedEngine`` with ZeRO 0, 1 or 2, or a ``PipelineEngine``; or Hugging Face's ``Trainer`` with
            such a configuration, whose engine is guarded once training begins.
        settings: path of a JSON file, or its contents; see ``docs/guides/attach.md``. Or the settings that
            ``check_settings`` has returned. None: a file that sets nothing.
        more: functions that make further protections, or return None where they are not asked for.
        protect: word in place of the file's `protect`: off, standard or strict; see ``docs/guides/protect.md``.
        gives_way: whether the guard is closed in silence where the program attaches one of its own.

    Returns:
        The guard; its ``close`` undoes everything.

    Raises:
        ConfigError: settings are wrong, with every problem, or the engine cannot be guarded.
        StorageError: the run folder cannot be written.
        LaunchError: a library lacks a private name that is needed.

    Collective: all ranks of the world; with a ``Trainer`` none before training begins.
    """
    check_private_names(GUARD)
    found, trial = _settings_of(settings, protect)
    if is_trainer(engine):
        check_trainer(engine, found)
        hides = bool(engine.args.logging_nan_inf_filter)
        return TrainerGuard(engine, lambda made: _guard(made, found, trial, more, hides_losses=hides))
    guard = _guard(engine, found, trial, more)
    if gives_way:
        _giving_way[engine] = weakref.ref(guard)
    return guard


def _settings_of(
    given: Path | str | Mapping[str, Any] | GuardSettings | None, protect: str | None
) -> tuple[GuardSettings, ReproRun | None]:
    """The settings, with the word and the changes of a trial, and the trial; None: it is an ordinary training."""
    run, trial = RankOfRun.of(os.environ), ReproRun.of(os.environ)
    word = run.protect or protect
    if isinstance(given, GuardSettings):
        found = with_word(given, word)
    else:
        overrides = [] if word is None else [f"protect={word}"]
        folder, asks = run.folder(sys.argv[0]), given is not None and run.run_dir is None
        found = load_settings({} if given is None else given, overrides, folder, word_needed=asks)
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
    if settings.protect == OFF:
        check_conditions(engine, settings, os.environ)
    if (earlier := _giving_way.pop(engine, None)) is not None and (guard := earlier()) is not None:
        guard.give_way()
    if engine in _guarded:
        raise ConfigError("engine: it has a guard already; close that one first.")
    guard = Guard(engine, settings, trial, more, hides_losses=hides_losses)
    _guarded.add(engine)
    return guard


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
        self._budget: GuardBudget | None = None
        self._slices: GuardSlices | None = None
        self._rows: GuardRows | None = None
        self._known = Conditions()
        try:
            self._training = training = replace(self._begin(engine, settings), hides_losses=hides_losses)
            self._saves = self._close_with_guard(SaveMarks(training, saves=trial is None))
            self._parts = self._attach(training)
            for build in more:
                if (part := build(training)) is not None:
                    self._parts.append(self._close_with_guard(part))
            self._left = None if trial is None else trial.steps
            """Steps until a trial ends."""
            if any(part.acts for part in self._parts):
                self._undo.callback(refuse_compiling(engine))
                engine._take_model_step = partial(self._before, engine._take_model_step)
                self._undo.callback(vars(engine).pop, "_take_model_step")
        except BaseException:
            self._undo.close()
            raise
        if self.dims.rank == 0 and trial is None:  # a trial turns audits off itself
            for warning in idle_warnings(training.settings, ""):
                logger.warning("guard: %s", warning)
        if trial is None:
            table = self._coverage({})
            training.events.emit_on_rank_0("start", "coverage", step=training.step - 1, table=table)
            if self.dims.rank == 0:
                level = logging.INFO if training.settings.protect == OFF else logging.DEBUG
                logger.log(level, "coverage of silent data corruption:\n%s", "\n".join(table))
        self._lifetime = Lifetime(training, self._checks(), says=trial is None)
        self._saves.tell = partial(setattr, self._lifetime, "candidate")
        self._at_end = weakref.finalize(self, self._lifetime.end)
        self._say_protection()

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

    def give_way(self) -> None:
        """Close in silence, before a step, since the program attaches a guard of its own."""
        self._lifetime.cancel()
        self.close()

    def close(self) -> None:
        """Undo everything; closing again does nothing."""
        self._at_end()
        self._undo.close()
        _guarded.discard(self._training.engine)

    def _close_with_guard(self, part: P) -> P:
        """Have a part closed with the guard; returns the part."""
        self._undo.callback(part.close)
        return part

    def _attach(self, training: Training) -> list[Protection]:
        """All parts that the settings ask for, in the order in which they act."""
        settings, parts = training.settings, list[Protection]()
        self._undo.callback(set_deterministic(settings.determinism))
        if settings.trace.enabled:
            parts.append(self._close_with_guard(GuardTrace(training)))
        if settings.nonfinite.enabled:
            parts.append(self._close_with_guard(GuardNonFinite(training)))
        always_on = settings.sdc.always_on
        if always_on.enabled and (always_on.rows or always_on.slice_elements is not None):
            self._budget = GuardBudget(training, self._is_audited)
        if always_on.enabled and always_on.rows and self._budget is not None:
            self._rows = self._close_with_guard(GuardRows(training, self._budget))
            parts.append(self._rows)
        if settings.sdc.golden is not None:
            parts.append(self._close_with_guard(GuardGolden(training)))
        if settings.audit.enabled and self.dims.data == 1 and not settings.audit.permutes(1):
            self._warn_not_audited(
                "nothing is audited",
                "there is one replica, and nothing to compare it with; give audit.permuted or sdc.golden",
            )
        elif settings.audit.enabled:
            checks = None if self._budget is None else self._budget.checks
            self._audit = self._close_with_guard(GuardAudit(training, self._saves.agreed, checks))
            parts.append(self._audit)
        if always_on.enabled and always_on.parameters and self.dims.data == 1:
            self._warn_not_audited(
                "parameters are not compared",
                "there is one replica, and sdc.always_on.parameters has nothing to compare it with",
            )
        elif always_on.enabled and always_on.parameters:
            parts.append(self._close_with_guard(GuardCopies(training, self._is_audited)))
        if always_on.enabled and always_on.slice_elements is not None:
            assert self._budget is not None, "slices are looked at by it"
            self._slices = self._close_with_guard(
                GuardSlices(training, self._settle_taken, self._budget, self._coverage)
            )
            parts.append(self._slices)
        if settings.optimizer_hooks:
            parts.append(self._close_with_guard(GuardBounds(training)))
        if self._slices is not None:
            parts.append(self._slices.unclipped)
        self._saves.after_load = self._go_on
        if self._budget is not None:
            parts.append(self._budget)
        return parts

    def _checks(self) -> list[str]:
        """What the guard looks at, in words."""
        settings = self._training.settings
        audit = settings.audit
        every = (
            number_of(audit.interval, "step") if audit.most_interval == audit.interval else f"{audit.intervals} steps"
        )
        told = [] if self._audit is None else [f"audits every {every}"]
        alone = self._audit is not None and settings.audit.permutes(self.dims.data)
        told += ["audits of each device with itself"] if alone else []
        told += [part.name for part in self._parts if part.name]
        return told

    def _go_on(self) -> None:
        """Begin again after a checkpoint was loaded, whose state is not what the last step has left."""
        if self._audit is not None:
            self._audit.go_on()
        if self._slices is not None:
            self._slices.forget()
        if self._budget is not None:
            self._budget.restart()

    def _coverage(self, within: Mapping[str, str]) -> list[str]:
        """The table of what is covered; see ``guard_coverage``."""
        slices = None if self._slices is None else self._slices.period
        return guard_coverage(self._training, slices, None if self._rows is None else self._rows.products, within)

    def _say_protection(self) -> None:
        """Say what the word `protect` covers, at which cost, and what not, and write it as an event."""
        training = self._training
        if lines := guard_start_lines(training.settings, self._known):
            word = training.settings.protect
            training.events.emit_on_rank_0("start", "protection", step=training.step - 1, word=word, lines=lines)
            if self.dims.rank == 0:
                for line in lines:
                    say(line)

    def _warn_not_audited(self, what: str, reason: str) -> None:
        self._training.events.emit_on_rank_0("guard", "not_audited", reason=reason)
        if self.dims.rank == 0:
            logger.warning("guard: %s: %s", what, reason)

    def _is_audited(self, step: int) -> bool:
        return self._audit is not None and self._audit.is_audit(step)

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
        known = Conditions() if settings.protect == OFF else conditions_of(engine, self.dims.data, os.environ)
        own = computing_names(model), trained_names(model), known
        texts, origins, *names = zip(*gather_objects((error and str(error), origin, *own), world), strict=True)
        remove_buffers([deepspeed_buffer(self.dims.rank)])  # all ranks have opened what DeepSpeed has made of it
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise StorageError(f"logging.run_dir: {folder} cannot be written: {failed[0]}") from error
        submodules, parameters = (sorted(set().union(*of_ranks)) for of_ranks in names[:2])
        if settings.protect != OFF:
            self._known = Conditions.of_ranks(names[2])
            settings = expand(settings, self._known)
            check_conditions(engine, settings, os.environ)
        if problems := pattern_problems(settings, submodules, parameters):
            raise ConfigError(problems)
        events.origin = replace(origins[0], device=device_uuid())
        watched = tuple(choose_watched(model, patterns))
        training = Training(engine, settings, self.dims, watched, world, copies, Suspects(), events)
        training.suspects.on_start(training)
        return training

    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Host groups of all ranks, and of the ranks that hold the same parameters as this one."""
        dims, own = self.dims, None
        for ranks in dims.positions:
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
            ConfigError: the model was compiled meanwhile.
        """
        step = self._training.step
        try:
            check_still_plain(self._training.engine)
            for part in self._parts:
                for found in part.before_step(step):
                    self._act(step, found, part.what, trained_on=part.trained_on)
            result = take_step(*args, **options)
            for part in (*self._parts, self._saves):
                part.after_step(step)
            room.waiting_s()  # writes what had no room before
            self._lifetime.took_step(step, self.audits, 0 if self._audit is None else self._audit.agreed)
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    raise SystemExit(0)
        except SystemExit:
            self.close()
            atexit.register(_end_groups)
            raise
        return result

    def _settle_taken(self, step: int, found: Finding) -> bool:
        """Settle a finding once the optimizer was called; returns whether its part puts right what is wrong.

        Raises:
            CorruptionExit: the policy is to halt; on all ranks.

        Collective: all ranks of the world.
        """
        skipped = bool(getattr(self._training.engine.optimizer, "overflow", False))
        return self._act(step, found, "check", trained_on=True, fate="skipped" if skipped else "taken") == "repair"

    def _act(self, step: int, found: Finding, what: str, *, trained_on: bool, fate: StepFate = "not taken") -> str:
        """Report a finding, and end the training if the policy is to halt; returns the action.

        Args:
            what: what has found it, as messages call it.
            trained_on: whether what was found is part of the training: what was wrong once is put right then, or ends
                it, unless ``not_reproduced`` is set.
            fate: what the optimizer has made of the step.

        Raises:
            CorruptionExit: the policy is to halt; on all ranks.

        Collective: all ranks of the world.
        """
        training, settings = self._training, self._training.settings
        policy = settings.sdc.policy
        if trained_on and "not_reproduced" not in policy.model_fields_set:
            policy = policy.model_copy(update={"not_reproduced": "halt" if found.unrepaired else "repair"})
        action = choose_action(policy, found)
        self._lifetime.findings += 1
        page = report_finding(
            *(training, training.suspects, step, found, action),
            *(partial(self._describe, fate), settings.health.alert_command),
        )
        text = f"the {what} of step {step} found silent data corruption: {found.text}. {what_to_do(page)}"
        if self.dims.rank == 0:
            goes_on = "it is put right, and training goes on" if action == "repair" else "training goes on"
            logger.error("%s; %s", text, ENDS[fate] if action == "halt" else goes_on)
        if action == "halt":
            self._lifetime.fail(step, CorruptionExit.exit_code, text)
            raise CorruptionExit(text)
        if self._budget is not None:
            self._budget.checks.watch()
        return action

    def _describe(self, fate: StepFate, _: list[str]) -> dict[str, Any]:
        """Fields of an incident; see ``policy.Describe``."""
        engine, saves = self._training.engine, self._saves
        return {
            "environment": Environment(installed_versions(), self.dims.layout, engine_precision(engine)),
            "verified_checkpoint": saves.verified and str(saves.verified),
            "newest_candidate": saves.candidate and str(saves.candidate),
            "script": Script(_command(sys.argv), saves.agreed_step, fate),
        }


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
