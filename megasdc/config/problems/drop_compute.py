"""Contradictions in the section `drop_compute`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megasdc.config.problems.problem import Problem
from megasdc.config.sections.drop_compute import (
    AUTO,
    DISCARD,
    INFINITE,
    LARGER_BATCH,
    RESAMPLE,
    DropComputeSection,
    largest_batch,
)
from megasdc.config.sections.megasdc import MegasdcSection

_D = "megasdc.drop_compute"


def drop_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks."""
    drop = file.drop_compute
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
    if compensation == RESAMPLE and file.data.blend:
        yield Problem(
            (f"{_D}.compensation", "megasdc.data.blend"),
            'got "resample" with megasdc.data.blend, whose parts end their epochs at different times; set samples '
            '"defer", which loses none.',
        )
    yield from _unread(drop)


def _unread(drop: DropComputeSection) -> Iterator[Problem]:
    """An interval that is too short."""
    if drop.retune_interval and drop.retune_interval <= drop.window_steps:
        yield Problem(
            (f"{_D}.retune_interval", f"{_D}.window_steps"),
            f"got {drop.retune_interval}, needed more than window_steps {drop.window_steps}, in which nothing is "
            "dropped.",
        )


def drop_warnings(file: MegasdcSection) -> Iterator[str]:
    """Sentences about settings that are probably unintended."""
    drop, steps = file.drop_compute, file.training.steps
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
    elif drop.enabled and drop.min_micro_batches == micro_batches and drop.threshold != INFINITE:
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
