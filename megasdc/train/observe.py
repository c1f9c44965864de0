"""Which results of this rank are shown to whom? One observer for everything that listens."""

from __future__ import annotations

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.observer import Listener, Observer
from megasdc.faults.injector import Injector, harmed_submodules
from megasdc.model.submodules import list_submodules
from megasdc.sdc.tracer import Tracer
from megasdc.train.run import StepHook


class Observation(StepHook):
    """Keeps an observer for the length of a run and takes its hooks away at the end.

    Args:
        observer: from ``build_observer``.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def close(self) -> None:
        """Take every hook away."""
        self._observer.close()


def build_observer(engine: TrainingEngine, injector: Injector | None, tracer: Tracer | None) -> Observer | None:
    """Attach this rank's observer to the submodules that someone listens to.

    Args:
        engine: the engine.
        injector: harms results; comes before what records them. Null: no faults.
        tracer: records checksums. Null: no trace.

    Returns:
        Null, and nothing attached, where nobody listens on any rank of this tensor group.

    Raises:
        ConfigError: the submodules' results cannot be observed.
    """
    if injector is None and tracer is None:
        return None
    every = list_submodules(engine.module)
    heard: set[str] = set()
    listeners: list[Listener] = []
    if injector is not None:
        heard |= {one.fqn for one in harmed_submodules(injector.specs, every)}
        listeners.append(injector)
    if tracer is not None:
        heard |= {one.fqn for one in every if tracer.fqns is None or one.fqn in tracer.fqns}
        listeners.append(tracer)
    chosen = [one for one in every if one.fqn in heard]
    return Observer(engine, chosen, listeners) if chosen else None
