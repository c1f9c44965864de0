"""Audits inside one device: the audited micro-batch once more, each operation with its elements in other places.

Each stage replays it alone, where it would wait for others (``megasdc.engine.stage_replay``), but for an extra one. The
first audit of a start computes it after all micro-batches, and also tries every operation both ways
(``megasdc.sdc.audits.places``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.run import Run
from megasdc.engine.stage_replay import StageReplay
from megasdc.sdc.audits.places import PermutableOps
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.permuted import Permuted
from megasdc.train.detection.evidence import Rehearse


class PermutedReplay:
    """Repeats micro-batches with the elements of all operations in other places.

    Args:
        run: whose ranks take part, and whose events tell what was tried.
        tracer: records what replays of a stage compute.
        clock: measures what those take.
    """

    def __init__(self, run: Run, tracer: Tracer, clock: AbstractContextManager[None]) -> None:
        self._places = PermutableOps(run.dims, run.host_group, run.events.emit)
        self._tracer, self._clock = tracer, clock

    def begin(self, engine: TrainingEngine) -> None:
        """A step that is audited begins: have its stages replay the micro-batch, where it is known what can be moved.

        What they compute comes to ``listen``.
        """
        if self._places.without is not None:
            engine.replay = StageReplay(0, self._moving)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        with self._clock, Permuted(self._places.without or ()):
            yield

    def listen(self, address: Address, result: Tensor) -> None:
        """A listener of replays."""
        with self._clock:
            self._tracer(address, result)

    def take(self, engine: TrainingEngine, recompute_micro_batch: Rehearse) -> Trace:
        """The trace of the audited micro-batch with elements in other places; without a fault that of the audit.

        It was computed in the step, or is now.

        Collective: all ranks of the world.
        """
        if engine.replay is None:
            return self.replay(engine, recompute_micro_batch)
        engine.replay = None
        return self._tracer.take()

    def replay(self, engine: TrainingEngine, recompute_micro_batch: Rehearse) -> Trace:
        """Compute the micro-batch so once more, after all others.

        Collective: all ranks of the world.
        """
        return self._places.compute(engine.step_number, lambda: recompute_micro_batch(engine, None)[0])

    def learn(self, engine: TrainingEngine, recompute_micro_batch: Rehearse) -> bool:
        """Try the micro-batch's operations again, after all others; whether more of them are not moved from now on.

        Collective: all ranks of the world.
        """
        return self._places.learn(engine.step_number, lambda: recompute_micro_batch(engine, None)[0])
