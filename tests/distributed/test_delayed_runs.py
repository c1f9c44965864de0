"""Are whole runs late by exactly what their configuration says, and otherwise the same in every bit?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.distributions import BoundedLogNormal, SlowRank
from megasdc.lab.planning.environment import DelayEnvironment

pytestmark = pytest.mark.distributed

STEPS, SEED = 6, 7
DELAYS = [
    {"kind": "bounded_lognormal", "mean_s": 0.5, "micro_batch_latency_s": 0.02, "preemptible": True, "seed": SEED},
    {"kind": "slow_rank", "replica": 0, "delay_s": 0.01, "seed": SEED},
]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _train(config: Path, ranks: int, *overrides: str) -> None:
    results = train_run(config, ranks, *overrides)
    assert [code for code, _ in results if code] == [], results


def _final(run_dir: Path) -> Any:
    return state_of(run_dir / "checkpoints" / "step_00000006"), metrics_of(run_dir)


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(1, 1, 2), (2, 2, 4)], ids=["dp2", "tp2_pp2"])
def test_ranks_sleep_what_is_drawn_and_change_nothing(
    tmp_path: Path, data: Path, tensor: int, pipeline: int, ranks: int
) -> None:
    """Slept seconds of each rank are the environment's, also over a resume; losses and weights have the same bits."""
    options = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    plain = write_config(tmp_path / "plain.json", data, tmp_path / "plain", **options)
    late = write_config(tmp_path / "late.json", data, tmp_path / "late", delay=DELAYS, **options)
    _train(plain, ranks)
    _train(late, ranks, "megasdc.training.stop_step=4")
    _train(late, ranks)
    assert _final(tmp_path / "plain") == _final(tmp_path / "late")

    data_size = ranks // (tensor * pipeline)
    environment = DelayEnvironment(0.0, (BoundedLogNormal(0.5 * 0.02), SlowRank(0, 0.01)), SEED)
    drawn = [environment.draw(step, 0, data_size, 4 // data_size, pipeline) for step in range(1, STEPS + 1)]
    told = events_of(tmp_path / "late", "delay", "slept")
    for rank in range(ranks):
        replica, stage = rank // tensor % data_size, rank // (tensor * data_size)
        mine = [event for event in told if event["rank"] == rank]
        if rank % tensor:
            assert mine == []
            continue
        assert [(event["first_step"], event["step"], event["cut_s"]) for event in mine] == [
            (step, step, 0.0) for step in range(1, STEPS + 1)
        ]
        wanted = [float(one[replica, :, stage].sum()) for one in drawn]
        assert [event["slept_s"] for event in mine] == pytest.approx(wanted, rel=1e-12)
    armed = events_of(tmp_path / "late", "delay", "armed")
    assert [event["ranks"] for event in armed[:2]] == [
        [rank for rank in range(ranks) if rank % tensor == 0],
        [rank for rank in range(ranks) if rank % tensor == 0 and rank // tensor % data_size == 0],
    ]
    assert armed[1]["delay"] == DELAYS[1] and len(armed) == 4  # of both parts of the run


def test_steps_last_at_least_as_long_as_the_slowest_replica_sleeps(tmp_path: Path, data: Path) -> None:
    """The delays are really slept: no step is shorter than the longest sum of delays in it."""
    delay = {"kind": "gamma", "mean_s": 0.1, "std_s": 0.1}
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", delay=[delay], training__eval_interval=0)
    _train(config, 2)
    told = events_of(tmp_path / "run", "delay", "slept")
    longest = {step: max(e["slept_s"] for e in told if e["step"] == step) for step in range(1, STEPS + 1)}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    took = {row["step"]: row["speed/step_s"] for row in rows if "speed/step_s" in row}
    assert all(took[step] >= longest[step] > 0 for step in range(1, STEPS + 1))


def test_a_run_with_an_unusable_file_of_delays_ends_before_it_starts(tmp_path: Path, data: Path) -> None:
    """Every rank ends with the exit code of a wrong configuration and names the entry."""
    (tmp_path / "delays.npy").write_text("nothing")
    delay = {"kind": "trace", "path": str(tmp_path / "delays.npy")}
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", delay=[delay])
    for code, message in train_run(config, 2):
        assert code == 70 and "megasdc.delay.0.path" in message
