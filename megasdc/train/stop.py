"""Reasons to stop a run before its last step: signals, time, skipped steps, no room, a folder that another launch took.

All ranks agree on them, but on the last, which is an error.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasdc.checkpoint.verify import find_way_back
from megasdc.common import durable as room
from megasdc.common.errors import LaunchError, NonFiniteError, StorageError
from megasdc.common.run_lock import STALE_S, RunLock
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.parallel.collectives import MIN, Field, gather_objects
from megasdc.train.signals import StopSignals

logger = logging.getLogger(__name__)


LAST_SKIPPED = 10
"""Number of last steps of a run that, if all were skipped for NaN or Inf, make it end with an error."""


TIME_LIMIT = "time limit"
"""The reason of a stop at ``training.time_limit_s``."""


def where_to_go_on(run: Run, folder: Path | None) -> str:
    """The checkpoint to go back to after NaN and Inf, in a sentence that says if there is none.

    Args:
        folder: folder of the run's checkpoints; None: it has none.

    Collective: all ranks of the world.
    """
    text = ""
    if run.dims.rank == 0:
        try:
            way = None if folder is None else find_way_back(folder)
        except OSError as error:
            text = f"the checkpoints in {folder} cannot be listed: {error.strerror}"
        else:
            text = f"there is no checkpoint to go back to in {folder}: start anew in another folder"
            if way is not None:
                text = f"go back to {way}, with megasdc.checkpoint.resume_at_most={way.step}"
    found: str = gather_objects(text, run.host_group)[0]
    return found


class FolderWatch(Hook):
    """Ends a run whose folder another launch has taken over, as one may after its host was frozen for ``STALE_S``.

    Of all hooks only `Health` and `LinkPings` come before it: reports and saves of a step come after.
    """

    def __init__(self, locks: Sequence[RunLock]) -> None:
        self.locks = locks

    def on_start(self, run: Run) -> None:
        """Emit an event for each stale lock that was replaced, once the folders are this launch's alone."""
        for lock in self.locks:
            lock.wait_until_alone()
            if lock.replaced is not None:
                run.events.emit("start", "lock_taken_over", folder=str(lock.folder), left_by=lock.replaced)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Check that this launch still holds the locks."""
        for lock in self.locks:
            if lock.taken_by is not None:
                raise LaunchError(
                    f"{lock.folder} was taken by {lock.taken_by}: this run did not update it for {STALE_S:g} s, or "
                    "its supervisor took it for ended; this run ends, so that only one of them writes there"
                )


class SkipWatch(Hook):
    """Reports every skipped step with its reason, and ends a run that skips too many in a row, or all at its end.

    Steps that are skipped while a dynamic loss scale of fp16 adapts are not for NaN or Inf: the loss is finite, and
    scaled gradients are not until the scale is low enough; DeepSpeed raises an error where it cannot get lower.

    Args:
        limit: number of skipped steps in a row that ends the run.
        folder: folder of the run's checkpoints; None: it has none.
    """

    saved_as = "SkipWatch"

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self.limit, self._folder = limit, folder
        self.in_a_row = 0
        self.for_values = 0
        """Number of last steps in a row that were skipped for NaN or Inf, not for a loss scale that adapts."""
        self._reason = ""

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count, report, and fail past the limit."""
        if result.skipped is None:
            self.in_a_row = self.for_values = 0
            return
        self.in_a_row += 1
        adapts = run.engine.fp16_enabled() and run.engine.dynamic_loss_scale() and math.isfinite(result.loss)
        self.for_values = 0 if adapts else self.for_values + 1
        place = run.progress.skip_place or "its origin is not known; sdc.always_on.finite locates it"
        run.events.emit(
            "skip",
            "optimizer_step",
            step=result.step,
            reason=result.skipped,
            place=place,
            loss_scale=result.loss_scale,
            stream_end=run.stream_end,
        )
        self._reason = f"{result.skipped}; {place}"
        if run.dims.rank == 0:
            logger.warning("step %d was skipped: %s", result.step, self._reason)
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"the optimizer skipped {self.in_a_row} steps in a row, up to step {result.step}: {self._reason}; "
                f"training.max_skipped_steps is {self.limit}. {self._advice(run)}"
            )

    def on_end(self, run: Run) -> None:
        """End a run with an error if its last steps were all skipped; one that was asked to stop has not ended.

        Its checkpoint holds the count, so that the start that goes on from it ends with the error.

        Collective: all ranks of the world.
        """
        if run.end.reason is not None and run.step < run.steps:
            return
        if self.for_values >= min(LAST_SKIPPED, run.steps) and run.end.error is None:
            run.end.error = NonFiniteError(
                f"the optimizer skipped the last {self.for_values} steps, up to step {run.step}: {self._reason}. "
                f"{self._advice(run)}"
            )

    def _advice(self, run: Run) -> str:
        advice = where_to_go_on(run, self._folder)
        return (
            f"What to do: {advice}; use a lower learning rate, or look for the first non-finite result in the events "
            "of kind nonfinite"
        )

    def state_dict(self) -> dict[str, Any]:
        """Number of steps skipped in a row, and how many of them for NaN or Inf."""
        return {"in_a_row": self.in_a_row, "for_values": self.for_values, "reason": self._reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; a checkpoint of an earlier version has the first number alone."""
        self.in_a_row = state["in_a_row"]
        self.for_values, self._reason = state.get("for_values", 0), state.get("reason", "")


def stop_without_room(run: Run, folder: Path, waited_s: float) -> None:
    """Let a run end after this step, on all ranks, since a folder has had no room for too long."""
    if run.end.error is None:
        run.end.reason = f"no room in {folder}"
        run.end.error = StorageError(
            f"{folder} has had no room, or its disk has failed, for {waited_s:.0f} s, up to step {run.step}; "
            f"megasdc.logging.wait_for_room_s is {room.limit_s():g}{_waiting()}. What to do: free space, or mend it, "
            "then start it again: what was saved before is kept",
            no_room=True,
        )
        run.events.emit("stop", "requested", step=run.step, reason=run.end.reason)


def _waiting() -> str:
    """Part of a sentence on what this rank could not write yet; empty where only others wait."""
    return f" ({', '.join(files)})" if (files := room.waiting_files()) else ""


class RoomWatch(Hook):
    """Lets a run train on while what it writes has no room and is kept, and stops it after a limit.

    Args:
        limit_s: seconds without room until the run stops; 0: nothing is kept, and a write without room is an error.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._waited_s, self._lost = limit_s, 0.0, 0
        self._since = 0.0
        self._waiting_s = Field(room.waiting_s)
        self.fields = (self._waiting_s,)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Evaluate the longest time that a rank has waited for room, as reduced in this step."""
        self.update(run, self._waiting_s.value)

    def update(self, run: Run, waits_s: float) -> None:
        """Report the begin and the end of missing room, and stop the run once it has lasted for too long.

        Args:
            waits_s: seconds that a rank has waited, the longest of all ranks.
        """
        before_s, self._waited_s = self._waited_s, waits_s
        if waits_s and not before_s:
            self._since = time.monotonic() - waits_s
            files = room.waiting_files()
            run.events.emit(
                "storage", "no_room", step=run.step, folder=str(run.folder), limit_s=self._limit_s, waiting=files
            )
            if run.dims.rank == 0:
                logger.warning(
                    "step %d: %s has no room, or its disk fails: training goes on, and its end waits, for up to %g s, "
                    "and what it writes is kept%s",
                    *(run.step, run.folder, self._limit_s, _waiting()),
                )
        elif before_s and not waits_s:
            lost, self._lost = room.lost_lines() - self._lost, room.lost_lines()
            waited_s = time.monotonic() - self._since  # a save may have waited since the last look
            run.events.emit("storage", "has_room", step=run.step, waited_s=round(waited_s, 1), lost_lines=lost)
            if run.dims.rank == 0:
                logger.warning("step %d: %s has room again, after %.0f s", run.step, run.folder, waited_s)
        if waits_s > self._limit_s:
            stop_without_room(run, run.folder, waits_s)


class LastLines(Hook):
    """Lets a run that has taken its last step wait for room for what is kept, for as long as its steps would.

    Comes after the last save, on all ranks: one that ended alone would leave the others without a peer.

    Args:
        watch: room watch of the same run.
    """

    def __init__(self, watch: RoomWatch) -> None:
        self._watch = watch

    def on_end(self, run: Run) -> None:
        """Wait; a run that is asked to end, or that ends with an error, does not.

        Collective: all ranks of the world.
        """
        while run.end.error is None:
            ranks = gather_objects((room.waiting_s(), room.is_asked_to_end()), run.host_group)
            waits_s = max(seconds for seconds, _ in ranks)
            self._watch.update(run, waits_s)
            if not waits_s or any(is_asked for _, is_asked in ranks):
                break
            run.enter("SAVE")  # again: it waits, and is not stuck
            time.sleep(room.RETRY_S)


class StopWatch(Hook):
    """Stops a run at the next step boundary on SIGTERM, SIGUSR1 or SIGINT, at its time limit, or at a given step.

    Ranks may receive a signal at different moments, so they agree once a step on the largest; a signal that comes after
    the agreement has begun counts for the next step.

    Args:
        signals: stop signals received by this rank since it started.
        time_limit_s: seconds from ``started_at``; None: no limit.
        started_at: start of the time limit, on the clock of ``time.monotonic``.
        stop_step: last step of this part of the run; None: none.
    """

    def __init__(
        self, signals: StopSignals, time_limit_s: float | None, started_at: float, stop_step: int | None
    ) -> None:
        self.signals = signals
        self.stop_step = stop_step
        self.deadline = None if time_limit_s is None else started_at + time_limit_s
        self._signal = Field(lambda: self.signals.received)
        self._time_left_s = Field(self._own_time_left_s, MIN, default=math.inf)
        self.fields = (self._signal, self._time_left_s)

    def on_start(self, run: Run) -> None:
        """Stop before the first step if a signal came while the run was built; the time limit is not checked yet."""
        room.end_waits_when(self._is_due)
        self._decide(run, max(gather_objects(self.signals.received, run.host_group)), time_is_up=False)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Stop if a rank has a reason."""
        self._decide(run, int(self._signal.value), time_is_up=self._time_left_s.value <= 0)

    def _is_due(self) -> bool:
        left_s = self._own_time_left_s()
        return bool(self.signals.received) or (left_s is not None and left_s <= 0)

    def _own_time_left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    def _decide(self, run: Run, number: int, *, time_is_up: bool) -> None:
        if number:
            run.end.reason = f"signal {signal.Signals(number).name}"
        elif time_is_up:
            run.end.reason = TIME_LIMIT
        elif self.stop_step is not None and run.step >= self.stop_step:
            passed = "" if run.step == self.stop_step else ", which the run had passed before"
            run.end.reason = f"training.stop_step {self.stop_step}{passed}"
        run.end.must_stop_soon = bool(number) or time_is_up
        if run.end.reason:
            run.events.emit("stop", "requested", step=run.step, reason=run.end.reason)
