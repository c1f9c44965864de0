"""Observation of this rank's results: one observer for all listeners, attached only while one listens.

``NonFiniteSearch`` listens to everything in micro-batches that are rerun, to find the first NaN or Inf over all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.observer import Listener, Observer
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

if TYPE_CHECKING:
    from megasdc.faults.injector import Injector
    from megasdc.sdc.tracer import Tracer


@dataclass(frozen=True)
class Watch:
    """A listener and the results that it needs.

    Args:
        wanted: returns the names of the submodules that it needs in a step, empty: none. The same on all ranks of a
            tensor group.
        gradients: whether it needs more than forward results of micro-batches.
        harms: whether it changes results (fault injection); it does so in replays too.
        replays: whether it gets results of a stage's replays, and no others.
    """

    listener: Listener
    wanted: Callable[[int], Collection[str]]
    gradients: bool = True
    harms: bool = False
    replays: bool = False


class ObserverSwitch(Hook):
    """Attaches an observer in the steps in which a watch needs results, and removes its hooks in the others.

    The observer is called at this hook's place in the engine's order.

    Args:
        watches: called in this order for every result: fault injection before recording.
        clock: measures the time of attaching and of all listeners; None: it is not measured.

    Raises:
        ConfigError: the submodules' results cannot be observed.
    """

    def __init__(
        self, engine: TrainingEngine, watches: Sequence[Watch], clock: AbstractContextManager[None] | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock or nullcontext()
        self._watches = tuple(watches)
        self._submodules = list_submodules(engine.module)
        self._observer: Observer | None = None
        self._attached: tuple[frozenset[str], tuple[Watch, ...]] = (frozenset(), ())

    def before_step(self, run: Run) -> None:
        """Attach an observer for the results that this step's watches need."""
        step = run.engine.step_number
        wanted = {watch: frozenset(watch.wanted(step)) for watch in self._watches}
        wanting = tuple(watch for watch in self._watches if wanted[watch])
        with self._clock:
            self._attach(frozenset().union(*wanted.values()), wanting)

    @contextmanager
    def everything(self, listener: Listener) -> Iterator[None]:
        """Context in which one listener gets all results, instead of the step's listeners; fault injection stays.

        Args:
            listener: the listener, which changes no result.

        Collective: none; but all ranks of a tensor group must do so together.
        """
        before = self._attached
        harming = [watch for watch in before[1] if watch.harms]
        self._attach(frozenset(one.fqn for one in self._submodules), (*harming, Watch(listener, lambda _: ())))
        try:
            yield
        finally:
            self._attach(*before)

    def _attach(self, fqns: frozenset[str], wanting: tuple[Watch, ...]) -> None:
        if (fqns, wanting) == self._attached:
            return
        self.close()
        chosen = [one for one in self._submodules if one.fqn in fqns]
        if chosen:
            gradients = any(watch.gradients for watch in wanting)
            listeners = [watch.listener for watch in wanting if not watch.replays]
            again = [watch.listener for watch in wanting if watch.replays or watch.harms]
            self._observer = Observer(
                self._engine, chosen, listeners, gradients, after=self, clock=self._clock, of_replays=again
            )
        self._attached = (fqns, wanting)

    def close(self) -> None:
        """Remove every hook."""
        if self._observer is not None:
            self._observer.close()
        self._observer = None
        self._attached = (frozenset(), ())


def watch_for_faults(injector: Injector, engine: TrainingEngine) -> Watch:
    """The watch of fault injection: submodules that some spec may hit on some rank, in every step."""
    from megasdc.faults.injector import harmed_submodules

    names = frozenset(one.fqn for one in harmed_submodules(injector.specs, list_submodules(engine.module)))
    return Watch(injector, lambda step: names, harms=True)


def watch_for_trace(tracer: Tracer) -> Watch:
    """The watch of a tracer, in the steps that it records."""
    names = tracer.fqns or frozenset()
    return Watch(tracer, lambda step: names if tracer.records(step) else frozenset())


logger = logging.getLogger(__name__)


class NonFiniteSearch:
    """Reruns a step's micro-batches with all checks when a result was not finite, and reports the first such result."""

    def __init__(
        self, run: Run, observation: ObserverSwitch, recompute_micro_batch: Callable[[TrainingEngine, int], Any]
    ) -> None:
        self._run = run
        self._observation = observation
        self._recompute = recompute_micro_batch
        self._submodules = list_submodules(run.engine.module)
        self._order = [submodule.fqn for submodule in self._submodules]
        self.place: str | None = None

    def begin(self) -> None:
        """Begin a step: forget the place that was found in the last one."""
        self.place = None

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
