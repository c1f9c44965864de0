"""Stragglers: which ranks are named as slow, when they begin and end to be, and what else makes a step long.

Named is who is slower than its peers of the same stage by a ratio that matters and by more than noise explains, over
one of two windows: a short one for what is much slower, a long one for what is a little slower. A stage that all
replicas find slow is imbalance by design, and names nobody. Times in Python's garbage collection are kept apart.

How much slower each rank computes than its peers of the same stage, by the times of many steps: pure arithmetic.

A step's time on a rank is compared with the median of its peers in the same step, so that what all do alike (longer
sequences, a stage with more layers) cancels out. The mean of the logarithms over a window, the largest and smallest
tenth left out, is what lasts: it tells how many times slower the rank is. The spread of the same values is what is
random, and gives the error of that mean. Noise may be of a micro-batch or of a whole step: the spread is measured over
steps, and so holds either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
TRIM = 0.1
"""Share of a window's steps that are left out at either end: a single hiccup is no slowness."""


@dataclass(frozen=True)
class Slowness:
    """Ranks against their peers over some steps.

    Args:
        steps: that were compared.
        ratio: time over that of the peers, [replica, stage].
        sigmas: standard errors by which the logarithm of that is above 0, [replica, stage]; infinite without noise.
        noise: standard deviation of the logarithm from step to step, of the stage's median rank, [stage].
    """

    steps: int
    ratio: Values
    sigmas: Values
    noise: Values


def compare_with_peers(busy_s: Values) -> Slowness:
    """Compare the ranks of each stage.

    Args:
        busy_s: seconds a micro-batch, above 0, [step, replica, stage]; at least one step and two replicas.
    """
    logs = np.log(busy_s)
    ordered = np.sort(logs - _median_of_peers(logs), axis=0)
    steps = len(ordered)
    cut = int(TRIM * steps)
    kept = ordered[cut : steps - cut]
    mean = _mean(kept)
    # Winsorized, for the standard error of a trimmed mean: Tukey and McLaughlin 1963.
    winsorized = np.minimum(np.maximum(ordered, kept[0]), kept[-1])
    centred = winsorized - _mean(winsorized)
    spread = np.sqrt(np.add.reduce(centred * centred) / max(steps - 1, 1)) / (1 - 2 * cut / steps)
    noise = _middle(np.sort(spread, axis=0))
    error = np.maximum(spread, noise) / np.sqrt(steps)  # a short window may show less noise than there is
    if error.all():
        sigmas = mean / error
    else:
        sigmas = np.divide(mean, error, out=np.copysign(np.full_like(mean, np.inf), mean), where=error > 0)
    return Slowness(steps, np.exp(mean), sigmas, noise)


def _median_of_peers(values: Values) -> Values:
    """Median over the other replicas, [step, replica, stage]."""
    peers = values.shape[1] - 1
    if peers == 1:
        return values[:, ::-1]
    order = np.argsort(values, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)

    def without_own(index: int) -> Values:
        return np.where(place <= index, ordered[:, index + 1 : index + 2], ordered[:, index : index + 1])

    return (without_own((peers - 1) // 2) + without_own(peers // 2)) / 2


def _mean(values: Values) -> Values:
    """Along the first axis; methods of arrays take several times as long for the few values here."""
    found: Values = np.add.reduce(values) / len(values)
    return found


def _middle(ordered: Values) -> Values:
    """Median of what is ordered, along the first axis; likewise."""
    count = len(ordered)
    found: Values = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return found


def stage_times(busy_s: Values) -> Values:
    """Seconds a micro-batch of each stage, the median over steps and replicas, [stage].

    Args:
        busy_s: as of ``compare_with_peers``; one replica is enough.
    """
    return _middle(np.sort(busy_s.reshape(-1, busy_s.shape[-1]), axis=0))


SHORT, LONG = 12, 40
"""Steps of the two windows; with the long one and 10 % of noise, 10 % of slowness are named within 50 steps."""
ENOUGH = 16
"""Steps from which the long window is judged while it fills."""
EVERY = 4
"""Steps between two judgements: each is a chance to name somebody wrongly, and costs time."""
SIGMAS = 5.0
"""Standard errors above which a difference is not noise: one in three million by chance, of thousands of judgements."""
MUCH = 3.0
"""The short window names from this many times the excess of ``slow_ratio``: 15 % for 1.05."""

ReplicaStage = tuple[int, int]
"""(replica, stage): one rank, or the tensor ranks of one stage, which wait for each other."""


@dataclass(frozen=True)
class Straggler:
    """One place that is slower than its peers.

    Args:
        place: replica and stage.
        ratio: its time over that of its peers.
        sigmas: standard errors by which it is above 1.
        window: steps in which that was measured.
        since_step: in which it was named.
    """

    place: ReplicaStage
    ratio: float
    sigmas: float
    window: int
    since_step: int


@dataclass(frozen=True)
class StragglerChange:
    """What a judgement changed: who is named anew, and who no more."""

    begun: tuple[Straggler, ...] = ()
    ended: tuple[Straggler, ...] = ()


class Stragglers:
    """Keeps the times of the last steps, and judges them.

    Args:
        slow_ratio: above 1; from this ratio to its peers a place is slow.

    Attributes:
        named: the places that are slow, as when they were named.
        recent: the last comparison over the long window; None before it, and with a single replica.
    """

    def __init__(self, replicas: int, stages: int, slow_ratio: float) -> None:
        self._slow_ratio = slow_ratio
        self._busy_s = np.ones((LONG, replicas, stages))
        self._garbage_s = np.zeros((LONG, replicas, stages))
        self._rows = self._busy_s.reshape(LONG, -1), self._garbage_s.reshape(LONG, -1)
        """The same memory, [step, place]."""
        self._added = 0
        self.named: dict[ReplicaStage, Straggler] = {}
        self.recent: Slowness | None = None

    @property
    def num_peers(self) -> int:
        """Of each place: the same stage of the other replicas."""
        return self._busy_s.shape[1] - 1

    @property
    def num_stages(self) -> int:
        """Of the pipeline."""
        return self._busy_s.shape[2]

    @property
    def has_garbage(self) -> bool:
        """Whether garbage was collected in a step of the long window."""
        return bool(self._garbage_s.any())

    @property
    def is_full(self) -> bool:
        """Whether the long window is."""
        return self._added >= LONG

    def add(self, busy_s: Sequence[float] | Values, garbage_s: Sequence[float] | Values) -> bool:
        """Keep the times of a step, in seconds a micro-batch without waiting and without garbage collection.

        Args:
            busy_s: [replica * stages + stage], 0 where there is none.
            garbage_s: seconds of garbage collection a micro-batch, likewise.

        Returns:
            Whether a judgement is due; a step in which a place has no time is not kept.
        """
        if min(busy_s) <= 0:
            return False
        slot = self._added % LONG
        self._rows[0][slot], self._rows[1][slot] = busy_s, garbage_s
        self._added += 1
        return self._added % EVERY == 0

    def _last(self, steps: int) -> Values:
        """Times of the last steps, at most those that were kept, in any order, [step, replica, stage]."""
        if self.is_full and steps == LONG:
            return self._busy_s
        count = min(steps, self._added)
        return self._busy_s[np.arange(self._added - count, self._added) % LONG]

    def judge(self, step: int) -> StragglerChange:
        """Compare over both windows, and say who is slow anew and who no more.

        Args:
            step: that was added last.
        """
        if not self.num_peers or self._added < SHORT:
            return StragglerChange()
        self.recent = recent = compare_with_peers(self._last(LONG))
        excess = self._slow_ratio - 1
        slow: dict[ReplicaStage, Straggler] = dict(_slow_in(recent, 1 + excess, step)) if recent.steps >= ENOUGH else {}
        slow = dict(self._much_slower(1 + MUCH * excess, step)) | slow
        begun = [one for place, one in sorted(slow.items()) if place not in self.named]
        ended = [one for place, one in self.named.items() if recent.ratio[place] < 1 + excess / 2]
        self.named |= {one.place: one for one in begun}
        for one in ended:
            del self.named[one.place]
        return StragglerChange(tuple(begun), tuple(ended))

    def _much_slower(self, ratio: float, step: int) -> Iterator[tuple[ReplicaStage, Straggler]]:
        """Places that are slow over the short window, which is compared only if a place was once so much slower."""
        short = self._last(SHORT)
        if (short.max(axis=1) >= ratio * short.min(axis=1)).any():
            yield from _slow_in(compare_with_peers(short), ratio, step)

    @property
    def stage_s(self) -> Values:
        """Seconds a micro-batch of each stage, [stage]; valid once a step was added."""
        return stage_times(self._last(LONG))

    @property
    def imbalance(self) -> float:
        """Time of the slowest stage over the mean of all: what the layout itself costs."""
        stages = self.stage_s
        return float(stages.max() / stages.mean())

    @property
    def garbage_share(self) -> Values:
        """Garbage collection over the other time, [replica, stage]."""
        count = min(LONG, self._added)
        found: Values = self._garbage_s[:count].sum(axis=0) / self._busy_s[:count].sum(axis=0)
        return found


def _slow_in(found: Slowness, ratio: float, step: int) -> Iterator[tuple[ReplicaStage, Straggler]]:
    for replica, stage in np.argwhere((found.ratio >= ratio) & (found.sigmas >= SIGMAS)).tolist():
        place = (replica, stage)
        yield place, Straggler(place, float(found.ratio[place]), float(found.sigmas[place]), found.steps, step)
