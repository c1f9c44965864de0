"""Does a whole run leave late micro-batches out, with all ranks of a replica agreeing, and count everything truly?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

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


LAYOUTS = [(1, 1, 2), (2, 1, 4), (1, 2, 4), (2, 2, 8)]


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


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), LAYOUTS)
def test_an_infinite_threshold_changes_no_bit(
    tmp_path: Path, data: Path, tensor: int, pipeline: int, ranks: int
) -> None:
    """With nothing left out a run is the plain engine's, whether nothing can be or nothing needs to be."""
    layout = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    plain = _config(tmp_path, "plain", data, **layout)
    measured = _config(tmp_path, "inf", data, drop_compute={"enabled": True, "threshold": "inf"}, **layout)
    asked = _config(tmp_path, "asked", data, drop_compute={**DROPPING, "threshold": 1e6}, **layout)
    for config in (plain, measured, asked):
        _train(config, ranks)
    assert _final(tmp_path / "inf") == _final(tmp_path / "plain") == _final(tmp_path / "asked")
    assert _losses(tmp_path / "inf") == _losses(tmp_path / "plain") == _losses(tmp_path / "asked")


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
