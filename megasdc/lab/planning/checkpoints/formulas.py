"""Expected training time, and the intervals that lose least of it.

- J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974: tau = sqrt(2 C M).
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006: a
  series for the optimum, and a complete model of the time that an interval takes, M e^(R/M) (e^((tau+C)/M) - 1).

The second is exact for one kind of save and has its minimum where (1 - tau/M) e^((tau+C)/M) = 1. With two kinds a cycle
is n segments of S seconds, m steps and a snapshot in memory each; the last one ends with a save on the disk of C
seconds. Failures of a share b need the disk and begin the cycle anew, the others begin their segment anew. With x_j
for the expected time from the begin of segment j to that of the next, f = e^(S/M) - 1 and f' = e^((S+C)/M) - 1 for the
last one, x_j = f (K + b (x_0 + ... + x_(j-1))), hence

    cycle = K / b ((1 + b f)^(n-1) (1 + b f') - 1),   K = M + mean outage,

which is Daly's model for b = n = 1. This is exact where a save may be read as soon as its stall has ended. Where it
must be older by L seconds (written in the background; verified), a failure loses L more: K grows by L times the share
of such failures and by what fails while L is done again, an approximation that the simulation checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megasdc.lab.planning.checkpoints.job import JobModel

_GOLDEN = (math.sqrt(5) - 1) / 2
_ROUNDS = 60
"""Of a search by golden section or bisection: an interval shrinks by 3e-13 or more."""
_FEW = 65
"""Fewer whole steps or segments than that are all tried."""
_LARGEST = 700.0
"""Exponents up to it do not overflow."""


@dataclass(frozen=True)
class Intervals:
    """Steps between saves; None: none are made.

    Args:
        memory: of snapshots in host memory.
        disk: of checkpoints on the disk, a multiple of ``memory``.
    """

    memory: float | None
    disk: float | None


def young(stall_s: float, mtbf_s: float) -> float:
    """Young's interval in seconds of training between saves; infinite without failures."""
    return math.inf if math.isinf(mtbf_s) else math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly's interval in seconds of training between saves: a series; M where C is 2 M or more."""
    if math.isinf(mtbf_s) or stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + ratio / 3 + ratio**2 / 9) - stall_s


def exact(stall_s: float, mtbf_s: float) -> float:
    """Minimum of Daly's complete model in seconds of training between saves."""
    if math.isinf(mtbf_s):
        return mtbf_s
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        # The logarithm of (1 - x) e^(x + C/M) = 1 for x = tau/M; falls as x grows.
        if math.log1p(-middle) + middle + stall_s / mtbf_s > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2 * mtbf_s


def elapsed_per_training(job: JobModel, intervals: Intervals) -> float:
    """Expected seconds that pass for each second of training that counts; infinite: there is no progress."""
    costs, outage = job.costs, job.outage
    memory = intervals.memory or intervals.disk
    if memory is None:  # no save at all
        return 1.0 if job.rate == 0 else math.inf
    segments = math.inf if intervals.disk is None else intervals.disk / memory
    training_s = memory * costs.step_s
    segment_s = training_s + (costs.memory_stall_s or 0.0)
    if job.rate == 0:
        return (segment_s + (costs.disk_stall_s / segments)) / training_s
    if job.rate * (segment_s + costs.disk_stall_s) > _LARGEST:
        return math.inf
    again = sum(outage.ends[source] * lag for source, lag in job.lags_s.items())
    lost_s = job.mtbf_s + outage.mean_s + again * (1 + job.rate * outage.mean_s)
    inner, last = math.expm1(job.rate * segment_s), math.expm1(job.rate * (segment_s + costs.disk_stall_s))
    share = outage.on_disk
    if math.isinf(segments):
        return math.inf if share else lost_s * inner / training_s
    if share == 0:
        return lost_s * ((segments - 1) * inner + last) / (segments * training_s)
    power = (segments - 1) * math.log1p(share * inner) + math.log1p(share * last)
    return lost_s / share * math.expm1(power) / (segments * training_s) if power < _LARGEST else math.inf


def shortest_disk(job: JobModel, memory: float) -> int:
    """Fewest segments of ``memory`` steps after which the save before is whole on the disk."""
    segment_s = memory * job.costs.step_s + (job.costs.memory_stall_s or 0.0)
    return max(1, math.ceil(job.costs.lag_s / segment_s * (1 - 1e-12)))


def best_intervals(job: JobModel) -> Intervals:
    """Whole steps between saves that lose least time, the disk's a multiple of the memory's."""
    costs, share = job.costs, job.outage.on_disk
    if job.rate == 0:
        return Intervals(None, None)
    longest = max(4.0, 4 * job.mtbf_s / costs.step_s)  # of a kind of save that every failure needs
    if not costs.has_memory:
        return Intervals(None, _least_whole(partial(_loss, job, None), shortest_disk(job, 1), longest))
    if not share:
        return Intervals(_least_whole(lambda memory: _loss(job, memory, math.inf), 1, longest), None)

    def segments(memory: float) -> tuple[Callable[[float], float], int, float]:
        """What a number of segments costs, and its range."""
        fewest = shortest_disk(job, memory)
        return partial(_loss, job, memory), fewest, max(fewest, longest / memory / share)

    def of_memory(memory: float) -> float:
        loss, fewest, most = segments(memory)
        return loss(_least(loss, fewest, most))

    def steps_of(count: int) -> int:
        """Best whole steps of a segment, of so many of them between saves on the disk."""
        shortest = math.ceil((costs.lag_s / count - (costs.memory_stall_s or 0.0)) / costs.step_s)
        return _least_whole(lambda memory: _loss(job, memory, count), max(1, shortest), longest)

    steps = _least(of_memory, 1, longest)
    number = _least(*segments(steps))
    # Rounding matters where there are few steps or segments: all are tried. Of many the nearest are enough.
    pairs = [(memory, _least_whole(*segments(memory))) for memory in {*range(1, _FEW), *_whole(steps, 1)}]
    pairs += [(steps_of(count), count) for count in {*range(1, _FEW), *_whole(number, 1)}]
    memory, count = min(pairs, key=lambda pair: _loss(job, *pair))
    return Intervals(memory, memory * count)


def _loss(job: JobModel, memory: float | None, number: float) -> float:
    """Of a number of segments of ``memory`` steps between saves on the disk; infinite: of none there."""
    if memory is None:
        return elapsed_per_training(job, Intervals(None, number))
    return elapsed_per_training(job, Intervals(memory, None if math.isinf(number) else memory * number))


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The argument between ``low`` and ``high`` for which ``loss`` is least, by golden section of its logarithm."""
    left, right = math.log(low), math.log(max(low, high))
    inner = [right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)]
    losses = [loss(math.exp(one)) for one in inner]
    for _ in range(_ROUNDS):
        if losses[0] <= losses[1]:
            right, inner[1], losses[1] = inner[1], inner[0], losses[0]
            inner[0] = right - _GOLDEN * (right - left)
            losses[0] = loss(math.exp(inner[0]))
        else:
            left, inner[0], losses[0] = inner[0], inner[1], losses[1]
            inner[1] = left + _GOLDEN * (right - left)
            losses[1] = loss(math.exp(inner[1]))
    return min((low, max(low, high), math.exp((left + right) / 2)), key=loss)


def _least_whole(loss: Callable[[float], float], low: int, high: float) -> int:
    """The same among whole numbers."""
    return min(_whole(_least(loss, low, high), low), key=loss)


def _whole(number: float, low: int) -> list[int]:
    """The whole numbers on both sides of a number, at least ``low``."""
    return sorted({max(low, math.floor(number)), max(low, math.ceil(number))})
