"""Who looks at the results of a run's submodules? One observer, whose listeners are called in the order given here."""

from __future__ import annotations

from megasdc.config import RunConfig
from megasdc.engine.observer import Observer
from megasdc.model.submodules import list_submodules
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.tensors.checksum import algorithm, default_algorithm
from megasdc.train.run import Run, StepHook
from megasdc.train.trace import TraceRecorder, trace_header


class Observation(StepHook):
    """Takes the observer away when the run ends.

    Args:
        observer: attached to the run's engine.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def close(self) -> None:
        """Leave no hook behind."""
        self._observer.close()


def build_observer(config: RunConfig, run: Run) -> list[StepHook]:
    """Attach what the configuration wants to see to the run's engine.

    Args:
        config: the run's configuration.
        run: with its engine, not started yet.

    Returns:
        The hooks that go with it, in their order; empty, and nothing attached, where nothing is wanted.

    Raises:
        ConfigError: the submodules' results cannot be observed.
    """
    section = config.megasdc.trace
    if not section.enabled:
        return []
    engine = run.engine
    chosen = choose_submodules(list_submodules(engine.module), section.granularity, section.layers)
    checksums = default_algorithm(engine.device) if section.algorithm is None else algorithm(section.algorithm)
    tracer = Tracer(checksums, section, chosen)
    observer = Observer(engine, chosen, [tracer])
    return [Observation(observer), TraceRecorder(tracer, trace_header(config, engine, checksums.name))]
