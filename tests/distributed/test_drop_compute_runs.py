"""Does a whole run leave late micro-batches out, with all ranks of a replica agreeing, and count everything truly?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.data.position import Order, position_for
from megasdc.dropcompute.threshold import search_recorded
from megasdc.dropcompute.tuning import RecordedSteps

pytestmark = pytest.mark.distributed

STEPS = 6
DROPPING = {"enabled": True, "threshold": 0.15, "warmup_steps": 1, "max_drop_rate": 1.0, "check_agreement": True}
LATE = {"kind": "bounded_lognormal", "mean_s": 0.08, "seed": 3}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _config(folder: Path, name: str, data: Path, **changes: Any) -> Path:
    options = {"deepspeed__train_batch_size": 8, "training__eval_interval": 0, **changes}
    return write_config(folder / f"{name}.json", data, folder / name, **options)


def _train(config: Path, ranks: int, *overrides: str) -> None:
    results = train_run(config, ranks, *overrides)
    assert [code for code, _ in results if code] == [], results


def _final(run_dir: Path, step: int = STEPS) -> Any:
    state = state_of(run_dir / "checkpoints" / f"step_{step:08d}")
    return {name: value for name, value in state.items() if "shared" not in name}


def _losses(run_dir: Path) -> list[Any]:
    return [row["train/loss"] for row in metrics_of(run_dir) if "train/loss" in row]


def _decisions(run_dir: Path) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (run_dir / "decisions.jsonl").read_text().splitlines()]
    return {line["step"]: line["completed"] for line in lines if "step" in line}


LARGER = [(2, 1, 4), (1, 2, 4), (2, 2, 8)]
LAYOUTS = [(1, 1, 2), *(pytest.param(*one, marks=pytest.mark.full) for one in LARGER[:2]), LARGER[2]]


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), LAYOUTS)
def test_late_micro_batches_are_left_out_and_the_decisions_repeat_the_run(
    tmp_path: Path, data: Path, tensor: int, pipeline: int, ranks: int
) -> None:
    """Drops are counted in events and metrics; replaying the decisions without any delay gives the same bits."""
    layout = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    late = _config(tmp_path, "late", data, drop_compute=DROPPING, delay=[LATE], **layout)
    _train(late, ranks)
    done = _decisions(tmp_path / "late")
    assert sorted(done) == list(range(1, STEPS + 1)) and done[1] == [4, 4]
    dropped = {step: 8 - sum(counts) for step, counts in done.items()}
    assert sum(dropped.values()) > 0
    told = events_of(tmp_path / "late", "drop", "micro_batches")
    assert {one["step"]: one["dropped"] for one in told} == {step: one for step, one in dropped.items() if one}
    rows = [json.loads(line) for line in (tmp_path / "late" / "metrics.jsonl").read_text().splitlines()]
    counted = {row["step"]: row["drops/micro_batches"] for row in rows if "drops/micro_batches" in row}
    assert counted[STEPS] == sum(dropped.values())
    samples = {row["step"]: row["train/samples"] for row in rows if "train/samples" in row}
    assert samples[STEPS] == 8 * STEPS - sum(dropped.values())

    replay = {"enabled": True, "replay_decisions": str(tmp_path / "late" / "decisions.jsonl")}
    again = _config(tmp_path, "again", data, drop_compute=replay, **layout)
    _train(again, ranks, "megasdc.training.stop_step=3")
    _train(again, ranks)
    assert _decisions(tmp_path / "again") == done
    assert _final(tmp_path / "again") == _final(tmp_path / "late")
    assert _losses(tmp_path / "again") == _losses(tmp_path / "late")


@pytest.mark.parametrize(
    ("tensor", "pipeline", "ranks"), [(1, 1, 2), *(pytest.param(*one, marks=pytest.mark.full) for one in LARGER)]
)
def test_an_infinite_threshold_changes_no_bit(
    tmp_path: Path, data: Path, tensor: int, pipeline: int, ranks: int
) -> None:
    """With nothing dropped a run is the plain engine's, whether nothing can be or nothing needs to be."""
    layout = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    plain = _config(tmp_path, "plain", data, **layout)
    measured = _config(tmp_path, "inf", data, drop_compute={"enabled": True, "threshold": "inf"}, **layout)
    asked = _config(tmp_path, "asked", data, drop_compute={**DROPPING, "threshold": 1e6}, **layout)
    for config in (plain, measured, asked):
        _train(config, ranks)
    assert _final(tmp_path / "inf") == _final(tmp_path / "plain") == _final(tmp_path / "asked")
    assert _losses(tmp_path / "inf") == _losses(tmp_path / "plain") == _losses(tmp_path / "asked")


def _loader_of(run_dir: Path, step: int) -> dict[str, Any]:
    """Where a checkpoint's data go on."""
    saved = json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "megasdc.json").read_text())
    return saved["loader"]


def _totals(run_dir: Path) -> dict[str, float]:
    """The last value of each metric of drops and samples."""
    last: dict[str, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        last.update({name: value for name, value in json.loads(line).items() if name != "time"})
    return last


AUTO = {"enabled": True, "threshold": "auto", "warmup_steps": 1, "window_steps": 4, "max_drop_rate": 0.5}
UNEQUAL = [{"kind": "gamma", "mean_s": 0.05, "std_s": 0.1, "seed": 5}]


def test_auto_measures_chooses_and_goes_on_after_a_resume(tmp_path: Path, data: Path) -> None:
    """The chosen tau maximises S_eff of the window's own times, all ranks drop by it, and a resume keeps it."""
    config = _config(tmp_path, "auto", data, drop_compute=AUTO, delay=UNEQUAL, training__steps=12)
    _train(config, 2, "megasdc.training.stop_step=8")
    _train(config, 2)
    (chosen,) = events_of(tmp_path / "auto", "drop", "threshold")
    assert chosen["step"] == 5
    rows = [
        {row["step"]: row for row in map(json.loads, path.read_text().splitlines()) if "step" in row}
        for path in sorted((tmp_path / "auto" / "step_times").glob("*.jsonl"))
    ]
    times = {
        name: np.array([[of_rank[step][name] for step in range(2, 6)] for of_rank in rows])
        for name in ("start_s", "end_s", "compute_s", "step_s")
    }
    recorded = RecordedSteps(**times)
    found = search_recorded(times["start_s"], times["end_s"], recorded.communication_s, 0.5)
    assert (chosen["tau_s"], chosen["speedup"]) == (found.tau_s, found.speedup)
    curve = chosen["curve"]
    allowed = [one for one, share in zip(curve["speedup"], curve["completed_share"], strict=True) if share >= 0.5]
    assert chosen["speedup"] == max([1.0, *allowed])
    saved = json.loads((tmp_path / "auto" / "checkpoints" / "step_00000012" / "megasdc.json").read_text())
    assert saved["hooks"]["DropCompute"]["chosen"]["curve"] == curve
    done = _decisions(tmp_path / "auto")
    assert all(done[step] == [4, 4] for step in range(1, 6))
    assert _totals(tmp_path / "auto")["drops/threshold_s"] == found.tau_s
    _train(config, 2, "megasdc.drop_compute.window_steps=2", "megasdc.training.steps=16")
    anew = events_of(tmp_path / "auto", "drop", "threshold")
    assert [one["step"] for one in anew] == [5, 15], "measured and chosen again, as a setting has changed"
    assert all(counts == [4, 4] for step, counts in _decisions(tmp_path / "auto").items() if 12 < step < 16)


COMPENSATIONS = ["extra_steps", "larger_batch", "resample", None]


@pytest.mark.parametrize("compensation", COMPENSATIONS)
def test_compensation(tmp_path: Path, data: Path, compensation: str | None) -> None:
    """Given-up samples are made up for as asked: more steps, more planned micro-batches, or once more in the epoch."""
    threshold = "auto" if compensation == "larger_batch" else 0.12  # a given one must leave time for what was planned
    section = {**DROPPING, "threshold": threshold, "samples": "discard", "compensation": compensation}
    section |= {"window_steps": 3}
    config = _config(tmp_path, "run", data, drop_compute=section, delay=UNEQUAL, training__steps=10)
    _train(config, 2, "megasdc.training.stop_step=7")
    _train(config, 2)
    run_dir = tmp_path / "run"
    done, totals = _decisions(run_dir), _totals(run_dir)
    lines = [json.loads(line) for line in (run_dir / "decisions.jsonl").read_text().splitlines()]
    planned = {line["step"]: line["planned"] for line in lines if "step" in line}
    dropped = sum(2 * planned[step] - sum(done[step]) for step in done)
    assert totals["drops/micro_batches"] == dropped > 0
    assert totals["train/samples"] == sum(map(sum, done.values()))
    assert max(done) == (10 + -(-dropped // 8) if compensation == "extra_steps" else 10)
    if compensation == "larger_batch":
        (measured,) = events_of(run_dir, "drop", "threshold")
        assert measured["tau_s"] > 0 and measured["speedup"] > 1 and measured["step"] == 4
        assert set(planned.values()) == {4, measured["micro_batches"]} and 4 < measured["micro_batches"] <= 8
        assert measured["completed"] == pytest.approx(4, rel=0.01), "in the steps it was chosen from"
        text = (run_dir / "checkpoints" / "step_00000010" / "megasdc.json").read_text()
        state = json.loads(text)["hooks"]["DropCompute"]
        owed = sum(2 * 4 - sum(done[step]) for step in range(5, 11))
        assert state["aims"] and state["owed"] == owed, "what is owed goes on over the resume"
    consumed = {str(replica): sum(planned.values()) for replica in range(2)}
    saved = _loader_of(run_dir, max(done))
    assert saved["consumed"] == consumed
    given_up = {str(replica): sum(planned[step] - done[step][replica] for step in done) for replica in range(2)}
    again = {replica: len(positions) for replica, positions in saved["again"].items()}
    assert again == (given_up if compensation == "resample" else {"0": 0, "1": 0})


def test_deferred_samples_come_first_and_go_to_any_number_of_replicas(tmp_path: Path, data: Path) -> None:
    """Replicas are at different places after drops; at another number of replicas every sample still comes once."""
    slow = [{"kind": "slow_rank", "replica": 1, "delay_s": 0.1}]
    config = _config(tmp_path, "late", data, drop_compute={**DROPPING, "threshold": 0.2}, delay=slow)
    _train(config, 2)
    done = _decisions(tmp_path / "late")
    taken = [sum(counts[replica] for counts in done.values()) for replica in range(2)]
    assert taken[0] > taken[1]
    saved = _loader_of(tmp_path / "late", STEPS)
    assert saved["consumed"] == {"0": taken[0], "1": taken[1]}
    left_over = [2 * index + 1 for index in range(taken[1], taken[0] - 1)]

    for dp_size in (1, 4):
        places = [position_for(saved, replica, dp_size) for replica in range(dp_size)]
        assert {place.order for place in places} == {Order(tuple(left_over), 2 * taken[0] - 1)}


def test_audits_find_nothing_in_healthy_replicas_that_completed_different_numbers(tmp_path: Path, data: Path) -> None:
    """The audited micro-batch always runs; drops, dropout, recompute and bf16 raise no alarm, and repeat."""
    checked = {
        "determinism__enabled": True,
        "audit__enabled": True,
        "audit__interval": 2,
        "sdc__always_on__enabled": True,
        "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
        "deepspeed__bf16": {"enabled": True},
        "model__hidden_dropout": 0.1,
    }
    section = {**DROPPING, "threshold": 0.2}
    late = _config(tmp_path, "late", data, drop_compute=section, delay=UNEQUAL, training__steps=10, **checked)
    _train(late, 2)
    done = _decisions(tmp_path / "late")
    uneven = [step for step, counts in done.items() if len(set(counts)) > 1]
    assert any(step % 2 == 0 for step in uneven), done
    agreed = [one["step"] for one in events_of(tmp_path / "late", "audit", "agreed") if one["rank"] == 0]
    assert agreed == [1, 2, 4, 6, 8, 10]
    for name in ("finding", "audit_void", "incident"):
        assert events_of(tmp_path / "late", "sdc", name) == []
    replay = {"enabled": True, "replay_decisions": str(tmp_path / "late" / "decisions.jsonl")}
    again = _config(tmp_path, "again", data, drop_compute=replay, training__steps=10, **checked)
    _train(again, 2, "megasdc.training.stop_step=5")
    _train(again, 2)
    assert _final(tmp_path / "again", 10) == _final(tmp_path / "late", 10)


def test_replayed_decisions_may_plan_more_than_the_configuration(tmp_path: Path, data: Path) -> None:
    """A log of a run with a larger batch plans more micro-batches a step, and the stream reaches as far as they do."""
    lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": 2, "micro_batches": 4}}]
    lines += [{"step": step, "planned": 6, "completed": [6, 5]} for step in range(1, STEPS + 1)]
    log = tmp_path / "given.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drop = {"enabled": True, "replay_decisions": str(log), "samples": "discard", "compensation": "larger_batch"}
    config = _config(tmp_path, "larger", data, drop_compute=drop)
    _train(config, 2)
    assert _decisions(tmp_path / "larger") == {step: [6, 5] for step in range(1, STEPS + 1)}
