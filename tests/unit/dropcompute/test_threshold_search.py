"""Is the chosen threshold that of the published rule, and are starts and ends those of the real schedule?"""

from __future__ import annotations

import math

import numpy as np
import pytest

from megasdc.common.errors import ConfigError
from megasdc.dropcompute.threshold import DropRule, micro_batch_times, search_recorded, search_threshold
from megasdc.dropcompute.tuning import expected_times_s

PAPER = DropRule(min_micro_batches=0)


def latencies(seed: int, replicas: int = 9, steps: int = 7, micro_batches: int = 5) -> np.ndarray:
    """Skewed ones, [replica, step, micro-batch]."""
    return 0.3 + np.random.default_rng(seed).gamma(0.7, 0.3, (replicas, steps, micro_batches))


def published_speedup(times: np.ndarray, tau: float, communication: float) -> tuple[float, float]:
    """S_eff, averaged over steps, and drop rate by eq. 6 alone: no array operation, one micro-batch after the other."""
    replicas, steps, micro_batches = times.shape
    speedups, completed = [], 0
    for step in range(steps):
        done, longest = 0, 0.0
        for replica in range(replicas):
            clock = 0.0
            for micro_batch in range(micro_batches):
                clock += float(times[replica, step, micro_batch])
                done += clock <= tau
            longest = max(longest, clock)
        share = done / (replicas * micro_batches)
        speedups.append(share * (longest + communication) / (min(tau, longest) + communication))
        completed += done
    return sum(speedups) / steps, 1 - completed / times.size


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_drop_rate", [1.0, 0.06])
def test_the_published_rule(seed: int, max_drop_rate: float) -> None:
    """Of 200 thresholds from the first end to the last the best one, within the drop rate, and its S_eff."""
    times = latencies(seed)
    found = search_threshold(times, 0.2, max_drop_rate, PAPER)
    ends = times.cumsum(axis=2)
    grid = np.linspace(ends.min(), ends.max(), 200)
    scores = [published_speedup(times, float(tau), 0.2) for tau in grid]
    allowed = [(score, tau) for (score, drops), tau in zip(scores, grid, strict=True) if drops <= max_drop_rate + 1e-12]
    score, tau = max(allowed)
    assert found.tau_s == tau and found.speedup == pytest.approx(score, rel=1e-12)
    assert found.drop_rate == pytest.approx(published_speedup(times, tau, 0.2)[1], abs=1e-12)
    assert found.drop_rate <= max_drop_rate and found.speedup > 1
    assert found.curve.speedup[:-1] == pytest.approx([score for score, _ in scores], rel=1e-12)


def test_every_rank_finds_the_same() -> None:
    """The order of replicas, and of the sums over steps, changes no bit of what is found."""
    times = latencies(3, steps=50)
    found = search_threshold(times, 0.2)
    for order in (np.random.default_rng(1).permutation(9), np.arange(9)[::-1]):
        other = search_threshold(times[order], 0.2)
        assert (other.tau_s, other.speedup, other.drop_rate) == (found.tau_s, found.speedup, found.drop_rate)
        assert np.array_equal(other.curve.speedup, found.curve.speedup)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(50)
        other = search_threshold(np.asfortranarray(times[:, order]), 0.2)
        assert other.tau_s == found.tau_s and np.array_equal(other.curve.speedup, found.curve.speedup)
        assert np.array_equal(other.curve.throughput, found.curve.throughput)


def test_nothing_is_dropped_where_nothing_is_gained() -> None:
    """Equal latencies, a slow step of all, one replica, or no drops allowed: infinity, S_eff 1, drop rate 0."""
    equal = np.full((4, 3, 5), 0.4)
    slow = equal * np.array([1.0, 3.0, 1.0])[:, None]
    for times, most in ((equal, 1.0), (slow, 0.1), (latencies(1)[:1], 0.05), (latencies(1), 0.0)):
        found = search_threshold(times, 10.0, most)
        assert (found.tau_s, found.speedup, found.drop_rate) == (math.inf, 1.0, 0.0)


def finish_step(times: np.ndarray, tau: float, least: int) -> tuple[int, float]:
    """One stage: each replica asks before each micro-batch; (completed by all, time of the slowest)."""
    done, longest = 0, 0.0
    for row in times:
        clock = 0.0
        for number, latency in enumerate(row):
            if number >= least and clock >= tau:
                break
            clock += float(latency)
            done += 1
        longest = max(longest, clock)
    return done, longest


@pytest.mark.parametrize("least", [1, 3, 5])
def test_started_micro_batches_are_finished(least: int) -> None:
    """Counts and step times of every threshold are those of replicas that ask before each micro-batch."""
    times = latencies(6)
    curve = search_threshold(times, 0.2, rule=DropRule(True, least)).curve
    for place, tau in enumerate(curve.thresholds_s):
        for step in range(times.shape[1]):
            done, longest = finish_step(times[:, step], float(tau), least)
            assert curve.completed[step, place] == done
            assert curve.times_s[step, place] == pytest.approx(longest, rel=1e-12)


def recorded(times: np.ndarray, finish: bool) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends, [replica, step, micro-batch], of latencies with an axis of stages."""
    steps = [micro_batch_times(times[:, step], 1 / 3, finish) for step in range(times.shape[1])]
    starts, ends = zip(*steps, strict=True)
    return np.stack(starts, axis=1), np.stack(ends, axis=1)


@pytest.mark.parametrize("least", [1, 2, 5])
@pytest.mark.parametrize("max_drop_rate", [1.0, 0.06])
@pytest.mark.parametrize("stages", [1, 3])
def test_recorded_times_give_the_threshold_of_their_latencies(stages: int, max_drop_rate: float, least: int) -> None:
    """From starts and ends, and from the latencies that made them, the same tau and the same curve, bit for bit."""
    times = np.stack([latencies(seed) for seed in range(stages)], axis=3)
    found = search_recorded(*recorded(times, finish=True), 0.2, max_drop_rate, least)
    wanted = search_threshold(times, 0.2, max_drop_rate, DropRule(True, least))
    assert (found.tau_s, found.speedup, found.drop_rate) == (wanted.tau_s, wanted.speedup, wanted.drop_rate)
    assert np.array_equal(found.curve.thresholds_s, wanted.curve.thresholds_s)
    assert np.array_equal(found.curve.completed, wanted.curve.completed)
    assert np.array_equal(found.curve.times_s, wanted.curve.times_s)


def test_times_of_steps_in_which_nothing_was_dropped() -> None:
    """Ends as in a whole step: counts are exact; times too where stages are equally fast, else never too short."""
    uneven = np.stack([latencies(seed) for seed in range(3)], axis=3)
    for times, exact in ((uneven, False), (np.full((4, 3, 6, 3), 0.5), True)):
        found = search_recorded(*recorded(times, finish=False), 0.2).curve
        wanted = search_threshold(times, 0.2, rule=DropRule(True, 1)).curve
        assert np.array_equal(found.completed, wanted.completed)
        assert (found.times_s >= wanted.times_s - 1e-12).all()
        assert np.allclose(found.times_s, wanted.times_s, rtol=1e-12) == exact
        assert np.array_equal(found.longest_s, wanted.longest_s)


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        (np.zeros((1, 1)), np.ones((1, 1)), r"shapes \(1, 1\) and \(1, 1\)"),
        (np.zeros((1, 1, 2)), np.ones((1, 1, 3)), r"shapes \(1, 1, 2\) and \(1, 1, 3\)"),
        (np.array([[[1.0, 0.5]]]), np.array([[[2.0, 3.0]]]), "starts_s holds .* before that"),
        (np.array([[[0.0, 1.0]]]), np.array([[[2.0, math.inf]]]), "ends_s holds .* infinite"),
        (np.array([[[0.0, 2.0]]]), np.array([[[1.0, 1.5]]]), "before the start of the same"),
    ],
)
def test_impossible_records(starts: np.ndarray, ends: np.ndarray, message: str) -> None:
    """What no run can have recorded is refused."""
    with pytest.raises(ValueError, match=message):
        search_recorded(starts, ends, 0.1)


def test_protected_micro_batches_are_completed() -> None:
    """With eq. 6 too the first ones run on every replica, and the step lasts as long as they do."""
    times = latencies(7)
    ends = times.cumsum(axis=2)
    curve = search_threshold(times, 0.2, rule=DropRule(min_micro_batches=2)).curve
    assert curve.thresholds_s[0] == ends[:, :, 1].min()
    for place, tau in enumerate(curve.thresholds_s):
        done = np.maximum((ends <= tau).sum(axis=2), 2).sum(axis=0)
        last = np.minimum(np.maximum(tau, ends[:, :, 1].max(axis=0)), ends[:, :, -1].max(axis=0))
        assert np.array_equal(curve.completed[:, place], done) and np.array_equal(curve.times_s[:, place], last)


@pytest.mark.parametrize(
    ("times", "arguments", "message"),
    [
        (np.ones((2, 3)), {}, "shape"),
        (np.full((1, 1, 1), np.nan), {}, "NaN"),
        (-np.ones((1, 1, 1)), {}, "negative"),
        (np.ones((1, 1, 1)), {"communication_s": -1.0}, "communication_s is -1.0"),
        (np.ones((1, 1, 1)), {"rule": DropRule(min_micro_batches=2)}, "more than the 1 of a step"),
    ],
)
def test_impossible_latencies(times: np.ndarray, arguments: dict, message: str) -> None:
    """What is no latency, or does not fit, is refused."""
    with pytest.raises(ValueError, match=message):
        search_threshold(times, **{"communication_s": 1.0} | arguments)
    with pytest.raises(ConfigError, match="takes no time"):
        search_threshold(np.zeros((1, 1, 1)), 0.0)
    with pytest.raises(ValueError, match="at least 1"):
        DropRule(finish=True, min_micro_batches=0)


def by_deepspeed(work: np.ndarray, limit: int, share: float) -> tuple[list[float], list[float]]:
    """Starts and ends on the first stage of one replica, [micro-batch, stage], in the order of DeepSpeed's schedule."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    stages = work.shape[1]
    orders = []
    for stage in range(stages):
        order, seen = [], {ForwardPass: 0, BackwardPass: 0}
        for commands in TrainSchedule(limit, stages, stage).steps():
            for command in commands:
                if type(command) in seen:
                    order.append((type(command) is BackwardPass, seen[type(command)]))
                    seen[type(command)] += 1
        orders.append(order)
    known: dict[tuple, tuple[float, float]] = {}

    def times(stage: int, backward: bool, number: int) -> tuple[float, float]:
        if (stage, backward, number) not in known:
            place = orders[stage].index((backward, number))
            begin = times(stage, *orders[stage][place - 1])[1] if place else 0.0
            needed = stage + 1 if backward else stage - 1
            if 0 <= needed < stages:
                begin = max(begin, times(needed, backward, number)[1])
            part = 1 - share if backward else share
            known[stage, backward, number] = begin, begin + part * float(work[number, stage])
        return known[stage, backward, number]

    return [times(0, False, m)[0] for m in range(limit)], [times(0, True, m)[1] for m in range(limit)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_order_of_deepspeeds_schedule(stages: int, micro_batches: int) -> None:
    """Starts, ends and ends of shortened steps are those of DeepSpeed's own 1F1B order, replica by replica."""
    work = np.random.default_rng(stages).gamma(2, 0.5, (3, micro_batches, stages))
    starts, ends = micro_batch_times(work, 0.3, finish=False)
    _, finished = micro_batch_times(work, 0.3, finish=True)
    for replica in range(3):
        expected = by_deepspeed(work[replica], micro_batches, 0.3)
        if stages == 1:
            assert ends[replica] == pytest.approx(expected[1]) and starts[replica] == pytest.approx(expected[0])
            continue
        assert starts[replica] == pytest.approx(expected[0]) and ends[replica] == pytest.approx(expected[1])
        for limit in range(1, micro_batches + 1):
            shorter = by_deepspeed(work[replica], limit, 0.3)
            assert starts[replica, :limit] == pytest.approx(shorter[0])  # no later micro-batch matters
            assert finished[replica, limit - 1] == pytest.approx(shorter[1][-1])


def test_length_of_an_even_pipeline() -> None:
    """Equal latencies t: M + stages - 1 of them."""
    for stages in (1, 2, 4):
        assert micro_batch_times(np.full((1, 6, stages), 0.5), 0.4, False)[1][0, -1] == pytest.approx(
            (5 + stages) * 0.5
        )


@pytest.mark.parametrize("sigmas", [0.0, 1.0])
def test_the_predictive_rule_completes_what_is_expected_to_end_by_the_threshold(sigmas: float) -> None:
    """Of every threshold: what is completed and how long steps last, one micro-batch after the other."""
    times = latencies(5)
    ends = times.cumsum(axis=2)
    starts = ends - times
    expected = expected_times_s(starts, ends, sigmas)
    found = search_recorded(starts, ends, 0.2, expected_s=expected)
    for place, tau in enumerate(found.curve.thresholds_s[:-1:20]):
        for step in range(times.shape[1]):
            completed, longest = 0, 0.0
            for replica in range(times.shape[0]):
                taken = times[replica].ravel()
                most = taken.mean() + sigmas * math.sqrt(((taken - taken.mean()) ** 2).mean())
                for start, end in zip(starts[replica, step], ends[replica, step], strict=True):
                    if start and start + most >= tau * (1 - 1e-12):
                        break
                    completed, longest = completed + 1, max(longest, end)
            assert found.curve.completed[step, 20 * place] == completed
            assert found.curve.times_s[step, 20 * place] == pytest.approx(longest, rel=1e-12)


def _by_pieces(
    latency: list[float], forward: list[float], tau: float, least: int, layers: int, most: float
) -> tuple[float, float]:
    """Micro-batches that a replica completes, and when it is done: one layer's backward pass after the other.

    ``forward``: share of the forward pass in a latency.
    """
    clock, completed = 0.0, 0.0
    for number, (seconds, share) in enumerate(zip(latency, forward, strict=True)):
        if number >= least and clock + most >= tau:
            break
        begun, completed = clock, completed + 1
        for layer in range(layers + 1):
            clock = begun + seconds * (share + (1 - share) * layer / layers)
            if layer < layers and number + 1 >= least and max(clock, begun + most * (number >= least)) >= tau:
                return completed - 1 + layer / layers, clock
    return completed, clock


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    ("micro_batches", "least", "layers", "sigmas"), [(1, 1, 4, None), (5, 1, 3, None), (5, 3, 2, None), (4, 2, 3, 1.0)]
)
def test_backward_passes_that_end_at_the_threshold(
    micro_batches: int, least: int, layers: int, sigmas: float | None, measured: bool
) -> None:
    """Each threshold has the work and the time that a plain loop over layers finds, and the best is the best of them;
    with one micro-batch a step, too, where whole ones gain nothing. Forward passes last as measured, or a third.
    """
    times = latencies(11, replicas=6, steps=4, micro_batches=micro_batches)
    ends = times.cumsum(axis=2)
    starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=2)
    expected = expected_times_s(starts, ends, sigmas)
    forward = np.random.default_rng(5).uniform(0.1, 0.6, times.shape) if measured else np.full(times.shape, 1 / 3)
    middles = starts + times * forward if measured else None
    found = search_recorded(starts, ends, 0.2, 0.3, least, expected, layers, middles)
    curve, gains = found.curve, []
    for place, tau in enumerate(curve.thresholds_s):
        ratios, total = [], 0.0
        for step in range(4):
            rows = zip(times[:, step].tolist(), forward[:, step].tolist(), expected.tolist(), strict=True)
            done = [_by_pieces(*row, tau - 1e-12 * (tau < math.inf), least, layers, most) for *row, most in rows]
            completed, last = sum(one for one, _ in done), max(at for _, at in done)
            assert curve.completed[step, place] == pytest.approx(layers * completed, abs=1e-9)
            assert curve.times_s[step, place] == pytest.approx(last, rel=1e-12)
            total += completed
            ratios.append(completed * (ends[:, step, -1].max() + 0.2) / (6 * micro_batches * (last + 0.2)))
        rate = 1 - total / (4 * 6 * micro_batches)
        gains.append(sum(ratios) / 4 if rate <= 0.3 + 1e-12 else -math.inf)
    assert found.speedup == pytest.approx(max(gains), rel=1e-12) and found.speedup > 1
    assert found.tau_s == curve.thresholds_s[np.flatnonzero(np.array(gains) >= max(gains) - 1e-12)[-1]]
    assert curve.completed[:, -1].tolist() == [6 * micro_batches * layers] * 4 and found.drop_rate <= 0.3
    if micro_batches == 1:
        assert search_recorded(starts, ends, 0.2, 0.3).tau_s == math.inf


def test_steady_latencies_make_the_predictive_rule_the_other_one_earlier() -> None:
    """Where every replica expects the same, its best threshold is later by that, and comes to the same."""
    ends = latencies(6).cumsum(axis=2)
    starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=2)
    plain = search_recorded(starts, ends, 0.2, 0.1)
    shifted = search_recorded(starts, ends, 0.2, 0.1, expected_s=np.full(len(ends), 0.5))
    assert shifted.tau_s == pytest.approx(plain.tau_s + 0.5, rel=1e-12)
    assert shifted.speedup == pytest.approx(plain.speedup, rel=1e-12)


@pytest.mark.parametrize("late_s", [-1e-9, 0.6])
def test_a_forward_pass_outside_its_micro_batch_is_refused(late_s: float) -> None:
    """It begins and ends within it."""
    ends = np.arange(0.5, 2.5, 0.5)[None, None]
    with pytest.raises(ValueError, match="forward_ends_s"):
        search_recorded(ends - 0.5, ends, 0.2, layers=2, forward_ends_s=ends - 0.5 + late_s)


@pytest.mark.parametrize("expected", [[0.1], [0.1] * 8 + [-1.0], [0.1] * 8 + [math.nan]])
def test_wrong_expectations_are_refused(expected: list[float]) -> None:
    """One number for each replica, finite and not negative."""
    ends = latencies(6).cumsum(axis=2)
    with pytest.raises(ValueError, match="expected_s"):
        search_recorded(ends - latencies(6), ends, 0.2, expected_s=np.array(expected))
