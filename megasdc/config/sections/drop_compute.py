"""Section `drop_compute`: when a late replica stops starting micro-batches."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import NonNegativeInt, PositiveInt, Section, asks, setting, tunes

AUTO, INFINITE = "auto", "inf"
ELAPSED, PREDICTIVE = "elapsed", "predictive"
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
    min_micro_batches: PositiveInt = setting(1, "Micro-batches that every replica starts in every step.")
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
