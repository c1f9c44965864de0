"""When does a run leave micro-batches out, what do all ranks know of it, and what is told?"""

from __future__ import annotations

import logging
import math
import socket
import statistics
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from megasdc.config import DropComputeSection
from megasdc.config.drop_sections import (
    AUTO,
    COMPUTED,
    DISCARD,
    EXTRA_STEPS,
    LARGER_BATCH,
    PREDICTIVE,
    RESAMPLE,
)
from megasdc.dropcompute.compensation import expected_steps, extra_steps, larger_batch
from megasdc.dropcompute.decisions import (
    ClockDecisions,
    DecisionLog,
    ReplayedDecisions,
    StepDecisions,
    read_decisions,
)
from megasdc.dropcompute.gate import ReplicaGate, new_replica_group, replica_ranks
from megasdc.dropcompute.time_log import TimeLog
from megasdc.dropcompute.tuning import TimeWindow, Tuning, tune
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import EngineHook
from megasdc.engine.step_times import StepTimes
from megasdc.errors import ConfigError
from megasdc.metrics.writer import MetricsWriter
from megasdc.parallel.collectives import gather_objects
from megasdc.train.garbage import CollectionTimer
from megasdc.train.run import Run, StepHook

logger = logging.getLogger(__name__)

EVENT_KIND = "drop"
SLOW_SHARE = 0.9
"""Share of steps with micro-batches left out from which a replica is called slow,"""
UNLUCKY_SHARE = 0.5
"""if the median replica is below this one."""


class DropCompute(StepHook, EngineHook):
    """Runs the section `drop_compute`: measures, chooses the threshold, decides, counts and tells.

    What all ranks do alike follows from counts that they agree on in every step; only whether to start the next
    micro-batch is decided on one rank of each replica.

    Args:
        section: the section, enabled.
        run: with engine and loader, at the step it goes on from.
        writer: where rank 0 writes metrics; null on other ranks.
        interval: steps between metrics.

    Raises:
        ConfigError: decisions to replay cannot be read, or do not reach to the end of the run.

    Collective: all ranks of the world.
    """

    def __init__(self, section: DropComputeSection, run: Run, writer: MetricsWriter | None, interval: int) -> None:
        engine, dims = run.engine, run.dims
        self._section, self._run, self._writer, self._interval = section, run, writer, interval
        self._base_steps = run.steps
        self._micro_batches = engine.gradient_accumulation_steps()
        self._tau_s = math.inf if section.threshold in ("auto", "inf") else float(section.threshold)
        self._tuned_at: int | None = None
        self._drop_rate: float | None = None
        self._dropped = self._planned = 0
        self._dropped_before = self._planned_before = 0
        self._limited = False
        self._recent: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=section.window_steps)
        self._window: TimeWindow | None = None
        self._log: DecisionLog | None = None
        self._time_log: TimeLog | None = None
        self._hosts: list[str] = []
        self._first_step = run.step + 1
        self._counts = torch.zeros(dims.data, dtype=torch.int64)
        self._exchange: Any = None
        self._group = new_replica_group(dims)
        self._replayed = self._read_replayed()
        self.times = StepTimes(engine.device)
        sigmas = section.sigmas if section.rule == PREDICTIVE else None
        self._clock = ClockDecisions(self.times, section.device_lag, sigmas)
        self._replay = ReplayedDecisions(dims.dp_rank)
        decisions: ClockDecisions | ReplayedDecisions = self._clock if self._replayed is None else self._replay
        self.gate = ReplicaGate(dims, self._group, decisions.decide, decisions.time_left_s, section.min_micro_batches)
        self._garbage = CollectionTimer()
        engine.gate = self.gate
        engine.divides_by_used = section.gradients == COMPUTED
        engine.hooks.insert(0, self.times)
        engine.hooks.append(self)

    def _read_replayed(self) -> dict[int, StepDecisions] | None:
        """What rank 0 reads, on all ranks.

        Collective: all ranks of the world.
        """
        path, dims = self._section.replay_decisions, self._run.dims
        if path is None:
            return None
        found: dict[int, StepDecisions] | ConfigError | None = None
        if dims.rank == 0:
            try:
                found = read_decisions(path, dims.data, self._micro_batches)
            except ConfigError as error:
                found = error
        found = gather_objects(found, self._run.host_group)[0]
        if isinstance(found, ConfigError):
            raise found
        return found

    # --- a run --------------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Open the logs, and learn on which host each replica decides.

        Raises:
            ConfigError: decisions to replay are missing.
        """
        dims, section = run.dims, self._section
        self._first_step = run.step + 1
        self._prolong(run)
        if self._replayed is not None and not run.is_last_step:
            missing = next((step for step in range(run.step + 1, run.steps + 1) if step not in self._replayed), None)
            if missing is not None:
                raise ConfigError(
                    f"megasdc.drop_compute.replay_decisions: {section.replay_decisions} has no decisions of step "
                    f"{missing}, this run has {run.steps} steps; use the log of a run that is as long."
                )
        hosts = gather_objects(socket.gethostname(), run.host_group)
        self._hosts = [hosts[replica_ranks(dims, replica)[0]] for replica in range(dims.data)]
        if section.record_times and dims.tp_rank == 0:
            self._time_log = TimeLog(run.folder, dims, self._micro_batches)
        if dims.rank == 0:
            self._log = DecisionLog(run.folder, run.step, dims.data, self._micro_batches)
            run.events.emit(EVENT_KIND, "start", step=run.step, tau_s=_plain(self._tau_s), rule=self._describe())
            logger.info("DropCompute: %s", self._describe())

    def before_step(self, run: Run) -> None:
        """Decide whether this step may leave micro-batches out.

        Raises:
            ConfigError: decisions to replay are missing.
        """
        engine, step = run.engine, run.step + 1
        if self._replayed is not None:
            engine.micro_batches = self._replayed[step].planned if step in self._replayed else self._micro_batches
            if step not in self._replayed:
                raise ConfigError(
                    f"megasdc.drop_compute.replay_decisions: {self._section.replay_decisions} has no decisions of step "
                    f"{step}; use the log of a run that is as long."
                )
            self._replay.begin(self._replayed[step])
            return
        if self._is_due_to_measure(step):
            self._window = TimeWindow(self._section.window_steps, self._micro_batches, run.dims)
            engine.micro_batches = self._micro_batches
        self._clock.tau_s = self._tau_s
        warming_up = step < self._first_step + self._section.warmup_steps
        self.gate.open = warming_up or self._window is not None or self._limited or self._tau_s == math.inf

    def _is_due_to_measure(self, step: int) -> bool:
        section = self._section
        measures = section.threshold == AUTO or section.compensation == LARGER_BATCH
        if not measures or self._window is not None or step < self._first_step + section.warmup_steps:
            return False
        if self._tuned_at is None:
            return True
        return bool(section.retune_interval) and step - self._tuned_at > section.retune_interval

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Tell all ranks how many micro-batches this replica has completed; nobody waits for it.

        Raises:
            RuntimeError: ranks of this replica have completed different numbers; with `check_agreement` alone.
        """
        if self._section.check_agreement:
            completed = gather_objects(engine.completed, self._group)
            if len(set(completed)) > 1:
                ranks = replica_ranks(engine.dims, engine.dims.dp_rank)
                raise RuntimeError(f"ranks {ranks} have completed {completed} micro-batches of one step")
        self._counts = torch.zeros(engine.dims.data, dtype=torch.int64)
        if engine.decides:
            self._counts[engine.dims.dp_rank] = engine.completed
        self._exchange = dist.all_reduce(self._counts, group=self._run.host_group, async_op=True)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count, log, pass samples over, look for what is wrong, and choose the threshold where it is time."""
        self.gate.finish()
        self._exchange.wait()
        completed = tuple(self._counts.tolist())
        engine, planned = run.engine, run.engine.micro_batches
        record, gc_s = self.times.take(), self._garbage.take()
        self._clock.learn(record)
        if self._time_log is not None:
            self._time_log.add(run.step, planned, record, gc_s)
        if self._log is not None:
            self._log.add(run.step, planned, completed)
        self._count(run, planned, completed)
        if self._section.samples == DISCARD and engine.completed < planned:
            run.loader.pass_over(planned - engine.completed, again=self._section.compensation == RESAMPLE)
        if self._window is not None:
            self._window.add(record)
            if self._window.is_full:
                self._tune(run, self._window)
        self._report(run)

    # --- what was left out --------------------------------------------------------------------------------------

    def _count(self, run: Run, planned: int, completed: tuple[int, ...]) -> None:
        dropped = planned * len(completed) - sum(completed)
        self._dropped += dropped
        self._planned += planned * len(completed)
        if not self.gate.open:
            self._recent.append((planned, completed))
        if dropped and run.dims.rank == 0:
            late = {str(replica): count for replica, count in enumerate(completed) if count < planned}
            run.events.emit(
                EVENT_KIND, "micro_batches", step=run.step, planned=planned, dropped=dropped, completed=late
            )
        if dropped and self._section.compensation == EXTRA_STEPS:
            self._prolong(run)
        if (
            not self.gate.open
            and len(self._recent) == self._recent.maxlen
            and run.step % self._section.window_steps == 0
        ):
            self._warn_of_slow_replicas(run)
        self._limit(run)

    def _prolong(self, run: Run) -> None:
        """Let the run and its stream reach as far as is needed now."""
        data, size = run.dims.data, run.engine.micro_batch_size
        if self._section.compensation == EXTRA_STEPS:
            run.steps = self._base_steps + extra_steps(self._dropped, self._micro_batches * data)
        steps = range(run.step + 1, run.steps + 1)
        if self._replayed is None:
            planned = len(steps) * max(run.engine.micro_batches, self._micro_batches)
        else:
            planned = sum(self._replayed[step].planned for step in steps if step in self._replayed)
        run.loader.dataset.prolong(run.loader.position.end_after(planned * size, data))

    def _limit(self, run: Run) -> None:
        """Leave nothing out while the last steps are above the largest drop rate."""
        if self._replayed is not None:
            return
        section = self._section
        dropped = sum(planned * len(completed) - sum(completed) for planned, completed in self._recent)
        allowed = section.max_drop_rate * section.window_steps * self._micro_batches * run.dims.data
        limited = dropped > allowed
        if self._limited:  # steps in which nothing may be left out move the window on, too
            if not limited:
                self._tell_limit(run, dropped, "below")
            else:
                self._recent.append((self._micro_batches, (self._micro_batches,) * run.dims.data))
        elif limited:
            self._tell_limit(run, dropped, "above")
        self._limited = limited

    def _tell_limit(self, run: Run, dropped: int, where: str) -> None:
        if run.dims.rank != 0:
            return
        rate = self._section.max_drop_rate
        run.events.emit(EVENT_KIND, "limit", step=run.step, dropped=dropped, max_drop_rate=rate, now=where)
        if where == "above":
            logger.warning(
                "step %d: %d micro-batches were left out in the last %d steps, more than drop_compute.max_drop_rate "
                "%g allows: nothing is left out until it is less",
                run.step,
                dropped,
                self._section.window_steps,
                rate,
            )

    def _warn_of_slow_replicas(self, run: Run) -> None:
        """Name replicas that are late in nearly every step while others are not."""
        steps = len(self._recent)
        late = [sum(done[replica] < planned for planned, done in self._recent) for replica in range(run.dims.data)]
        median = statistics.median(late)
        if run.dims.rank != 0 or median > UNLUCKY_SHARE * steps:
            return
        for replica, count in enumerate(late):
            if count < SLOW_SHARE * steps:
                continue
            ranks = replica_ranks(run.dims, replica)
            run.events.emit(
                EVENT_KIND,
                "slow_replica",
                step=run.step,
                replica=replica,
                ranks=ranks,
                on_host=self._hosts[replica],
                late_steps=count,
                of_steps=steps,
                median_of_replicas=median,
            )
            logger.warning(
                "replica %d (ranks %s, decides on %s) was past the threshold in %d of %d steps, the median replica in "
                "%g: it is slow, not unlucky, and its samples are %s; look at its hardware and at "
                "`megasdc dropcompute times`",
                replica,
                ranks,
                self._hosts[replica],
                count,
                steps,
                median,
                "taken ever later" if self._section.samples != DISCARD else "left out more than others'",
            )

    # --- the threshold ------------------------------------------------------------------------------------------

    def _tune(self, run: Run, window: TimeWindow) -> None:
        """Choose the threshold, the same on all ranks.

        Collective: all ranks of the world.
        """
        section = self._section
        given = None if section.threshold == AUTO else self._tau_s
        tuning = tune(window.gather(run.host_group), given, section.max_drop_rate, section.min_micro_batches)
        self._window, self._tuned_at = None, run.step
        self._tau_s, self._drop_rate = tuning.tau_s, tuning.drop_rate
        if section.compensation == LARGER_BATCH:
            run.engine.micro_batches = larger_batch(self._micro_batches, tuning.drop_rate)
            self._prolong(run)
        if run.dims.rank == 0:
            self._tell_tuning(run, tuning)

    def _tell_tuning(self, run: Run, tuning: Tuning) -> None:
        curve = tuning.curve
        run.events.emit(
            EVENT_KIND,
            "threshold",
            step=run.step,
            tau_s=_plain(tuning.tau_s),
            drop_rate=tuning.drop_rate,
            speedup=tuning.speedup,
            communication_s=tuning.communication_s,
            micro_batches=run.engine.micro_batches,
            expected_steps=expected_steps(self._base_steps, tuning.drop_rate),
            curve=None
            if curve is None
            else {
                "thresholds_s": curve.thresholds_s[:-1].tolist(),
                "speedup": curve.speedup[:-1].tolist(),
                "completed_share": curve.completed_share[:-1].tolist(),
            },
        )
        gain = "" if tuning.speedup is None else f", expected effective speed-up {tuning.speedup:.3f}"
        logger.info(
            "step %d: DropCompute threshold %.4g s%s, %.2f %% of micro-batches left out, %d micro-batches a step%s",
            run.step,
            tuning.tau_s,
            gain,
            100 * tuning.drop_rate,
            run.engine.micro_batches,
            self._length(tuning.drop_rate),
        )

    def _length(self, drop_rate: float) -> str:
        if self._section.compensation != EXTRA_STEPS:
            return ""
        return f", {expected_steps(self._base_steps, drop_rate)} steps in place of {self._base_steps}"

    # --- what is told -------------------------------------------------------------------------------------------

    def _describe(self) -> str:
        section = self._section
        if self._replayed is not None:
            return f"the decisions of {section.replay_decisions} are repeated"
        tau = "chosen after a window" if section.threshold == AUTO and self._tuned_at is None else f"{self._tau_s:g} s"
        after = f" after {section.warmup_steps} steps" if section.warmup_steps else ""
        return f"threshold {tau}, rule {section.rule}, samples {section.samples}, gradients {section.gradients}{after}"

    def _report(self, run: Run) -> None:
        if run.step % self._interval and not run.is_last_step:
            return
        dropped, planned = self._dropped - self._dropped_before, self._planned - self._planned_before
        self._dropped_before, self._planned_before = self._dropped, self._planned
        if self._writer is not None:
            values: dict[str, float | int] = {
                "drops/micro_batches": self._dropped,
                "drops/rate": dropped / planned if planned else 0.0,
            }
            if self._tau_s != math.inf:
                values["drops/threshold_s"] = self._tau_s
            self._writer.write(run.step, values)
        if dropped and run.dims.rank == 0:
            share = 100 * dropped / planned
            length = self._length(self._dropped / self._planned)
            logger.info("step %d | %d micro-batches left out, %.2f %%%s", run.step, dropped, share, length)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Threshold and counters."""
        return {
            "tau_s": _plain(self._tau_s),
            "tuned_at": self._tuned_at,
            "drop_rate": self._drop_rate,
            "micro_batches": self._run.engine.micro_batches,
            "dropped": self._dropped,
            "planned": self._planned,
            "dropped_before": self._dropped_before,
            "planned_before": self._planned_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the threshold that was chosen; one that is given in the configuration wins."""
        self._dropped, self._planned = state["dropped"], state["planned"]
        self._dropped_before, self._planned_before = state["dropped_before"], state["planned_before"]
        if self._section.threshold == AUTO:
            self._tau_s = math.inf if state["tau_s"] is None else state["tau_s"]
            self._tuned_at, self._drop_rate = state["tuned_at"], state["drop_rate"]
        if self._section.compensation == LARGER_BATCH and state["tuned_at"] is not None:
            self._tuned_at = state["tuned_at"]
            self._run.engine.micro_batches = state["micro_batches"]

    def close(self) -> None:
        """Close the logs."""
        for log in (self._log, self._time_log):
            if log is not None:
                log.close()
        self._garbage.close()


def _plain(tau_s: float) -> float | None:
    """For JSON: null where it is infinite."""
    return None if math.isinf(tau_s) else tau_s
