"""Traces of a guarded training: what the submodules compute in a step, written for ``megasdc compare-traces``."""

from __future__ import annotations

from collections.abc import Iterable

from megasdc.attached.copies import read_copies
from megasdc.attached.engine import engine_precision
from megasdc.attached.record import ResultRecorder
from megasdc.attached.training import Protection, Training
from megasdc.common.addresses import MICRO_BATCH_PHASES, PARAMETER
from megasdc.sdc.finding import Finding
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import TrainingTrace


class GuardTrace(Protection):
    """Part of a guard that records every ``trace.interval``-th step, from its first forward pass to its end."""

    name = "a trace of results"

    def __init__(self, training: Training) -> None:
        engine, algorithm = training.engine, training.algorithm
        patterns = training.settings.audit.submodules
        self._training, self._engine, self._algorithm = training, engine, algorithm
        self._interval = training.settings.trace.interval
        self._recorder = ResultRecorder(engine.module, training.watched, algorithm)
        self._step: int | None = None
        recorded = {
            "sequence_parallel": False,
            "granularity": "gemm" if patterns is None else " ".join(patterns),
            "phases": [*MICRO_BATCH_PHASES, PARAMETER],
            "interval": self._interval,
            "micro_batches": None,
            "layers": None,
        }
        self._trace = TrainingTrace(training, algorithm.name, engine_precision(engine), recorded)
        self._begin(training.step)

    def _begin(self, step: int) -> None:
        """Begin to record a step, if it is due."""
        if (step - 1) % self._interval == 0:
            self._step = step
            self._recorder.attach(step)

    def before_step(self, step: int) -> Iterable[Finding]:
        """Stop recording; a trace of another step, begun before a checkpoint was loaded, is discarded."""
        self._recorder.detach()
        if self._step not in (None, step):
            self._training.events.emit_on_rank_0("trace", "left_out", step=step, recorded_as=self._step)
            self._recorder.pop_trace()
            self._step = None
        return ()

    def after_step(self, step: int) -> None:
        """Write the step's trace, with the parameters after the step; the next step begins."""
        if self._step is not None:
            self._write(self._step)
            self._step = None
        self._begin(self._training.step)

    def _write(self, step: int) -> None:
        trace, after = self._recorder.pop_trace(), read_copies(self._engine, self._algorithm, step)
        kept = [place for place, address in enumerate(after.addresses) if address.phase == PARAMETER]
        trace.extend(Trace([after.addresses[one] for one in kept], [after.checksums[one] for one in kept]))
        self._trace.append(step, trace)

    def close(self) -> None:
        """Remove every hook, and close the file."""
        self._recorder.detach()
        self._trace.close()
