"""Search for the first NaN or Inf over all ranks: it listens to everything in micro-batches that are rerun."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run
from megasdc.engine.observer import ObserverSwitch
from megasdc.model.submodules import list_submodules
from megasdc.sdc.nonfinite import (
    EVENT_KIND,
    FiniteRecorder,
    InputKinds,
    NonFinite,
    NonFiniteOrigin,
    find_first,
    origin_here,
)

logger = logging.getLogger(__name__)


class NonFiniteSearch:
    """Reruns a step's micro-batches with all checks when a result was not finite, and reports the first such result.

    Attributes:
        place: sentence on the place that was found in this step; None: none was.
    """

    def __init__(
        self, run: Run, observation: ObserverSwitch, recompute_micro_batch: Callable[[TrainingEngine, int], Any]
    ) -> None:
        self._run = run
        self._observation = observation
        self._recompute = recompute_micro_batch
        self._submodules = list_submodules(run.engine.module)
        self._order = [submodule.fqn for submodule in self._submodules]
        self.place: str | None = None

    def explain(self, engine: TrainingEngine, seen: NonFinite | None, *, repeat: bool) -> None:
        """Find and report the first place over all ranks, and store it as a sentence in ``place``; may recompute a
        micro-batch.

        ``seen``: result of this rank, by the checks of the step; ``repeat``: micro-batches are recomputed with all
        checks, the same on all ranks.

        Collective: all ranks of the world.
        """
        run, recorder, inputs = self._run, FiniteRecorder(), InputKinds()

        def recompute(micro_batch: int) -> tuple[NonFiniteOrigin | None, None]:
            inputs.clear()
            self._recompute(engine, micro_batch)
            own = recorder.pop_first(run.dims)
            return None if own is None else self._origin(own, inputs.finite(own.address), inputs_read=True), None

        before = None if seen is None else self._origin(seen, True, inputs_read=False)
        with ExitStack() as watching:
            if repeat:
                watching.enter_context(self._observation.everything(recorder))
                watching.enter_context(inputs.watch_inputs(self._submodules))
            found, _ = find_first(run, before, engine.completed if repeat else 0, recompute, self._order)
        self.place = found.text
        if run.dims.rank != 0 or (found.origin is None and found.reproduced is None):
            return
        logger.warning("step %d: %s", engine.step_number, self.place)
        run.events.emit_on_rank_0(EVENT_KIND, "first", step=engine.step_number, **found.fields)

    def _origin(self, found: NonFinite, inputs_finite: bool | None, *, inputs_read: bool) -> NonFiniteOrigin:
        parameters = [
            parameter.data
            for submodule in self._submodules
            if submodule.fqn == found.address.fqn
            for parameter in submodule.parameters.values()
        ]
        return origin_here(found, inputs_finite, parameters, inputs_read=inputs_read)
