"""Which results of this rank are shown to whom? One observer for everything that listens."""

from __future__ import annotations

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.observer import Observer
from megasdc.faults.injector import Injector, harmed_submodules
from megasdc.model.submodules import list_submodules
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


def build_observer(engine: TrainingEngine, injector: Injector | None) -> Observer | None:
    """Attach this rank's observer to the submodules that someone listens to.

    Args:
        engine: the engine.
        injector: harms results; comes before what records them. Null: no faults.

    Returns:
        Null, and nothing attached, where nobody listens on any rank of this tensor group.
    """
    if injector is None:
        return None
    chosen = harmed_submodules(injector.specs, list_submodules(engine.module))
    return Observer(engine, chosen, [injector]) if chosen else None
