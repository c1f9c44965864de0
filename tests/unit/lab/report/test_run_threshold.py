"""Is the threshold of a run that of its recorded times, and is what replicas lose divided as it was put in?"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from recorded_run import append, file_of, layout_line, step_line, write_run
from typer.testing import CliRunner

from megasdc.cli import app, main
from megasdc.dropcompute.threshold import exact_longest, longest_density, micro_batch_times, search_recorded
from megasdc.lab.report.imbalance import report_times
from megasdc.lab.report.step_times import load_step_times


def run(*arguments: object) -> dict:
    result = CliRunner().invoke(app, ["dropcompute", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def latencies(replicas: int = 6, steps: int = 8, micro_batches: int = 5, stages: int = 1) -> np.ndarray:
    return 0.3 + np.random.default_rng(4).gamma(0.7, 0.3, (replicas, steps, micro_batches, stages))


@pytest.mark.parametrize("stages", [1, 3])
def test_the_threshold_of_a_run(tmp_path: Path, stages: int) -> None:
    """All numbers are those of the search on the same times, with Tc as it was put in, or as it is given."""
    work = latencies(stages=stages)
    times = [micro_batch_times(work[:, step], 1 / 3, finish=False) for step in range(8)]
    starts, ends = (np.stack(part, axis=1) for part in zip(*times, strict=True))
    write_run(tmp_path, work, 0.25)
    found = run("threshold", tmp_path, "--max-drop-rate", 0.3, "--min-micro-batches", 2)
    assert found["communication_measured"] and found["communication_s"] == pytest.approx(0.25)
    wanted = search_recorded(starts, ends, found["communication_s"], 0.3, 2)
    best = found["best"]
    assert (best["tau_s"], best["speedup"], best["drop_rate"]) == (wanted.tau_s, wanted.speedup, wanted.drop_rate)
    assert found["curve"]["speedup"] == wanted.curve.speedup.tolist() and best["speedup"] > 1
    assert found["mean_compute_s"] == pytest.approx(ends[:, :, -1].mean())
    part = run("threshold", tmp_path, "--communication", 0.05, "--first-step", 2, "--last-step", 6)
    wanted = search_recorded(starts[:, 1:6], ends[:, 1:6], 0.05, 0.1, 1)
    assert part["best"]["tau_s"] == (wanted.tau_s if np.isfinite(wanted.tau_s) else None)
    assert part["curve"]["speedup"] == wanted.curve.speedup.tolist()
    assert part["steps"] == {"first": 2, "last": 6, "count": 5} and not part["communication_measured"]


def test_steps_with_drops_are_not_searched(tmp_path: Path, monkeypatch, capsys) -> None:
    """They and steps of another length are left out with a note; where there are no others, that is an error."""
    work = latencies(replicas=2)
    write_run(tmp_path, work, 0.25)
    whole = run("threshold", tmp_path)
    ends = np.arange(1.0, 6.0)
    for rank, done in ((0, 5), (1, 4)):
        append(file_of(tmp_path, rank), step_line(9, ends[:done] - 1, ends[:done], ends[:done], planned=5))
    found = run("threshold", tmp_path)
    assert found["best"] == whole["best"] and found["steps"]["last"] == 8
    assert "1 steps in which micro-batches were dropped are not used" in found["notes"][0]
    longer = np.arange(1.0, 7.0)
    for rank in (0, 1):
        append(file_of(tmp_path, rank), step_line(10, longer - 1, longer, longer))
    found = run("threshold", tmp_path)
    assert found["steps"]["count"] == 1 and found["micro_batches"] == 6
    assert "another number of micro-batches than 6" in found["notes"][1]
    arguments = ["megasdc", "dropcompute", "threshold", str(tmp_path), "--first-step", "9", "--last-step", "9"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err
    assert caught.value.code == 71 and "in all 1 recorded steps from 9 to 9" in said and 'threshold "inf"' in said


def test_a_run_whose_backward_passes_may_end(tmp_path: Path) -> None:
    """The search ends them as the run does, on steps in which none was; where some steps lack the ends of forward
    passes it takes them as whole, with a note.
    """
    work = latencies(replicas=4)
    times = [micro_batch_times(work[:, step], 1 / 3, finish=False) for step in range(8)]
    starts, ends = (np.stack(part, axis=1) for part in zip(*times, strict=True))
    write_run(tmp_path, work, 0.25, of_layers=3)
    found = run("threshold", tmp_path, "--max-drop-rate", 0.3)
    rest_s, middles = found["communication_s"], (starts + ends) / 2
    wanted = search_recorded(starts, ends, rest_s, 0.3, layers=3, forward_ends_s=middles)
    best = found["best"]
    assert (best["tau_s"], best["speedup"], best["drop_rate"]) == (wanted.tau_s, wanted.speedup, wanted.drop_rate)
    assert (found["layers"], found["ended_passes"], found["notes"]) == (3, 0, [])
    _end_passes(tmp_path, 9, [1, 3])
    cut = run("threshold", tmp_path, "--max-drop-rate", 0.3)
    assert (cut["best"], cut["ended_passes"], cut["steps"]["last"]) == (best, 2, 8)
    assert "1 steps in which micro-batches were dropped or backward passes ended (2) are not used" in cut["notes"][0]
    write_run(tmp_path / "later", work[:, :4], 0.25)
    write_run(tmp_path / "later", work[:, 4:], 0.25, first_step=5, of_layers=3)
    later = run("threshold", tmp_path / "later", "--max-drop-rate", 0.3)
    whole = search_recorded(starts, ends, later["communication_s"], 0.3)
    assert (later["layers"], later["best"]["speedup"]) == (0, whole.speedup) and "taken as whole" in later["notes"][0]
    ended_only = run("threshold", tmp_path / "later", "--max-drop-rate", 0.3, "--first-step", 5)
    assert (ended_only["layers"], ended_only["notes"]) == (3, [])


def _end_passes(run_dir: Path, step: int, replicas: list[int]) -> None:
    """Go on with a step of 4 replicas with 5 micro-batches of 1 s, in which some end the last backward pass at once."""
    for rank in range(4):
        ends = np.arange(1.0, 6.0) - np.array([0, 0, 0, 0, 0.5]) * (rank in replicas)
        line = step_line(step, np.arange(5.0), ends, ends - np.arange(5.0)) | {
            "forward_end_s": [0.5, 1.5, 2.5, 3.5, 4.5]
        }
        append(file_of(run_dir, rank), line | ({"layers": 0} if rank in replicas else {}))


def test_times_of_a_run_whose_backward_passes_ended(tmp_path: Path) -> None:
    """A micro-batch takes what whole ones took, and eq. 3 is of steps in which nothing was cut; both are counted."""
    work = latencies(replicas=4)
    whole = run("times", write_run(tmp_path, work, 0.25, of_layers=3))
    assert whole["ended_passes"] == 0 and whole["slowest"]["steps"] == 8
    _end_passes(tmp_path, 9, [1, 3])
    _end_passes(tmp_path, 10, [1])
    found = run("times", tmp_path)
    assert (found["steps_with_drops"], found["ended_passes"]) == (2, 3)
    assert found["slowest"] == whole["slowest"]
    cut = {0: 0, 1: 2, 2: 0, 3: 1}
    for rank, one in enumerate(found["replicas"]):
        taken = [*work[rank].ravel(), *[1.0] * (10 - cut[rank])]
        assert one["busy_s"] == pytest.approx([np.mean(taken)])
        assert one["max_s"] == pytest.approx(max(work[rank].sum(axis=(1, 2)).max(), 5.0 if cut[rank] < 2 else 4.5))
    shown = CliRunner().invoke(app, ["dropcompute", "times", str(tmp_path)], catch_exceptions=False)
    told = " ".join(shown.stdout.split())
    assert "in 2 of 10 steps micro-batches were dropped or backward passes ended (3): these times are shorter" in told
    assert "of a step without drops, 8 in all" in told


def test_times_where_every_backward_pass_ended(tmp_path: Path) -> None:
    """What is not known is null, and said; the rest is as measured."""
    for rank in range(2):
        append(file_of(tmp_path, rank), layout_line(rank, 0, 2, 1, 1) | {"of_layers": 3})
        for step in (1, 2):
            ends = np.array([1.0 + rank])
            append(file_of(tmp_path, rank), step_line(step, ends - ends, ends, ends) | {"layers": 1})
    found = run("times", tmp_path, "--figure", tmp_path / "page.html")
    assert found["slowest"] is None and [one["busy_s"] for one in found["replicas"]] == [[None], [None]]
    assert [one["mean_s"] for one in found["replicas"]] == [1, 2] and found["loss"]["stage_excess_s"] is None
    assert "of steps without drops, of which none is recorded" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-drop-rate", "1.5", "max_drop_rate is 1.5, needed 0 to 1"),
        ("--communication", "-1", "communication_s is -1.0"),
        ("--min-micro-batches", "6", "more than the 5 of a step"),
        ("--min-micro-batches", "0", "min_micro_batches is 0"),
    ],
)
def test_impossible_values(tmp_path: Path, monkeypatch, capsys, option: str, value: str, message: str) -> None:
    """One message that names value and need, and the exit code of a wrong configuration."""
    write_run(tmp_path, latencies(replicas=2, steps=2), 0.25)
    monkeypatch.setattr(sys, "argv", ["megasdc", "dropcompute", "threshold", str(tmp_path), option, value])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 70 and message in capsys.readouterr().err


STEPS, REPLICAS, MICRO = 40, 4, 5


def parts(slow_s: float = 0.0, random_s: float = 0.0, garbage_s: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Latencies and collections of known loss.

    In every step one replica, each in its turn, is later by ``random_s``; replica 2 is later by ``slow_s`` in all of
    them; and in every step the replica after the late one collects garbage for ``garbage_s``.
    """
    work = np.full((REPLICAS, STEPS, MICRO, 1), 0.2)
    collected = np.zeros((REPLICAS, STEPS))
    step = np.arange(STEPS)
    work[step % REPLICAS, step, 0] += random_s
    work[2] += slow_s / MICRO
    work[(step + 1) % REPLICAS, step, 3] += garbage_s
    collected[(step + 1) % REPLICAS, step] = garbage_s
    return work, collected


@pytest.mark.parametrize(
    ("work", "collected", "wanted", "advice"),
    [
        (*parts(), (0.0, 0.0, 0.0), "has little to gain"),
        (*parts(random_s=0.4), (0.0, 0.0, 0.3), "100% of the 18.2% of a step .* is random"),
        (*parts(slow_s=0.4), (0.3, 0.0, 0.0), r"comes from replica 2 \(stage 0, node2\)"),
        (*parts(garbage_s=0.4), (0.0, 0.3, 0.0), 'set megasdc.training.garbage_collection "managed"'),
        # the slow one is always last: 0.4 + 0.1 in a quarter of the steps, else 0.4; the mean is 0.4 / 4 + 0.1 / 4
        (*parts(slow_s=0.4, random_s=0.1), (0.3, 0.0, 0.0), "comes from replica 2"),
        # the late one waits for the one that collects: 0.4 - 0.5 / 4 is lost, 0.1 - 0.1 / 4 without the collection
        (*parts(random_s=0.1, garbage_s=0.4), (0.0, 0.2, 0.075), "garbage collection"),
    ],
    ids=["even", "random", "slow", "garbage", "slow_and_random", "random_and_garbage"],
)
def test_parts_that_are_known(tmp_path: Path, work, collected, wanted, advice: str) -> None:
    """Deterministic, garbage and random part, and their sum, are what was put in; the advice names the largest."""
    report = report_times(load_step_times(write_run(tmp_path, work, 0.25, collected)))
    loss = report.loss
    assert (loss.deterministic_s, loss.garbage_s, loss.random_s) == pytest.approx(wanted, abs=1e-12)
    assert loss.total_s == pytest.approx(sum(wanted), abs=1e-12)
    assert re.search(advice, report.advice), report.advice
    json.dumps(report.as_dict(), allow_nan=False)


def test_replicas_of_the_report(tmp_path: Path) -> None:
    """Means, spread, who was last, share of waiting and time on each stage are those of the arrays."""
    work = latencies(stages=2)
    work[3, :, :, 1] += 0.5
    found = run("times", write_run(tmp_path, work, 0.25))
    ends = np.stack([micro_batch_times(work[:, step], 1 / 3, False)[1][:, -1] for step in range(8)], axis=1)
    longest = ends.max(axis=0)
    for number, one in enumerate(found["replicas"]):
        own = ends[number]
        assert one["mean_s"] == pytest.approx(own.mean()) and one["std_s"] == pytest.approx(own.std())
        assert one["p50_s"] == pytest.approx(np.median(own)) and one["max_s"] == own.max()
        assert one["p99_s"] == pytest.approx(np.quantile(own, 0.99))
        assert one["last_steps"] == (own == longest).sum()
        assert one["waiting_share"] == pytest.approx((longest - own).sum() / (longest + 0.25).sum())
        assert one["busy_s"] == pytest.approx(work[number].mean(axis=(0, 1)))
    assert found["step_s"] == pytest.approx((longest + 0.25).mean())
    slowest = found["slowest"]
    assert slowest["mean_s"] == pytest.approx(longest.mean())
    assert slowest["expected_s"] == pytest.approx(exact_longest(len(ends), ends.mean(), ends.std()))
    counts, edges = np.histogram(longest, len(slowest["measured"]), density=True)
    assert slowest["edges_s"] == pytest.approx(edges) and slowest["measured"] == pytest.approx(counts)
    middles = (edges[1:] + edges[:-1]) / 2
    assert slowest["predicted"] == pytest.approx(longest_density(middles, len(ends), ends.mean(), ends.std()))
    loss = found["loss"]
    assert (loss["slowest"], loss["stage"]) == (3, 1)
    assert loss["stage_excess_s"] == pytest.approx((work[3] - work.mean(axis=0)).mean(axis=(0, 1))[1])
    assert found["steps_with_drops"] == 0


def test_one_replica_waits_for_nobody(tmp_path: Path) -> None:
    """A run without replicas to wait for is told so."""
    assert "One replica" in run("times", write_run(tmp_path, latencies(replicas=1), 0.1))["advice"]


@pytest.mark.parametrize(("command", "shown"), [("times", "lost to waiting"), ("threshold", "S_eff")])
def test_for_people_and_as_a_page(tmp_path: Path, command: str, shown: str) -> None:
    """Tables on the terminal; a page that needs no network; the whole result in a file."""
    write_run(tmp_path, latencies(replicas=20, stages=2), 0.1)
    page, out = tmp_path / "page.html", tmp_path / "out.json"
    arguments = ["dropcompute", command, str(tmp_path), "--figure", str(page), "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    printed = " ".join(result.stdout.split())  # where lines are broken depends on the length of tmp_path
    assert result.exit_code == 0 and shown in printed and "8 steps from 1 to 8" in printed
    html = page.read_text()
    assert "<script src" not in html and '<link href="http' not in html
    assert json.loads(out.read_text())["stages"] == 2
