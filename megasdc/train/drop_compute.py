"""The section `drop_compute` in a run: measurement, choice of the threshold, decisions and counts.

Report of dropped micro-batches: events, log lines and metrics of rank 0.
"""

from __future__ import annotations

import logging
import math
import socket
from dataclasses import dataclass
from typing import Any

from megasdc.common.errors import ConfigError
from megasdc.config.drop_compute import (
    AUTO,
    BACKWARD_PASS,
    COMPUTED,
    DISCARD,
    EXTRA_STEPS,
    LARGER_BATCH,
    PREDICTIVE,
    RESAMPLE,
    DropComputeSection,
    largest_batch,
)
from megasdc.dropcompute.gate import (
    ClockDecisions,
    DecisionLog,
    RecentSteps,
    ReplayedDecisions,
    ReplicaGate,
    SlowReplica,
    StepDecisions,
    TimeLog,
    new_replica_group,
    read_decisions,
    replica_ranks,
)
from megasdc.dropcompute.tuning import (
    TOLERANCE,
    TimeWindow,
    Tuning,
    WorkBalance,
    expected_steps,
    extra_steps,
    tune,
    tune_larger_batch,
)
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.partial_backward import PartialBackward
from megasdc.engine.step_times import StepTimes
from megasdc.metrics.writer import MetricsWriter
from megasdc.parallel.collectives import Field, gather_objects
from megasdc.train.process import CollectionTimer

logger = logging.getLogger(__name__)

EVENT_KIND = "drop"


@dataclass(frozen=True)
class Interval:
    """Steps between two reports, of all replicas.

    Args:
        dropped: micro-batches that were not started.
        ended: backward passes that were ended.
        left_out: shares of transformer layers that these left out, summed.
        planned: micro-batches planned.
    """

    dropped: int
    ended: int
    left_out: float
    planned: int

    @property
    def rate(self) -> float:
        """Share of the planned micro-batches that was dropped, ended backward passes by what they left out."""
        return (self.dropped + self.left_out) / self.planned if self.planned else 0.0


class DropReport:
    """Reports DropCompute's figures on rank 0; does nothing on other ranks, where ``writer`` is None.

    ``steps``: number of steps of the run, before any compensation; ``interval``: number of steps between metrics.
    """

    def __init__(
        self, section: DropComputeSection, run: Run, steps: int, writer: MetricsWriter | None, interval: int
    ) -> None:
        self._section, self._run, self._steps = section, run, steps
        self._writer, self._interval = writer, interval
        self._speaks = run.dims.rank == 0

    def start(self, tau_s: float | None) -> None:
        """Report the rule at the start of a run; ``tau_s``: threshold in seconds, None: it will be chosen."""
        if not self._speaks:
            return
        rule = self._describe(tau_s)
        self._run.events.emit(EVENT_KIND, "start", step=self._run.step, rule=rule)
        logger.info("DropCompute: %s", rule)

    def _describe(self, tau_s: float | None) -> str:
        section = self._section
        if section.replay_decisions is not None:
            return f"the decisions of {section.replay_decisions} are replayed"
        tau = f"chosen after {section.window_steps} measured steps" if tau_s is None else f"{tau_s:g} s"
        after = f", not in the first {section.warmup_steps} steps" if section.warmup_steps else ""
        if section.granularity == BACKWARD_PASS:
            after = f", backward passes end at it{after}"
        return f"threshold {tau}, rule {section.rule}, samples {section.samples}, gradients {section.gradients}{after}"

    def step(self, decisions: StepDecisions) -> None:
        """Report a finished step."""
        if not ((decisions.dropped or decisions.ended) and self._speaks):
            return
        planned = decisions.planned
        late = {str(replica): done for replica, done in enumerate(decisions.completed) if done < planned}
        ended = {str(replica): done for replica, done in decisions.ended.items()}
        layers: dict[str, Any] = {"layers": ended} if ended else {}
        self._run.events.emit(
            EVENT_KIND,
            "micro_batches",
            step=self._run.step,
            planned=planned,
            dropped=decisions.dropped,
            completed=late,
            **layers,
        )

    def limit(self, dropped: float, limited: bool) -> None:
        """Report that the largest drop rate was exceeded, or is kept again."""
        if not self._speaks:
            return
        section, step = self._section, self._run.step
        rate = section.max_drop_rate
        now = "above" if limited else "below"
        self._run.events.emit(EVENT_KIND, "limit", step=step, dropped=dropped, max_drop_rate=rate, now=now)
        if limited:
            logger.warning(
                "step %d: %.10g micro-batches were dropped in the last %d steps%s, more than "
                "drop_compute.max_drop_rate %g allows: none is dropped until the number falls below it",
                step,
                dropped,
                section.window_steps,
                ", ended backward passes by the layers that they left out"
                if section.granularity == BACKWARD_PASS
                else "",
                rate,
            )

    def slow_replica(self, slow: SlowReplica, host: str) -> None:
        """Warn of a replica that is late in nearly every step while others are not."""
        if not self._speaks:
            return
        ranks = replica_ranks(self._run.dims, slow.replica)
        self._run.events.emit(
            EVENT_KIND,
            "slow_replica",
            step=self._run.step,
            replica=slow.replica,
            ranks=ranks,
            on_host=host,
            late_steps=slow.late_steps,
            of_steps=slow.of_steps,
            median_of_replicas=slow.median,
        )
        logger.warning(
            "replica %d (ranks %s, decides on %s) was past the threshold in %d of %d steps, the median replica in %g: "
            "it is persistently slow, and its samples are %s; look at its hardware and at `megasdc dropcompute times`",
            slow.replica,
            ranks,
            host,
            slow.late_steps,
            slow.of_steps,
            slow.median,
            "dropped more often than others'" if self._section.samples == DISCARD else "delayed more and more",
        )

    def tuning(self, tuning: Tuning, wanted: int) -> dict[str, Any]:
        """Report a chosen threshold, or the drop rate of a given one; returns the event's fields, on all ranks.

        ``wanted``: number of micro-batches that a larger batch must complete.
        """
        curve = tuning.curve
        fields: dict[str, Any] = {
            "tau_s": None if math.isinf(tuning.tau_s) else tuning.tau_s,
            "drop_rate": tuning.drop_rate,
            "speedup": tuning.speedup,
            "communication_s": tuning.communication_s,
            "micro_batches": tuning.micro_batches,
            "completed": tuning.completed,
            "curve": None
            if curve is None
            else {
                "thresholds_s": curve.thresholds_s[:-1].tolist(),
                "speedup": curve.speedup[:-1].tolist(),
                "completed_share": curve.completed_share[:-1].tolist(),
            },
        }
        if not self._speaks:
            return fields
        self._run.events.emit(EVENT_KIND, "threshold", step=self._run.step, **fields)
        gain = "" if tuning.speedup is None else f", expected effective speed-up {tuning.speedup:.3f}"
        logger.info(
            "step %d: DropCompute threshold %.4g s%s, %.2f %% of micro-batches dropped, %d micro-batches a step%s",
            self._run.step,
            tuning.tau_s,
            gain,
            100 * tuning.drop_rate,
            tuning.micro_batches,
            self._length(tuning.drop_rate if tuning.not_started is None else tuning.not_started),
        )
        if self._section.compensation == LARGER_BATCH and tuning.completed < (1 - TOLERANCE) * wanted:
            self._not_compensated(tuning, wanted)
        return fields

    def _not_compensated(self, tuning: Tuning, wanted: int) -> None:
        """Report that no larger batch completes the planned number of micro-batches with a given threshold."""
        step, completed, tau_s = self._run.step, tuning.completed, tuning.tau_s
        largest = largest_batch(wanted, self._section.max_drop_rate)
        fields: dict[str, Any] = {"wanted": wanted, "completed": completed, "largest": largest}
        self._run.events.emit(EVENT_KIND, "not_compensated", step=step, **fields)
        logger.warning(
            "step %d: no larger batch of at most %d micro-batches completes %d before the threshold of %.4g s, %.4g "
            "are completed: the drop is not made up for; raise drop_compute.threshold or drop_compute.max_drop_rate",
            step,
            largest,
            wanted,
            tau_s,
            completed,
        )

    def _length(self, drop_rate: float) -> str:
        if self._section.compensation != EXTRA_STEPS:
            return ""
        return f", {expected_steps(self._steps, drop_rate)} steps instead of {self._steps}"

    def is_due(self) -> bool:
        """Whether totals are to be reported after this step."""
        return self._run.step % self._interval == 0 or self._run.is_last_step

    def totals(self, dropped: int, since: Interval, rate: float, tau_s: float, ended: int | None) -> None:
        """Report totals.

        Args:
            dropped: micro-batches dropped since the run began.
            since: the steps since the last report.
            rate: share of all planned micro-batches that were dropped.
            ended: backward passes ended since the run began; None: none can be.
        """
        if self._writer is not None:
            values: dict[str, float | int] = {"drops/micro_batches": dropped, "drops/rate": since.rate}
            if ended is not None:
                values["drops/ended_passes"] = ended
            if not math.isinf(tau_s):
                values["drops/threshold_s"] = tau_s
            self._writer.write(self._run.step, values)
        if (since.dropped or since.ended) and self._speaks:
            passes = f", {since.ended} backward passes ended" if since.ended else ""
            left_out = f"{since.dropped} micro-batches dropped{passes}, {100 * since.rate:.2f} %"
            logger.info("step %d | %s%s", self._run.step, left_out, self._length(rate))


WHOLE = -1.0
"""Number of layers that stands for a whole backward pass."""


@dataclass
class EndedPasses:
    """Counts backward passes that were ended.

    Args:
        ended: number of them since the run began, over all replicas.
        untold: shares of transformer layers that they left out since the last report, summed.
        told: number of them at the last report.
    """

    ended: int = 0
    untold: float = 0.0
    told: int = 0

    def count(self, step: StepDecisions) -> None:
        """Count a step."""
        self.ended += len(step.ended)
        self.untold += step.lost - step.dropped

    def pop_untold(self) -> tuple[int, float]:
        """Number of passes ended since the last call, and the shares that they left out."""
        found = self.ended - self.told, self.untold
        self.untold, self.told = 0.0, self.ended
        return found

    @property
    def state(self) -> list[float]:
        """Its arguments."""
        return [self.ended, self.untold, self.told]


class DropCompute(Hook):
    """Runs the section `drop_compute`: measures, chooses the threshold, decides and counts.

    All ranks act alike from counts that they exchange in every step; only whether to start the next micro-batch is
    decided on one rank of each replica.

    Args:
        section: the section `drop_compute`, enabled.
        run: the run, at the step from which it continues.
        writer: writer of metrics on rank 0; None on other ranks.
        interval: number of steps between metrics.

    Attributes:
        times: the hook that measures a step; it comes before hooks that take time.

    Raises:
        ConfigError: decisions to replay cannot be read.

    Collective: all ranks of the world.
    """

    saved_as = "DropCompute"

    def __init__(self, section: DropComputeSection, run: Run, writer: MetricsWriter | None, interval: int) -> None:
        engine, dims = run.engine, run.dims
        self._section, self._run = section, run
        self._micro_batches = engine.gradient_accumulation_steps()
        self._base_steps = run.steps
        self._report = DropReport(section, run, run.steps, writer, interval)
        self._given_s = math.inf if isinstance(section.threshold, str) else float(section.threshold)
        self._tau_s = self._given_s
        self._tuned_at: int | None = None
        self._chosen: dict[str, Any] = {}
        self._balance = WorkBalance(self._micro_batches, dims.data)
        self._window: TimeWindow | None = None
        self._totals = [0, 0]
        self._told = [0, 0]
        self._passes = EndedPasses()
        self._recent = RecentSteps(section.window_steps)
        self._limited = False
        self._first_step = run.step + 1
        self._hosts: list[str] = []
        self._log: DecisionLog | None = None
        self._time_log: TimeLog | None = None
        self._completed = Field(
            lambda: engine.completed if engine.decides else None, places=dims.data, place=dims.dp_rank
        )
        self._ended = Field(
            lambda: engine.ended_after if engine.decides else None, default=WHOLE, places=dims.data, place=dims.dp_rank
        )
        self.fields = (self._completed, self._ended) if section.granularity == BACKWARD_PASS else (self._completed,)
        self._group = new_replica_group(dims)
        self.times = StepTimes(engine.device)
        self._clock = ClockDecisions(self.times, section.device_lag, _sigmas(section))
        self._replayed = self._read_replayed()
        self._replay = ReplayedDecisions(dims.dp_rank)
        decisions: ClockDecisions | ReplayedDecisions = self._clock if self._replayed is None else self._replay
        self.gate = ReplicaGate(
            dims, self._group, decisions.decide, decisions.time_left_s, section.min_micro_batches, decisions.goes_on
        )
        self._garbage = CollectionTimer()
        engine.gate = self.gate
        if section.granularity == BACKWARD_PASS:
            engine.partial = PartialBackward(engine.module, self.gate.may_go_on)
        engine.divides_by_used = section.gradients == COMPUTED

    def _read_replayed(self) -> dict[int, StepDecisions] | None:
        """The decisions to replay, read on rank 0 and sent to all ranks; None: none.

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

    # --- before a step ------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Open the logs, and gather on which host each replica decides.

        Raises:
            ConfigError: decisions to replay are missing.
        """
        dims = run.dims
        self._first_step = run.step + 1
        self._reach(run)
        for step in range(run.step + 1, run.steps + 1):
            self._replayed_step(step)
        hosts = gather_objects(socket.gethostname(), run.host_group)
        self._hosts = [hosts[replica_ranks(dims, replica)[0]] for replica in range(dims.data)]
        if self._section.record_times and dims.tp_rank == 0:
            partial = run.engine.partial
            of_layers = 0 if partial is None else partial.num_layers
            self._time_log = TimeLog(run.folder, dims, self._micro_batches, of_layers)
        if dims.rank == 0:
            self._log = DecisionLog(run.folder, run.step, dims.data, self._micro_batches)
        self._report.start(None if self._section.threshold == AUTO and self._tuned_at is None else self._tau_s)

    def _replayed_step(self, step: int) -> StepDecisions | None:
        if self._replayed is None:
            return None
        if step not in self._replayed:
            raise ConfigError(
                f"megasdc.drop_compute.replay_decisions: {self._section.replay_decisions} has no decisions of step "
                f"{step}, this run has {self._run.steps} steps; use the log of a run that is as long."
            )
        replayed, partial = self._replayed[step], self._run.engine.partial
        if (least := min(replayed.completed)) < (always := self._section.min_micro_batches):
            raise ConfigError(
                f"megasdc.drop_compute.min_micro_batches: got {always}, but a replica of "
                f"{self._section.replay_decisions} completed {least} in step {step}; set {least} or less, so that the "
                "decisions can be replayed."
            )
        layers = 0 if partial is None else partial.num_layers
        if replayed.ended and replayed.of_layers != layers:
            of_run = (
                f"a model of {layers} layers; use another" if layers else 'granularity "micro_batch"; set "backward"'
            )
            raise ConfigError(
                f"megasdc.drop_compute.replay_decisions: {self._section.replay_decisions} has backward passes that "
                f"ended in a model of {replayed.of_layers} layers, in step {step}, this run has {of_run}."
            )
        return replayed

    def before_step(self, run: Run) -> None:
        """Decide whether this step may drop micro-batches.

        Raises:
            ConfigError: decisions to replay are missing.
        """
        engine, step = run.engine, run.step + 1
        self._garbage.pop_seconds()  # excludes collections between steps
        if (replayed := self._replayed_step(step)) is not None:
            engine.micro_batches = replayed.planned
            self._replay.begin(replayed)
            return
        if self._is_due_to_measure(step):
            self._window = TimeWindow(
                self._section.window_steps, self._micro_batches, run.dims, passes_end=engine.partial is not None
            )
            engine.micro_batches, self._balance.aims = self._micro_batches, ()
        if self._balance.aims:
            self._tau_s = min(self._balance.tau_s, self._given_s)
        self._clock.tau_s = self._tau_s
        is_warm = step >= self._first_step + self._section.warmup_steps
        self.gate.open = not is_warm or self._window is not None or self._limited or math.isinf(self._tau_s)

    def _is_due_to_measure(self, step: int) -> bool:
        section = self._section
        measures = section.threshold == AUTO or section.compensation == LARGER_BATCH
        if not measures or self._window is not None or step < self._first_step + section.warmup_steps:
            return False
        if self._tuned_at is None:
            return True
        return bool(section.retune_interval) and step - self._tuned_at > section.retune_interval

    # --- in and after a step ------------------------------------------------------------------------------------

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Compare what the ranks of this replica have completed; only with `check_agreement`.

        Raises:
            RuntimeError: they have completed different numbers.
        """
        if self._section.check_agreement:
            completed = gather_objects(engine.completed, self._group)
            if len(set(completed)) > 1:
                ranks = replica_ranks(engine.dims, engine.dims.dp_rank)
                raise RuntimeError(f"ranks {ranks} have completed {completed} micro-batches of one step")

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count, log, skip dropped samples, check the drop rate, and choose the threshold when the window is full."""
        self.gate.finish()
        engine, section = run.engine, self._section
        step, ended_after = self._decided(run), engine.ended_after
        record, gc_s = self.times.pop_record(), self._garbage.pop_seconds()
        self._clock.update(record, is_whole=ended_after is None)
        if self._time_log is not None:
            self._time_log.add(run.step, step.planned, record, gc_s, ended_after)
        if self._log is not None:
            self._log.add(run.step, step)
        if section.samples == DISCARD and engine.completed < step.planned:
            run.loader.skip_next(step.planned - engine.completed, again=section.compensation == RESAMPLE)
        if section.samples == DISCARD and section.compensation != RESAMPLE:
            run.progress.uncounted_samples += step.dropped * engine.micro_batch_size
        self._count(run, step)
        if self._replayed is None:
            self._watch(run, step)
        if self._window is not None:
            self._window.add(record)
            if self._window.is_full:
                self._tune(run, self._window)
        if self._report.is_due():
            self._report_totals()

    def _decided(self, run: Run) -> StepDecisions:
        """The decisions of the finished step.

        Raises:
            ConfigError: they are not those to replay.
        """
        engine, partial = run.engine, run.engine.partial
        completed = tuple(int(count) for count in self._completed.values)
        if partial is None:
            return StepDecisions(engine.micro_batches, completed)
        layers = tuple(None if one == WHOLE else int(one) for one in self._ended.values)
        step = StepDecisions(engine.micro_batches, completed, layers, partial.num_layers)
        if self._replayed is not None and step.ended != (wanted := self._replayed[run.step].ended):
            raise ConfigError(
                f"megasdc.drop_compute.replay_decisions: in step {run.step} backward passes of replicas ended after "
                f"{step.ended} layers, in {self._section.replay_decisions} after {wanted}; repeat the run with its "
                "pipeline.activation_checkpoint_interval and its audits."
            )
        return step

    def _count(self, run: Run, step: StepDecisions) -> None:
        self._passes.count(step)
        self._totals[0] += step.dropped
        self._totals[1] += step.planned * len(step.completed)
        self._balance.count(step.completed)
        self._report.step(step)
        if step.dropped:
            self._reach(run)

    def _reach(self, run: Run) -> None:
        """Extend the run and its data stream to the number of steps needed now."""
        engine = run.engine
        if self._section.compensation == EXTRA_STEPS:
            run.progress.steps = self._base_steps + extra_steps(self._totals[0], self._micro_batches * run.dims.data)
        steps = range(run.step + 1, run.steps + 1)
        if self._replayed is None:
            planned = len(steps) * engine.micro_batches
        else:
            planned = sum(self._replayed[step].planned for step in steps if step in self._replayed)
        run.loader.extend(planned * engine.micro_batch_size)

    def _watch(self, run: Run, step: StepDecisions) -> None:
        """Stop dropping while the drop rate is exceeded; report replicas that are always late."""
        if self.gate.open and not self._limited:
            return
        self._recent.add(step)
        if run.step % self._section.window_steps == 0:
            for slow in self._recent.slow_replicas():
                self._report.slow_replica(slow, self._hosts[slow.replica])
        limited = self._recent.exceeds(self._section.max_drop_rate, step.planned * run.dims.data)
        if limited != self._limited:
            self._report.limit(self._recent.dropped, limited)
        self._limited = limited

    def _tune(self, run: Run, window: TimeWindow) -> None:
        """Choose the threshold, and with `larger_batch` the planned micro-batches, the same on all ranks.

        Collective: all ranks of the world.
        """
        section, partial = self._section, run.engine.partial
        given = None if section.threshold == AUTO else self._given_s
        steps, limits = window.gather(run.host_group), (section.max_drop_rate, section.min_micro_batches)
        if section.compensation == LARGER_BATCH:
            tuning = tune_larger_batch(steps, given, *limits, _sigmas(section))
        else:
            tuning = tune(steps, given, *limits, _sigmas(section), 0 if partial is None else partial.num_layers)
        self._window, self._tuned_at, self._tau_s = None, run.step, tuning.tau_s
        self._balance.aims = tuning.aims
        if tuning.micro_batches != run.engine.micro_batches:
            run.engine.micro_batches = tuning.micro_batches
            self._reach(run)
        self._chosen = self._report.tuning(tuning, self._micro_batches)

    def _report_totals(self) -> None:
        dropped, planned = self._totals
        since = Interval(dropped - self._told[0], *self._passes.pop_untold(), planned - self._told[1])
        self._told = [dropped, planned]
        ended = self._passes.ended if self._section.granularity == BACKWARD_PASS else None
        self._report.totals(dropped, since, dropped / planned, self._tau_s, ended)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Threshold and counts."""
        passes = self._passes
        ended = {"ended": passes.state} if passes.ended or self._section.granularity == BACKWARD_PASS else {}
        return {
            "tau_s": None if math.isinf(self._tau_s) else self._tau_s,
            "tuned_at": self._tuned_at,
            "chosen": self._chosen,
            "aims": [list(aim) for aim in self._balance.aims],
            "owed": self._balance.owed,
            "micro_batches": self._run.engine.micro_batches,
            "totals": self._totals,
            "told": self._told,
            **ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``; a threshold given in the configuration takes precedence, unless it was lowered."""
        self._totals, self._told = list(state["totals"]), list(state["told"])
        self._passes = EndedPasses(*state.get("ended", ()))
        section = self._section
        if section.threshold == AUTO or (section.compensation == LARGER_BATCH and state["tuned_at"] is not None):
            self._tau_s = math.inf if state["tau_s"] is None else state["tau_s"]
        if section.threshold == AUTO or section.compensation == LARGER_BATCH:
            self._tuned_at, self._chosen = state["tuned_at"], state["chosen"]
            self._balance.aims, self._balance.owed = state.get("aims", ()), state.get("owed", 0)
        if section.compensation == LARGER_BATCH and self._tuned_at is not None:
            self._run.engine.micro_batches = state["micro_batches"]

    def close(self) -> None:
        """Close the logs, and remove the hooks of backward passes."""
        if (partial := self._run.engine.partial) is not None:
            partial.close()
            self._run.engine.partial = None
        for log in (self._log, self._time_log):
            if log is not None:
                log.close()
        self._garbage.close()


def _sigmas(section: DropComputeSection) -> float | None:
    return section.sigmas if section.rule == PREDICTIVE else None
