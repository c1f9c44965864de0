"""One training rank, from a configuration file to an exit code: its start, the loop over steps, its end."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasdc.common import durable as room
from megasdc.common.errors import CorruptionError, LaunchError, NonFiniteError, as_known_error
from megasdc.common.imports import frozen_imports
from megasdc.common.run_lock import LockedFolders, launches_locked_out
from megasdc.common.versions import check_range, component_versions, names_checked
from megasdc.config.checks import check_layout, find_warnings, replica_config, with_replicas
from megasdc.config.environment import record_collectives, set_deterministic_environment
from megasdc.config.load import RunConfig, load_config
from megasdc.config.sections import StudySection
from megasdc.events import EventLog
from megasdc.parallel.dims import ReplicaWorld
from megasdc.train.logs import LibraryLines, set_up_logging
from megasdc.train.signals import STOPPED_START, Leave, StopSignals

if TYPE_CHECKING:
    from megasdc.engine.hooks import Run
    from megasdc.train.build import Features
    from megasdc.train.isolation import SurvivingRanks
    from megasdc.train.process import StartClock


logger = logging.getLogger("megasdc")

ALL_DONE = "all steps done"


def pretrain(
    config_path: str,
    overrides: Sequence[str],
    allow_changed: Sequence[str] = (),
    leave: Leave | None = None,
    on_end: Callable[[str], object] = lambda end: None,
    *,
    features: Callable[[], Features],
) -> tuple[int, BaseException | None]:
    """Train as one rank of a run.

    Args:
        config_path: path of the JSON configuration.
        overrides: changes of the configuration, as texts ``a.b.c=value``.
        allow_changed: paths ``a.b.c`` of fields that may differ from the checkpoint that the run resumes from.
        leave: ends the process with an exit code and an error, if a stop signal arrives while the rank is still
            starting and may be stuck; None: such a signal is only recorded.
        on_end: called with how a training ended that has not failed: ``ALL_DONE``, or where and why it stopped before.
            A process that exits with 0 and has not called it was ended by something else.
        features: returns the features that are added to the core; called once, when PyTorch may be imported.

    Returns:
        The exit code, and the error behind it if there is one.

    Collective: all ranks of the world.
    """
    started_at, process_started, folder = time.monotonic(), time.time(), None
    held = LockedFolders()

    def leave_start(code: int, error: BaseException | None) -> None:
        held.release()  # else a start on another host would wait until the lock is stale
        if code == 0:
            on_end(STOPPED_START)
        assert leave is not None, "asked only where it is given"
        leave(code, error)

    def leave_running(code: int, error: BaseException | None) -> None:
        assert leave is not None and error is not None, "asked only where it is given, and with a reason"
        report_failure(folder, code, error, process_started, held)
        leave_start(code, error)

    signals = StopSignals(None if leave is None else leave_start)
    signals.leave_running = None if leave is None else leave_running
    rank = int(os.environ.get("RANK", "0"))
    set_up_logging(rank)
    try:
        check_range(component_versions())
        config = load_config(config_path, overrides, allow_changed)
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
        cut = cut_world(config.megasdc.study, os.environ)
        sections = (config if cut is None else replica_config(config, cut.replica)).megasdc
        held.folder, folder = Path(config.megasdc.logging.run_dir), Path(sections.logging.run_dir)
        room.set_limit(sections.logging.wait_for_room_s)
        room.end_waits_when(lambda: signals.received)
        set_deterministic_environment(config.megasdc.determinism, os.environ)  # before torch is imported
        if sections.health.is_on(launched=leave is not None, studied=cut is not None):
            record_collectives(os.environ)  # likewise
        if rank == 0:
            for warning in find_warnings(config):
                logger.warning("%s", warning)
        on_end(_train(config, started_at, cut, signals, held, features))
    except Exception as error:
        if signals.start is not None:
            signals.start.wait_where_all_leave()
        code, known = _explain(error)
        report_failure(folder, code, known, process_started, held)
        return code, known
    except KeyboardInterrupt as error:  # the record of the end must still be written
        logger.error("interrupted by a second SIGINT; steps since the last checkpoint are lost")
        code = 128 + signal.SIGINT
        report_failure(folder, code, error, process_started, held)
        return code, error
    finally:
        room.finish()
        held.release()
        signals.close()
    return 0, None


def _explain(error: Exception) -> tuple[int, Exception]:
    """Log an error; its exit code, and the documented error that it is, if it is one."""
    known = as_known_error(error)
    if known is None:
        logger.error("unexpected error\n%s", traceback.format_exc())
        return 1, error
    if not isinstance(known, CorruptionError | NonFiniteError) or os.environ.get("RANK", "0") == "0":
        logger.error("%s", known)  # what all ranks have found together is told by one
    return known.exit_code, known


def cut_world(section: StudySection, environ: MutableMapping[str, str]) -> ReplicaWorld | None:
    """Reduce this rank's world to its replica, for everything that reads the launcher's variables later.

    RANK and WORLD_SIZE in ``environ`` become those of the replica; LOCAL_RANK, which names the device, stays. Returns
    the place in the launch; None without a study.
    """
    if section.replicas is None:
        return None
    cut = ReplicaWorld.from_environment(section.replicas, environ)
    environ.update(cut.environment)
    set_up_logging(cut.rank, cut.replica)
    return cut


@dataclass(frozen=True)
class _Start:
    """A start of training in this process.

    Args:
        began_at: time of the start in seconds, on the clock of ``time.monotonic``.
        remaining: the ranks that are left of the launch; None: all.
    """

    config: RunConfig
    clock: StartClock
    began_at: float
    remaining: SurvivingRanks | None = None


@dataclass(frozen=True)
class _Rank:
    """Objects that all starts of training in this process share.

    Args:
        world: place of this rank in a launch of several replicas; None without a study.
        library: log lines of libraries.
    """

    world: ReplicaWorld | None
    signals: StopSignals
    held: LockedFolders
    library: LibraryLines
    features: Features


def _train(
    config: RunConfig,
    started_at: float,
    world: ReplicaWorld | None,
    signals: StopSignals,
    held: LockedFolders,
    features: Callable[[], Features],
) -> str:
    """Train to the end; where replicas are left out, this rank starts once more or ends. Returns how it ended."""
    library = LibraryLines()
    with frozen_imports(), library, compiled_when_called(), names_checked():
        from megasdc.train import build  # noqa: F401 - all of PyTorch and DeepSpeed
        from megasdc.train.isolation import free_previous_run
        from megasdc.train.process import StartClock

        rank = _Rank(world, signals, held, library, features())

    start = _Start(config, StartClock(started_at), started_at)
    while not isinstance(remaining := _train_from(start, rank), str):
        began_at = time.monotonic()
        free_previous_run()
        whole = check_layout(config, remaining.launch_size)
        fewer = with_replicas(config, whole, remaining.replicas(whole))
        start = _Start(fewer, StartClock(started_at, again=True), began_at, remaining)
    return remaining


def _train_from(start: _Start, rank: _Rank) -> SurvivingRanks | str:
    """Train until the run ends or leaves replicas out; returns how it ended, or the ranks that go on, with this one."""
    from megasdc.parallel import groups
    from megasdc.train.build import build_run
    from megasdc.train.isolation import IsolationError, leave_replicas_out

    signals, held, library = rank.signals, rank.held, rank.library
    try:
        run = build_run(start.config, start.clock, signals, held, rank.features, rank.world, start.remaining)
    except BaseException:
        library.keep_on_console()
        raise
    library.keep_in(run.folder, run.dims.rank)
    if run.dims.rank == 0:
        logger.info("ready after %.1f s, at step %d of %d", time.monotonic() - start.began_at, run.step, run.steps)
    if signals.start is not None:
        signals.start.close()
    first = run.step
    try:
        train(run)
    except IsolationError as error:
        step, wrong = error.step, error.ranks
    else:
        if run.dims.rank == 0:
            report_end(run, first)
        run.events.close()
        groups.shutdown()
        if run.end.error is not None:
            raise run.end.error
        if run.step >= run.steps:
            return ALL_DONE
        assert run.end.reason is not None, f"the loop has ended at step {run.step} of {run.steps}"
        return f"stopped at step {run.step} of {run.steps}: {run.end.reason}"
    remaining = leave_replicas_out(run, step, wrong, start.remaining, held)
    if run.launch_dims.rank in remaining.ranks:
        set_up_logging(int(os.environ["RANK"]))
        return remaining
    logger.warning("this rank ends: its replica was found wrong in step %d, and is left out", step)
    return f"left out: its replica was found wrong in step {step}"


def train(run: Run) -> None:
    """Run steps until the run is complete or has a reason to stop, from the step from which it continues.

    Raises:
        IsolationError: replicas are wrong, without which the others can go on; on all ranks.

    Collective: all ranks of the world.
    """
    from megasdc.train.isolation import IsolationError

    hooks = tuple(run.hooks)
    try:
        for hook in hooks:
            hook.on_start(run)
        while not run.is_last_step:
            train_step(run)
        for hook in hooks:
            hook.on_end(run)
    except IsolationError:
        for hook in hooks:
            hook.before_isolation(run)
        raise
    finally:
        for hook in hooks:
            hook.close()


def train_step(run: Run) -> None:
    """Run one step of a started run, with all hooks before and after it.

    Collective: all ranks of the world.
    """
    for hook in tuple(run.hooks):  # a copy: an observer may be attached or removed meanwhile
        hook.before_step(run)
    result = run.engine.train_step(run.batches)
    run.progress.step = result.step
    run.progress.tokens += result.tokens
    run.progress.samples += result.micro_batches * run.engine.micro_batch_size
    run.progress.skipped_steps += result.skipped is not None
    if result.is_finite:
        run.progress.finite_step = result.step
    for hook in tuple(run.hooks):
        hook.after_step(run, result)


def report_end(run: Run, first: int) -> None:
    """Report the end of a run that did not fail, as a line and an event; a launch that trained nothing is a warning.

    ``first``: the step after which this launch began.
    """
    reason = run.end.reason or ALL_DONE
    if not run.end.reason and first >= run.steps:
        logger.warning(
            "nothing to train: %s is already at step %d of %d; for a new run set another megasdc.logging.run_dir, to "
            "go on raise megasdc.training.steps",
            run.folder,
            run.step,
            run.steps,
        )
    else:
        skipped = f"; {run.progress.skipped_steps} steps were skipped" if run.progress.skipped_steps else ""
        logger.info("stopped at step %d of %d: %s%s", run.step, run.steps, reason, skipped)
    run.events.emit("end", "run", step=run.step, reason=reason, results=run.end.results)


def report_failure(
    folder: Path | None, code: int, error: BaseException, process_started: float, held: LockedFolders
) -> None:
    """Write the event ``end/failed`` to the run folder, for the summary and the report of the run.

    Nothing is written to a folder that does not exist, is not known (None), or is held by another launch;
    ``process_started``: seconds since the epoch.
    """
    if folder is None or isinstance(error, LaunchError):
        return  # a refused start is not part of the run in that folder, which may be running
    text = str(error) or repr(error)
    try:
        if not folder.is_dir():
            return
        with launches_locked_out(held.folder or folder, held.token, logger.warning) as free:
            if not free:
                return
            events = EventLog(folder, int(os.environ.get("RANK", "0")), held.origin)
            events.emit(
                "end",
                "failed",
                exit_code=code,
                error=type(error).__name__,
                message=text.splitlines()[0],
                process_started=process_started,
            )
            events.close()
    except OSError as problem:
        logger.warning("the event of the end could not be written into %s: %s", folder, problem)


Function = Callable[..., Any]


IMPORTED_LATER = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")
"""Modules imported when any optimizer is created: Dynamo by PyTorch, Muon by DeepSpeed."""


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Context in which ``torch.compile`` of a function compiles it, with the same options, at its first call.

    Megatron-core (0.16.1, ``core/jit.py``) so decorates every fused function on import, and DeepSpeed (0.19.8) its
    Muon, which it imports when it builds an optimizer of any kind (``zero/utils.py``). The first decoration imports
    Inductor: a fifth of the processor time of a rank's imports, even if none of these functions is called. Modules that
    the optimizer would import later are imported at the end of the block.
    """
    import torch

    compile_now: Function = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        return _later(model, compile_now, options) if inspect.isfunction(model) else compile_now(model, **options)

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
        for name in IMPORTED_LATER:
            with suppress(ImportError):  # as DeepSpeed, which works without it
                importlib.import_module(name)
    finally:
        torch.compile = compile_now  # type: ignore[assignment]


def _later(function: Function, compile_now: Function, options: dict[str, Any]) -> Function:
    compiled = functools.cache(lambda: compile_now(function, **options))

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call
