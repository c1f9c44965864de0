"""Do whole runs end backward passes at the threshold, count and log them, repeat them, and raise no false alarm?"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed
from test_local_sgd import train_replicas
from whole_runs import checked, end_of, events_of, metrics_of, prepare_text, pretrain_rank, train_run, write_run

from megasdc.common.addresses import BACKWARD
from megasdc.dropcompute.threshold import search_recorded
from megasdc.dropcompute.tuning import measured_communication_s
from megasdc.lab.report.run_threshold import search_run
from megasdc.lab.report.step_times import load_step_times
from megasdc.model.gpt import TransformerBlock
from megasdc.sdc.trace import read_folder

pytestmark = pytest.mark.distributed

STEPS = 6
LAST = ("4", "5", "loss")
"""Final norm, output and loss, which each backward pass comes through."""
ENDING = {"enabled": True, "granularity": "backward", "gradients": "computed"}
AT_ONCE = {**ENDING, "threshold": 0.0, "warmup_steps": 1, "max_drop_rate": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _train(config: Path, *overrides: str) -> list[str]:
    """Train, and return the lines of rank 0 about drops."""
    results = run_distributed(_pretrain, 2, str(config), list(overrides), init=False)
    assert [code for code, _, _ in results if code] == [], results
    return results[0][2]


def _pretrain(config: str, overrides: list[str]) -> tuple[int, str | None, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megasdc.train.drop_compute").addHandler(handler)
    return *pretrain_rank(config, overrides), lines


def _pretrain_with_slow_layers(config: str, overrides: list[str]) -> tuple[int, str | None]:
    """Body of a rank; the backward pass of rank 1's second layer takes 0.6 s in step 3 and from step 5 on."""
    forward, calls = TransformerBlock.forward, itertools.count()

    def slow(block: TransformerBlock, *inputs: Any, **named: Any) -> Any:
        output = forward(block, *inputs, **named)
        if output.requires_grad and dist.get_rank() == 1 and next(calls) in (4, *range(8, 2 * STEPS, 2)):
            output.register_hook(lambda _gradient: time.sleep(0.6))  # that of the first: the second's input
        return output

    TransformerBlock.forward = slow  # type: ignore[method-assign]
    return pretrain_rank(config, overrides)


def _steps(run_dir: Path) -> dict[int, tuple[list[int], list[int | None] | None]]:
    """Completed micro-batches, and layers where a pass was ended, by step."""
    lines = [json.loads(line) for line in (run_dir / "decisions.jsonl").read_text().splitlines()]
    return {line["step"]: (line["completed"], line.get("layers")) for line in lines if "step" in line}


def _write_log(path: Path, micro_batches: int, steps: list[tuple[list[int], list[int | None]]]) -> None:
    lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": 2, "micro_batches": micro_batches}}]
    for number, (completed, layers) in enumerate(steps, 1):
        lines.append({"step": number, "planned": micro_batches, "completed": completed})
        if layers != [None, None]:
            lines[-1] |= {"layers": layers, "of_layers": 2}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_one_micro_batch_a_step_ends_at_the_threshold_and_repeats(tmp_path: Path, data: Path) -> None:
    """With no time at all every pass ends behind the last layer; a replay, resumed in the middle, has the same bits."""
    small = {"deepspeed__train_batch_size": 2, "trace__enabled": True}
    lines = _train(write_run(tmp_path, data, "late", drop_compute=AT_ONCE, **small))
    run_dir = tmp_path / "late"
    ended = "0 micro-batches dropped, 2 backward passes ended, 100.00 %"
    assert [line for line in lines if "dropped, " in line] == [f"step {step} | {ended}" for step in range(2, STEPS + 1)]
    after = ([1, 1], [0, 0])
    assert _steps(run_dir) == {1: ([1, 1], None), **dict.fromkeys(range(2, STEPS + 1), after)}
    told = events_of(run_dir, "drop", "micro_batches")
    assert [(one["step"], one["dropped"], one["layers"]) for one in told] == [
        (step, 0, {"0": 0, "1": 0}) for step in range(2, STEPS + 1)
    ]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ended = {row["step"]: (row["drops/ended_passes"], row["drops/rate"]) for row in rows if "drops/rate" in row}
    assert ended == {1: (0, 0.0), **{step: (2 * (step - 1), 1.0) for step in range(2, STEPS + 1)}}
    assert metrics_of(run_dir)[-1]["train/samples"] == 2 * STEPS, "a sample whose pass was ended is used"
    assert load_step_times(run_dir).is_whole.tolist() == [[True] + [False] * 5] * 2

    replay = {**ENDING, "replay_decisions": str(run_dir / "decisions.jsonl")}
    again = write_run(tmp_path, data, "again", drop_compute=replay, **small)
    _train(again, "megasdc.training.stop_step=3")
    _train(again)
    assert _steps(tmp_path / "again") == _steps(run_dir)
    assert end_of(tmp_path / "again") == end_of(run_dir)
    trace, repeated = (read_folder(folder / "trace")[0][1] for folder in (run_dir, tmp_path / "again"))
    assert trace.addresses == repeated.addresses and trace.checksums == repeated.checksums
    found = {(one.step, one.fqn.split(".")[0]) for one in trace.addresses if one.phase == BACKWARD}
    assert found == {*((1, part) for part in ("1", "2", "3", *LAST)), *itertools.product(range(2, 7), LAST)}

    changes = {"granularity": "micro_batch", "threshold": "inf"}
    other = write_run(tmp_path, data, "other", drop_compute=replay | changes, **small)
    whole = train_run(other, 2)
    assert [code for code, _ in whole] == [70, 70] and 'set "backward"' in whole[0][1]


def test_auto_ends_passes_of_the_only_micro_batch(tmp_path: Path, data: Path) -> None:
    """The chosen tau is what the search with ended passes finds on the window's times, forward passes as measured, and
    what the command finds; whole passes have none. What is slow in backward passes is then left out.
    """
    drop = {**ENDING, "threshold": "auto", "warmup_steps": 1, "window_steps": 3, "max_drop_rate": 0.1}
    small = {"deepspeed__train_batch_size": 2, "training__eval_interval": STEPS}
    config = write_run(tmp_path, data, "auto", drop_compute=drop, **small)
    results = run_distributed(_pretrain_with_slow_layers, 2, str(config), [], init=False)
    assert [code for code, _ in results if code] == [], results
    (chosen,) = events_of(tmp_path / "auto", "drop", "threshold")
    times = load_step_times(tmp_path / "auto")
    window = times.only((times.steps >= 2) & (times.steps <= 4))
    starts, ends, compute, step = (getattr(window, name)[:, 0] for name in ("start_s", "end_s", "compute_s", "step_s"))
    rest_s = measured_communication_s(compute, step)
    middles = window.forward_end_s[:, 0]
    assert (starts < middles).all() and (middles < ends).all() and (ends - middles)[1, 1] > 0.6 > middles.max()
    found = search_recorded(starts, ends, rest_s, 0.1, layers=2, forward_ends_s=middles)
    assert (chosen["step"], chosen["tau_s"], chosen["speedup"]) == (4, found.tau_s, found.speedup)
    assert found.speedup > 1 and search_recorded(starts, ends, rest_s, 0.1).tau_s == math.inf
    command = search_run(load_step_times(tmp_path / "auto", 2, 4), 0.1, 1, None)
    assert (command.layers, command.threshold.tau_s, command.threshold.speedup) == (2, found.tau_s, found.speedup)
    assert {number: layers[1] for number, (_, layers) in _steps(tmp_path / "auto").items() if layers} == {5: 1, 6: 1}


def test_passes_end_within_a_replica_that_trains_apart(tmp_path: Path, data: Path) -> None:
    """Weights of rounds are averaged by the tokens used, and replayed decisions give the same bits."""
    batch = {"deepspeed__train_batch_size": 4, "training__eval_interval": 6}
    apart = [{"local_sgd": {"replicas": 2, "replica": one, "every": 3}, **batch} for one in range(2)]
    ended = []
    for name, own in (("run", AT_ONCE), ("again", {**ENDING, "replay_decisions": str(tmp_path / "decisions.jsonl")})):
        configs = [
            write_run(tmp_path, data, f"{name}_{one}", **apart[one], **({} if one else {"drop_compute": own}))
            for one in range(2)
        ]
        found, rounds = train_replicas(configs, 2)
        assert [code for code, _ in found if code] == [], found
        assert [one.members for one in rounds] == [(0, 1)] * 2 and not any(one.left_out for one in rounds)
        assert [one.micro_batches for one in rounds] == [{0: 8, 1: 12}, {0: 6, 1: 12}]
        assert all(one.tokens == {part: 32 * done for part, done in one.micro_batches.items()} for one in rounds)
        digests = [
            [told["digest"] for told in events_of(tmp_path / f"{name}_{one}", "local_sgd", "round")] for one in (0, 1)
        ]
        assert digests[0] == digests[1] and len(digests[0]) == 2
        ended.append((digests, [one.norms for one in rounds], [end_of(tmp_path / f"{name}_{one}") for one in range(2)]))
        if name == "run":
            shutil.copy(tmp_path / "run_0" / "decisions.jsonl", tmp_path / "decisions.jsonl")
    assert _steps(tmp_path / "run_0") == {1: ([2, 2], None), **dict.fromkeys(range(2, STEPS + 1), ([1, 1], [0, 0]))}
    assert ended[0] == ended[1]


LOGGED: list[tuple[list[int], list[int | None]]] = [
    ([4, 4], [None, 2]),
    ([3, 4], [0, None]),
    ([2, 2], [2, 1]),
    ([4, 3], [None, None]),
    ([2, 4], [1, 0]),
    ([4, 2], [2, 2]),
]


@pytest.mark.parametrize(("precision", "audited"), [("fp32", "training"), ("bf16", "extra")])
def test_checks_of_every_kind_raise_no_alarm(tmp_path: Path, data: Path, precision: str, audited: str) -> None:
    """Audits, checks of sums by slices, of recomputation and of the chain: passes that end anywhere are no fault."""
    _write_log(tmp_path / "given.jsonl", 4, LOGGED)
    config = write_run(
        tmp_path,
        data,
        "run",
        **checked(coverage="one", slice_elements=1_000_000),
        drop_compute={**ENDING, "replay_decisions": str(tmp_path / "given.jsonl"), "check_agreement": True},
        audit={"enabled": True, "interval": 2, "micro_batch": audited},
        deepspeed__train_batch_size=8,
        deepspeed__pipeline={"activation_checkpoint_interval": 1},
        **({"deepspeed__bf16": {"enabled": True}} if precision == "bf16" else {}),
    )
    _train(config)
    run_dir = tmp_path / "run"
    assert list(_steps(run_dir).values()) == [
        (completed, None if layers == [None, None] else layers) for completed, layers in LOGGED
    ]
    assert [one["step"] for one in events_of(run_dir, "audit", "agreed") if one["rank"] == 0] == [1, 2, 4, 6]
    told = {one["step"]: (one["dropped"], one.get("layers")) for one in events_of(run_dir, "drop", "micro_batches")}
    assert len(told) == STEPS and told[1] == (0, {"1": 2}) and told[4] == (1, None), "of all layers, too"
    for name in ("finding", "audit_void", "incident", "slice_given_up"):
        assert events_of(run_dir, "sdc", name) == [], name


def test_an_audited_micro_batch_is_whole(tmp_path: Path, data: Path) -> None:
    """Where there is no time at all, passes that audits compare are whole; the start's audit has an extra one."""
    drop = AT_ONCE | {"warmup_steps": 0}
    audit = {"enabled": True, "interval": 2}
    _train(write_run(tmp_path, data, "run", **checked(), drop_compute=drop, audit=audit, deepspeed__train_batch_size=2))
    ended = {step: layers for step, (_, layers) in _steps(tmp_path / "run").items()}
    assert ended == {step: [0, 0] if step % 2 else None for step in range(1, STEPS + 1)}
    agreed = [one["step"] for one in events_of(tmp_path / "run", "audit", "agreed") if one["rank"] == 0]
    assert agreed == [1, 2, 4, 6] and events_of(tmp_path / "run", "sdc", "audit_void") == []


def test_a_replay_that_cannot_end_where_the_log_says_is_refused(tmp_path: Path, data: Path) -> None:
    """Where layers are recomputed together there is no end between them; both numbers are told."""
    _write_log(tmp_path / "given.jsonl", 2, [([2, 2], [1, None])] * STEPS)
    config = write_run(
        tmp_path,
        data,
        "run",
        drop_compute={**ENDING, "replay_decisions": str(tmp_path / "given.jsonl")},
        deepspeed__pipeline={"activation_checkpoint_interval": 2},
    )
    results = train_run(config, 2)
    assert [code for code, _ in results] == [70, 70]
    assert "{0: 2} layers" in results[0][1] and "after {0: 1}" in results[0][1]


def test_a_replay_starts_no_more_than_the_log_says(tmp_path: Path, data: Path) -> None:
    """Micro-batches that would always be started, and that the other run did not, are refused before the first step."""
    _write_log(tmp_path / "given.jsonl", 2, [([2, 2], [None, None])] * 3 + [([2, 1], [None, 1])] * 3)
    drop = {**ENDING, "replay_decisions": str(tmp_path / "given.jsonl"), "min_micro_batches": 2}
    results = train_run(write_run(tmp_path, data, "run", drop_compute=drop), 2)
    assert [code for code, _ in results] == [70, 70]
    assert "min_micro_batches: got 2" in results[0][1] and "completed 1 in step 4; set 1 or less" in results[0][1]
