"""Section `drop_compute`, when a late replica stops starting micro-batches, and its checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import NonNegativeInt, PositiveInt, Problem, Section, asks, setting, tunes

AUTO, INFINITE = "auto", "inf"
ELAPSED, PREDICTIVE = "elapsed", "predictive"
MICRO_BATCH, BACKWARD_PASS = "micro_batch", "backward"
PLANNED, COMPUTED = "planned", "computed"
DEFER, DISCARD = "defer", "discard"
EXTRA_STEPS, LARGER_BATCH, RESAMPLE = "extra_steps", "larger_batch", "resample"
Seconds = Annotated[float, Field(ge=0)]


def largest_batch(micro_batches: int, max_drop_rate: float) -> int:
    """Most micro-batches M' that `larger_batch` plans so that M are completed: M / (1 - rate), and at most 2 M."""
    if max_drop_rate >= 0.5:
        return 2 * micro_batches
    return math.floor(micro_batches / (1 - max_drop_rate) + 1e-9)


class DropComputeSection(Section):
    """DropCompute (Giladi et al., NeurIPS 2023): a late replica starts no more micro-batches in a step."""

    at_resume = "applied"
    needs = tunes("drop_compute.enabled")

    enabled: bool = setting(False, "Measure micro-batches and drop late ones; off: no hook is attached.")
    threshold: Seconds | Literal["auto", "inf"] = setting(
        "auto",
        "tau: seconds of a step after which a replica starts no further micro-batch; auto: the one of the largest "
        'effective speed-up on measured steps; "inf": measure only.',
    )
    rule: Literal["elapsed", "predictive"] = setting(
        "elapsed",
        "elapsed: a micro-batch is started before tau; predictive: where it is expected to have gone through the "
        "whole pipeline and back by tau.",
    )
    sigmas: Annotated[float, Field(ge=0)] = setting(
        1.0,
        "predictive: standard deviations above the mean that a micro-batch is expected to take.",
        needs=asks('drop_compute.rule="predictive"'),
    )
    granularity: Literal["micro_batch", "backward"] = setting(
        "micro_batch",
        "micro_batch: what was started is finished; backward: a backward pass that tau finds in progress ends between "
        "two transformer layers, and each parameter is averaged over the micro-batches that reached it. backward "
        'needs `gradients` "computed", one tensor rank and one stage.',
    )
    min_micro_batches: PositiveInt = setting(
        1,
        'Micro-batches that every replica starts in every step; with granularity "backward" the last of them need not '
        "be whole.",
    )
    max_drop_rate: Annotated[float, Field(ge=0, le=1)] = setting(
        0.1,
        "Largest drop rate: auto chooses no tau beyond it, and while the last `window_steps` steps are above it "
        "nothing is dropped.",
    )
    warmup_steps: NonNegativeInt = setting(
        5, "Steps after each start of the run in which nothing is dropped or measured."
    )
    window_steps: PositiveInt = setting(
        45, "Steps that are measured for auto and larger_batch, and that warnings and the limit look back."
    )
    retune_interval: NonNegativeInt = setting(
        0,
        "auto: steps after which tau is measured and chosen again; 0: never.",
        needs=asks('drop_compute.threshold="auto"'),
    )
    gradients: Literal["planned", "computed"] = setting(
        "planned",
        "planned: divide the sum of gradients by the planned number of micro-batches, as the paper does; computed: by "
        "what was really used, over all replicas.",
    )
    samples: Literal["defer", "discard"] = setting(
        "defer",
        "What happens to samples that were not started: defer: the replica takes them first in its next step; "
        "discard: they are lost.",
    )
    compensation: Literal["extra_steps", "larger_batch", "resample"] | None = setting(
        None,
        "With discard: extra_steps: as many more steps as were lost; larger_batch: more micro-batches a step, with a "
        "threshold so that as many as planned before are completed; resample: lost samples are used before their "
        "epoch ends; null: none.",
    )
    replay_decisions: str | None = setting(
        None,
        "`decisions.jsonl` of a run: start the same micro-batches as it did, whatever the time; null: decide anew.",
        needs=asks("drop_compute.enabled"),
        min_length=1,
    )
    record_times: bool = setting(True, "Write the times of every micro-batch to `step_times` in the run folder.")
    check_agreement: bool = setting(
        False,
        "Compare in each step whether all ranks of a replica completed the same micro-batches.",
        needs=asks("drop_compute.enabled"),
    )
    device_lag: NonNegativeInt = setting(1, "On GPUs: micro-batches that the deciding host may be ahead of its device.")


_D = "megasdc.drop_compute"


def drop_problems(drop: DropComputeSection, blends: bool) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks; ``blends``: the data are a blend."""
    compensation = drop.compensation
    if compensation is not None and drop.samples != DISCARD:
        yield Problem(
            (f"{_D}.compensation", f"{_D}.samples"),
            f'got "{compensation}" with samples "{drop.samples}", which loses none; set samples "discard", or '
            "compensation null.",
        )
    if compensation is not None and drop.threshold == INFINITE and drop.replay_decisions is None:
        yield Problem(
            (f"{_D}.compensation", f"{_D}.threshold"),
            f'got "{compensation}" with threshold "inf", which drops nothing; give another.',
        )
    if compensation == RESAMPLE and blends:
        yield Problem(
            (f"{_D}.compensation", "megasdc.data.blend"),
            'got "resample" with megasdc.data.blend, whose parts end their epochs at different times; set samples '
            '"defer", which loses none.',
        )
    yield from _unread(drop)


def granularity_problems(drop: DropComputeSection, tensor: int, pipeline: int) -> Iterator[Problem]:
    """Yield what does not fit backward passes that end at the threshold.

    Args:
        tensor: number of tensor ranks.
        pipeline: number of pipeline stages.
    """
    if not drop.enabled or drop.granularity != BACKWARD_PASS:
        return
    path, text = f"{_D}.granularity", f'got "{BACKWARD_PASS}"'
    whole = f'or granularity "{MICRO_BATCH}".'
    if tensor > 1:
        yield Problem(
            (path, "megasdc.parallel.tensor"),
            f"{text} with {tensor} tensor ranks, whose backward passes exchange results within each layer, so that one "
            f"that ends would leave the others waiting; set tensor 1, {whole}",
        )
    if pipeline > 1:
        yield Problem(
            (path, "megasdc.parallel.pipeline"),
            f"{text} with {pipeline} stages, each of which waits for the gradient that one that ends would not send; "
            f"set pipeline 1, {whole}",
        )
    if drop.gradients == PLANNED:
        yield Problem(
            (path, f"{_D}.gradients"),
            f'{text} with gradients "{PLANNED}", by which the gradients of the first layers, reached by fewer '
            f'micro-batches, would be smaller than those of the last; set "{COMPUTED}", {whole}',
        )
    if drop.compensation == LARGER_BATCH:
        yield Problem(
            (path, f"{_D}.compensation"),
            f'{text} with "{LARGER_BATCH}", which plans for micro-batches that are whole; set "{EXTRA_STEPS}", {whole}',
        )


def _unread(drop: DropComputeSection) -> Iterator[Problem]:
    """An interval that is too short."""
    if drop.retune_interval and drop.retune_interval <= drop.window_steps:
        yield Problem(
            (f"{_D}.retune_interval", f"{_D}.window_steps"),
            f"got {drop.retune_interval}, needed more than window_steps {drop.window_steps}, in which nothing is "
            "dropped.",
        )


def drop_warnings(drop: DropComputeSection, steps: int) -> Iterator[str]:
    """Sentences about settings that are probably unintended in a run of so many steps."""
    measured = drop.warmup_steps + drop.window_steps
    chooses = drop.threshold == AUTO or drop.compensation == LARGER_BATCH
    if drop.enabled and chooses and drop.replay_decisions is None and measured >= steps:
        yield (
            f"{_D}.window_steps: {drop.window_steps} after {drop.warmup_steps} of warm-up, the run has {steps} steps: "
            "it ends before a threshold is chosen."
        )


def drop_layout_problems(drop: DropComputeSection, micro_batches: int, accumulation_name: str) -> Iterator[str]:
    """Sentences about settings that do not fit the planned micro-batches of a replica's step.

    ``accumulation_name`` is the setting that determines their number.
    """
    if drop.enabled and drop.min_micro_batches > micro_batches:
        yield (
            f"{_D}.min_micro_batches: got {drop.min_micro_batches}, but a replica's step has {micro_batches} "
            f"micro-batches; raise {accumulation_name}, or lower it."
        )
    elif (
        drop.enabled
        and drop.min_micro_batches == micro_batches
        and drop.threshold != INFINITE
        and drop.granularity == MICRO_BATCH
    ):
        yield (
            f"{_D}.enabled: got true, but a replica's step has {micro_batches} micro-batches and min_micro_batches is "
            f'as many, so that nothing can be dropped; raise {accumulation_name}, or set threshold "inf" to measure.'
        )
    chooses_batch = drop.enabled and drop.compensation == LARGER_BATCH and drop.replay_decisions is None
    if chooses_batch and largest_batch(micro_batches, drop.max_drop_rate) == micro_batches:
        dropped = math.ceil(1e4 / (micro_batches + 1)) / 1e4
        yield (
            f'{_D}.max_drop_rate: got {drop.max_drop_rate:g} with compensation "larger_batch", but a replica that '
            f"completes {micro_batches} of {micro_batches + 1} micro-batches drops {dropped:g} of them; allow "
            f'that, raise {accumulation_name}, or set compensation "extra_steps".'
        )
