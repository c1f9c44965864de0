"""A configuration on a number of ranks: checks of its layout, warnings, and configurations of single or fewer replicas.

Warnings are of settings that are probably unintended. A replica of a study has the configuration of an ordinary run,
which could be started alone; a run that goes on with fewer replicas takes the same samples each step.

No torch here: the checks run in the launcher, and on machines where torch is not installed.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasdc.common.errors import ConfigError
from megasdc.common.words import number_of
from megasdc.config.contradictions import (
    MOST_SAMPLES_LOST,
    fault_place_problems,
    isolation_layout_problems,
    samples_lost,
)
from megasdc.config.drop_compute import drop_layout_problems, drop_warnings
from megasdc.config.faults import FaultPlace, FaultSpec
from megasdc.config.fields import LARGEST_INTEGER
from megasdc.config.load import RunConfig, parse_config
from megasdc.config.schema import idle_warnings
from megasdc.config.sections import MegasdcSection, StudySection

if TYPE_CHECKING:
    from megasdc.config.load import RunConfig


@dataclass(frozen=True)
class BatchLayout:
    """Layout of the ranks, and batch sizes.

    Attributes:
        world_size: number of all ranks, the product of the next three; in a study, of one replica's ranks.
        train_batch_size: number of samples of one step over all ranks.
        micro_batch_size: number of samples of one micro-batch on one replica.
        accumulation_steps: number of micro-batches of one step on one replica, the largest where they differ.
        replicas: number of replicas of a study, each of ``world_size`` ranks; 1 without a study.
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
        """Number of successive samples that one replica gets: 1, or a micro-batch where they are dealt unevenly."""
        return self.micro_batch_size if self.is_uneven else 1


def check_layout(config: RunConfig, world_size: int, launch_size: int | None = None) -> BatchLayout:
    """Check that the layout and the batch sizes fit a number of ranks, all those of the run.

    Args:
        world_size: number of ranks of the run.
        launch_size: number of ranks at the start of the launch, by whose numbers faults are placed; None: as many.

    Raises:
        ConfigError: with every problem: the ranks do not fit the layout or the enabled features, a fault names a rank
            that does not exist, or the three batch sizes disagree; all numbers are given.
    """
    if problems := layout_problems(config, world_size, launch_size):
        raise ConfigError(problems, config.source)
    parallel, replicas = config.megasdc.parallel, config.megasdc.study.replicas or 1
    ranks = world_size // replicas
    data = ranks // (parallel.tensor * parallel.pipeline)
    train, micro, accumulation = batch_sizes(config, data)
    return BatchLayout(ranks, parallel.tensor, parallel.pipeline, data, train, micro, accumulation, replicas)


def layout_problems(config: RunConfig, world_size: int, launch_size: int | None = None) -> list[str]:
    """Every problem of a number of ranks, a sentence each that starts with its dotted path; see ``check_layout``."""
    parallel, replicas = config.megasdc.parallel, config.megasdc.study.replicas or 1
    ranks = parallel.tensor * parallel.pipeline
    if world_size < 1 or world_size % (replicas * ranks):
        if replicas > 1:
            return [
                f"megasdc.study.replicas: {replicas} replicas of tensor {parallel.tensor} x pipeline "
                f"{parallel.pipeline} = {replicas * ranks} does not divide the world size {world_size}; start a "
                f"multiple of {replicas * ranks} ranks, or change replicas, tensor or pipeline."
            ]
        return [
            f"megasdc.parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} = {ranks} does not divide the "
            f"world size {world_size}; start a multiple of {ranks} ranks, or change tensor or pipeline."
        ]
    data = world_size // (replicas * ranks)
    began_with = data if launch_size is None else launch_size // ranks
    problems = [
        *fault_place_problems(config.megasdc, parallel.tensor, parallel.pipeline, began_with),
        *isolation_layout_problems(config.megasdc, data),
    ]
    if config.megasdc.audit.enabled and data == 1 and not config.megasdc.audit.permutes(data):
        problems.append(
            f"megasdc.audit.enabled: got true with {number_of(world_size // replicas, 'rank')}, one replica alone, "
            f"which has no other to be compared with; start at least {2 * ranks * replicas} ranks, set "
            "megasdc.audit.permuted true, which compares each rank with itself, or megasdc.audit.enabled false."
        )
    return [*problems, *_batch_problems(config, data)]


def _batch_problems(config: RunConfig, data: int) -> list[str]:
    """Problems of the batch sizes with a data-parallel size."""
    try:
        train, micro, accumulation = batch_sizes(config, data)
    except ConfigError as error:
        return list(error.problems)
    problems, steps = list[str](), config.megasdc.training.steps
    if train * steps > LARGEST_INTEGER:
        problems.append(
            f"megasdc.training.steps: got {steps} of {train} samples each, together more than {LARGEST_INTEGER}, up to "
            "which samples are numbered; set fewer steps or a smaller batch."
        )
    if config.megasdc.drop_compute.enabled and train % (micro * data):
        problems.append(
            f"megasdc.drop_compute.enabled: got true, but the {train // micro} micro-batches of a step cannot be "
            f"divided among {data} replicas, which DropCompute needs; make train_batch_size a multiple of "
            f"{micro * data}, or set megasdc.drop_compute.enabled false."
        )
    return [*problems, *drop_layout_problems(config.megasdc.drop_compute, accumulation, "gradient_accumulation_steps")]


MOST_REPLICAS = 64


def smallest_layout(config: RunConfig, at_least: int = 1) -> BatchLayout:
    """The layout with the fewest replicas that the batch sizes allow.

    Args:
        at_least: number of replicas that are needed.

    Raises:
        ConfigError: none with up to 64 replicas; says what is wrong with the fewest.
    """
    ranks = config.megasdc.parallel.tensor * config.megasdc.parallel.pipeline
    for replicas in range(at_least, MOST_REPLICAS + 1):
        with contextlib.suppress(ConfigError):
            return check_layout(config, ranks * replicas)
    return check_layout(config, ranks * at_least)


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
    warnings += [
        *drop_warnings(file.drop_compute, steps),
        *health_warnings(file),
        *config.reset,
        *idle_warnings(file, "megasdc."),
    ]
    if file.model.vocab_multiple % 8:
        warnings.append(f"megasdc.model.vocab_multiple: {file.model.vocab_multiple} is no multiple of 8: slow on GPUs.")
    return warnings


def disturbances(file: MegasdcSection) -> list[str]:
    """What disturbs a run on purpose, a sentence each that starts with its dotted path; empty: nothing."""
    armed = {"faults": len(file.faults), "process_faults": len(file.process_faults), "delay": len(file.delay)}
    return [
        f"megasdc.{name}: {number_of(count, 'entry', 'entries')}: the run is disturbed on purpose; remove the section "
        "for a run that is no drill."
        for name, count in armed.items()
        if count
    ]


_SLOW = "starts, first steps, evaluations, saves, what comes between steps, and phases that were seldom timed yet"


def health_warnings(file: MegasdcSection) -> Iterator[str]:
    """Yield which hangs end by the timeout of collectives before health can name their cause."""
    health, timeout_s = file.health, file.parallel.timeout_s
    if not health.is_on(launched=True, studied=file.study.replicas is not None):
        return
    late = [name for name in ("hang_floor_s", "slow_floor_s") if getattr(health, name) >= timeout_s]
    if not late:
        return
    hangs = {"hang_floor_s": f"hangs outside of {_SLOW} end", "slow_floor_s": f"hangs in {_SLOW} end"}
    which = hangs[late[0]] if len(late) == 1 else "every hang ends"
    values = ", and slow_floor_s ".join(f"{getattr(health, name):g}" for name in late)
    yield (
        f"megasdc.health.{late[0]}: {values}, but megasdc.parallel.timeout_s is {timeout_s:g}: {which} by the timeout, "
        f"without a named cause; set a lower {' and '.join(late)}, or a higher timeout_s."
    )


def settings_for(config: RunConfig, whole: BatchLayout, replicas: int) -> list[str]:
    """Overrides for a run that continues with fewer replicas, texts ``a.b.c=value``.

    If the loss of one more replica would leave too few, the policy becomes halt where it was isolate.

    Args:
        whole: layout of all replicas.
        replicas: number of replicas that continue.
    """
    settings = []
    if replicas < whole.data and "gradient_accumulation_steps" in config.deepspeed:
        size, micro = whole.train_batch_size, whole.micro_batch_size
        settings += [
            f"train_batch_size={size}",
            f"train_micro_batch_size_per_gpu={micro}",
            f"gradient_accumulation_steps={math.ceil(size / (micro * replicas))}",
        ]
    sdc = config.megasdc.sdc
    if replicas <= sdc.isolation.min_replicas:
        settings += [f"megasdc.sdc.policy.{name}=halt" for name in sdc.policy.isolating]
    return settings


def with_replicas(config: RunConfig, whole: BatchLayout, replicas: int) -> RunConfig:
    """The configuration of a run that continues with fewer replicas.

    Raises:
        ConfigError: a setting contradicts the smaller number.
    """
    fewer = parse_config(config.resolved(), settings_for(config, whole, replicas), config.source, stored=True)
    return replace(fewer, allow_changed=config.allow_changed)


T = TypeVar("T", bound=FaultPlace)
_SEEDS_APART = 1 << 32
"""Difference between the seeds of a fault in consecutive replicas, so that their draws are independent."""


def replica_folder(folder: Path | str, replica: int) -> Path:
    """Folder of a replica, in place of ``folder`` of an ordinary run."""
    return Path(folder) / f"replica_{replica}"


def faulty_replica(study: StudySection) -> int:
    """The replica that is not trusted, in a study of two."""
    return 0 if study.trusted else 1


def replica_config(config: RunConfig, replica: int) -> RunConfig:
    """The configuration of one replica, counted from 0, of a study: own folders, only its faults, no study."""
    sections = config.megasdc
    logging = sections.logging.model_copy(
        update={
            "run_dir": str(replica_folder(sections.logging.run_dir, replica)),
            "progress_bar": sections.logging.progress_bar and replica == sections.study.trusted,
            "prometheus": sections.logging.prometheus if replica == sections.study.trusted else None,
        }
    )
    checkpoint = sections.checkpoint
    if checkpoint.folder is not None:
        checkpoint = checkpoint.model_copy(update={"folder": str(replica_folder(checkpoint.folder, replica))})
    own = {
        "study": StudySection.model_validate({}),
        "logging": logging,
        "checkpoint": checkpoint,
        "faults": [_reseeded(spec, replica) for spec in _of_replica(sections.faults, replica)],
        "process_faults": _of_replica(sections.process_faults, replica),
    }
    return replace(config, deepspeed=_own_monitors(config.deepspeed, replica), megasdc=sections.model_copy(update=own))


def own_faults(sections: MegasdcSection, data: int) -> MegasdcSection:
    """The sections with the faults of this replica of Local-SGD alone, whose ``replica`` counts over all of them.

    Args:
        data: number of data ranks of each replica.
    """
    local = sections.local_sgd
    if local.replicas is None:
        return sections
    first = local.replica * data
    faults = [_reseeded(spec, local.replica) for spec in _moved(sections.faults, first, data)]
    return sections.model_copy(
        update={"faults": faults, "process_faults": _moved(sections.process_faults, first, data)}
    )


def _moved(faults: Iterable[T], first: int, data: int) -> list[T]:
    """Faults of the replicas from ``first`` on, so many, counted from 0."""
    here = [spec for spec in faults if spec.replica is None or 0 <= spec.replica - first < data]
    return [
        spec if spec.replica is None else spec.model_copy(update={"replica": spec.replica - first}) for spec in here
    ]


def _of_replica(faults: Iterable[T], replica: int) -> list[T]:
    return [spec.model_copy(update={"replica": None}) for spec in faults if spec.replica in (None, replica)]


def _reseeded(spec: FaultSpec, replica: int) -> FaultSpec:
    return spec.model_copy(update={"seed": spec.seed + replica * _SEEDS_APART})


def _own_monitors(deepspeed: dict[str, Any], replica: int) -> dict[str, Any]:
    """Give each replica its own names of TensorBoard and CSV files."""
    own = copy.deepcopy(deepspeed)
    for name in ("tensorboard", "csv_monitor"):
        if own.get(name, {}).get("enabled"):
            own[name]["job_name"] = f"{own[name]['job_name']}_replica_{replica}"
    return own
