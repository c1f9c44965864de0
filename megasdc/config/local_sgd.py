"""Section `local_sgd`: whole runs that train apart, and agree on their weights every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megasdc.common.words import number_of
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
ROUNDS_FILE = "rounds.jsonl"
"""File in the folder of a launch of replicas with a line for each round."""


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


FP32_BYTES = 4


@dataclass(frozen=True)
class PlannedRounds:
    """What replicas of Local-SGD do in a round, as far as their configuration says it.

    Args:
        replicas: number of replicas.
        every: local steps of a round.
        rounds: of the whole run.
        outer: see ``LocalSgdSection``, as ``outer_lr``, ``outer_momentum``, ``deadline_s`` and ``threshold``.
        outer_lr: None: the outer rule has none, as of ``outer_momentum``.
        samples: of all replicas in a round; None: the batch size is not known, as of ``tokens``.
        fetched_bytes: of the others' weights that all replicas fetch in a round, where all take part.
    """

    replicas: int
    every: int
    rounds: int
    outer: str
    outer_lr: float | None
    outer_momentum: float | None
    deadline_s: float | None
    threshold: float | str
    samples: int | None
    tokens: int | None
    fetched_bytes: int

    @staticmethod
    def of(
        section: LocalSgdSection, steps: int, batch: int | None, sequence_length: int, parameters: int
    ) -> PlannedRounds | None:
        """Derive it; None: the file asks for no replicas.

        Args:
            steps: of the whole run.
            batch: samples of a step of one replica; None: not known.
            sequence_length: tokens of a sample.
            parameters: of the model, whose master weights are exchanged in fp32.
        """
        if section.replicas is None:
            return None
        steps_further = section.outer == NESTEROV
        samples = None if batch is None else section.replicas * section.every * batch
        return PlannedRounds(
            replicas=section.replicas,
            every=section.every,
            rounds=steps // section.every,
            outer=section.outer,
            outer_lr=section.outer_lr if steps_further else None,
            outer_momentum=section.outer_momentum if steps_further else None,
            deadline_s=section.deadline_s,
            threshold=section.threshold,
            samples=samples,
            tokens=None if samples is None else samples * sequence_length,
            fetched_bytes=section.replicas * (section.replicas - 1) * parameters * FP32_BYTES,
        )

    def render(self) -> str:
        """As text, a line each."""
        rule = self.outer
        rule += "" if self.outer_lr is None else f", outer_lr {self.outer_lr:g}, outer_momentum {self.outer_momentum:g}"
        lines = [
            f"Local-SGD: {number_of(self.replicas, 'replica')}, each a launch of its own, agree on their weights every "
            f"{number_of(self.every, 'step')} ({rule}), {number_of(self.rounds, 'round')} in all"
        ]
        used = ""
        if self.samples is not None:
            a_step = self.samples // self.every
            used = f"{self.samples:,} samples ({a_step:,} a step), {self.tokens:,} tokens of all replicas; "
        lines.append(
            f"a round: {used}each fetches {self.fetched_bytes / self.replicas / 1e6:,.1f} MB of weights from the "
            f"others, {self.fetched_bytes / 1e6:,.1f} MB in all"
        )
        waits = "the median time of the last rounds, at least 10 s," if self.deadline_s is None else ""
        waits = waits or f"{self.deadline_s:g} s"
        lines.append(f"a late replica is waited for {waits} after the first; then the others go on without it")
        if self.threshold == AUTO:
            lines.append("a replica starts no micro-batch after a time of a round that is chosen from measured ones")
        elif self.threshold != INFINITE:
            lines.append(f"a replica starts no micro-batch after {self.threshold:g} s of a round")
        return "\n".join(lines)
