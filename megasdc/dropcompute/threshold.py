"""DropCompute's compute threshold: the paper's closed forms, and the search for the best one on given latencies.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute variance reduction",
NeurIPS 2023, arXiv 2306.10598, section 4. N replicas compute M micro-batches a step, whose latencies are independent
with mean mu and standard deviation s. All times are in seconds.

**Closed forms**: convergence, step time, completed micro-batches and effective speed-up. The time of a replica is taken
as normal with mean M mu and variance M s^2, and the time T of a step, without communication, is that of the slowest
replica. Differences from the paper: the expectation of the largest of N normal values is also computed by quadrature,
to show the error of eq. 4; so is that of min(tau, T), which eq. 6 states for one step.

**Times in a pipeline**: with several stages, forwards and backwards follow 1F1B, the schedule of DeepSpeed's
``TrainSchedule``: a stage starts its next pass once it is free and the stage before it (forward) or after it (backward)
has ended the same one. Messages between stages take no time, and sends do not block.

**Search**: of 200 thresholds the one whose effective speed-up (eq. 6), averaged over the steps of a window, is largest.
Sums are exactly rounded; all else is counts, maxima and single operations. So every rank computes the same threshold
from the same latencies, on any processor. Differences from the published code: the step then lasts min(tau, T), as in
eq. 6, and not until the last completed micro-batch; a micro-batch that ends at tau is completed; the smallest threshold
is the first at which a replica completes ``min_micro_batches``, not six; the largest is infinity, which drops nothing;
on a tie the largest is taken; the drop rate is bounded; the first ``min_micro_batches`` are protected.
``DropRule.finish`` is the rule of a pipeline that drains: what was started before tau counts, as in a run. Where
backward passes end between layers, a micro-batch is its forward pass, as long as measured, and equally long passes
through its layers: each is started before tau, and finished, and counts as a share of the micro-batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import ConfigError

EULER_GAMMA = float(np.euler_gamma)
_ERFC = np.frompyfunc(math.erfc, 1, 1)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)
THRESHOLDS = 200
"""Number of finite thresholds of a search, at equal distances."""
_FAR = 40.0
"""Standard deviations beyond which the tail of a normal distribution is negligible in float64."""


def normal_cdf(x: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Phi, the standard normal distribution function, element by element."""
    return np.asarray(_ERFC(-np.asarray(x, dtype=np.float64) / math.sqrt(2)), dtype=np.float64) / 2


def published_norm_bound(
    samples: float, largest_batch: float, smoothness: float, noise: float, start_gap: float
) -> float:
    """Bound on E[||grad L||^2] of SGD whose batch differs from step to step, by Theorem 4.1 (eq. 2).

    2 L b_max D / K + 2 sigma sqrt(L D / K), of K ``samples`` in steps of at most b_max = ``largest_batch``, for a loss
    with ``smoothness`` (Lipschitz constant of the gradient) L, gradients of a sample with variance ``noise``^2, and D =
    ``start_gap``, the first loss over the least one. The expectation is over the samples, and over the steps with
    probabilities proportional to their batches.
    """
    return 2 * smoothness * largest_batch * start_gap / samples + 2 * noise * math.sqrt(
        smoothness * start_gap / samples
    )


def gradient_norm_bound(
    samples: float, largest_batch: float, smoothness: float, noise: float, start_gap: float
) -> tuple[float, float]:
    """A tighter bound on what ``published_norm_bound`` bounds, and the learning rate that gives it; derived here.

    A step being eta times the sum of b_i gradients, the loss falls by at least eta b_i ||grad||^2 (1 - L eta b_i / 2) -
    L eta^2 b_i sigma^2 / 2 in expectation. Summed over steps, E[||grad||^2] <= (D / (eta K) + L eta sigma^2 / 2) / (1 -
    L eta b_max / 2) for eta <= 1 / (L b_max), the mean over samples. It is least, A + sqrt(A^2 + B^2) with A = L b_max
    D / K and B^2 = 2 L sigma^2 D / K, at eta = 1 / (L b_max / 2 + sqrt((L b_max / 2)^2 + L sigma^2 K / (2 D))). That is
    at most 2 A + B, and the published bound is 2 A + sqrt(2) B: equal only without noise.
    What is dropped costs convergence only by the samples that it lacks: b_max is the planned batch with and without.
    """
    half_batch = smoothness * largest_batch / 2
    inverse = half_batch + math.sqrt(half_batch**2 + smoothness * noise**2 * samples / (2 * start_gap))
    return 2 * start_gap * inverse / samples, 1 / inverse


def expected_longest(num_replicas: int, mean_s: float, std_s: float) -> float:
    """E[T] by eq. 4: the largest of N >= 2 normal values, by the limit of extreme values.

    std_s ((1 - g) Phi^-1(1 - 1/N) + g Phi^-1(1 - 1/(e N))) + mean_s, g being Euler's constant; a replica's time has the
    mean M mu and the deviation sqrt(M) s. ValueError for one replica, for which eq. 4 is undefined.
    """
    if num_replicas < 2:
        raise ValueError(f"num_replicas is {num_replicas}, needed at least 2")
    inverse = NormalDist().inv_cdf
    # Phi^-1(1 - p) is -Phi^-1(p), which loses no precision for small p
    far = (1 - EULER_GAMMA) * inverse(1 / num_replicas) + EULER_GAMMA * inverse(1 / (math.e * num_replicas))
    return mean_s - std_s * far


def longest_density(
    times_s: NDArray[np.float64], num_replicas: int, mean_s: float, std_s: float
) -> NDArray[np.float64]:
    """Density of T, the time of the slowest of N >= 1 replicas, by eq. 3: N f(x) F(x)^(N-1), [time], in 1 / s.

    f and F are the normal density and distribution with mean and standard deviation > 0 of one replica's time.
    """
    x = (np.asarray(times_s, dtype=np.float64) - mean_s) / std_s
    own = np.exp(-(x**2) / 2) / (math.sqrt(2 * math.pi) * std_s)
    return num_replicas * own * normal_cdf(x) ** (num_replicas - 1)


def exact_longest(num_replicas: int, mean_s: float, std_s: float) -> float:
    """E[T] of N >= 1 normal values by quadrature of eq. 3's distribution of the largest, Phi^N, without eq. 4's limit.

    ``mean_s`` and ``std_s``: mean and standard deviation of a replica's time.
    """
    return mean_s + std_s * exact_cut(num_replicas, _FAR)


def exact_cut(num_replicas: int, cut: float) -> float:
    """E[min(c, X)], X being the largest of N >= 1 standard normal values: c - the integral of Phi(x)^N up to c.

    In standard deviations from the mean, like c; for a large c the expected largest value. Relative error below 1e-9.
    """
    cut = min(cut, _FAR)
    edges = np.linspace(-_FAR, cut, 17)  # pieces, because Phi^N rises within a fraction of a standard deviation
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + _NODES)
    below, above = normal_cdf(x), normal_cdf(-x)  # the smaller of the two is precise
    log = np.where(x < 0, np.log(np.maximum(below, 1e-300)), np.log1p(-np.minimum(above, 0.5)))
    power = np.exp(num_replicas * log)
    return float(cut - (half * _WEIGHTS * power).sum())


def expected_completed(
    thresholds_s: NDArray[np.float64], micro_batches: int, mean_s: float, std_s: float
) -> NDArray[np.float64]:
    """E[M~] by eq. 5, [threshold]: micro-batches that a replica completes before tau; an infinite tau: all.

    The sum over m = 1..M of Phi((tau - m mu) / sqrt(m s^2)), with mu and s > 0 of one micro-batch.
    """
    number = np.arange(1, micro_batches + 1)
    return normal_cdf((np.asarray(thresholds_s)[:, None] - number * mean_s) / (np.sqrt(number) * std_s)).sum(axis=1)


def expected_speedup(
    thresholds_s: NDArray[np.float64],
    num_replicas: int,
    micro_batches: int,
    mean_s: float,
    std_s: float,
    communication_s: float,
) -> NDArray[np.float64]:
    """S_eff by eq. 6, [threshold], with E[M~] of eq. 5 and the exact expectations of T and min(tau, T).

    E[M~] (E[T] + Tc) / (M (E[min(tau, T)] + Tc)), 1 without drops; mu and s > 0 are of one micro-batch, Tc >= 0 of a
    step.
    """
    mean, std = micro_batches * mean_s, math.sqrt(micro_batches) * std_s
    cut = np.array([mean + std * exact_cut(num_replicas, (tau - mean) / std) for tau in thresholds_s])
    completed = expected_completed(thresholds_s, micro_batches, mean_s, std_s)
    longest = exact_longest(num_replicas, mean, std)
    return completed * (longest + communication_s) / (micro_batches * (cut + communication_s))


def published_speedup(
    thresholds_s: NDArray[np.float64],
    num_replicas: int,
    micro_batches: int,
    mean_s: float,
    std_s: float,
    communication_s: float,
) -> NDArray[np.float64]:
    """S_eff, [threshold], as the paper plots it: eq. 6 with E[M~] of eq. 5, and E[T] of eq. 4 in place of every T.

    E[M~] (E[T] + Tc) / (M (min(tau, E[T]) + Tc)). ValueError for one replica, for which eq. 4 is undefined; other
    arguments as of ``expected_speedup``.
    """
    longest = expected_longest(num_replicas, micro_batches * mean_s, math.sqrt(micro_batches) * std_s)
    completed = expected_completed(thresholds_s, micro_batches, mean_s, std_s)
    cut = np.minimum(thresholds_s, longest)
    return completed * (longest + communication_s) / (micro_batches * (cut + communication_s))


def extra_steps_share(drop_rate: float) -> float:
    """Additional steps, as a share of the planned ones, that make up for the dropped micro-batches: R / (1 - R).

    0.11 for a drop rate R of 0.1, as in the paper's Table 1; infinite for 1.
    """
    return drop_rate / (1 - drop_rate) if drop_rate < 1 else math.inf


Seconds = NDArray[np.float64]


@functools.cache
def order_of_work(micro_batches: int, stages: int) -> tuple[tuple[int, int, bool], ...]:
    """All forwards and backwards of a replica, each after the passes that it depends on.

    (stage, micro-batch, whether it is a backward), 2 M stages of them; those of one stage in 1F1B order.
    """
    todo = [_order_of_stage(micro_batches, stages, stage) for stage in range(stages)]
    done: set[tuple[int, int, bool]] = set()
    order: list[tuple[int, int, bool]] = []
    while len(order) < 2 * micro_batches * stages:
        for stage in range(stages):
            while todo[stage]:
                micro_batch, backward = todo[stage][0]
                needed = stage + 1 if backward else stage - 1
                if 0 <= needed < stages and (needed, micro_batch, backward) not in done:
                    break
                order.append((stage, micro_batch, backward))
                done.add(order[-1])
                todo[stage].pop(0)
    return tuple(order)


def _order_of_stage(micro_batches: int, stages: int, stage: int) -> list[tuple[int, bool]]:
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(number, False) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [(ahead + number, False), (number, True)]
    return order + [(number, True) for number in range(micro_batches - ahead, micro_batches)]


def micro_batch_times(latencies_s: Seconds, forward_share: float, finish: bool) -> tuple[Seconds, Seconds]:
    """Starts and ends of micro-batches, in seconds since the step began.

    Args:
        latencies_s: latency of forward and backward together, [replica, micro-batch, stage].
        forward_share: share of the forward in a latency, in [0, 1]; without effect for one stage.
        finish: kind of the returned ends, see Returns.

    Returns:
        Starts on the first stage, [replica, micro-batch], which depend on no later micro-batch. Ends,
        [replica, micro-batch]: with ``finish`` the end of the replica's step if no later one is started; else that
        of the micro-batch if all are started.
    """
    _, micro_batches, stages = latencies_s.shape
    if stages == 1:
        ends = np.cumsum(latencies_s[:, :, 0], axis=1)
        starts = np.zeros_like(ends)
        starts[:, 1:] = ends[:, :-1]
        return starts, ends
    work = np.ascontiguousarray(latencies_s.transpose(2, 1, 0))
    starts, ends = _walk(work, micro_batches, forward_share)
    if finish:
        for started in range(1, micro_batches):
            ends[started - 1] = _walk(work, started, forward_share)[1][-1]
    return starts.T, ends.T


def _walk(work: Seconds, micro_batches: int, forward_share: float) -> tuple[Seconds, Seconds]:
    """Starts of forwards and ends of backwards on the first stage, [micro-batch, replica]."""
    stages, _, replicas = work.shape
    free = np.zeros((stages, replicas))
    ended: dict[tuple[int, int, bool], Seconds] = {}
    starts, ends = np.empty((2, micro_batches, replicas))
    for stage, number, backward in order_of_work(micro_batches, stages):
        before = ended.pop((stage + 1 if backward else stage - 1, number, backward), None)
        start = free[stage] if before is None else np.maximum(free[stage], before)
        if stage == 0 and not backward:
            starts[number] = start
        share = 1 - forward_share if backward else forward_share
        free[stage] = start + share * work[stage, number]
        ended[stage, number, backward] = free[stage].copy()
        if stage == 0 and backward:
            ends[number] = free[0]
    return starts, ends


Chunks = Callable[[], Iterator[tuple[int, Seconds]]]
"""Yields the same pieces of latencies in every call: (index of the step from 0, [replica, micro-batch, stage])."""
Times = Callable[[], Iterator[tuple[int, Seconds, Seconds]]]
"""Yields the same (index of the step from 0, starts, ends) in every call, both as from ``micro_batch_times``."""


@dataclass(frozen=True)
class DropRule:
    """Rule for micro-batches when the threshold tau has passed.

    Args:
        finish: whether a micro-batch that was started before tau is finished and counts. Otherwise, as in eq. 6, the
            one in progress at tau is lost and the step ends at tau.
        min_micro_batches: number of micro-batches that every replica completes whatever the threshold, >= 1; with
            ``finish`` false also 0.
        forward_share: share of the forward in a latency, in [0, 1]; used with more than one stage.
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
        thresholds_s: thresholds tau, [threshold], the last one infinite.
        completed: number of micro-batches, or of their parts, that all replicas together complete, [step, threshold].
        times_s: compute time of the slowest replica, [step, threshold].
        num_replicas: number N of replicas.
        micro_batches: number M of micro-batches planned for a replica's step.
        communication_s: Tc, time of a step that no threshold shortens.
        parts: number of parts that a micro-batch counts as.
    """

    thresholds_s: Seconds
    completed: NDArray[np.int64]
    times_s: Seconds
    num_replicas: int
    micro_batches: int
    communication_s: float
    parts: int = 1

    @property
    def planned(self) -> int:
        """What all replicas together complete in a step without drops, counted as ``completed``."""
        return self.num_replicas * self.micro_batches * self.parts

    @property
    def longest_s(self) -> Seconds:
        """T, the compute time without drops, [step]."""
        return self.times_s[:, -1]

    @property
    def completed_share(self) -> Seconds:
        """M~ / M over all steps, [threshold]."""
        return self.completed.sum(axis=0) / (len(self.completed) * self.planned)

    @property
    def speedup(self) -> Seconds:
        """S_eff, the mean over steps of eq. 6, [threshold]."""
        plain = (self.longest_s + self.communication_s)[:, None]
        of_steps = self.completed * plain / (self.planned * (self.times_s + self.communication_s))
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
        tau_s: the threshold; infinite if dropping gains nothing.
        speedup: S_eff on the latencies from which it was chosen.
        drop_rate: share of micro-batches that are not completed with it on these latencies.
        curve: figures of all thresholds.
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
    count: int = THRESHOLDS,
) -> Threshold:
    """The threshold of the largest effective speed-up on recorded latencies.

    Args:
        latencies_s: [replica, step, micro-batch] or [replica, step, micro-batch, stage]; finite, >= 0.
        communication_s: Tc, time of a step that no threshold shortens, >= 0.
        max_drop_rate: largest share of micro-batches that may be dropped, in [0, 1].
        rule: rule for micro-batches at the threshold; None: eq. 6 with at least one micro-batch.
        count: number of finite thresholds, at equal distances.

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
    expected_s: Seconds | None = None,
    layers: int = 0,
    forward_ends_s: Seconds | None = None,
) -> Threshold:
    """The threshold of the largest effective speed-up on the times of steps in which nothing was dropped.

    The rule is ``finish``: a started micro-batch is finished, and only before tau one is started (with ``expected_s``:
    only so long before tau). A replica whose last started micro-batch is m is taken to be done when m was in the
    recording. With one stage, or several equally fast ones, that is exact; else the replica can be done earlier, by the
    forwards of later micro-batches that ran before the backward of m.

    Args:
        starts_s: start of each micro-batch on the first stage, [replica, step, micro-batch], seconds since the
            replica's step began.
        ends_s: end of the backward pass of each on the first stage, same shape and origin.
        communication_s: Tc, time of a step that no threshold shortens, >= 0.
        max_drop_rate: largest share of micro-batches that may be dropped, in [0, 1].
        min_micro_batches: number of micro-batches that every replica completes whatever the threshold, >= 1.
        expected_s: duration that each replica expects of a micro-batch, [replica], seconds; None: only its start
            must be before tau.
        layers: number of transformer layers between which backward passes end at tau, with one stage; 0: they are
            whole. Of the ``min_micro_batches`` the last one may end, too.
        forward_ends_s: end of each forward pass, of the shape and origin of ``starts_s``; None: after a third of the
            micro-batch. Without effect where passes are whole.

    Returns:
        The same on every rank that gives the same arguments, and for one stage and whole passes what
        ``search_threshold`` finds on the latencies.

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
    if layers:
        record = starts, _forward_ends(starts, ends, forward_ends_s), ends
        waits = expected[:, None] * (np.arange(micro_batches) >= min_micro_batches)  # the first ones start in any case
        curve = _make_curve(
            lambda: ((step, *_pieces([one[:, step] for one in record], waits, layers)) for step in range(steps)),
            (replicas, steps, micro_batches),
            communication_s,
            DropRule(True, (min_micro_batches - 1) * (layers + 1) + 1),
            THRESHOLDS,
            layers,
        )
    else:
        curve = _make_curve(
            lambda: ((step, starts[:, step] + expected[:, None], ends[:, step]) for step in range(steps)),
            (replicas, steps, micro_batches),
            communication_s,
            DropRule(True, min_micro_batches),
            THRESHOLDS,
        )
    return _chosen(curve, max_drop_rate)


def _forward_ends(starts: Seconds, ends: Seconds, measured: Seconds | None) -> Seconds:
    if measured is None:
        return np.asarray(starts + (ends - starts) * DropRule.forward_share)
    if measured.shape != starts.shape or not ((starts <= measured) & (measured <= ends)).all():
        raise ValueError("forward_ends_s holds a value outside its micro-batch, or has another shape than starts_s")
    return measured


def _pieces(record: Sequence[Seconds], waits: Seconds, layers: int) -> tuple[Seconds, Seconds]:
    """Latest tau at which each piece of a replica's work is not begun, and its end, [replica, piece].

    Pieces of a micro-batch are its forward pass and its layers' backward passes, the last layer's first. ``record``:
    starts of micro-batches, ends of their forward passes, and their ends, [replica, micro-batch] each. ``waits``:
    seconds before tau by which a micro-batch must be started, [replica, micro-batch].
    """
    starts, forward_ends, ends = record
    ended = forward_ends[..., None] + (ends - forward_ends)[..., None] * (np.arange(layers + 1) / layers)
    ended[..., -1] = ends
    begun = np.concatenate([(starts + waits)[..., None], ended[..., :-1]], axis=-1)
    shape = len(starts), -1
    return np.maximum.accumulate(begun, axis=-1).reshape(shape), ended.reshape(shape)


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


def _make_curve(
    times: Times, sizes: tuple[int, int, int], communication_s: float, rule: DropRule, count: int, layers: int = 0
) -> Curve:
    """See ``make_curve``; with ``layers``, times and the rule are of ``_pieces``, of which forward passes count 0."""
    replicas, steps, micro_batches = sizes
    counted = np.tile([False] + [True] * layers, micro_batches) if layers else np.full(micro_batches, True)
    if not 0 <= communication_s < math.inf:
        raise ValueError(f"communication_s is {communication_s}, needed a finite number of seconds >= 0")
    if rule.min_micro_batches > len(counted):
        raise ValueError(f"min_micro_batches is {rule.min_micro_batches}, more than the {len(counted)} of a step")
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
        place = np.searchsorted(thresholds, deadline[:, optional], side)
        completed[step] += np.cumsum(np.bincount(place[:, counted[optional]].ravel(), minlength=len(thresholds)))
        if rule.finish:
            np.maximum.at(last[step], place.ravel(), ends[:, optional].ravel())
    completed += replicas * int(counted[: rule.min_micro_batches].sum())
    if rule.finish:
        last = np.maximum(np.maximum.accumulate(last, axis=1), protected[:, None])
    else:
        last = np.minimum(np.maximum(thresholds, protected[:, None]), longest[:, None])
    return Curve(thresholds, completed, last, replicas, micro_batches, communication_s, layers or 1)


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
