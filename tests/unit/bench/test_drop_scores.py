"""Do the benchmarks of DropCompute say what their runs were? Numbers by hand, files as runs write them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megasdc.common.errors import ConfigError, StorageError
from megasdc.distributions import BoundedLogNormal
from megasdc.dropcompute.gate import StepDecisions, read_decisions
from megasdc.lab.planning.environment import DelayEnvironment
from megasdc.parallel.dims import ParallelDims
from tools.bench.campaign import CampaignLog
from tools.bench.drops.cost import BAR, LayoutCost, StepCost, TimedGate
from tools.bench.drops.options import DropPartialOptions, DropSpeedupOptions, DropTrainOptions, Segment, Setting
from tools.bench.drops.partial import BACKWARD_PASS, MICRO_BATCH, NONE, decide
from tools.bench.drops.speedup_scores import choose_thresholds, compare, recorded_steps, sleep_share
from tools.bench.drops.training import DropTrainResult
from tools.bench.drops.training_scores import DropRun
from tools.bench.drops.training_setup import COMMUNICATION_S, LATENCY_S, MEAN_DELAY_S, draw
from tools.bench.small.gpt import SmallGpt

FIRST, SECOND = Segment(1, 41), Segment(41, 81)
FAST_S, SLOW_S, REST_S = 1.0, 3.0, 0.5


def _step_cost(share: float, micro_batch_s: float = 0.6) -> StepCost:
    return StepCost(wall_s=2.0, parts={"a": share, "b": share}, micro_batch_s=micro_batch_s, messages=9)


def test_cost_of_a_layout() -> None:
    """Parts add up to the share, messages are of one replica and micro-batch, and the bar needs long micro-batches."""
    cheap = LayoutCost((2, 2, 1), 4, [_step_cost(BAR / 2)] * 20)
    assert cheap.share.median == pytest.approx(BAR / 2) and cheap.messages_per_micro_batch == 3
    assert cheap.parts == {"a": pytest.approx(BAR / 4), "b": pytest.approx(BAR / 4)}
    assert cheap.passed and cheap.bar == BAR
    assert not LayoutCost((2, 2, 1), 4, [_step_cost(1.01 * BAR)] * 20).passed
    short = LayoutCost((2, 2, 1), 4, [_step_cost(1.01 * BAR, 0.4)] * 20)
    assert short.bar is None and short.passed


def test_waiting_for_who_decides_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearing counts from the moment of telling, or of asking where that is later; deciding counts whole."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Gate:
        def may_start(self, micro_batch: int) -> bool:
            clock[0] += 5.0
            return True

    hearing = TimedGate(Gate(), ParallelDims(tensor=1, pipeline=2, data=2, rank=3))  # type: ignore[arg-type]
    assert hearing.source == 1
    hearing.may_start(0)  # asks at 0, goes on at 5
    hearing.may_start(1)  # asks at 5, goes on at 10
    told = [{"decided": {}, "announced": {0: 4.0, 1: 3.0}} if rank == 1 else {} for rank in range(4)]
    assert hearing.receive_s(told) == pytest.approx((5 - 4) + (10 - 5))
    assert hearing.clock.parts == {}

    deciding = TimedGate(Gate(), ParallelDims(tensor=1, pipeline=2, data=2, rank=1))  # type: ignore[arg-type]
    deciding.may_start(0)
    assert deciding.told["decided"] == {0: 10.0} and deciding.clock.parts == {"decide": 5.0}
    assert deciding.receive_s(told) == 0
    deciding.begin()
    assert deciding.clock.parts == {}


def _write_run(folder: Path, completed: list[int]) -> Path:
    """Steps 1 to 81 of a fast and a slow replica with two stages, whose times are recorded as if all had completed."""
    (folder / "step_times").mkdir(parents=True)
    decisions = [{"start": {"step": 0, "data": 2, "micro_batches": 2}}]
    for rank, (replica, stage) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        sizes = {"data": 2, "pipeline": 2, "micro_batches": 2}
        lines = [{"kind": "layout", "rank": rank, "dp_rank": replica, "pp_rank": stage, **sizes}]
        each = (FAST_S, SLOW_S)[replica] * (1 + 99 * stage)
        for step in range(1, 82):
            times = {"start_s": [0.0, each], "end_s": [each, 2 * each], "compute_s": 2 * each}
            times |= {"busy_s": [each, each], "step_s": 2 * SLOW_S + REST_S, "gc_s": 0.0}
            lines.append({"step": step, "planned": 2, **times})
        path = folder / "step_times" / f"rank_{rank:05d}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    decisions += [{"step": step, "planned": 2, "completed": completed} for step in range(1, 82)]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decisions))
    return folder


def test_speedup_is_compared_with_what_other_steps_predict(tmp_path: Path) -> None:
    """By hand: half of the latencies are 1 s, half 3 s; tau 2 s drops the second micro-batch after a slow one."""
    plain, late = _write_run(tmp_path / "plain", [2, 2]), _write_run(tmp_path / "late", [2, 1])
    walls = [100.0] + [7.0] * 80, [50.0] + [4.0] * 40
    found = compare(2.0, (plain, walls[0]), (late, walls[1]), FIRST, plain, SECOND)
    assert found.speedup == pytest.approx(3 / 4 * 7 / 4) and found.rate == pytest.approx(1 / 4)
    assert found.predicted_same == pytest.approx(3 / 4 * 6.5 / 3.5)
    # dealt out anew, a replica takes 2, 4, 4 or 6 s, and with tau 2, 4, 3 or 3 s; the slower of two counts
    longest, dropped = (2 + 8 * 4 + 7 * 6) / 16 + REST_S, (2 + 8 * 3 + 7 * 4) / 16 + REST_S
    assert found.predicted == pytest.approx(3 / 4 * longest / dropped, rel=0.03)
    assert found.predicted_rate == pytest.approx(1 / 4, abs=0.02)
    assert found.difference == pytest.approx(found.speedup / found.predicted - 1)
    assert not found.own and compare(2.0, (plain, walls[0]), (late, walls[0]), SECOND, late, FIRST).own
    nothing = compare(None, (plain, walls[0]), (plain, walls[0]), FIRST, plain, SECOND)
    assert (nothing.speedup, nothing.predicted, nothing.predicted_rate) == (1, 1, 0)


def test_recorded_steps_are_those_of_first_stages(tmp_path: Path) -> None:
    """Times come by replica, of the steps that were asked for; thresholds drop the shares that were asked for."""
    steps = recorded_steps(_write_run(tmp_path / "run", [2, 2]), Segment(10, 13))
    assert steps.start_s.tolist() == [[[0.0, FAST_S]] * 3, [[0.0, SLOW_S]] * 3]
    assert steps.communication_s == pytest.approx(REST_S)
    (tau_s,) = choose_thresholds(steps, [0.25], None)
    assert FAST_S <= tau_s < SLOW_S


def test_share_slept(tmp_path: Path) -> None:
    """Drawn delays over the time of micro-batches: 0.5 s in 2 and in 6 s of two micro-batches."""
    steps = recorded_steps(_write_run(tmp_path / "run", [2, 2]), FIRST)
    delay = [{"kind": "normal", "mean_s": 0.5, "std_s": 0.0}]
    assert sleep_share(steps, FIRST, delay) == pytest.approx(4 * 0.5 / (2 + 6))


SMALL = DropTrainOptions(steps=40, seeds=2, rates=(0.1,), replicas=2, evaluations=2, gpt=SmallGpt(32, micro_batches=6))


@pytest.mark.parametrize("setting", SMALL.settings, ids=lambda setting: setting.name)
def test_what_is_drawn_leaves_out_the_share_and_takes_its_time(tmp_path: Path, setting: Setting) -> None:
    """Of all replicas that train: the setting's share; steps last as long as a plain loop over the draws finds."""
    drawn = draw(SMALL, setting, seed=5)
    steps, replicas = drawn.completed.shape
    planned = 7 if setting.compensation == "larger_batch" else 6
    assert (drawn.planned, replicas) == (planned, 2)
    assert steps == (50 if setting.compensation == "extra_steps" else 40)
    wanted = 6.0 if setting.compensation == "larger_batch" else planned * (1 - setting.rate)
    tolerance = 0.01 * 6 if setting.compensation == "larger_batch" else 2 / drawn.completed.size
    assert drawn.completed.mean() == pytest.approx(wanted, abs=tolerance)
    environment = DelayEnvironment(LATENCY_S, (BoundedLogNormal(MEAN_DELAY_S),), 5)
    for step in (1, steps):
        latencies = environment.draw(step, 0, 2, planned, 1)[:, :, 0]
        ends = [sum(latencies[replica, : drawn.completed[step - 1, replica]]) for replica in range(2)]
        assert drawn.step_s[step - 1] == pytest.approx(max(ends) + COMMUNICATION_S)
    drawn.write(tmp_path / "decisions.jsonl", 6)
    read = read_decisions(tmp_path / "decisions.jsonl", 2, 6)
    assert read[steps] == StepDecisions(planned, tuple(drawn.completed[-1].tolist())) and len(read) == steps


def _run(setting: Setting, seed: int, loss: float) -> DropRun:
    samples = int(draw(SMALL, setting, seed).completed[: SMALL.steps].sum())
    return DropRun(setting, seed, SMALL.steps, samples, 1000, 0, ((20, 6.0), (SMALL.steps, loss)), 3.0)


def test_scores_and_verdict_of_training() -> None:
    """Losses are compared with those of the same seed; what seeds do not agree on, or is small, is told as chance."""
    none, late, deferred, again = (
        Setting(0.0),
        Setting(0.1),
        Setting(0.1, "defer"),
        Setting(0.1, "discard", "resample"),
    )
    runs = [_run(none, 1, 5.0), _run(late, 1, 5.05), _run(deferred, 1, 5.5), _run(again, 1, 5.01)]
    runs += [_run(none, 2, 5.1), _run(late, 2, 5.05), _run(deferred, 2, 5.61), _run(again, 2, 5.11)]
    result = DropTrainResult({}, SMALL, runs)
    scores = {one.setting: one for one in result.scores}
    assert scores[late].losses == (5.05, 5.05)
    assert scores[late].over_none == pytest.approx((5.05 / 5.0 + 5.05 / 5.1) / 2 - 1)
    assert {one.setting for one in result.scores if one.is_chance} == {none, late, again}
    assert scores[deferred].over_none == pytest.approx(0.1)
    assert scores[deferred].increases == pytest.approx((0.1, 0.1))
    drawn = [draw(SMALL, late, seed).step_s.sum() / draw(SMALL, none, seed).step_s.sum() for seed in (1, 2)]
    assert scores[late].time == pytest.approx(np.mean(drawn)) and scores[late].time < 1
    assert scores[late].samples == pytest.approx(0.9, abs=0.02)
    assert [point[0] for point in scores[late].curve] == [20, 40] and scores[late].curve[1][2] == 5.05
    assert "10 % of micro-batches changes the final loss by +0.01 %" in result.verdict
    assert result.verdict.endswith("of over 0.50 %: 10 %, defer.")
    json.dumps(result.as_dict(), allow_nan=False)


def test_steps_and_time_to_equal_loss() -> None:
    """By hand: the loss after 30 steps is reached after 33, halfway between evaluations, in the time of those steps;
    one that is not reached has no row.
    """
    options = replace(SMALL, seeds=1, rates=(0.45,), replicas=8, evaluations=4, all_train=True)
    none, late = options.settings
    falls = ((10, 6.0), (20, 5.5), (30, 5.2), (40, 5.1))
    lags = ((10, 6.1), (20, 5.6), (30, 5.23), (40, 5.13))
    runs = [DropRun(none, 1, 40, 1920, 1000, 0, falls, 3.0), DropRun(late, 1, 40, 1800, 1000, 0, lags, 3.0)]
    result = DropTrainResult({}, options, runs)
    first, second = result.equal_loss
    assert (first.step, second.step, second.losses) == (20, 30, (5.2,))
    steps = 20 + 10 * (5.6 - 5.5) / (5.6 - 5.23), 33.0
    assert [one.steps[0] for one in result.equal_loss] == pytest.approx([steps[0] / 20, steps[1] / 30])
    plain, drops = (draw(options, one, 1).step_s for one in (none, late))
    assert second.time[0] == pytest.approx(drops[:33].sum() / plain[:30].sum()) and second.time[0] < second.steps[0]
    assert draw(options, late, 1).completed.shape == (40, 8)
    mean = 100 * ((first.steps[0] + second.steps[0]) / 2 - 1)
    assert f"at most 45 %, given up (6.2 % are): {mean:+.1f} ({mean:+.1f} to {mean:+.1f}) % steps" in result.verdict


def test_a_log_of_runs_goes_on_and_is_of_one_campaign(tmp_path: Path) -> None:
    """Finished runs are read back, a torn line is none, and a log of other options or of something else is refused."""
    path = tmp_path / "runs.jsonl"
    run = _run(Setting(0.1, "defer"), 2, 5.0)
    CampaignLog(path, SMALL, DropRun).add(run)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"setting"')
    again = CampaignLog(path, SMALL, DropRun)
    again.add(_run(Setting(0.1), 2, 6.0))
    assert [(one.setting, one.seed, one.loss) for one in CampaignLog(path, SMALL, DropRun).outcomes] == [
        (run.setting, 2, 5.0),
        (Setting(0.1), 2, 6.0),
    ]
    with pytest.raises(ConfigError, match="other options"):
        CampaignLog(path, DropTrainOptions(), DropRun)
    path.write_text("nothing\n")
    with pytest.raises(StorageError, match="name another file"):
        CampaignLog(path, SMALL, DropRun)


def test_options_out_of_range_are_refused() -> None:
    """Every wrong option is named."""
    with pytest.raises(ConfigError, match=r"(?s)--drop-rates.*--mean|--mean.*--drop-rates"):
        DropSpeedupOptions(mean_s=0.0, drop_rates=(1.5,))
    with pytest.raises(ConfigError, match=r"(?s)--evaluations.*--seeds|--seeds.*--evaluations"):
        DropTrainOptions(steps=10, evaluations=3, seeds=0)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_partial_passes_of_a_simulated_job(tmp_path: Path, micro_batches: int) -> None:
    """The share that is late is as asked; the log has what was drawn; steps are shorter the more may be cut."""
    options = DropPartialOptions(steps=40, counts=(micro_batches,), gradient_steps=1, replicas=8, late=0.25)
    none, whole, ended = (decide(options, micro_batches, 3, kind) for kind in (NONE, MICRO_BATCH, BACKWARD_PASS))
    assert none.lost == 0 and (none.completed == micro_batches).all() and (none.layers < 0).all()
    assert (ended.completed == whole.completed).all() and (whole.layers < 0).all()
    late = (ended.layers >= 0) | (ended.completed < micro_batches)
    assert late.mean() == pytest.approx(0.25, abs=1 / late.size)
    assert ended.lost > whole.lost and ended.step_s < whole.step_s <= none.step_s
    assert ((ended.layers == -1) | ((ended.layers >= 0) & (ended.layers <= options.gpt.layers))).all()
    ended.write(tmp_path / "d.jsonl", micro_batches, options.gpt.layers)
    read = read_decisions(tmp_path / "d.jsonl", 2, micro_batches)
    assert [read[step].ended.get(1, -1) for step in read] == ended.layers[:, 1].tolist()
