"""What a guarded rank is doing, for its host's agent (with ``megasdc run``), and which ranks are slow."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from megasdc.attached.training import Protection, Training
from megasdc.engine.step_times import mark
from megasdc.ops.health.instructions import PHASES
from megasdc.ops.health.limits import FIRST_STEPS
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.program_health import ProgramHealth, current_health
from megasdc.ops.health.slow.report import SlowReport, Where
from megasdc.ops.health.slow.stragglers import EVERY, LONG, Stragglers
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)


def build_phases(training: Training) -> Protection | None:
    """Phases of this rank, where ``megasdc run`` has started it and watches its health."""
    health = current_health()
    return None if health is None else GuardPhases(training, health)


def build_stragglers(training: Training) -> Protection | None:
    """The watch for slow ranks, where it is asked for and there are replicas to compare.

    Collective: all ranks of the world.
    """
    ratio = training.settings.health.slow_ratio
    return None if ratio is None or training.dims.data == 1 else GuardStragglers(training, ratio)


class GuardPhases(Protection):
    """Records the phases of a DeepSpeed engine: of a pipeline by its instructions, else by its calls.

    What the training does between those is ``between steps``, also within one: nothing is known of it.
    """

    def __init__(self, training: Training, health: ProgramHealth) -> None:
        self._engine = engine = training.engine
        self._undo = ExitStack()
        dims = training.dims
        health.acquire(pp_rank=dims.pp_rank, tp_rank=dims.tp_rank, dp_rank=dims.dp_rank)
        self._undo.callback(health.release)
        self._recorders = {phase: health.recorder(phase) for phase in Phase}
        self._is_pipeline = hasattr(engine, "_INSTRUCTION_MAP")
        if self._is_pipeline:
            self._watch_instructions()
        else:
            self._watch_calls()
        self._surround("_take_model_step", Phase.OPTIMIZER)
        self._surround("save_checkpoint", Phase.SAVE)
        self.enter(Phase.BETWEEN)

    def close(self) -> None:
        """Give the engine back its own methods; what this rank does is seen by its collectives again."""
        self._undo.close()

    def enter(self, phase: Phase) -> None:
        """Record a change to a phase."""
        engine = self._engine
        in_step = phase in (Phase.FORWARD, Phase.BACKWARD) and not self._is_pipeline
        micro_batch = engine.micro_steps % engine.gradient_accumulation_steps() if in_step else -1
        self._recorders[phase](int(engine.global_steps) + 1, micro_batch)

    def _surround(self, name: str, phase: Phase) -> None:
        """Record a phase around each call of a method of the engine."""
        method = getattr(self._engine, name)
        had = vars(self._engine).get(name)

        def call(*args: Any, **options: Any) -> Any:
            self.enter(phase)
            try:
                return method(*args, **options)
            finally:
                self.enter(Phase.BETWEEN)

        setattr(self._engine, name, call)
        self._undo.callback(_restore_method, self._engine, name, had)

    def _watch_calls(self) -> None:
        model = self._engine.module
        self._undo.callback(model.register_forward_pre_hook(self._before_forward).remove)
        self._undo.callback(model.register_forward_hook(lambda *_: self.enter(Phase.BETWEEN)).remove)
        self._surround("backward", Phase.BACKWARD)

    def _before_forward(self, model: Any, _args: Any) -> None:
        self.enter(Phase.FORWARD if model.training else Phase.EVALUATION)

    def _watch_instructions(self) -> None:
        def watched(kind: type, method: Callable[..., Any]) -> Callable[..., Any]:
            if (phase := PHASES.get(kind)) is None:
                return method

            def run(engine: Any, *args: Any, **options: Any) -> Any:
                self.enter(phase)
                return method(engine, *args, **options)

            return run

        self._surround("_exec_schedule", Phase.BETWEEN)
        own = self._engine._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {kind: watched(kind, method) for kind, method in own.items()}
        self._undo.callback(vars(self._engine).pop, "_INSTRUCTION_MAP")


class GuardStragglers(Protection):
    """Compares how long the forward passes of the ranks of each stage take; they wait for nobody.

    Times are exchanged every few steps. The first tensor rank of a stage gives them.

    Collective: all ranks of the world.
    """

    def __init__(self, training: Training, slow_ratio: float) -> None:
        engine, dims, group = training.engine, training.dims, training.host_group
        self._group, self._emit = group, training.events.emit_on_rank_0
        self._on_device = engine.device.type == "cuda"
        self._stragglers = Stragglers(dims.data, dims.pipeline, slow_ratio)
        self._first_step = training.step
        self._begun: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._steps: list[float] = []
        self._undo = ExitStack()
        self._undo.callback(engine.module.register_forward_pre_hook(self._begin).remove)
        self._undo.callback(engine.module.register_forward_hook(self._end).remove)
        hosts = gather_objects(socket.gethostname(), group)
        self._ranks = [
            dims.tensor * (replica + dims.data * stage)
            for replica in range(dims.data)
            for stage in range(dims.pipeline)
        ]
        """First tensor rank of each place."""
        self._report: SlowReport | None = None
        if dims.rank == 0:
            where = {
                divmod(number, dims.pipeline): Where(tuple(range(first, first + dims.tensor)), hosts[first])
                for number, first in enumerate(self._ranks)
            }
            self._report = SlowReport(training.folder, slow_ratio, where, LONG, training.events.origin)
            self._write(lambda report: report.write_suspects(self._stragglers, self._first_step - 1), self._first_step)

    def close(self) -> None:
        """Look at no further pass."""
        self._undo.close()

    def after_step(self, step: int) -> None:
        """Keep the times of a step, and exchange those of the last ones when it is time.

        Collective: all ranks of the world, every few steps.
        """
        spans, self._spans = self._spans, []
        if step < self._first_step + FIRST_STEPS:
            return
        self._steps.append(median(map(self._seconds, spans)) if spans else 0.0)
        if len(self._steps) < EVERY:
            return
        told, self._steps = gather_objects(self._steps, self._group), []
        if self._report is None:
            return
        for times in zip(*(told[rank] for rank in self._ranks), strict=True):
            if self._stragglers.add(times, [0.0] * len(times)):
                self._judge(self._report, step)

    def _judge(self, report: SlowReport, step: int) -> None:
        change = self._stragglers.judge(step)
        for name, fields in report.events(change, self._stragglers):
            logger.warning("health: step %d: %s", step, fields["message"])
            self._emit("health", name, step=step, **fields)
        self._write(lambda report: report.write(change, self._stragglers, step), step)

    def _write(self, write: Callable[[SlowReport], Any], step: int) -> None:
        """Write files on rank 0; a disk that takes none does not end the training."""
        assert self._report is not None, "only rank 0 writes"
        try:
            write(self._report)
        except OSError as error:
            logger.warning("health: who is slow cannot be written: %s", error)
            self._emit("health", "unwritten", step=step, problem=str(error))

    def _begin(self, model: Any, _args: Any) -> None:
        self._begun = self._mark() if model.training else None

    def _end(self, *_: Any) -> None:
        if self._begun is not None:
            self._spans.append((self._begun, self._mark()))
            self._begun = None

    def _mark(self) -> Any:
        return mark(self._on_device)

    def _seconds(self, span: tuple[Any, Any]) -> float:
        begin, end = span
        if not self._on_device:
            return float(end - begin)
        end.synchronize()  # of a step that is over
        return float(begin.elapsed_time(end)) / 1000


def _restore_method(engine: Any, name: str, method: Any) -> None:
    """Restore the method that an engine had of its own; None: that of its class."""
    if method is None:
        vars(engine).pop(name, None)
    else:
        setattr(engine, name, method)
