"""Section `local_sgd`: whole runs that train apart, and agree on their weights every few steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import (
    REFUSED,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    asks,
    setting,
    tunes,
)

AVERAGE, NESTEROV = "average", "nesterov"
AUTO, INFINITE = "auto", "inf"
LOCAL_SGD, AGREED_WEIGHTS = "LocalSgd", "agreed"
"""Name of the hook's state in checkpoints, and of its part that each rank saves for itself."""


class LocalSgdSection(Section):
    """Local-SGD: replicas that are launches of their own take `every` steps apart, and then agree on their weights."""

    at_resume = "flag"
    needs = tunes("local_sgd.replicas")

    replicas: PositiveInt | None = setting(
        None,
        "Replicas N, each a launch of its own; `megasdc launch --replicas N` sets it; null: no Local-SGD.",
        REFUSED,
    )
    replica: NonNegativeInt = setting(
        0,
        "Number of this replica, from 0; `megasdc launch --replicas` sets it.",
        REFUSED,
        needs=asks("local_sgd.replicas"),
    )
    every: PositiveInt = setting(500, "Local steps H of a round, after which replicas agree on their weights.", REFUSED)
    outer: Literal["average", "nesterov"] = setting(
        AVERAGE,
        "average: the mean of the weights, each weighted by the tokens that its replica has used; nesterov: the outer "
        "optimizer of DiLoCo, a step from the agreed weights towards that mean.",
    )
    outer_lr: PositiveFloat = setting(0.7, "nesterov: outer learning rate.", needs=asks('local_sgd.outer="nesterov"'))
    outer_momentum: Probability = setting(0.9, "nesterov: outer momentum.", needs=asks('local_sgd.outer="nesterov"'))
    deadline_s: PositiveFloat | None = setting(
        None,
        "Seconds after the first replica has ended a round until it goes on without those that have not; null: the "
        "median time of the last rounds, at least 10.",
        {"at_resume": "applied"},
    )
    threshold: Annotated[float, Field(gt=0)] | Literal["auto", "inf"] = setting(
        "inf",
        "DropCompute on a round: seconds of it after which a replica starts no further micro-batch, and joins the "
        'exchange with what it has; auto: the one of the largest effective speed-up on measured rounds; "inf": none.',
    )
    max_drop_rate: Annotated[float, Field(ge=0, le=1)] = setting(
        0.1,
        "auto: largest share of a round's micro-batches that may be dropped.",
        needs=asks('local_sgd.threshold="auto"'),
    )
    window_rounds: PositiveInt = setting(
        10, "auto: rounds that are measured before one is chosen.", needs=asks('local_sgd.threshold="auto"')
    )
    replay_rounds: str | None = setting(
        None,
        "`rounds.jsonl` of a run: the same replicas take part in each round with the same work, whatever the time; "
        "null: decide anew.",
        min_length=1,
    )
