"""Distributions of delays, shared by simulations and injected delays: seeded pure functions, a class for each kind.

Each kind is a frozen value that draws the delays of one step of a block of replicas; one of them repeats recorded
latencies from a NumPy file. A draw depends only on the seed, the place and the kind's own values: step 7 of replica 130
always gets the same seconds, whatever was drawn before. Replicas are drawn in blocks of a fixed size, so that a million
of them need few generators and a single one costs little. Streams are NumPy's PCG64, seeded through ``SeedSequence``;
they are equal between runs with the same NumPy.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import DataError


def load_latencies(path: Path) -> NDArray[np.float64]:
    """Reads seconds from a file of NumPy's format (``.npy``).

    Args:
        path: an array [replica, step, micro-batch], or [replica, step, micro-batch, stage].

    Returns:
        Seconds, [replica, step, micro-batch, stage].

    Raises:
        DataError: it cannot be read, has another shape, or holds a value that is negative or not finite.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}; write it with numpy.save") from error
    if not isinstance(array, np.ndarray) or array.ndim not in (3, 4) or 0 in array.shape:
        shape = getattr(array, "shape", "an archive")
        raise DataError(
            f"{path} has the shape {shape}, needed [replica, step, micro-batch] with or without a fourth axis of stages"
        )
    if array.dtype.kind not in "fiu":
        raise DataError(f"{path} holds {array.dtype}, needed numbers of seconds")
    seconds = array.astype(np.float64)
    wrong = np.argwhere(~(np.isfinite(seconds) & (seconds >= 0)))
    if len(wrong):
        place = [int(i) for i in wrong[0]]
        raise DataError(f"{path} has {seconds[tuple(wrong[0])]} at {place}, needed finite seconds >= 0")
    return seconds if seconds.ndim == 4 else seconds[..., None]


BLOCK_REPLICAS = 128
"""Number of replicas whose delays come from one generator."""
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class DelayPlace:
    """One step of one block of replicas.

    Args:
        seed: seed of the whole environment, >= 0.
        stream: index of this delay in the environment.
        step: number of the step; the first is 1.
        block: number of the block: replicas from ``block * BLOCK_REPLICAS`` on.
        micro_batches: number of micro-batches per step, M.
        stages: number of pipeline stages.
    """

    seed: int
    stream: int
    step: int
    block: int
    micro_batches: int
    stages: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a draw: [replica, micro-batch, stage]."""
        return BLOCK_REPLICAS, self.micro_batches, self.stages

    @property
    def replicas(self) -> NDArray[np.int64]:
        """Indices of the block's replicas, [replica]."""
        return np.arange(self.block * BLOCK_REPLICAS, (self.block + 1) * BLOCK_REPLICAS)

    def generator(self, step: int | None = None) -> np.random.Generator:
        """The generator of this place, or of another step; step 0 is for draws that hold for the whole run."""
        return np.random.default_rng([self.seed, self.stream, self.step if step is None else step, self.block])


@dataclass(frozen=True)
class Delay:
    """Base of every kind: times in seconds of one micro-batch on one stage."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (0 <= value < math.inf):
                raise ValueError(f"{self.kind}: {field.name} is {value}, needed a finite number of seconds >= 0")

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place: seconds >= 0 that broadcast to ``place.shape``, [replica, micro-batch, stage]."""
        raise NotImplementedError

    def _need_above_zero(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{self.kind}: {name} is {getattr(self, name)}, needed more than 0")


@dataclass(frozen=True)
class BoundedLogNormal(Delay):
    """The delay environment of DropCompute: a log-normal distribution on 1..999, scaled to a mean.

    A length L in 1..999 is drawn with p(L) ~ exp(-(ln L - 4)^2 / 2) / L and divided by its mean. With a mean of half of
    a micro-batch's own latency, as in the paper, the standard deviation is 0.58 and the maximum 5.7 of this latency.

    Source: Giladi et al., NeurIPS 2023, arXiv 2306.10598, appendix, and its published code (`create_dist_lognormal`).
    """

    kind = "bounded_lognormal"
    mean_s: float

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place, by the alias method: constant time per draw."""
        kept, alias, values = _lognormal_tables()
        spot = place.generator().random(place.shape)
        spot *= len(values)
        cell = spot.astype(np.intp)
        spot -= cell
        return self.mean_s * values[np.where(spot < kept[cell], cell, alias[cell])]


@functools.cache
def _lognormal_tables() -> tuple[Seconds, NDArray[np.intp], Seconds]:
    """Tables of the alias method (Walker 1977): probability of keeping a cell, its alias, and values with mean 1."""
    lengths = np.arange(1, 1000)
    shares = np.exp(-((np.log(lengths) - 4) ** 2) / 2) / lengths
    shares /= shares.sum()
    values = lengths / (shares * lengths).sum()
    kept, alias = shares * len(lengths), np.arange(len(lengths))
    poor, rich = [int(i) for i in np.flatnonzero(kept < 1)], [int(i) for i in np.flatnonzero(kept >= 1)]
    while poor and rich:
        one, other = poor.pop(), rich[-1]
        alias[one] = other
        kept[other] -= 1 - kept[one]
        if kept[other] < 1:
            poor.append(rich.pop())
    return kept, alias, values


@dataclass(frozen=True)
class Normal(Delay):
    """Normal distribution; a draw below 0 becomes 0, so keep the mean some standard deviations above 0.

    Mean and standard deviation are those before clamping.
    """

    kind = "normal"
    mean_s: float
    std_s: float

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        drawn = place.generator().standard_normal(place.shape)
        drawn *= self.std_s
        drawn += self.mean_s
        return np.maximum(drawn, 0, out=drawn)


@dataclass(frozen=True)
class Gamma(Delay):
    """Gamma distribution; mean and standard deviation are above 0."""

    kind = "gamma"
    mean_s: float
    std_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need_above_zero("mean_s", "std_s")

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        shape = (self.mean_s / self.std_s) ** 2
        return place.generator().gamma(shape, self.mean_s / shape, place.shape)


@dataclass(frozen=True)
class Exponential(Delay):
    """Exponential distribution with a mean delay."""

    kind = "exponential"
    mean_s: float

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        return place.generator().exponential(self.mean_s, place.shape)


@dataclass(frozen=True)
class Bursts(Delay):
    """Random bursts: a replica is slow for some steps, in all its micro-batches and stages.

    ``probability``: probability that a burst of a replica begins in a step, in [0, 1]; ``delay_s``: delay of each
    micro-batch and stage during a burst of ``num_steps``.
    """

    kind = "bursts"
    probability: float
    num_steps: int
    delay_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need_above_zero("num_steps")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"{self.kind}: probability is {self.probability}, needed 0 to 1")

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place: slow if a burst began in one of the last ``num_steps`` steps, from step 1 on."""
        slow = np.zeros(BLOCK_REPLICAS, dtype=bool)
        for step in range(max(1, place.step - self.num_steps + 1), place.step + 1):
            slow |= place.generator(step).random(BLOCK_REPLICAS) < self.probability
        return np.where(slow, self.delay_s, 0.0)[:, None, None]


@dataclass(frozen=True)
class SlowRank(Delay):
    """One replica is slower by a constant time in every step.

    ``delay_s``: delay of each of its micro-batches; ``stage``: the slow pipeline stage, -1: all.
    """

    kind = "slow_rank"
    replica: int
    delay_s: float
    stage: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replica < 0 or self.stage < -1:
            raise ValueError(
                f"{self.kind}: replica {self.replica}, stage {self.stage}; needed a replica >= 0, a stage >= -1"
            )

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        stages = np.arange(place.stages)
        slow_stage = (stages == self.stage) | (self.stage == -1)
        return self.delay_s * ((place.replicas == self.replica)[:, None, None] & slow_stage)


@dataclass(frozen=True)
class SlowPeriods(Delay):
    """Every replica is slow for some steps of each period, each at its own random phase.

    ``period_steps``: steps from the start of one slow period to the next; ``slow_steps``: slow steps of each period, at
    most ``period_steps``; ``delay_s``: delay of each micro-batch and stage in a slow step.
    """

    kind = "slow_periods"
    period_steps: int
    slow_steps: int
    delay_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.slow_steps <= self.period_steps:
            raise ValueError(
                f"{self.kind}: slow_steps is {self.slow_steps}, needed 1 to period_steps, which is {self.period_steps}"
            )

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        phase = place.generator(0).integers(self.period_steps, size=BLOCK_REPLICAS)
        return np.where((phase + place.step) % self.period_steps < self.slow_steps, self.delay_s, 0.0)[:, None, None]


@dataclass(frozen=True)
class RecordedDelay(Delay):
    """Delays from a file of ``load_latencies``, [replica, step, micro-batch, stage]; each axis wraps around."""

    kind = "trace"
    path: str

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        delays = _loaded(self.path)
        replicas, steps, micro_batches, stages = delays.shape
        rows = delays[place.replicas % replicas, (place.step - 1) % steps]
        rows = rows[:, np.arange(place.micro_batches) % micro_batches]
        return rows[:, :, np.arange(place.stages) % stages]


@dataclass(frozen=True)
class Resampled(Delay):
    """Delays from a file of ``load_latencies``: each step of each replica is one recorded step of any, drawn at random.

    Differences between replicas are lost: one slow replica makes all of them slow now and then. The file has at least
    as many micro-batches and stages as are drawn.
    """

    kind = "resampled"
    path: str

    def draw(self, place: DelayPlace) -> Seconds:
        """Delays of a place."""
        delays = _loaded(self.path)
        if delays.shape[2] < place.micro_batches or delays.shape[3] < place.stages:
            raise DataError(
                f"{self.path} holds {delays.shape[2]} micro-batches of {delays.shape[3]} stage(s), needed "
                f"{place.micro_batches} of {place.stages}"
            )
        draws = place.generator()
        replica, step = (draws.integers(size, size=BLOCK_REPLICAS) for size in delays.shape[:2])
        return delays[replica, step, : place.micro_batches, : place.stages]


@functools.lru_cache(maxsize=4)
def _loaded(path: str) -> Seconds:
    return load_latencies(Path(path))


KINDS: dict[str, type[Delay]] = {
    kind.kind: kind
    for kind in (BoundedLogNormal, Normal, Gamma, Exponential, Bursts, SlowRank, SlowPeriods, RecordedDelay, Resampled)
}
"""Kinds of delays by name."""
