"""Process faults: a rank exits, is killed, stops, hangs or slows down."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence

import torch

from megasdc.config.faults import ProcessFaultSpec
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.faults.injector import in_steps, is_here
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)

OnProcessFault = Callable[[int, ProcessFaultSpec, int, int | None], None]
"""Function called with (index of the spec, spec, step, micro_batch) before the fault; for ``slow`` only once."""


class ProcessFaults(Hook):
    """Ends, stops or slows this rank as the specs say.

    Each spec acts once in the life of a process; ``slow`` acts on every pass that fits.

    Args:
        specs: all process faults of the run.
        on_firing: function called before the fault; its writes must be on disk when it returns.
        fired_before: indices of specs that fired on this rank before it was restarted; they act again only with
            ``after_restart``, or if they are ``slow``.
        host: name of this rank's host; None: the system's host name.
    """

    in_replays = True

    def __init__(
        self,
        specs: Sequence[ProcessFaultSpec],
        dims: ParallelDims,
        on_firing: OnProcessFault,
        *,
        fired_before: Collection[int] = (),
        host: str | None = None,
    ) -> None:
        host = socket.gethostname() if host is None else host
        self._armed = {
            index: spec
            for index, spec in enumerate(specs)
            if is_here(spec, dims, host) and (index not in fired_before or spec.after_restart or spec.kind == "slow")
        }
        self._on_firing = on_firing
        self._told: set[int] = set()
        self._started_at = 0.0

    @property
    def armed(self) -> bool:
        """Whether any spec may act on this rank."""
        return bool(self._armed)

    @property
    def waiting(self) -> list[int]:
        """Indices of specs that have not acted on this rank."""
        return sorted(set(self._armed) - self._told)

    @property
    def acted(self) -> list[int]:
        """Indices of specs that have acted on this rank."""
        return sorted(self._told)

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Act, or record the start of the pass."""
        self._before_pass("forward", engine, micro_batch)

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Lengthen the pass."""
        self._after_pass("forward", engine, micro_batch)

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Act, or record the start of the pass."""
        self._before_pass("backward", engine, micro_batch)

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Lengthen the pass."""
        self._after_pass("backward", engine, micro_batch)

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Act while the other replicas join the sum of gradients."""
        self._act("collective", engine.step_number, None)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Act while the other ranks join the optimizer's collectives."""
        self._act("update", engine.step_number, None)

    def _before_pass(self, phase: str, engine: TrainingEngine, micro_batch: int) -> None:
        self._act(phase, engine.step_number, micro_batch)
        if self._slowness(phase, engine.step_number, micro_batch):
            self._started_at = _time_on_device()

    def _after_pass(self, phase: str, engine: TrainingEngine, micro_batch: int) -> None:
        step = engine.step_number
        for index, spec, factor in self._slowness(phase, step, micro_batch):
            took = _time_on_device() - self._started_at
            if index not in self._told:
                self._emit(index, spec, step, micro_batch)
            time.sleep((factor - 1.0) * took)

    def _slowness(self, phase: str, step: int, micro_batch: int) -> list[tuple[int, ProcessFaultSpec, float]]:
        return [
            (index, spec, spec.factor)
            for index, spec in self._armed.items()
            if spec.factor is not None and spec.phase == phase and in_steps(spec, step, micro_batch)
        ]

    def _act(self, phase: str, step: int, micro_batch: int | None) -> None:
        for index, spec in self._armed.items():
            if spec.kind == "slow" or spec.phase != phase or index in self._told:
                continue
            if in_steps(spec, step, micro_batch):
                self._emit(index, spec, step, micro_batch)
                _do(spec)

    def _emit(self, index: int, spec: ProcessFaultSpec, step: int, micro_batch: int | None) -> None:
        self._told.add(index)
        where = f"step {step}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")
        logger.warning("injected fault: %s in phase %s at %s", spec.kind, spec.phase, where)
        self._on_firing(index, spec, step, micro_batch)


def _do(spec: ProcessFaultSpec) -> None:
    if spec.kind == "exit":
        os._exit(spec.exit_code)  # no cleanup, as in a crash
    if spec.kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while spec.kind == "hang":
        time.sleep(3600)


def _time_on_device() -> float:
    """Monotonic seconds after all issued device work has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()
