"""Search for the first NaN or Inf over all ranks; micro-batches are rerun to find it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.nonfinite import (
    EVENT_KIND,
    FiniteRecorder,
    InputKinds,
    NonFinite,
    NonFiniteOrigin,
    explain,
    origin_here,
)
from megasdc.train.detection.observe import ObserverSwitch

logger = logging.getLogger(__name__)


class NonFiniteSearch:
    """Reruns a step's micro-batches with all checks when a result was not finite, and reports the first such result."""

    def __init__(
        self, run: Run, observation: ObserverSwitch, recompute_micro_batch: Callable[[TrainingEngine, int], Any]
    ) -> None:
        self._dims = run.dims
        self._group = run.host_group
        self._events = run.events
        self._observation = observation
        self._rehearse = recompute_micro_batch
        self._submodules = list_submodules(run.engine.module)
        self._order = [submodule.fqn for submodule in self._submodules]
        self.place: str | None = None

    def begin(self) -> None:
        """A step begins."""
        self.place = None

    def explain(self, engine: TrainingEngine, seen: NonFinite | None, *, repeat: bool) -> None:
        """Find and report the first place over all ranks, and store it as a sentence in ``place``; may recompute a
        micro-batch.

        ``seen``: result of this rank, by the checks of the step; ``repeat``: micro-batches are recomputed with all
        checks, the same on all ranks.

        Collective: all ranks of the world.
        """
        before = gather_objects(None if seen is None else self._origin(seen, True, inputs_read=False), self._group)
        after = self._repeat(engine) if repeat else None
        found = explain(before, after, self._order, self._dims)
        self.place = found.text
        if self._dims.rank != 0 or (found.origin is None and found.reproduced is None):
            return
        logger.warning("step %d: %s", engine.step_number, self.place)
        self._events.emit(EVENT_KIND, "first", step=engine.step_number, **found.fields)

    def _repeat(self, engine: TrainingEngine) -> list[NonFiniteOrigin | None]:
        """By rank, the first non-finite result when the step's micro-batches are recomputed."""
        recorder, inputs = FiniteRecorder(), InputKinds()
        found: list[NonFiniteOrigin | None] = [None] * self._dims.world_size
        with self._observation.everything(recorder), inputs.look_at(self._submodules):
            for micro_batch in range(max(gather_objects(engine.completed, self._group))):
                inputs.clear()
                self._rehearse(engine, micro_batch)
                own = recorder.take(self._dims)
                origin = None if own is None else self._origin(own, inputs.finite(own.address), inputs_read=True)
                found = gather_objects(origin, self._group)
                if any(found):
                    break
        return found

    def _origin(self, found: NonFinite, inputs_finite: bool | None, *, inputs_read: bool) -> NonFiniteOrigin:
        parameters = [
            parameter.data
            for submodule in self._submodules
            if submodule.fqn == found.address.fqn
            for parameter in submodule.parameters.values()
        ]
        return origin_here(found, inputs_finite, parameters, inputs_read=inputs_read)
