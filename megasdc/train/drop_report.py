"""Report of dropped micro-batches: events, log lines and metrics of rank 0."""

from __future__ import annotations

import logging
import math
from typing import Any

from megasdc.config import DropComputeSection
from megasdc.config.sections.drop_compute import DISCARD, EXTRA_STEPS, LARGER_BATCH, largest_batch
from megasdc.dropcompute.compensation import TOLERANCE, expected_steps
from megasdc.dropcompute.decisions import StepDecisions
from megasdc.dropcompute.gate import replica_ranks
from megasdc.dropcompute.recent import SlowReplica
from megasdc.dropcompute.tuning import Tuning
from megasdc.engine.run import Run
from megasdc.metrics.writer import MetricsWriter

logger = logging.getLogger(__name__)

EVENT_KIND = "drop"


class DropReport:
    """Reports DropCompute's figures on rank 0; does nothing on other ranks, where ``writer`` is None.

    ``steps``: of the run, before any compensation; ``interval``: steps between metrics.
    """

    def __init__(
        self, section: DropComputeSection, run: Run, steps: int, writer: MetricsWriter | None, interval: int
    ) -> None:
        self._section, self._run, self._steps = section, run, steps
        self._writer, self._interval = writer, interval
        self._speaks = run.dims.rank == 0

    def start(self, tau_s: float | None) -> None:
        """Report the rule at the start of a run; tau is None where it is to be chosen."""
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
        return f"threshold {tau}, rule {section.rule}, samples {section.samples}, gradients {section.gradients}{after}"

    def step(self, decisions: StepDecisions) -> None:
        """Report a finished step."""
        if not (decisions.dropped and self._speaks):
            return
        planned = decisions.planned
        late = {str(replica): done for replica, done in enumerate(decisions.completed) if done < planned}
        self._run.events.emit(
            EVENT_KIND,
            "micro_batches",
            step=self._run.step,
            planned=planned,
            dropped=decisions.dropped,
            completed=late,
        )

    def limit(self, dropped: int, limited: bool) -> None:
        """Report that the largest drop rate was exceeded, or is kept again."""
        if not self._speaks:
            return
        section, step = self._section, self._run.step
        rate = section.max_drop_rate
        now = "above" if limited else "below"
        self._run.events.emit(EVENT_KIND, "limit", step=step, dropped=dropped, max_drop_rate=rate, now=now)
        if limited:
            logger.warning(
                "step %d: %d micro-batches were dropped in the last %d steps, more than drop_compute.max_drop_rate "
                "%g allows: none is dropped until the number falls below it",
                step,
                dropped,
                section.window_steps,
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

        ``wanted``: micro-batches that a larger batch is to complete.
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
            self._length(tuning.drop_rate),
        )
        if self._section.compensation == LARGER_BATCH and tuning.completed < (1 - TOLERANCE) * wanted:
            self._not_compensated(tuning, wanted)
        return fields

    def _not_compensated(self, tuning: Tuning, wanted: int) -> None:
        """Report that no larger batch completes what was planned before a given threshold."""
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

    def totals(self, dropped: int, since: tuple[int, int], rate: float, tau_s: float) -> None:
        """Report micro-batches dropped since the run began; ``since``: dropped and planned since the last report."""
        share = since[0] / since[1] if since[1] else 0.0
        if self._writer is not None:
            values: dict[str, float | int] = {"drops/micro_batches": dropped, "drops/rate": share}
            if not math.isinf(tau_s):
                values["drops/threshold_s"] = tau_s
            self._writer.write(self._run.step, values)
        if since[0] and self._speaks:
            left_out = f"{since[0]} micro-batches dropped, {100 * share:.2f} %"
            logger.info("step %d | %s%s", self._run.step, left_out, self._length(rate))
