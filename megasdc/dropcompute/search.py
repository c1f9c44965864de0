"""Search for the compute threshold with the largest effective speed-up on given latencies.

Giladi et al., NeurIPS 2023, arXiv 2306.10598: of 200 thresholds the one whose effective speed-up (eq. 6), averaged over
the steps of a window, is largest. Sums are exactly rounded; all else is counts, maxima and single
operations. So every rank computes the same threshold from the same latencies, on any processor.

Differences from the published code: the step then lasts min(tau, T), as in eq. 6, and not until the last completed
micro-batch; a micro-batch that ends at tau is completed; the smallest threshold is the first at which a replica
completes ``min_micro_batches``, not six; the largest is infinity, which drops nothing; on a tie the largest is
taken; the drop rate is bounded; the first ``min_micro_batches`` are protected. ``DropRule.finish`` is the rule of a
pipeline that drains: what was started before tau counts, as in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import ConfigError
from megasdc.dropcompute.pipeline import micro_batch_times

Seconds = NDArray[np.float64]
Chunks = Callable[[], Iterator[tuple[int, Seconds]]]
"""Yields the same pieces of latencies in every call: (index of the step from 0, [replica, micro-batch, stage])."""
Times = Callable[[], Iterator[tuple[int, Seconds, Seconds]]]
"""Yields the same (index of the step from 0, starts, ends) in every call, both as from ``micro_batch_times``."""


@dataclass(frozen=True)
class DropRule:
    """Rule for micro-batches when the threshold tau has passed.

    Args:
        finish: a started micro-batch is finished and counts; only before tau one is started. Else, as in eq. 6, the
            one in progress at tau is lost and the step ends at tau.
        min_micro_batches: that every replica completes whatever the threshold, >= 1; with ``finish`` false also 0.
        forward_share: of the forward in a latency, in [0, 1]; used with more than one stage.
    """

    finish: bool = False
    min_micro_batches: int = 1
    forward_share: float = 1 / 3

    def __post_init__(self) -> None:
        if self.min_micro_batches < int(self.finish):
            raise ValueError(f"min_micro_batches is {self.min_micro_batches}, needed at least {int(self.finish)}")
        if not 0 <= self.forward_share <= 1:
            raise ValueError(f"forward_share is {self.forward_share}, needed 0 to 1")


@dataclass(frozen=True)
class Curve:
    """Completed micro-batches and step times for each threshold.

    Args:
        thresholds_s: tau, [threshold], the last one infinite.
        completed: micro-batches completed by all replicas together, [step, threshold].
        times_s: compute time of the step, of its slowest replica, [step, threshold].
        micro_batches: M, planned for a replica's step.
    """

    thresholds_s: Seconds
    completed: NDArray[np.int64]
    times_s: Seconds
    num_replicas: int
    micro_batches: int
    communication_s: float

    @property
    def longest_s(self) -> Seconds:
        """T, the compute time without drops, [step]."""
        return self.times_s[:, -1]

    @property
    def completed_share(self) -> Seconds:
        """M~ / M over all steps, [threshold]."""
        return self.completed.sum(axis=0) / (len(self.completed) * self.num_replicas * self.micro_batches)

    @property
    def speedup(self) -> Seconds:
        """S_eff, the mean over steps of eq. 6, [threshold]."""
        plain = (self.longest_s + self.communication_s)[:, None]
        of_steps = (
            self.completed * plain / (self.num_replicas * self.micro_batches * (self.times_s + self.communication_s))
        )
        return np.array([math.fsum(column) / len(column) for column in of_steps.T])

    @property
    def throughput(self) -> Seconds:
        """Micro-batches per second over all steps, relative to the throughput without drops, [threshold]."""
        seconds = [math.fsum(column + self.communication_s) for column in self.times_s.T]
        return self.completed_share * seconds[-1] / np.array(seconds)

    def best(self, max_drop_rate: float) -> int:
        """Index of the threshold with the largest S_eff among those within the allowed drop rate, in [0, 1]."""
        allowed = 1 - self.completed_share <= max_drop_rate
        speedup = np.where(allowed, self.speedup, -math.inf)
        return int(np.flatnonzero(speedup == speedup.max())[-1])


@dataclass(frozen=True)
class Threshold:
    """A chosen threshold.

    Args:
        tau_s: infinite if dropping gains nothing.
        speedup: S_eff on the latencies it was chosen from.
        drop_rate: share of micro-batches not completed on them.
    """

    tau_s: float
    speedup: float
    drop_rate: float
    curve: Curve


def search_threshold(
    latencies_s: Seconds,
    communication_s: float,
    max_drop_rate: float = 1.0,
    rule: DropRule | None = None,
    count: int = 200,
) -> Threshold:
    """The threshold of the largest effective speed-up on recorded latencies.

    Args:
        latencies_s: [replica, step, micro-batch] or [replica, step, micro-batch, stage]; finite, >= 0.
        communication_s: Tc, time of a step that no threshold shortens, >= 0.
        max_drop_rate: largest share of micro-batches that may be dropped, in [0, 1].
        rule: what happens at the threshold; None: eq. 6 with at least one micro-batch.
        count: of finite thresholds, at equal distances.

    Returns:
        The same on every rank that gives the same arguments.

    Raises:
        ValueError: a wrong shape or value.
        ConfigError: a step takes no time.

    Collective: none.
    """
    if latencies_s.ndim not in (3, 4) or 0 in latencies_s.shape:
        raise ValueError(f"latencies_s has the shape {latencies_s.shape}, needed [replica, step, micro-batch]")
    if not (np.isfinite(latencies_s).all() and (latencies_s >= 0).all()):
        raise ValueError("latencies_s holds a value that is negative, infinite or NaN")
    whole = latencies_s.astype(np.float64)[(...,) + (None,) * (4 - latencies_s.ndim)]
    replicas, steps, micro_batches, _ = whole.shape
    curve = make_curve(
        lambda: ((step, whole[:, step]) for step in range(steps)),
        (replicas, steps, micro_batches),
        communication_s,
        rule or DropRule(),
        count,
    )
    return _chosen(curve, max_drop_rate)


def search_recorded(
    starts_s: Seconds,
    ends_s: Seconds,
    communication_s: float,
    max_drop_rate: float = 1.0,
    min_micro_batches: int = 1,
    count: int = 200,
    expected_s: Seconds | None = None,
) -> Threshold:
    """The threshold of the largest effective speed-up on the times of steps in which nothing was dropped.

    The rule is ``finish``: a started micro-batch is finished, and only before tau one is started (with ``expected_s``:
    only so long before tau). A replica whose last started micro-batch is m is taken to be done when m was in the
    recording. With one stage, or several equally fast ones, that is exact; else the replica can be done earlier, by the
    forwards of later micro-batches that ran before the backward of m.

    Args:
        starts_s: when the first stage started each micro-batch, [replica, step, micro-batch], seconds since the
            replica's step began.
        ends_s: when the first stage ended the backward pass of each, same shape and origin.
        communication_s: Tc, time of a step that no threshold shortens, >= 0.
        max_drop_rate: largest share of micro-batches that may be dropped, in [0, 1].
        min_micro_batches: that every replica completes whatever the threshold, >= 1.
        count: of finite thresholds, at equal distances.
        expected_s: duration that each replica expects of a micro-batch, [replica], seconds; None: only its start
            must be before tau.

    Returns:
        The same on every rank that gives the same arguments, and for one stage what ``search_threshold`` finds on the
        latencies.

    Raises:
        ValueError: a wrong shape or value.
        ConfigError: a step takes no time.

    Collective: none.
    """
    if starts_s.ndim != 3 or 0 in starts_s.shape or starts_s.shape != ends_s.shape:
        raise ValueError(
            f"starts_s and ends_s have the shapes {starts_s.shape} and {ends_s.shape}, needed [replica, step, "
            "micro-batch] twice"
        )
    starts, ends = starts_s.astype(np.float64), ends_s.astype(np.float64)
    for name, times in (("starts_s", starts), ("ends_s", ends)):
        if not (np.isfinite(times).all() and (times >= 0).all() and (np.diff(times) >= 0).all()):
            raise ValueError(
                f"{name} holds a value that is negative, infinite, NaN or before that of the micro-batch before"
            )
    if (ends < starts).any():
        raise ValueError("ends_s holds a value before the start of the same micro-batch")
    replicas, steps, micro_batches = starts.shape
    expected = np.zeros(replicas) if expected_s is None else expected_s
    if expected.shape != (replicas,) or not (np.isfinite(expected).all() and (expected >= 0).all()):
        raise ValueError(f"expected_s is {expected.tolist()}, needed {replicas} finite numbers of seconds >= 0")
    curve = _make_curve(
        lambda: ((step, starts[:, step] + expected[:, None], ends[:, step]) for step in range(steps)),
        (replicas, steps, micro_batches),
        communication_s,
        DropRule(True, min_micro_batches),
        count,
    )
    return _chosen(curve, max_drop_rate)


def _chosen(curve: Curve, max_drop_rate: float) -> Threshold:
    best = curve.best(max_drop_rate)
    tau_s, speedup = float(curve.thresholds_s[best]), float(curve.speedup[best])
    return Threshold(tau_s, speedup, 1 - float(curve.completed_share[best]), curve)


def make_curve(
    chunks: Chunks, sizes: tuple[int, int, int], communication_s: float, rule: DropRule, count: int
) -> Curve:
    """Effective speed-up against ``count`` finite thresholds, from latencies in pieces, which are read twice.

    ``chunks`` must yield the same pieces in both passes; ``sizes`` are replicas N, steps and micro-batches M.
    ConfigError where a step takes no time.
    """

    def times() -> Iterator[tuple[int, Seconds, Seconds]]:
        for step, latencies in chunks():
            yield step, *micro_batch_times(latencies, rule.forward_share, rule.finish)

    return _make_curve(times, sizes, communication_s, rule, count)


def _make_curve(times: Times, sizes: tuple[int, int, int], communication_s: float, rule: DropRule, count: int) -> Curve:
    replicas, steps, micro_batches = sizes
    if not 0 <= communication_s < math.inf:
        raise ValueError(f"communication_s is {communication_s}, needed a finite number of seconds >= 0")
    if rule.min_micro_batches > micro_batches:
        raise ValueError(f"min_micro_batches is {rule.min_micro_batches}, more than the {micro_batches} of a step")
    longest, protected = np.zeros(steps), np.zeros(steps)
    thresholds = np.append(_grid(times(), rule, longest, protected, count), math.inf)
    if not (longest + communication_s).all():
        raise ConfigError("a step takes no time: all its latencies and communication_s are 0")
    completed = np.zeros((steps, len(thresholds)), dtype=np.int64)
    last = np.zeros((steps, len(thresholds)))
    for step, starts, ends in times():
        optional = slice(rule.min_micro_batches, None)
        deadline = starts if rule.finish else ends
        side: Literal["left", "right"] = "right" if rule.finish else "left"  # started before tau; ended by tau
        place = np.searchsorted(thresholds, deadline[:, optional].ravel(), side)
        completed[step] += np.cumsum(np.bincount(place, minlength=len(thresholds)))
        if rule.finish:
            np.maximum.at(last[step], place, ends[:, optional].ravel())
    completed += replicas * rule.min_micro_batches
    if rule.finish:
        last = np.maximum(np.maximum.accumulate(last, axis=1), protected[:, None])
    else:
        last = np.minimum(np.maximum(thresholds, protected[:, None]), longest[:, None])
    return Curve(thresholds, completed, last, replicas, micro_batches, communication_s)


def _grid(
    times: Iterable[tuple[int, Seconds, Seconds]], rule: DropRule, longest: Seconds, protected: Seconds, count: int
) -> Seconds:
    """Thresholds at equal distances; fills in the latest end of each step, of all and of protected micro-batches."""
    low, high = math.inf, 0.0
    for step, starts, ends in times:
        first = min(rule.min_micro_batches, starts.shape[1] - 1)
        deadline = starts[:, first:] if rule.finish else ends[:, max(rule.min_micro_batches - 1, 0) :]
        low, high = min(low, float(deadline.min())), max(high, float(deadline.max()))
        longest[step] = max(longest[step], ends[:, -1].max())
        if rule.min_micro_batches:
            protected[step] = max(protected[step], ends[:, rule.min_micro_batches - 1].max())
    return np.linspace(low, high, count)
