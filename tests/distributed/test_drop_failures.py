"""What happens where DropCompute cannot go on: a rank dies, a replica is slow, too much is dropped, data end?"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed
from whole_runs import (
    events_of,
    failure_of,
    leave_with_the_code,
    prepare_text,
    pretrain_rank,
    state_of,
    train_run,
    verdicts_of,
    write_config,
)

from megasdc.data.dataset import TokenDataset
from megasdc.dropcompute.gate import ClockDecisions

pytestmark = pytest.mark.distributed

DATA, HANG, PEER = 71, 75, 79
ASKED = {"enabled": True, "threshold": 1e6, "warmup_steps": 0}
NEVER = {"enabled": True, "threshold": 0.0, "warmup_steps": 0, "max_drop_rate": 1.0}
"""Every replica completes one micro-batch of every step."""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _config(folder: Path, data: Path, **changes: Any) -> Path:
    options = {"training__eval_interval": 0, "checkpoint__interval": 0, **changes}
    return write_config(folder / "c.json", data, folder / "run", **options)


def _completed(folder: Path) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (folder / "run" / "decisions.jsonl").read_text().splitlines()]
    return {line["step"]: line["completed"] for line in lines if "step" in line}


# --- a rank that decides ends or stands still -------------------------------------------------------------------------


def _fail_deciding(config: str, number: int) -> None:
    """Body of a rank; rank 0 sends itself a signal where it would decide for the fifth time."""
    decide, asked = ClockDecisions.decide, itertools.count(1)

    def deciding(self: ClockDecisions, micro_batch: int) -> bool:
        if dist.get_rank() == 0 and next(asked) == 5:
            os.kill(os.getpid(), number)
        return decide(self, micro_batch)

    ClockDecisions.decide = deciding  # type: ignore[method-assign]
    leave_with_the_code(config)


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(2, 1, 4), (1, 2, 4)], ids=["tp2_dp2", "pp2_dp2"])
def test_the_rank_that_decides_dies(tmp_path: Path, data: Path, tensor: int, pipeline: int, ranks: int) -> None:
    """Whoever waits for its decision, or for its replica, ends with the code of a lost peer."""
    options = {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "deepspeed__train_batch_size": 8}
    config = _config(tmp_path, data, drop_compute=ASKED, **options)
    ends = {0: -signal.SIGKILL, **dict.fromkeys(range(1, ranks), PEER)}
    run_distributed(_fail_deciding, ranks, str(config), signal.SIGKILL, init=False, expect_exit=ends, timeout_s=50)
    assert failure_of(tmp_path / "run").exit_code == PEER, "the rank that was killed could tell nothing"


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_the_rank_that_decides_stands_still(tmp_path: Path, data: Path, tensor: int, pipeline: int) -> None:
    """Who waits for its decision gives up after parallel.timeout_s, with the code of a hang."""
    options = {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "parallel__timeout_s": 6.0}
    config = _config(tmp_path, data, drop_compute=ASKED, **options)
    ends = {1: HANG}
    run_distributed(
        _fail_deciding, 2, str(config), signal.SIGSTOP, init=False, expect_exit=ends, timeout_s=50, grace_s=0
    )
    failed = failure_of(tmp_path / "run")
    assert (failed.exit_code, failed.rank) == (HANG, 1) and "parallel.timeout_s" in failed.text


# --- a replica that is always late ------------------------------------------------------------------------------------


def test_a_slow_replica_is_named_once_a_window(tmp_path: Path, data: Path) -> None:
    """The one replica that is past the threshold in every step is named, with its host, in each window."""
    late = {"kind": "slow_rank", "replica": 1, "delay_s": 0.7}
    config = _config(
        tmp_path,
        data,
        deepspeed__train_batch_size=6,
        training__steps=8,
        drop_compute={**NEVER, "threshold": 0.6, "window_steps": 3},
        delay=[late],
    )
    results = train_run(config, 3)
    assert [code for code, _ in results] == [0, 0, 0], results
    assert {done[1] for done in _completed(tmp_path).values()} == {1}
    told = events_of(tmp_path / "run", "drop", "slow_replica")
    assert [(one["step"], one["replica"], one["ranks"], one["on_host"]) for one in told] == [
        (step, 1, [1], socket.gethostname()) for step in (3, 6)
    ]
    assert [(one["late_steps"], one["of_steps"]) for one in told] == [(3, 3), (3, 3)]


def test_replicas_that_are_all_late_are_not_slow(tmp_path: Path, data: Path) -> None:
    """No replica is named where every one is past the threshold in every step."""
    config = _config(tmp_path, data, training__steps=6, drop_compute={**NEVER, "window_steps": 3})
    train_run(config, 2)
    assert set(map(tuple, _completed(tmp_path).values())) == {(1, 1)}
    assert events_of(tmp_path / "run", "drop", "slow_replica") == []


# --- the largest drop rate --------------------------------------------------------------------------------------------


def test_the_largest_drop_rate_is_kept(tmp_path: Path, data: Path) -> None:
    """Above it nothing is dropped until the last window of steps is below it; both are told.

    All that may be dropped is: 6 of 8 micro-batches a step. 0.3 of a window of 4 steps are 9.6: two such steps are
    above, one is below.
    """
    section = {**NEVER, "max_drop_rate": 0.3, "window_steps": 4}
    config = _config(tmp_path, data, deepspeed__train_batch_size=8, training__steps=12, drop_compute=section)
    train_run(config, 2)
    done = _completed(tmp_path)
    assert [step for step, counts in done.items() if counts == [1, 1]] == [1, 2, 6, 7, 11, 12]
    assert all(done[step] == [4, 4] for step in (3, 4, 5, 8, 9, 10))
    told = events_of(tmp_path / "run", "drop", "limit")
    assert [(one["step"], one["now"], one["dropped"]) for one in told] == [
        (2, "above", 12),
        (5, "below", 6),
        (7, "above", 12),
        (10, "below", 6),
        (12, "above", 12),
    ]


def test_a_larger_batch_is_limited_by_its_own_size_and_repeats(tmp_path: Path, data: Path) -> None:
    """The drop rate is that of the micro-batches planned now; a replay plans as many, on a stream that is as long.

    Of 8 planned for 4 that are completed half is dropped, which is the limit, while 4 of 4 would be far above.
    """
    larger = {**NEVER, "threshold": "auto", "max_drop_rate": 0.5, "window_steps": 3}
    larger |= {"samples": "discard", "compensation": "larger_batch"}
    late = {"kind": "gamma", "mean_s": 0.1, "std_s": 0.2, "seed": 4}
    options = {
        "deepspeed__train_batch_size": 8,
        "checkpoint__interval": 6,
        "training__steps": 6,
        "determinism__enabled": True,
    }
    # Checks that follow the places in the data know with how many micro-batches each step began.
    followed = {"enabled": True, **dict.fromkeys(("recompute", "finite", "chain", "tokens"), False)}
    config = _config(tmp_path, data, drop_compute=larger, delay=[late], sdc={"always_on": followed}, **options)
    results = train_run(config, 2)
    assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "run") == []
    (told,) = events_of(tmp_path / "run", "drop", "threshold")
    assert 4 < told["micro_batches"] <= 8 and told["completed"] == pytest.approx(4, rel=0.01)
    planned = [
        json.loads(line).get("planned") for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()
    ]
    assert planned[1:] == [4] * 3 + [told["micro_batches"]] * 3

    (tmp_path / "again").mkdir()
    replay = {"enabled": True, "samples": "discard", "replay_decisions": str(tmp_path / "run" / "decisions.jsonl")}
    again = _config(tmp_path / "again", data, drop_compute=replay, **options)
    results = train_run(again, 2)
    assert [code for code, _ in results] == [0, 0], results
    last = Path("run", "checkpoints", "step_00000006")
    first, second = state_of(tmp_path / last), state_of(tmp_path / "again" / last)
    assert all(second[name] == value for name, value in first.items() if "shared" not in name)


def test_where_no_larger_batch_is_enough_it_is_told(tmp_path: Path, data: Path) -> None:
    """Before a threshold of 0 one micro-batch is started, however many are planned: their number stays."""
    larger = {**NEVER, "window_steps": 2, "samples": "discard", "compensation": "larger_batch"}
    config = _config(tmp_path, data, drop_compute=larger, deepspeed__train_batch_size=8, training__steps=4)
    train_run(config, 2)
    assert [_completed(tmp_path)[step] for step in range(1, 5)] == [[4, 4]] * 2 + [[1, 1]] * 2
    (chosen,) = events_of(tmp_path / "run", "drop", "threshold")
    assert (chosen["micro_batches"], chosen["completed"], chosen["tau_s"]) == (4, 1, 0)
    (told,) = events_of(tmp_path / "run", "drop", "not_compensated")
    assert (told["step"], told["wanted"], told["completed"], told["largest"]) == (2, 4, 1, 8)


# --- a stream that ends -----------------------------------------------------------------------------------------------

LOSING = {**NEVER, "samples": "discard", "compensation": "extra_steps"}
"""Three of four micro-batches are lost: four steps do the work of one."""


def _train_on_a_short_stream(config: str) -> Any:
    """Body of a rank whose stream does not grow when more steps are needed."""
    TokenDataset.extend = lambda self, num_samples: None  # type: ignore[method-assign]
    return pretrain_rank(config, [])


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_stream_that_ends(tmp_path: Path, data: Path, pipeline: int) -> None:
    """The run ends with the code of the data, and says how long the stream is and what was asked for."""
    config = _config(
        tmp_path,
        data,
        training__steps=3,
        deepspeed__train_batch_size=8,
        drop_compute=LOSING,
        parallel__pipeline=pipeline,
        parallel__timeout_s=10.0,
    )
    results = run_distributed(_train_on_a_short_stream, 2 * pipeline, str(config), init=False)
    texts = [text for code, text in results if code == DATA]
    assert texts and {code for code, _ in results} <= {DATA, HANG, PEER}, results
    assert all("has 24 samples and replica" in text and "build it with more samples" in text for text in texts), texts


def test_the_stream_grows_with_the_run(tmp_path: Path, data: Path) -> None:
    """Extra steps run on samples that were not planned at first, until as much is completed as was planned."""
    config = _config(tmp_path, data, training__steps=3, deepspeed__train_batch_size=8, drop_compute=LOSING)
    results = train_run(config, 2)
    assert [code for code, _ in results] == [0, 0], results
    done = _completed(tmp_path)
    assert sorted(done) == list(range(1, 13)) and sum(map(sum, done.values())) == 3 * 8
