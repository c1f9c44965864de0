"""Checks of a configuration against the number of ranks, and warnings of settings that are probably unintended.

No torch here: the checks run in the launcher, and on machines where torch is not installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasdc.common.errors import ConfigError
from megasdc.config.fields import LARGEST_INTEGER
from megasdc.config.problems.detection import (
    MOST_SAMPLES_LOST,
    isolation_layout_problems,
    samples_lost,
)
from megasdc.config.problems.drop_compute import drop_layout_problems, drop_warnings
from megasdc.config.problems.faults import fault_place_problems
from megasdc.config.problems.health import health_warnings
from megasdc.config.problems.without_effect import idle_warnings

if TYPE_CHECKING:
    from megasdc.config.load import RunConfig


@dataclass(frozen=True)
class BatchLayout:
    """Layout of the ranks, and batch sizes.

    Attributes:
        world_size: all ranks, the product of the next three; in a study, those of one replica.
        train_batch_size: samples of one step over all ranks.
        micro_batch_size: samples of one micro-batch on one replica.
        accumulation_steps: micro-batches of one step on one replica, the most where they are not equally many.
        replicas: of a study, each of ``world_size`` ranks; 1 without.
    """

    world_size: int
    tensor: int
    pipeline: int
    data: int
    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    replicas: int = 1

    @property
    def is_uneven(self) -> bool:
        """Whether replicas take different numbers of micro-batches in a step."""
        return self.train_batch_size % (self.micro_batch_size * self.data) != 0

    @property
    def dealt_together(self) -> int:
        """Samples in a row of the stream that one replica gets: whole micro-batches where they are dealt unevenly."""
        return self.micro_batch_size if self.is_uneven else 1


def check_layout(config: RunConfig, world_size: int, launch_size: int | None = None) -> BatchLayout:
    """Check that the layout and the batch sizes fit a number of ranks, all those of the run.

    Args:
        launch_size: ranks with which the launch began, in whose numbers faults are placed; None: as many.

    Raises:
        ConfigError: the ranks do not fit the layout or the enabled features, a fault names a rank that does not exist,
            or the three batch sizes disagree; all numbers are given.
    """
    parallel = config.megasdc.parallel
    replicas = config.megasdc.study.replicas or 1
    ranks = parallel.tensor * parallel.pipeline
    if world_size < 1 or world_size % (replicas * ranks):
        text = (
            f"megasdc.parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} = {ranks} does not divide the "
            f"world size {world_size}; start a multiple of {ranks} ranks, or change tensor or pipeline."
        )
        if replicas > 1:
            text = (
                f"megasdc.study.replicas: {replicas} replicas of tensor {parallel.tensor} x pipeline "
                f"{parallel.pipeline} = {replicas * ranks} does not divide the world size {world_size}; start a "
                f"multiple of {replicas * ranks} ranks, or change replicas, tensor or pipeline."
            )
        raise ConfigError(text, config.source)
    world_size //= replicas
    data = world_size // ranks
    began_with = data if launch_size is None else launch_size // ranks
    if wrong := fault_place_problems(config.megasdc, parallel.tensor, parallel.pipeline, began_with):
        raise ConfigError(wrong, config.source)
    if wrong := list(isolation_layout_problems(config.megasdc, data)):
        raise ConfigError(wrong, config.source)
    if config.megasdc.audit.enabled and data == 1 and not config.megasdc.audit.permuted:
        text = (
            f"megasdc.audit.enabled: got true, but {world_size} ranks are one replica, which has no other to be "
            f"compared with; start at least {2 * ranks * replicas} ranks, set megasdc.audit.permuted true, which "
            "compares each rank with itself, or megasdc.audit.enabled false."
        )
        raise ConfigError(text, config.source)
    train, micro, accumulation = batch_sizes(config, data)
    steps = config.megasdc.training.steps
    if train * steps > LARGEST_INTEGER:
        text = (
            f"megasdc.training.steps: got {steps} of {train} samples each, together more than {LARGEST_INTEGER}, up to "
            "which samples are numbered; set fewer steps or a smaller batch."
        )
        raise ConfigError(text, config.source)
    if config.megasdc.drop_compute.enabled and train % (micro * data):
        text = (
            f"megasdc.drop_compute.enabled: got true, but the {train // micro} micro-batches of a step cannot be "
            f"divided among {data} replicas, which DropCompute needs; make train_batch_size a multiple of "
            f"{micro * data}, or set megasdc.drop_compute.enabled false."
        )
        raise ConfigError(text, config.source)
    if few := list(drop_layout_problems(config.megasdc.drop_compute, accumulation, "gradient_accumulation_steps")):
        raise ConfigError(few, config.source)
    return BatchLayout(world_size, parallel.tensor, parallel.pipeline, data, train, micro, accumulation, replicas)


def resolve_batch(config: RunConfig, world_size: int) -> tuple[int, int, int, int]:
    """The batch sizes (train, micro, accumulation steps) and the data-parallel size; raises as `check_layout`."""
    layout = check_layout(config, world_size)
    return layout.train_batch_size, layout.micro_batch_size, layout.accumulation_steps, layout.data


def batch_sizes(config: RunConfig, data: int) -> tuple[int, int, int]:
    """Derive the sizes that are absent, or check all three: train = micro x accumulation x data.

    Where train is given and micro does not divide it among the replicas, some take one micro-batch fewer, and
    accumulation is the largest number.

    Returns them in the order of that equation; ConfigError if they disagree.
    """
    train: int | None = config.deepspeed.get("train_batch_size")
    micro: int | None = config.deepspeed.get("train_micro_batch_size_per_gpu")
    accumulation: int | None = config.deepspeed.get("gradient_accumulation_steps")
    unit = (micro or 1) * (accumulation or 1) * data
    if train is None:
        train = unit
    if micro is not None and train % micro == 0 and train >= micro * data:
        most = math.ceil(train / (micro * data))
        if accumulation in (None, most):
            return train, micro, most
    if micro is not None and accumulation is not None:
        if train == unit:
            return train, micro, accumulation
        remedy = f"set train_batch_size to {unit}, change the factors, or omit one of the three"
    else:
        if train % unit == 0:
            return train, micro or train // unit, accumulation or train // unit
        remedy = f"make train_batch_size a multiple of {micro or unit}"
        if micro is not None and train < micro * data:
            remedy = f"each replica needs a micro-batch: make train_batch_size at least {micro * data}"
        remedy += ", or change the number of ranks"
    text = (
        f"train_batch_size: got {train}, which is not train_micro_batch_size_per_gpu {micro or '(derived)'} x "
        f"gradient_accumulation_steps {accumulation or '(derived)'} x data-parallel size {data}; {remedy}."
    )
    raise ConfigError(text, config.source)


def find_warnings(config: RunConfig) -> list[str]:
    """Settings that are allowed but probably unintended, each a sentence that starts with its dotted path."""
    file, warnings = config.megasdc, []
    steps = file.training.steps
    params = config.deepspeed["scheduler"]["params"]
    total, warmup = params.get("total_num_steps"), params["warmup_num_steps"]
    if total is not None and total != steps:
        effect = "the rate stays at its floor for the rest" if total < steps else "the rate never reaches its floor"
        warnings.append(f"scheduler.params.total_num_steps: {total}, but megasdc.training.steps is {steps}: {effect}.")
    if warmup >= steps > 1:
        warnings.append(f"scheduler.params.warmup_num_steps: {warmup} of {steps} steps: warm-up never ends.")
    for name, interval in (
        ("megasdc.training.eval_interval", file.training.eval_interval),
        ("megasdc.checkpoint.interval", file.checkpoint.interval),
        ("megasdc.logging.interval", file.logging.interval),
    ):
        if interval > steps:
            warnings.append(f"{name}: {interval}, but the run has {steps} steps.")
    interval, keep = file.checkpoint.interval, file.checkpoint.keep_every
    if keep and (interval == 0 or keep % interval):
        warnings.append(
            f"megasdc.checkpoint.keep_every: {keep} is no multiple of megasdc.checkpoint.interval {interval}: "
            "few or no checkpoints are kept by it."
        )
    accumulation = config.deepspeed.get("gradient_accumulation_steps")
    if accumulation is not None and (lost := samples_lost(file, accumulation)) > MOST_SAMPLES_LOST:
        enough = round(1 / accumulation / MOST_SAMPLES_LOST)
        warnings.append(
            f"megasdc.audit.interval: {file.audit.interval}: audits take up to 1/(M K) = {lost:.2%} of the independent "
            f"samples, with M = {accumulation} micro-batches a step; from {enough} on it is at most "
            f"{MOST_SAMPLES_LOST:.1%}."
        )
    warnings += [*drop_warnings(file), *health_warnings(file), *config.reset, *idle_warnings(file, "megasdc.")]
    if file.model.vocab_multiple % 8:
        warnings.append(f"megasdc.model.vocab_multiple: {file.model.vocab_multiple} is no multiple of 8: slow on GPUs.")
    return warnings
