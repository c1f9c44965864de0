"""``megasdc.attach``: a guard of a training with DeepSpeed, whose model and loop stay as they are."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasdc.checkpoint.manifest import installed_versions
from megasdc.config.sections.guard import GuardSettings
from megasdc.determinism import set_deterministic
from megasdc.errors import ConfigError, CorruptionError, StorageError
from megasdc.events import EventLog
from megasdc.guard.audit import Auditor
from megasdc.guard.bounds import GuardBounds, check_bounds
from megasdc.guard.engine import check_engine, check_environment, dims_of, precision_of
from megasdc.guard.golden import GuardGolden
from megasdc.guard.health import GuardPhases, GuardStragglers
from megasdc.guard.nonfinite import GuardNonFinite
from megasdc.guard.record import Watched, check_patterns, choose_watched
from megasdc.guard.saves import SaveMarks
from megasdc.guard.settings import Trial, load_settings
from megasdc.guard.trace import GuardTrace
from megasdc.guard.trainer import TrainerGuard, check_trainer, is_trainer
from megasdc.health.program_health import current_health
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.device import gather_places
from megasdc.sdc.incidents.incident import Environment, Script
from megasdc.sdc.incidents.page import write_incident
from megasdc.sdc.incidents.settled import Settled, describe
from megasdc.sdc.suspects import Suspects
from megasdc.tensors.checksum import default_algorithm
from megasdc.versions.private_names import GUARD, check_private_names

logger = logging.getLogger(__name__)

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
SEVERITY = ("warn", "halt")


class CorruptionExit(CorruptionError, SystemExit):
    """Silent data corruption in a guarded training; where nobody catches it the process ends with its exit code."""

    @property
    def code(self) -> int:  # type: ignore[override]
        """Exit code of the process."""
        return self.exit_code


def attach(engine: Any, settings: Path | str | Mapping[str, Any]) -> Guard | TrainerGuard:
    """Protect a training: call after ``deepspeed.initialize``, on all ranks.

    Args:
        engine: a ``DeepSpeedEngine`` with ZeRO 0, 1 or 2, or a ``PipelineEngine``; or Hugging Face's ``Trainer`` with
            such a configuration, whose engine is guarded once training begins.
        settings: path of a JSON file, or what it would hold; see ``docs/guides/attach.md``.

    Returns:
        The guard; its ``close`` undoes everything.

    Raises:
        ConfigError: with every problem of the settings, or why the engine cannot be guarded.
        StorageError: the run folder cannot be written.
        LaunchError: a library lacks a private name that is needed.

    Collective: all ranks of the world; with a ``Trainer`` none before training begins.
    """
    check_private_names(GUARD)
    found, trial = load_settings(settings), Trial.of(os.environ)
    found = found if trial is None else trial.applied(found)
    if is_trainer(engine):
        check_trainer(engine)
        return TrainerGuard(engine, lambda made: _guard(made, found, trial))
    return _guard(engine, found, trial)


def _guard(engine: Any, settings: GuardSettings, trial: Trial | None) -> Guard:
    check_engine(engine)
    check_bounds(settings.optimizer_hooks, engine)
    if settings.audit.enabled or settings.golden.path is not None or settings.determinism.enabled:
        check_environment(engine.device.type, settings.determinism.enabled, os.environ)
    if engine in _guarded:
        raise ConfigError("engine: it has a guard already; close that one first.")
    guard = Guard(engine, settings, trial)
    _guarded.add(engine)
    return guard


class Guard:
    """Audits a training before optimizer steps, until it is closed; made by ``attach``.

    Attributes:
        dims: layout of the training and this rank's place.
        audits: how many were done.
    """

    def __init__(self, engine: Any, settings: GuardSettings, trial: Trial | None = None) -> None:
        self.dims = dims_of(engine)
        self.audits = 0
        self._engine, self._settings, self._trial = engine, settings, trial
        self._undo = ExitStack()
        self._agreed: int | None = None
        self._folder = Path(settings.logging.run_dir)
        self._world, self._copies = self._groups()
        self._suspects = Suspects()
        self._bounds: GuardBounds | None = None
        self._trace: GuardTrace | None = None
        self._stragglers: GuardStragglers | None = None
        self._golden: GuardGolden | None = None
        self._nonfinite: GuardNonFinite | None = None
        try:
            self._begin()
        except BaseException:
            self._undo.close()
            raise

    def _begin(self) -> None:
        engine, settings = self._engine, self._settings
        watched = self._prepare()
        groups, algorithm = (self._world, self._copies), default_algorithm(engine.device)
        self._auditor = Auditor(engine, settings, watched, self.dims, *groups, self._wanted, self._tell)
        self._undo.callback(self._auditor.close)
        self._undo.callback(set_deterministic(settings.determinism))
        self._suspects.on_start(engine.device, self._world)
        self._ranks = gather_places(engine.device, self.dims, self._world)
        self._first = self._step
        self._last = None if self._trial is None else self._first + self._trial.steps - 1
        if settings.golden.path is not None:
            self._golden = GuardGolden(engine, watched, algorithm, self.dims, groups, settings, self._tell)
            self._undo.callback(self._golden.close)
        if settings.nonfinite.enabled:
            self._nonfinite = GuardNonFinite(
                *(engine, watched, algorithm, self.dims, self._world, settings.nonfinite, self._tell)
            )
            self._undo.callback(self._nonfinite.close)
        if specs := settings.optimizer_hooks:
            interval = settings.logging.interval
            self._bounds = GuardBounds(engine, specs, self.dims, self._world, interval, self._tell)
            self._undo.callback(self._bounds.close)
        if settings.trace.enabled:
            patterns, interval = settings.audit.submodules, settings.trace.interval
            self._trace = GuardTrace(
                *(engine, watched, algorithm, self.dims, self._folder, interval, patterns, self._tell)
            )
            self._undo.callback(self._trace.close)
        if (ratio := settings.health.slow_ratio) is not None and self.dims.data > 1:
            self._stragglers = GuardStragglers(
                *(engine, self.dims, ratio, self._world, self._folder, self._events.origin, self._tell)
            )
            self._undo.callback(self._stragglers.close)
        parts = self._golden, self._nonfinite, self._bounds, self._trace, self._stragglers
        if settings.audit.enabled or any(parts):
            engine._take_model_step = partial(self._before, engine._take_model_step)
            self._undo.callback(vars(engine).pop, "_take_model_step")
        self._saves = SaveMarks(engine, self._tell, writes=self.dims.rank == 0, saves=self._trial is None)
        self._undo.callback(self._saves.close)
        if (health := current_health()) is not None:
            self._undo.callback(GuardPhases(engine, health).close)
        if self._trace is not None:
            self._trace.begin(self._step)
        names = [one.fqn for one in watched]
        self._tell("guard", "attached", layout=str(self.dims), interval=settings.audit.interval, watched=names)

    def _prepare(self) -> list[Watched]:
        """Open the event log, and choose submodules; errors of a rank are raised on all."""
        error: OSError | None = None
        try:
            self._events = EventLog(self._folder, self.dims.rank)
            self._undo.callback(self._events.close)
        except OSError as caught:
            error = caught
        model, patterns = self._engine.module, self._settings.audit.submodules
        own = {fqn for fqn, _ in model.named_modules() if fqn}, {name for name, _ in model.named_parameters()}
        texts, *names = zip(*gather_objects((error and str(error), *own), self._world), strict=True)
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise StorageError(f"logging.run_dir: {self._folder} cannot be written: {failed[0]}") from error
        submodules, parameters = (sorted(set().union(*of_ranks)) for of_ranks in names)
        check_patterns("audit.submodules", "submodule", patterns or (), submodules)
        for place, spec in enumerate(self._settings.optimizer_hooks):
            check_patterns(f"optimizer_hooks.{place}.parameters", "parameter", spec.parameters, parameters)
        return choose_watched(model, patterns)

    def close(self) -> None:
        """Undo everything; closing again does nothing."""
        self._undo.close()
        _guarded.discard(self._engine)

    @property
    def _step(self) -> int:
        """Number of the optimizer step that comes next, the first is 1."""
        return int(self._engine.global_steps) + 1

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

    # --- an audit -------------------------------------------------------------------------------------------------

    def _source(self, step: int) -> int | None:
        """The replica whose batch is audited in a step, another one each time; None: it is not audited."""
        audit = self._settings.audit
        interval = audit.interval
        if not audit.enabled or (step != self._first and step % interval):
            return None
        return step // interval % self.dims.data

    def _wanted(self) -> int | None:
        """The step that runs, if this rank's batch is audited in it."""
        step = self._step  # of the engine itself: a checkpoint may have been loaded
        return step if self._source(step) == self.dims.dp_rank else None

    def _before(self, take_step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Audit a step that is due, bound its gradients, and take it.

        Raises:
            CorruptionExit: on all ranks, where the policy is to halt; the step is not taken.
            NonFiniteExit: likewise, for NaN or Inf in gradients.
        """
        try:
            return self._step_guarded(take_step, *args, **options)
        except SystemExit:
            self.close()
            atexit.register(_end_groups)
            raise

    def _step_guarded(self, take_step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        step = self._step
        source = self._source(step)
        if self._trace is not None:
            self._trace.pause(step)
        if self._nonfinite is not None:
            self._nonfinite.before_step(step)
        if self._golden is not None and (found := self._golden.before_step(step, self._suspects.ranks)) is not None:
            self._act(step, found)
        if source is not None:
            self._audit(step, source)
        if self._bounds is not None:
            self._bounds.before_step(step)
        result = take_step(*args, **options)
        if self._bounds is not None:
            self._bounds.after_step(step)
        if self._trace is not None:
            self._trace.end()
            self._trace.begin(self._step)
        if self._stragglers is not None:
            self._stragglers.after_step(step)
        if step == self._last:
            raise SystemExit(0)
        return result

    def _audit(self, step: int, source: int) -> None:
        began = time.monotonic()
        audited = self._auditor.compute(step, source)
        self.audits += 1
        agreed = True
        for found in self._auditor.settle(audited, self._suspects.ranks):
            if found.rulings:
                agreed = False
                self._act(step, found)
        if agreed:
            self._agreed = step
            self._saves.agreed(step)
            seconds = round(time.monotonic() - began, 3)
            self._tell("audit", "agreed", step=step, compared=len(audited.results), seconds=seconds)

    def _act(self, step: int, found: Settled) -> None:
        policy = self._settings.sdc.policy
        action = max((getattr(policy, one.verdict) for one in found.rulings), key=SEVERITY.index)
        for ruling in found.rulings:
            self._tell("sdc", "verdict", step=step, tier=found.tier, action=action, **describe(ruling))
        self._suspects.add(one.rank for one in found.rulings if one.rank is not None)
        page = gather_objects(self._report(step, found, action) if self.dims.rank == 0 else None, self._world)[0]
        what = "golden trace" if found.tier == "golden" else "audit"
        text = f"the {what} of step {step} found silent data corruption: {found.text}. " + (
            f"What to do: {page}" if page else "The incident report could not be written"
        )
        if self.dims.rank == 0:
            logger.error("%s; %s", text, "the step is not taken" if action == "halt" else "training goes on")
        if action == "halt":
            raise CorruptionExit(text)

    def _report(self, step: int, found: Settled, action: str) -> str | None:
        try:
            incident = found.incident(
                *(self._folder, step, action, self._ranks),
                environment=Environment(installed_versions(), self.dims.layout, precision_of(self._engine)),
                verified_checkpoint=_text(self._saves.verified),
                newest_candidate=_text(self._saves.candidate),
                script=Script(shlex.join(sys.argv), self._agreed),
            )
            return str(write_incident(incident)[1])
        except StorageError as error:
            logger.error("%s", error)
        except Exception:  # any error in the evidence: the other ranks wait for the page
            logger.exception("the incident of step %d cannot be reported", step)
        return None

    def _tell(self, kind: str, name: str, *, step: int | None = None, **fields: Any) -> None:
        """Write an event on rank 0; one that cannot be written is logged, since other ranks go on."""
        if self.dims.rank == 0:
            try:
                self._events.emit(kind, name, step=step, **fields)
            except OSError as error:
                logger.error("the event %s/%s of step %s is not written: %s", kind, name, step, error)


def _end_groups() -> None:
    """End all process groups when Python ends: threads of gloo that still run may abort it, with another exit code."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
