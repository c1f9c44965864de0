"""Entries of the section `delay`, injected delays: ranks, duration, distribution.

Problems of the entries of `delay`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, setting
from megasdc.config.problems.problem import Problem
from megasdc.config.sections.faults import Fault, FaultPlace, Share, step_problems

Seconds = Annotated[float, Field(ge=0)]


class DelaySpec(FaultPlace):
    """One delay before micro-batches; without a rank or tensor rank, on tensor rank 0 of each stage that fits."""

    at_resume = "applied"

    kind: Literal[
        "bounded_lognormal",
        "normal",
        "gamma",
        "exponential",
        "bursts",
        "slow_rank",
        "slow_periods",
        "trace",
        "resampled",
    ] = setting(
        ...,
        "How long, for each micro-batch and stage: drawn anew (bounded_lognormal is the environment of DropCompute's "
        "paper, normal, gamma, exponential); `delay_s` while a burst of a replica lasts, always on one `replica` "
        "(slow_rank), or in a part of each period; as recorded in a file (trace), or a recorded step drawn at random "
        "(resampled).",
    )
    mean_s: Seconds | None = setting(None, "bounded_lognormal, normal, gamma, exponential: mean; needed there.")
    std_s: Seconds | None = setting(None, "normal, gamma: standard deviation; needed there.")
    delay_s: Seconds | None = setting(
        None, "bursts, slow_rank, slow_periods: of a micro-batch while slow; needed there."
    )
    probability: Share | None = setting(
        None, "bursts: that one of a replica begins in a step, in [0, 1]; needed there."
    )
    num_steps: PositiveInt | None = setting(None, "bursts: steps that one lasts; needed there.")
    period_steps: PositiveInt | None = setting(
        None,
        "slow_periods: from the begin of one slow time of a replica to the next, each replica at its own time; needed "
        "there.",
    )
    slow_steps: PositiveInt | None = setting(None, "slow_periods: slow ones of each period, at most all; needed there.")
    path: str | None = setting(
        None,
        "trace, resampled: .npy file of seconds [replica, step, micro-batch], or with a fourth axis of stages; needed "
        "there. In a trace each axis starts again at its end.",
        min_length=1,
    )
    micro_batch_latency_s: PositiveFloat | None = setting(
        None,
        "What mean, deviation, delay and file are multiples of, as in the paper, where the mean is 0.5 of a "
        "micro-batch's latency; null: they are seconds.",
    )
    preemptible: bool = setting(
        False,
        "The delay ends when the time of the replica is up. So it is on the rank that decides whether a micro-batch "
        "is started, tensor rank 0 of the first stage; on other ranks a delay always lasts to its end.",
    )
    seed: NonNegativeInt = setting(1, "Seed of every draw, with the place of the entry in the list.")


PARAMETERS_OF = {
    "bounded_lognormal": ("mean_s",),
    "normal": ("mean_s", "std_s"),
    "gamma": ("mean_s", "std_s"),
    "exponential": ("mean_s",),
    "bursts": ("probability", "num_steps", "delay_s"),
    "slow_rank": ("replica", "delay_s"),
    "slow_periods": ("period_steps", "slow_steps", "delay_s"),
    "trace": ("path",),
    "resampled": ("path",),
}
"""Fields that each kind needs besides its place; it does not read the other fields named here."""


_PARAMETERS = sorted({name for names in PARAMETERS_OF.values() for name in names} - FaultPlace.model_fields.keys())


def delay_problems(specs: Sequence[DelaySpec]) -> Iterator[Problem]:
    """Yield everything that is wrong with delays, whatever the number of ranks."""
    for index, spec in enumerate(specs):
        path = f"megasdc.delay.{index}"
        for field, text in (*step_problems(spec), *_parameter_problems(spec), *_value_problems(spec)):
            yield Problem((f"{path}.{field}", f"{path}.kind"), f"{text}.")
        if "path" in PARAMETERS_OF[spec.kind] and spec.path is not None and not Path(spec.path).is_file():
            what = f"got {spec.path!r}, which is not a file; give one written with numpy.save."
            yield Problem((f"{path}.path", f"{path}.kind"), what, of_host=True)


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
    if spec.preemptible and (spec.stage or spec.tensor_rank):
        yield (
            "preemptible",
            f"got true with stage {spec.stage}, tensor_rank {spec.tensor_rank}; only tensor rank 0 of stage 0 decides "
            "whether a micro-batch is started, so a delay on another rank cannot be cut short; remove it",
        )
