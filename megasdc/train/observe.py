"""Which results of this rank are shown to whom? One observer for everything that listens."""

from __future__ import annotations

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.observer import Observer
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


def build_observer(engine: TrainingEngine, tracer: Tracer | None) -> Observer | None:
    """Attach this rank's observer to the submodules that someone listens to.

    Args:
        engine: the engine.
        tracer: records checksums; null: no trace.

    Returns:
        Null, and nothing attached, where nobody listens.

    Raises:
        ConfigError: the submodules' results cannot be observed.
    """
    if tracer is None:
        return None
    chosen = [one for one in list_submodules(engine.module) if tracer.fqns is None or one.fqn in tracer.fqns]
    return Observer(engine, chosen, [tracer])
