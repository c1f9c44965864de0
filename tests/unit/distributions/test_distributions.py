"""Are delays a function of seed and place alone, and distributed as they say?"""

from __future__ import annotations

import numpy as np
import pytest

from megasdc.common.errors import ConfigError, DataError
from megasdc.distributions import BLOCK_REPLICAS, KINDS, load_latencies
from megasdc.lab.planning.environment import DelayEnvironment, parse_delay

RANDOM = [
    "bounded_lognormal:mean_s=0.2",
    "normal:mean_s=0.5,std_s=0.1",
    "gamma:mean_s=0.5,std_s=0.3",
    "exponential:mean_s=0.4",
]


def environment(*texts: str, latency_s: float = 0.0, seed: int = 1) -> DelayEnvironment:
    return DelayEnvironment(latency_s, tuple(parse_delay(text) for text in texts), seed)


@pytest.mark.parametrize("text", [*RANDOM, "bursts:probability=0.2,num_steps=3,delay_s=1"])
def test_a_replica_has_the_same_delays_in_every_range(text: str) -> None:
    """Asked for alone, in a range over block borders or after other steps: the same; other steps and seeds differ."""
    drawn = environment(text).draw(5, 0, 3 * BLOCK_REPLICAS, 6, 2)
    environment(text).draw(4, 0, 10, 6, 2)
    for first, stop in ((0, 1), (100, 300), (BLOCK_REPLICAS, BLOCK_REPLICAS + 1), (2 * BLOCK_REPLICAS - 1, 270)):
        assert np.array_equal(environment(text).draw(5, first, stop, 6, 2), drawn[first:stop])
    for other in (environment(text, seed=2).draw(5, 0, 384, 6, 2), environment(text).draw(17, 0, 384, 6, 2)):
        assert not np.array_equal(other, drawn)
    assert not np.array_equal(drawn[:BLOCK_REPLICAS], drawn[BLOCK_REPLICAS : 2 * BLOCK_REPLICAS])


def test_delays_add_up_from_streams_of_their_own() -> None:
    """Two equal kinds are drawn independently and added to the undisturbed latency."""
    one = environment(RANDOM[3]).draw(1, 0, 256, 40, 1)
    two = environment(RANDOM[3], RANDOM[3], latency_s=2).draw(1, 0, 256, 40, 1)
    second = two - one - 2
    assert second.min() >= 0
    assert abs(np.corrcoef(one.ravel(), second.ravel())[0, 1]) < 4.5 / np.sqrt(one.size)


@pytest.mark.parametrize(("text", "mean", "std"), [(RANDOM[1], 0.5, 0.1), (RANDOM[2], 0.5, 0.3), (RANDOM[3], 0.4, 0.4)])
def test_moments(text: str, mean: float, std: float) -> None:
    """Mean and standard deviation are those asked for."""
    drawn = environment(text).draw(1, 0, 2048, 50, 1)
    assert drawn.mean() == pytest.approx(mean, abs=4.5 * std / np.sqrt(drawn.size))
    assert drawn.std() == pytest.approx(std, rel=0.02)


def test_lognormal_delays_are_those_of_the_paper() -> None:
    """Lengths are as frequent as p(L) says; with mean .5: standard deviation .58, 99 % below 3.0, all below 5.7."""
    drawn = environment("bounded_lognormal:mean_s=0.5").draw(1, 0, 8192, 100, 1).ravel()
    lengths = np.arange(1, 1000)
    share = np.exp(-((np.log(lengths) - 4) ** 2) / 2) / lengths
    share /= share.sum()
    values = 0.5 * lengths / (share * lengths).sum()
    counts = np.bincount(np.rint(drawn / values[0]).astype(int), minlength=1000)[1:]
    chi_square = ((counts - share * len(drawn)) ** 2 / (share * len(drawn))).sum()
    assert abs(chi_square - 998) < 4.5 * np.sqrt(2 * 998)
    assert values.max() == pytest.approx(5.7, abs=0.05) and drawn.max() <= values.max() * (1 + 1e-12)
    assert drawn.mean() == pytest.approx(0.5, abs=0.005) and drawn.std() == pytest.approx(0.58, abs=0.01)
    assert np.quantile(drawn, 0.99) == pytest.approx(3.0, abs=0.1)


def test_a_negative_draw_of_normal_becomes_zero() -> None:
    """No time is negative."""
    drawn = environment("normal:mean_s=0,std_s=1").draw(1, 0, 128, 20, 1)
    assert drawn.min() == 0 and (drawn == 0).mean() == pytest.approx(0.5, abs=0.05)


def test_bursts_last_their_steps() -> None:
    """A burst slows all micro-batches of a replica for at least its steps, and begins as often as asked."""
    one = environment("bursts:probability=0.02,num_steps=4,delay_s=3")
    slow = np.stack([one.draw(step, 0, 256, 3, 2) for step in range(1, 61)])
    assert set(np.unique(slow)) == {0, 3} and np.all(slow == slow[:, :, :1, :1])
    flags = slow[:, :, 0, 0] > 0
    assert flags[10:].mean() == pytest.approx(1 - 0.98**4, abs=0.01)
    for replica in range(256):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], flags[:, replica], [False]]).astype(int)))
        begins, ends = edges[::2], edges[1::2]
        assert all(end - begin >= 4 for begin, end in zip(begins, ends, strict=True) if end < 60)


def test_a_slow_rank_is_one_replica_and_stage() -> None:
    """Nobody else is slower."""
    drawn = environment("slow_rank:replica=130,delay_s=2,stage=1").draw(9, 100, 200, 4, 3)
    expected = np.zeros((100, 4, 3))
    expected[30, :, 1] = 2
    assert np.array_equal(drawn, expected)
    assert environment("slow_rank:replica=0,delay_s=2").draw(9, 0, 2, 4, 3).sum() == 2 * 12


def test_slow_periods_return() -> None:
    """In every period each replica is slow for its steps, and not all at the same time."""
    one = environment("slow_periods:period_steps=10,slow_steps=3,delay_s=2")
    flags = np.stack([one.draw(step, 0, 128, 1, 1)[:, 0, 0] for step in range(1, 41)]) > 0
    assert np.all(flags[:30].reshape(3, 10, 128).sum(axis=1) == 3)
    assert np.array_equal(flags[:30], flags[10:])
    assert 0 < flags[0].sum() < 128


def test_recorded_latencies(tmp_path) -> None:
    """A trace starts again on every axis; resampled steps are recorded ones, whole, and not all the same."""
    recorded = np.random.default_rng(1).random((3, 4, 5))
    path = tmp_path / "latencies.npy"
    np.save(path, recorded)
    drawn = environment(f"trace:path={path}").draw(6, 2, 5, 7, 2)
    assert np.array_equal(drawn[:, :, 0], recorded[[2, 0, 1], 1][:, [0, 1, 2, 3, 4, 0, 1]])
    assert np.array_equal(drawn[:, :, 0], drawn[:, :, 1])
    rows = {tuple(row) for row in recorded.reshape(12, 5)}
    found = {tuple(row) for row in environment(f"resampled:path={path}").draw(1, 0, 300, 5, 1)[:, :, 0]}
    assert found == rows
    with pytest.raises(DataError, match="holds 5 micro-batches of 1 stage"):
        environment(f"resampled:path={path}").draw(1, 0, 1, 6, 1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((2, 3)), "shape"),
        (np.ones((2, 0, 3)), "shape"),
        (np.ones((1, 1, 1), dtype=complex), "complex"),
        (np.array([[[1.0, -2.0]]]), r"-2.0 at \[0, 0, 1\]"),
        (np.array([[[1.0], [np.nan]]]), r"nan at \[0, 1, 0\]"),
        (np.array([[["a"]]], dtype=object), "cannot be read"),
    ],
)
def test_unfit_files(tmp_path, array, message: str) -> None:
    """A wrong shape, type or value is told with its place."""
    np.save(tmp_path / "wrong.npy", array)
    with pytest.raises(DataError, match=message):
        load_latencies(tmp_path / "wrong.npy")
    with pytest.raises(DataError, match="cannot be read"):
        load_latencies(tmp_path / "missing.npy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognormal", "needed one of bounded_lognormal, normal"),
        ("normal:mean_s=1", "std_s missing, as in normal:mean_s=0.2,std_s=0.2"),
        ("normal:mean=1", "needed KEY=VALUE with mean_s, std_s"),
        ("normal:mean_s=x,std_s=1", "mean_s is 'x', needed float"),
        ("slow_rank:replica=1.5,delay_s=1", "replica is '1.5', needed int"),
        ("exponential:mean_s=-1", "mean_s is -1.0, needed a finite"),
        ("exponential:mean_s=nan", "mean_s is nan"),
        ("gamma:mean_s=1,std_s=0", "std_s is 0.0, needed more than 0"),
        ("bursts:probability=2,num_steps=1,delay_s=1", "needed 0 to 1"),
        ("bursts:probability=0.1,num_steps=0,delay_s=1", "num_steps is 0"),
        ("slow_rank:replica=-1,delay_s=1", "needed a replica >= 0"),
        ("slow_periods:period_steps=3,slow_steps=4,delay_s=1", "needed 1 to period_steps, which is 3"),
    ],
)
def test_impossible_delays(text: str, message: str) -> None:
    """An unknown kind, a wrong key or an impossible value is a wrong configuration that says what was needed."""
    with pytest.raises(ConfigError, match=message):
        parse_delay(text)


def test_every_kind_is_known_by_its_name() -> None:
    """Names in text are those of the classes."""
    assert {kind.kind for kind in KINDS.values()} == set(KINDS) and len(KINDS) == 9
