"""Does a simulation say what formulas, its own latencies and the search say, and what does its command take?"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from megasdc.cli import app, main
from megasdc.dropcompute.threshold import DropRule, search_threshold
from megasdc.lab.planning import simulate
from megasdc.lab.planning.environment import DelayEnvironment, parse_delay
from megasdc.lab.planning.simulate import Simulation, simulate_thresholds

NORMAL = DelayEnvironment(0.0, (parse_delay("normal:mean_s=0.45,std_s=0.09"),), seed=3)
PAPER = DelayEnvironment(0.45, (parse_delay("bounded_lognormal:mean_s=0.225"),), seed=3)


def quiet(*_: object) -> None:
    """Progress that nobody reads."""


def test_samples_and_formulas_side_by_side() -> None:
    """Of normal latencies E[T], completed micro-batches and S_eff of all thresholds agree with the closed forms."""
    result = simulate_thresholds(
        Simulation(64, 12, 1, 0.5, steps=1000, rule=DropRule(min_micro_batches=0)), NORMAL, quiet
    )
    formulas, longest = result.formulas, result.curve.longest_s
    assert abs(longest.mean() - formulas.exact_longest_s) < 4.5 * result.longest_error_s
    assert formulas.longest_s == pytest.approx(formulas.exact_longest_s, rel=5e-3)
    assert result.longest_error_s == pytest.approx(longest.std(ddof=1) / math.sqrt(1000))
    assert result.curve.completed_share == pytest.approx(formulas.completed_share, abs=1e-3)
    usual = formulas.completed_share > 0.3  # below, few completed ones make S_eff noisy
    for speedup in (result.curve.throughput, result.curve.speedup):
        assert speedup[usual] == pytest.approx(formulas.speedup[usual], rel=3e-3)
    best = result.at(result.best)
    assert best["speedup"] == pytest.approx(formulas.speedup.max(), rel=3e-3) and best["speedup"] > 1.03
    assert best["extra_steps"] == math.ceil(10_000 * best["drop_rate"] / (1 - best["drop_rate"]))
    assert len(result.replica_times_s) == 64_000


@pytest.mark.parametrize("rule", [DropRule(), DropRule(finish=True, min_micro_batches=2)])
@pytest.mark.parametrize("stages", [1, 3])
def test_pieces_are_the_whole(monkeypatch, rule: DropRule, stages: int) -> None:
    """In pieces of few replicas: the curve that the search finds on all latencies at once, and their moments."""
    monkeypatch.setattr(simulate, "_CHUNK", 7 * 4 * stages)
    result = simulate_thresholds(Simulation(150, 4, stages, 0.3, 0.2, steps=5, rule=rule), PAPER, quiet)
    whole = np.stack([PAPER.draw(step, 0, 150, 4, stages) for step in range(1, 6)], axis=1)
    found = search_threshold(whole, 0.3, 0.2, rule)
    assert np.array_equal(found.curve.completed, result.curve.completed)
    assert np.array_equal(found.curve.times_s, result.curve.times_s)
    assert result.curve.thresholds_s[result.best] == found.tau_s
    assert result.moments.mean_s == pytest.approx(whole.mean(), rel=1e-12)
    assert result.moments.std_s == pytest.approx(whole.std(), rel=1e-12)
    assert result.moments.largest_s == whole.max()
    assert (result.formulas is None) == (stages > 1)
    assert result.replica_times_s[:150].max() == pytest.approx(result.curve.longest_s[0])
    if stages == 1:
        assert result.replica_times_s == pytest.approx(whole.sum(axis=(2, 3)).T.ravel())


@pytest.mark.slow
def test_the_gain_grows_with_replicas() -> None:
    """The paper's Figure 1: its delay environment, 12 micro-batches, 8 to 2048 replicas, and E[T] grows like it."""
    numbers = [8, 32, 128, 512, 2048]
    results = [simulate_thresholds(Simulation(n, 12, communication_s=0.5, steps=60), PAPER, quiet) for n in numbers]
    gains = [result.at(result.best)["speedup"] for result in results]
    times = [result.curve.longest_s.mean() for result in results]
    assert gains == sorted(gains) and times == sorted(times)
    assert gains[0] > 1.03 and gains[-1] > gains[0] + 0.2
    assert all(result.at(result.best)["drop_rate"] < 0.2 for result in results)


def test_a_replica_that_is_always_slow_is_not_what_formulas_know() -> None:
    """One slow replica: its time is that of every step, far from what the formulas take from the moments."""
    slow = DelayEnvironment(0.45, (parse_delay("slow_rank:replica=5,delay_s=0.4"),))
    result = simulate_thresholds(Simulation(64, 12, steps=10), slow, quiet)
    assert result.curve.longest_s == pytest.approx(12 * 0.85)
    assert result.formulas.exact_longest_s < 0.75 * 12 * 0.85


def run(*arguments: object):
    return CliRunner().invoke(app, ["dropcompute", "simulate", *map(str, arguments)])


SMALL = ("--replicas", "16,4", "--micro-batches", 3, "--steps", 20, "--thresholds", 10, "--communication", 0.1)


def test_command_as_json(tmp_path) -> None:
    """--json and --out hold the same, the same in each run: sizes, moments, E[T] three times, best and whole curve."""
    first = run(*SMALL, "--json", "--out", tmp_path / "plan.json")
    found = json.loads(first.stdout)
    assert found == json.loads((tmp_path / "plan.json").read_text()) == json.loads(run(*SMALL, "--json").stdout)
    assert [one["simulation"]["replicas"] for one in found["results"]] == [4, 16]
    assert found["environment"]["delays"] == [{"kind": "bounded_lognormal", "mean_s": 0.225}]
    one = found["results"][1]
    assert set(one["longest"]) == {"simulated_s", "error_s", "formula_s", "exact_s"}
    assert {len(values) for values in one["curve"].values()} == {11} and one["curve"]["tau_s"][-1] is None
    assert one["best"]["drop_rate"] <= 0.1 and one["best"]["speedup"] == max(
        speedup
        for speedup, share in zip(one["curve"]["speedup"], one["curve"]["completed_share"], strict=True)
        if share >= 0.9
    )
    assert json.loads(run(*SMALL, "--json", "--seed", 2).stdout) != found


def test_command_for_people_and_figure(tmp_path) -> None:
    """Tables with every number of replicas; the page needs no network."""
    shown = run(*SMALL, "--figure", tmp_path / "page.html", "--rule", "finish", "--stages", 2)
    assert shown.exit_code == 0 and "best threshold" in shown.stdout and "no formulas" in shown.stdout
    shown = run(*SMALL, "--figure", tmp_path / "page.html")
    assert "eq. 4" in shown.stdout and "S_eff" in shown.stdout
    page = (tmp_path / "page.html").read_text()
    assert "best S_eff" in page and "<script src" not in page and '<link href="http' not in page


def test_recorded_latencies_as_they_are_and_resampled(tmp_path) -> None:
    """A file gives sizes and latencies; with --replicas its steps are drawn at random for as many as wanted."""
    recorded = np.random.default_rng(1).gamma(2, 0.2, (6, 8, 5))
    path = tmp_path / "latencies.npy"
    np.save(path, recorded)
    one = json.loads(run("--latencies", path, "--communication", 0.1, "--json").stdout)["results"][0]
    sizes = one["simulation"]
    assert (sizes["replicas"], sizes["steps"], sizes["micro_batches"], sizes["stages"]) == (6, 8, 5, 1)
    found = search_threshold(recorded, 0.1, 0.1)
    assert one["best"]["tau_s"] == found.tau_s and one["best"]["speedup"] == found.speedup
    assert one["longest"]["simulated_s"] == pytest.approx(recorded.sum(axis=2).max(axis=0).mean())
    drawn = json.loads(run("--latencies", path, "--replicas", 500, "--steps", 3, "--json").stdout)
    many = drawn["results"][0]
    assert drawn["environment"]["delays"] == [{"kind": "resampled", "path": str(path)}]
    assert many["longest"]["simulated_s"] == pytest.approx(recorded.sum(axis=2).max())
    assert many["simulation"]["replicas"] == 500 and many["longest"]["simulated_s"] > one["longest"]["simulated_s"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--replicas", "0"], 70, "replicas is 0, needed at least 1"),
        (["--replicas", "8,x"], 70, "got '8,x', needed a number"),
        (["--micro-batches", "0"], 70, "micro_batches is 0"),
        (["--stages", "0"], 70, "stages is 0"),
        (["--communication", "-1"], 70, "communication_s is -1.0"),
        (["--communication", "nan"], 70, "communication_s is nan"),
        (["--latency", "-1"], 70, "needed a finite number of seconds"),
        (["--latency", "0", "--steps", "2"], 70, "takes no time"),
        (["--max-drop-rate", "1.5"], 70, "max_drop_rate is 1.5, needed 0 to 1"),
        (["--min-micro-batches", "13"], 70, "more than the 12 of a step"),
        (["--min-micro-batches", "0", "--rule", "finish"], 70, "needed at least 1"),
        (["--forward-share", "2"], 70, "forward_share is 2.0"),
        (["--thresholds", "1"], 70, "thresholds is 1"),
        (["--steps", "-1"], 70, "steps is -1"),
        (["--training-steps", "0"], 70, "training_steps is 0"),
        (["--delay", "normal"], 70, "mean_s, std_s missing"),
        (["--latencies", "no_such_file.npy"], 71, "cannot be read"),
        (["--latencies", "x.npy", "--delay", "exponential:mean_s=1"], 70, "got both"),
        (["--rule", "other"], 2, "other"),
    ],
)
def test_impossible_values(monkeypatch, capsys, arguments: list[str], code: int, message: str) -> None:
    """One message that names value and need, and the documented exit code."""
    monkeypatch.setattr(sys, "argv", ["megasdc", "dropcompute", "simulate", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code and message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("rule", ["interrupt", "finish"])
def test_a_million_replicas(rule: str) -> None:
    """A million replicas of 32 micro-batches need less than 2 GiB, and far less than a minute of processor time."""
    command = [sys.executable, "-m", "megasdc", "dropcompute", "simulate", "--replicas", "1000000", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # as a user has it
    words = [*command, "--micro-batches", "32", "--rule", rule]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0 and json.loads(output)["results"][0]["best"]["speedup"] > 1.2
    assert usage.ru_maxrss < 2 << 20  # KiB
    assert usage.ru_utime + usage.ru_stime < 60
