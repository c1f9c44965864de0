"""Section `local_sgd`: whole runs that train apart, and agree on their weights every few steps."""

from __future__ import annotations

from typing import Literal

from megasdc.config.fields import (
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
LOCAL_SGD, AGREED_WEIGHTS = "LocalSgd", "agreed"
"""Name of the hook's state in checkpoints, and of its part that each rank saves for itself."""


class LocalSgdSection(Section):
    """Local-SGD: replicas that are launches of their own take `every` steps apart, and then agree on their weights."""

    at_resume = "flag"
    needs = tunes("local_sgd.replicas")

    replicas: PositiveInt | None = setting(
        None, "Replicas N, each a launch of its own; `megasdc launch --replicas N` sets it; null: no Local-SGD."
    )
    replica: NonNegativeInt = setting(
        0, "Number of this replica, from 0; `megasdc launch --replicas` sets it.", needs=asks("local_sgd.replicas")
    )
    every: PositiveInt = setting(500, "Local steps H of a round, after which replicas agree on their weights.")
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
