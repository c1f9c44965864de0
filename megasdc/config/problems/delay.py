"""Problems of the entries of `delay`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megasdc.config.problems.fault_specs import Fault, step_problems
from megasdc.config.problems.problem import Problem
from megasdc.config.sections.delay import PARAMETERS_OF, DelaySpec
from megasdc.config.sections.faults import FaultPlace

_PARAMETERS = sorted({name for names in PARAMETERS_OF.values() for name in names} - FaultPlace.model_fields.keys())


def delay_problems(specs: Sequence[DelaySpec]) -> Iterator[Problem]:
    """Yield everything that is wrong with delays, whatever the number of ranks."""
    for index, spec in enumerate(specs):
        path = f"megasdc.delay.{index}"
        for field, text in (*step_problems(spec), *_parameter_problems(spec), *_value_problems(spec)):
            yield Problem((f"{path}.{field}", f"{path}.kind"), f"{text}.")


def _parameter_problems(spec: DelaySpec) -> Iterator[Fault]:
    for field in PARAMETERS_OF[spec.kind]:
        if getattr(spec, field) is None:
            yield field, f"missing; kind {spec.kind} needs it"
    for field in _PARAMETERS:
        if field not in PARAMETERS_OF[spec.kind] and getattr(spec, field) is not None:
            readers = [kind for kind, names in PARAMETERS_OF.items() if field in names]
            yield (
                field,
                f"got {getattr(spec, field)}, but kind {spec.kind} does not read it (only {', '.join(readers)}); "
                "remove it",
            )


def _value_problems(spec: DelaySpec) -> Iterator[Fault]:
    if spec.kind == "gamma":
        for field in ("mean_s", "std_s"):
            if getattr(spec, field) == 0:
                yield field, "got 0.0; kind gamma needs more than 0"
    if spec.slow_steps is not None and spec.period_steps is not None and spec.slow_steps > spec.period_steps:
        yield "slow_steps", f"got {spec.slow_steps}, more than period_steps {spec.period_steps}; needed at most all"
    if "path" in PARAMETERS_OF[spec.kind] and spec.path is not None and not Path(spec.path).is_file():
        yield "path", f"got {spec.path!r}, which is not a file; give one written with numpy.save"
    if spec.preemptible and (spec.stage or spec.tensor_rank):
        yield (
            "preemptible",
            f"got true with stage {spec.stage}, tensor_rank {spec.tensor_rank}; only tensor rank 0 of stage 0 decides "
            "whether a micro-batch is started, so a delay on another rank cannot be cut short; remove it",
        )
