"""Checkpoints in the memory of hosts: taken every few steps, they stay until the run has ended without an error."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from megasdc.checkpoint.ranks import CheckpointGroup, RankProblem, describe_error, find_place, raise_on_all_ranks
from megasdc.checkpoint.snapshots.held import (
    RESTORE,
    Lineage,
    claim,
    forget,
    mark_verified_up_to,
    memory_folder,
    remove_forgotten,
    write_line,
)
from megasdc.checkpoint.snapshots.memory_budget import GIB, why_not
from megasdc.checkpoint.snapshots.memory_saver import MemorySaver
from megasdc.checkpoint.snapshots.recover import InMemoryCheckpoint, find_in_memory
from megasdc.checkpoint.verify import find_corruption
from megasdc.common.errors import ConfigError, StorageError
from megasdc.common.host import is_own_folder
from megasdc.config.load import RunConfig
from megasdc.config.sections import MemorySection
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.parallel.collectives import gather_objects
from megasdc.train.isolation import own_address
from megasdc.train.saving.saver import OncePerStep, RunState, checkpoint_folder, wanted_dims

logger = logging.getLogger(__name__)


class MemoryCheckpoints(Hook):
    """Takes snapshots that outlive the ranks.

    Args:
        writer: of metrics, on rank 0 alone.
        before_save: called on all ranks. A hook before this one must call ``wait_for_copy``.

    Collective: all ranks of the world.
    """

    def __init__(
        self, section: MemorySection, run: Run, state: RunState, writer: MetricsWriter | None, before_save: OncePerStep
    ) -> None:
        self._interval, self._state, self._writer, self._before_save = section.interval, state, writer, before_save
        self._may_go_on, self._is_off = section.without_room == "go_on", False
        self._folder, self._start = memory_folder(run.events.origin.run), _number_of_start(run)
        self._place = find_place(CheckpointGroup("node_local", run.host_group, run.events))
        self._saver = MemorySaver(
            self._folder,
            run.events.origin.run,
            self._start,
            run.dims,
            self._place,
            run.engine.device,
            self._interval,
        )
        self._partners = section.partners
        self._first = self._taken = run.step
        self._has_old = self._saver.adopt(run.step)
        self._has_looked = False
        self._was_taken = True
        self.fields = self._saver.fields

    def on_start(self, run: Run) -> None:
        """Find a partner."""
        if self._partners:
            self._join_partners(run)

    def _look(self, run: Run) -> None:
        """Look whether memory has room, and take it; after a step, since moments begin with the first.

        Raises:
            ConfigError: it has none, and the run may not go on without; on all ranks.
        """
        size, there = self._saver.measure(run.engine, self._state.of(run))
        largest = max(gather_objects(size, run.host_group))
        if run.dims.rank == 0:
            run.events.emit("memory", "needs", step=run.step, rank_bytes=largest)
        if (problem := why_not(size - there, run.host_group, is_asked=True, with_names=True)) is not None:
            if self._may_go_on:
                self._is_off = True
                if run.dims.rank == 0:
                    logger.warning("memory: no snapshots are taken: %s", problem)
                    run.events.emit("warning", "memory_without_room", step=run.step, message=problem)
                return
            if self._place.leader and not self._has_old:
                shutil.rmtree(self._folder, ignore_errors=True)  # it holds nothing
            raise ConfigError(f"megasdc.checkpoint.memory.interval is {self._interval}, but {problem}; or set it to 0")
        self._saver.reserve(run.engine, self._state.of(run))
        if run.dims.rank == 0:
            logger.info("every %d steps a snapshot stays in memory: %.2f GiB a rank", self._interval, size / GIB)

    def _join_partners(self, run: Run) -> None:
        problem = self._saver.join_partners(own_address(run))
        if problem is not None and run.dims.rank == 0:
            logger.warning("memory: no host keeps copies for another: %s", problem)
            run.events.emit("warning", "memory_without_partners", step=run.step, message=problem)

    def wait_for_copy(self) -> None:
        """Wait until the snapshot under way is whole; before anything changes in a step."""
        self._saver.wait_for_copy()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Take a snapshot when due."""
        if not self._has_looked and result.skipped is None:
            self._has_looked = True
            self._look(run)
        if self._is_off:
            return
        if (problem := self._saver.advance()) is not None and run.dims.rank == 0:
            logger.warning("memory: no snapshot was kept: %s; training goes on", problem)
            run.events.emit("warning", "memory_not_kept", step=run.step, message=problem)
        if self._has_old and self._saver.whole > self._first:
            self._has_old = False
            self._forget_old(run)
        is_kept = isinstance(run.end.error, StorageError)  # perhaps the only place where the last step can be saved
        if (run.step % self._interval or run.is_last_step) and not is_kept:
            return
        if run.progress.finite_step <= self._taken:  # the state is that of the last snapshot, and may lead nowhere
            return
        run.enter("SAVE")
        self._before_save(run)
        state = self._state.of(run)
        if (wrong := state.wrong_place) is not None:  # of all ranks alike: it leads nowhere
            run.enter("BETWEEN")
            if run.dims.rank == 0:
                logger.warning("memory: step %d is not kept: %s", run.step, wrong)
                run.events.emit("warning", "memory_not_kept", step=run.step, message=wrong)
            return
        if is_kept:
            self._saver.finish()
        taken = self._saver.begin(run.engine, run.step, state)
        run.progress.paused_s += self._saver.stalled_s if taken else 0.0
        self._taken = run.step if taken else self._taken
        if is_kept:
            self._saver.finish()
        run.enter("BETWEEN")
        if self._was_taken and not taken and run.dims.rank == 0:  # the first of several
            run.events.emit("skip", "memory_snapshot", step=run.step, skipped=self._saver.skipped)
            logger.warning(
                "memory: step %d is not kept: those before are still being made whole; a larger interval keeps up",
                run.step,
            )
        self._was_taken = taken
        if self._writer is not None:
            self._writer.write(
                run.step,
                {
                    "memory/step": self._saver.whole,
                    "memory/stalled_s": self._saver.stalled_s,
                    "memory/skipped": self._saver.skipped,
                    "memory/failed": self._saver.failed,
                },
            )

    def _forget_old(self, run: Run) -> None:
        """Remove what earlier starts of the run hold here: all ranks have something newer.

        Collective: all ranks of the world.
        """
        if self._place.leader:
            try:
                forget(self._folder, lambda record: record.start == self._start)
            except OSError as error:
                logger.warning("memory: what is older cannot be removed: %s", error)
                run.events.emit("warning", "memory_not_removed", step=run.step, message=str(error))
        self._place.gather(None)  # no rank uses a slot again before

    def on_end(self, run: Run) -> None:
        """The run needs no memory any more; where no step was taken it may hold what nothing else does.

        Collective: all ranks of the world.
        """
        self._saver.close()
        if self._has_old and run.step == self._first and run.step < run.steps:
            return
        self._place.gather(None)  # a writer that still runs would make the folder again
        if self._place.leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def before_isolation(self, run: Run) -> None:
        """Wait until the last snapshot is whole, here and at the partner: the run goes on from it."""
        self._saver.finish()

    def close(self) -> None:
        """End the writer; what is held stays after an error."""
        self._saver.close()


def _number_of_start(run: Run) -> int:
    number = run.events.origin.attempt
    assert number is not None, "the start was counted"
    return number


def find_memory_checkpoint(config: RunConfig, run: Run) -> InMemoryCheckpoint | None:
    """The newest step that the hosts of this start hold; from now on it is this start's memory.

    Raises:
        StorageError: shared memory of a host cannot be written; on all ranks.

    Collective: all ranks of the world.
    """
    origin, section = run.events.origin, config.megasdc.checkpoint
    ranks = CheckpointGroup("node_local", run.host_group, run.events)
    place = find_place(ranks)
    problem: RankProblem | None = None
    if place.leader:
        folder = memory_folder(origin.run)
        try:
            remove_forgotten(claim(folder, f"{origin.run}.{origin.attempt}", section.memory.linger_s))
        except OSError as error:
            problem = describe_error(error, f"write {folder}")
    raise_on_all_ranks(problem, place, "nothing can be kept in memory")
    corrupt = any(place.gather(find_corruption(checkpoint_folder(config)) if place.leader else None))
    verified_only = section.require_verified == "always" or (section.require_verified == "auto" and corrupt)
    if section.resume == "never":
        return None
    dims, newest = wanted_dims(config, run), section.resume_at_most
    return find_in_memory(
        memory_folder(origin.run), origin.run, dims, ranks, newest=newest, verified_only=verified_only
    )


def keep_only(config: RunConfig, run: Run, found: InMemoryCheckpoint | None) -> None:
    """Remove from this host's memory all but the step that the run goes on from; None: nothing stays.

    Other hosts may hold more: from now on that does not count.
    """
    folder = memory_folder(run.events.origin.run)
    place = find_place(CheckpointGroup("node_local", run.host_group))
    if not place.leader:
        return
    shutil.rmtree(folder / RESTORE, ignore_errors=True)
    try:
        number = _number_of_start(run)
        line = Lineage(start=number) if found is None else found.line(number, place)
        write_line(folder, line)
        forget(folder, lambda record: (record.start, record.step) == (line.from_start, line.from_step))
    except OSError as error:
        logger.warning("memory: what is not used any more cannot be removed: %s", error)


def remove_step(run: Run, found: InMemoryCheckpoint) -> None:
    """Remove a step from this host's memory, and leave older ones."""
    if find_place(CheckpointGroup("node_local", run.host_group)).leader:
        try:
            forget(memory_folder(run.events.origin.run), lambda record: record.step != found.step)
        except OSError as error:
            logger.warning("memory: step %d cannot be removed: %s", found.step, error)


def mark_memory(folder: Path, step: int) -> None:
    """Note that an audit has agreed after a step; where that fails, a restart after corruption takes the disk."""
    if is_own_folder(folder):
        try:
            mark_verified_up_to(folder, step)
        except OSError as error:
            logger.warning("memory: step %d cannot be marked as verified: %s", step, error)
