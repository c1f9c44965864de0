"""Simulated runs: the formula's share, the same as a run followed save by save, and every second in one part."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest

from megasdc.lab.planning.checkpoints.formulas import Intervals
from megasdc.lab.planning.checkpoints.job import SOURCES, Costs
from megasdc.lab.planning.runs.fleet import Audits, FailureCause, Fleet, spares_needed
from megasdc.lab.planning.runs.run_plan import investments, make_run_plan
from megasdc.lab.planning.runs.simulation import DECIDING, DETECTING, LOST, RECOMPUTED, STARTING, WAITING, simulate_runs

COSTS = Costs(
    step_s=10,
    memory_stall_s=0.5,
    partners=True,
    disk_stall_s=20,
    disk_duration_s=60,
    verification_s=0,
    detection_s=0,
    restart_memory_s=60,
    restart_partner_s=90,
    restart_disk_s=300,
)
HOST, SOFTWARE, CORRUPTION = (
    FailureCause("host", 0.02, 20.0, 1.0),
    FailureCause("software", 0.03, 5.0, 0.25),
    FailureCause("corruption", 0.01, 2.0, 1.0),
)
FLEET = Fleet(
    devices=16,
    hosts=4,
    causes=(HOST, SOFTWARE, CORRUPTION),
    costs=COSTS,
    start_per_host_s=2.0,
    deciding_s=3.0,
    audits=Audits(interval=20, coverage=0.8, step_coverage=0.3, cost=0.1),
    spares=1,
    repair_s=9000.0,
    fixed=Intervals(4, 40),
)
FLEETS: dict[str, Fleet] = {
    "all": FLEET,
    "no partners": replace(FLEET, costs=replace(COSTS, partners=False)),
    "disk alone": replace(FLEET, costs=replace(COSTS, partners=False, memory_stall_s=None), fixed=Intervals(None, 40)),
    "no spares": replace(FLEET, spares=0),
    "snapshots alone": replace(FLEET, causes=(HOST, SOFTWARE), fixed=Intervals(4, None)),
}


def silent(*_: object) -> None:
    pass


def disk_alone(mtbf_s: float, costs: Costs, detection_s: float, steps: int) -> Fleet:
    """One device that fails of software, with saves on the disk."""
    return replace(
        FLEET,
        devices=1,
        hosts=1,
        causes=(FailureCause("software", 3600 / mtbf_s, detection_s, 0.0),),
        costs=costs,
        start_per_host_s=0.0,
        audits=Audits(0, 0.0, 0.0, 0.0),
        fixed=Intervals(None, steps),
    )


@pytest.mark.parametrize("mtbf_s", [900, 5000, 60_000])
def test_the_share_of_training_is_that_of_daly(mtbf_s: float) -> None:
    """M e^(R/M) (e^((tau+C)/M) - 1) for each interval, with each of its failures so much longer as it is detected."""
    costs = replace(COSTS, memory_stall_s=None, partners=False, disk_duration_s=20)
    fleet = disk_alone(mtbf_s, costs, 40.0, 30)
    runs = simulate_runs(fleet, 100, 3, 2000 * mtbf_s)
    cycle_s = mtbf_s * math.exp(300 / mtbf_s) * math.expm1((300 + 20) / mtbf_s)
    wanted = 300 / (cycle_s * (1 + (40 + 3) / mtbf_s))
    shares = runs.trained_s / runs.wall_s
    error = shares.std(ddof=1) / math.sqrt(len(shares))
    assert abs(shares.mean() - wanted) < 4.5 * error and error < 0.02 * (1 - wanted)
    assert fleet.expected == pytest.approx(wanted, rel=1e-12)


def followed(fleet: Fleet, wall_s: float, seed: int) -> tuple[float, Counter[tuple[str, str]]]:
    """One run save by save in plain Python, with its saves in lists: training that counts, other seconds by cause."""
    costs, rng, now, parts = fleet.job.costs, np.random.default_rng(seed), 0.0, Counter[tuple[str, str]]()
    assert fleet.intervals.memory or fleet.intervals.disk
    every = (fleet.intervals.memory or fleet.intervals.disk or 0) * costs.step_s
    count = math.inf if fleet.intervals.disk is None else round(fleet.intervals.disk * costs.step_s / every)
    starts = (costs.restart_memory_s, costs.restart_partner_s, costs.restart_disk_s, costs.restart_disk_s)
    saves: dict[str, float] = {"memory": 0.0, "disk": 0.0, "verified": 0.0}
    back, replaced, wait = [0.0] * fleet.spares, 0, 0.0
    cause, detect, decide, need = "first start", 0.0, 0.0, SOURCES.index(fleet.costs.source(host_lost=False))
    while True:
        gap, choice = rng.exponential(fleet.job.mtbf_s, 1)[0], rng.random(1)[0]
        for part, seconds in ((WAITING, wait), (DETECTING, detect), (DECIDING, decide)):
            spent = min(seconds, wall_s - now)
            parts[cause, part] += spent
            now += spent
        start = min(starts[need], gap, wall_s - now)
        parts[cause, STARTING] += start
        ran, now = min(gap, wall_s - now) - start, now + min(gap, wall_s - now)
        place = saves["memory"] if need < 2 else saves["disk"] if need == 2 else saves["verified"]
        if ran > 0:  # else the start has failed, and all saves are as they were
            older = saves["verified"] if need == 3 else saves["disk"]
            saves = {"memory": place, "disk": older, "verified": saves["verified"]}
            if ran >= costs.verification_s:
                saves["verified"] = older
            clock = 0.0
            while True:
                training = min(every, ran - clock)
                clock, place = clock + training, place + training
                stall = (costs.memory_stall_s or 0.0) if training == every else 0.0
                on_disk = training == every and round(place / every) % count == 0
                stall += costs.disk_stall_s if on_disk else 0.0
                if clock + stall > ran or training < every:
                    parts["", "paused"] += ran - clock
                    break
                clock += stall
                parts["", "paused"] += stall
                saves["memory"] = place
                if on_disk and clock + costs.lag_s <= ran:
                    saves["disk"] = place
                if on_disk and clock + costs.lag_s + costs.verification_s <= ran:
                    saves["verified"] = place
        if now >= wall_s:
            return place, parts
        total, drawn = 0.0, fleet.kinds[-1]
        for kind in fleet.kinds:
            total += kind.per_s / fleet.per_s
            if choice < total:
                drawn = kind
                break
        new = SOURCES.index(drawn.source)
        need = new if ran > 0 else max(new, need)
        left = saves["memory"] if need < 2 else saves["disk"] if need == 2 else saves["verified"]
        parts[drawn.cause, RECOMPUTED] += place - left
        cause, detect, decide, wait = drawn.cause, drawn.detection_s, fleet.deciding_s, 0.0
        if drawn.replaced and fleet.spares:
            wait = max(0.0, back[replaced % fleet.spares] - now)
            back[replaced % fleet.spares] = now + fleet.repair_s
        elif drawn.replaced:
            wait = fleet.repair_s
        replaced += drawn.replaced


@pytest.mark.parametrize("name", FLEETS)
def test_a_run_is_that_which_is_followed_save_by_save(name: str) -> None:
    """To rounding, in its training and in each part of each cause, for runs of many failures."""
    fleet = FLEETS[name]
    for seed in range(3):
        runs = simulate_runs(fleet, 1, seed, 600_000.0)
        trained_s, parts = followed(fleet, 600_000.0, seed)
        assert runs.failures.sum() > 40
        assert runs.trained_s[0] == pytest.approx(trained_s, rel=1e-9)
        assert runs.paused_s[0] == pytest.approx(parts["", "paused"], rel=1e-6)
        for cause in set(runs.causes):
            for place, part in enumerate(LOST):
                found = sum(runs.lost_s[0, kind, place] for kind, one in enumerate(runs.causes) if one == cause)
                assert found == pytest.approx(parts[cause, part], rel=1e-6, abs=1e-3), (cause, part)


@pytest.mark.parametrize("name", FLEETS)
def test_every_second_is_in_a_part(name: str) -> None:
    """Of runs until a time, and of runs until they are done, which have done as much as they should."""
    fleet = FLEETS[name]
    for runs in (simulate_runs(fleet, 20, 1, 200_000.0), simulate_runs(fleet, 20, 1, training_s=50_000.0)):
        assert runs.trained_s + runs.paused_s + runs.lost_s.sum(axis=(1, 2)) == pytest.approx(runs.wall_s, rel=1e-9)
    assert runs.trained_s == pytest.approx(50_000.0)


def test_spares_that_are_needed() -> None:
    """The fewest for which mpmath's Poisson tail is below the chance; and no more wait with them when simulated."""
    for mean, chance in ((0.3, 0.01), (36.2, 0.01), (36.2, 1e-6), (2000.0, 0.05)):
        needed = spares_needed(mean / 50, 50.0, chance)
        tail = [float(mpmath.gammainc(count, 0, mean, regularized=True)) for count in (needed - 1, needed)]
        assert tail[1] < chance <= tail[0]
    assert spares_needed(0.0, 50.0, 0.01) == spares_needed(1.0, 0.0, 0.01) == 0
    fleet = replace(FLEET, causes=(HOST,), repair_s=100_000.0)
    needed = spares_needed(fleet.replaced_per_s, fleet.repair_s, 0.05)
    waited = []
    for spares in (needed, needed - 2):
        runs = simulate_runs(replace(fleet, spares=spares), 50, 2, 3e6)
        waited.append(runs.waited.sum() / runs.replaced.sum())
    assert waited[0] < 0.05 < waited[1]


def test_what_is_never_found() -> None:
    """Corruptions that neither checks nor audits see: their rate, in no failure; all of them without either."""
    plan = make_run_plan(replace(FLEET, spares=100), 20.0, 0.01, 20, 1, silent)
    assert plan.missed == pytest.approx(0.01 * 16 * 24 * 20 * 0.7 * 0.2)
    found = next(one for one in plan.causes if one.name == "corruption")
    assert found.failures == pytest.approx(0.01 * 16 * 24 * 20 * (1 - 0.7 * 0.2), rel=0.3)
    blind = replace(FLEET, audits=Audits(0, 0.8, 0.0, 0.1))
    assert blind.missed_per_s == pytest.approx(0.01 * 16 / 3600)
    assert {kind.cause for kind in blind.kinds} == {"host", "software"}


@pytest.mark.slow
def test_what_buys_most() -> None:
    """Gains are those of the formula, best first, and each names what is not there yet."""
    costs = replace(COSTS, memory_stall_s=None, partners=False, disk_duration_s=20)
    fleet = replace(disk_alone(5000.0, costs, 400.0, 30), spares=5, repair_s=1.0)
    plan = make_run_plan(fleet, 60.0, 0.01, 50, 1, silent)
    gains = [one.gain for one in plan.investments]
    assert gains == sorted(gains, reverse=True)
    found = {one.name: one for one in plan.investments}
    cycle_s = [5000 * math.exp(start / 5000) * math.expm1(320 / 5000) / 300 for start in (300, 150)]
    shares = [
        1 / (cycle_s[0] * (1 + 403 / 5000)),
        1 / (cycle_s[0] * (1 + 203 / 5000)),
        1 / (cycle_s[1] * (1 + 401.5 / 5000)),
    ]
    for name, share in (
        ("failures detected in half the time", shares[1]),
        ("decisions and starts in half the time", shares[2]),
    ):
        assert found[name].error < 0.1 * found[name].gain
        assert found[name].gain == pytest.approx(share - shares[0], abs=4.5 * found[name].error)
    assert found["one more spare"].gain == 0 and "audits twice as often" not in found
    assert "snapshots in host memory" in found and "copies of snapshots at partners" not in found
    assert "copies of snapshots at partners" in dict(investments(FLEETS["no partners"]))


@pytest.mark.slow
def test_parts_and_causes_add_up() -> None:
    """Shares of all parts are 1, and what the causes cost is what the parts have of it."""
    plan = make_run_plan(FLEET, 30.0, 0.01, 20, 1, silent)
    assert sum(plan.parts.values()) == pytest.approx(1)
    for part in LOST:
        assert sum(one.lost[part] for one in plan.causes) == pytest.approx(plan.parts[part])
    assert plan.parts["checking"] == pytest.approx(plan.training * 0.1 / 20)
    assert plan.low < plan.training < plan.high and plan.error < plan.high - plan.low
    shares = [share for _, share in plan.sizes if share is not None]
    assert shares == sorted(shares, reverse=True) and len(plan.sizes) > 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causes": (replace(HOST, per_device_hour=0.0),)}, "rate of all causes is 0"),
        ({"causes": (replace(HOST, per_device_hour=9.0),)}, "almost no restart"),
    ],
)
def test_fleets_without_a_plan(change: dict[str, Any], message: str) -> None:
    """An error that says why."""
    with pytest.raises(ValueError, match=message):
        make_run_plan(replace(FLEET, **change), 10.0, 0.01, 10, 1, silent)


@pytest.mark.parametrize(("field", "value"), [("per_device_hour", -1.0), ("detection_s", math.nan), ("replaced", 1.5)])
def test_impossible_causes(field: str, value: float) -> None:
    """An error that names the figure and its cause."""
    with pytest.raises(ValueError, match=f"{field} of host is {value:g}"):
        replace(HOST, **{field: value})
