"""Do whole runs harm themselves as their configuration says: repeatably, over resumes, and told in their events?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import (
    events_of,
    leave_with_the_code,
    metrics_of,
    prepare_text,
    state_of,
    train_run,
    write_config,
)

from megasdc.events import read_events

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of a run on two ranks without faults."""
    folder = tmp_path_factory.mktemp("clean")
    _train(write_config(folder / "clean.json", data, folder / "run"), 2)
    return folder / "run"


def _train(config: Path, ranks: int, *overrides: str) -> None:
    results = train_run(config, ranks, *overrides)
    assert [code for code, _ in results if code] == [], results


def _final(run_dir: Path) -> Any:
    return state_of(run_dir / "checkpoints" / "step_00000006"), metrics_of(run_dir)


def _firings(run_dir: Path) -> list[tuple[Any, ...]]:
    """Every firing, in the order of ranks and time."""
    return [
        (event.rank, event.step, event.micro_batch, json.dumps(event.fields))
        for event in read_events(run_dir, kind="fault", name="injected")
    ]


FAULTS = [
    {"submodule": "*.linear_fc2", "rank": 1, "element_probability": 0.001, "bits": "mantissa", "probability": 0.3},
    {"submodule": "2.*", "phase": "backward", "kind": "noise", "deviation": 0.1, "elements": 5, "probability": 0.2},
    {"phase": "weight_grad", "replica": 1, "once": True, "probability": 0.2, "steps": [2, None]},
    {"phase": "optimizer_state", "slot": "*.exp_avg", "once": True, "kind": "scale", "factor": 3},
    {"phase": "tokens", "bits": [0], "probability": 0.1},
    {"phase": "collective", "burst": {"length": 2, "probability": 0.3}, "probability": 0.05},
]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)], ids=["dp2", "tp2", "pp2"])
def test_a_harmed_run_repeats_and_resumes(tmp_path: Path, data: Path, tensor: int, pipeline: int) -> None:
    """The same config fires the same faults with the same end; so does a run that stops and resumes half way.

    Over stages with untied embeddings: a checkpoint holds a tied weight once, so that copies which a fault
    made different are equal again after a resume.
    """
    faults = [dict(spec) for spec in FAULTS]
    if tensor * pipeline > 1:
        faults[2]["replica"] = 0
    options = {"faults": faults, "parallel__tensor": tensor, "parallel__pipeline": pipeline}
    options["model__tie_embeddings"] = pipeline == 1
    for name in ("whole", "again", "resumed"):
        config = write_config(tmp_path / f"{name}.json", data, tmp_path / name, **options)
        if name == "resumed":
            _train(config, 2, "megasdc.training.stop_step=3")
        _train(config, 2)
    assert _final(tmp_path / "whole") == _final(tmp_path / "again") == _final(tmp_path / "resumed")
    told = _firings(tmp_path / "whole")
    assert told == _firings(tmp_path / "again") == _firings(tmp_path / "resumed")
    assert {json.loads(fields)["spec"] for *_, fields in told} == set(range(6))
    changes = [(rank, json.loads(fields)["spec"]) for rank, *_, fields in told if json.loads(fields)["changed"]]
    for spec in (2, 3):  # those that fire once
        ranks = [rank for rank, changing in changes if changing == spec]
        assert ranks and len(ranks) == len(set(ranks))
    assert events_of(tmp_path / "whole", "fault", "never_fired") == []


def test_faults_that_never_fire_change_nothing_and_are_told(tmp_path: Path, data: Path, clean: Path) -> None:
    """The run is bit-identical to one without faults, says that they were armed, and why each did nothing."""
    reasons = {
        "steps and micro-batches": {"steps": [50, None]},
        "narrower than min_hidden_size": {"min_hidden_size": 4096},
        "no rank matches": {"host": "no-such-host"},
        "probability and bursts": {"probability": 0.0},
        "no element was in range": {"only_above": 1e30},
        "already had their values": {
            "kind": "value",
            "value": 0.0,
            "only_below": 0.0,
            "phase": "weight_grad",
            "submodule": "0.word_embeddings",
        },
        "bits 0 to 31": {"bits": [40]},
    }
    armed = write_config(
        tmp_path / "armed.json",
        data,
        tmp_path / "armed",
        faults=list(reasons.values()),
        process_faults=[{"kind": "sigkill", "steps": [50, None]}],
    )
    _train(armed, 2)
    assert _final(clean) == _final(tmp_path / "armed")
    assert events_of(tmp_path / "armed", "fault", "armed") == [
        {"rank": 0, "step": 0, "faults": len(reasons), "process_ranks": 2}
    ]
    told = {event["spec"]: event["reason"] for event in events_of(tmp_path / "armed", "fault", "never_fired")}
    assert sorted(told) == list(range(len(reasons)))
    for index, reason in enumerate(reasons):
        assert reason in told[index]
    assert [e["ranks"] for e in events_of(tmp_path / "armed", "fault", "process_never_fired")] == [[0, 1]]


def test_a_damaged_checkpoint(tmp_path: Path, data: Path, clean: Path) -> None:
    """One byte of the stated file is flipped after the save; a resume finds it and takes the step before."""
    fault = {"phase": "checkpoint", "file": "*optim_states.pt", "steps": [6, 6], "rank": 1}
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", faults=[fault], checkpoint__interval=2)
    _train(config, 2)
    (told,) = events_of(tmp_path / "run", "fault", "injected")
    assert (told["rank"], told["step"], told["elements"], told["changed"]) == (1, 6, 1, 1)
    harmed, sound = (run / "checkpoints" / "step_00000006" / told["fqn"] for run in (tmp_path / "run", clean))
    content = harmed.read_bytes()
    assert f"{content[told['indices'][0]]:x}" == told["bits_after"][0]
    assert len(content) == sound.stat().st_size
    _train(config, 2, "megasdc.faults=[]", "megasdc.training.stop_step=5")
    assert [event["step"] for event in events_of(tmp_path / "run", "resume", "checkpoint")] == [4]


@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        ({"kind": "exit", "exit_code": 17, "micro_batches": [1], "phase": "backward"}, {1: 17}),
        ({"kind": "sigkill", "phase": "update"}, {1: -9}),
        ({"kind": "sigstop", "micro_batches": [0]}, {0: 75}),
        ({"kind": "hang", "phase": "collective"}, {0: 75}),
    ],
    ids=["exit", "sigkill", "sigstop", "hang"],
)
def test_a_process_fault_and_the_restart(
    tmp_path: Path, data: Path, clean: Path, fault: Any, ends: dict[int, int]
) -> None:
    """Rank 1 fails as stated (a peer of one that stands still gives up with the exit code of a hang); the restarted run
    does not fail again and ends as one that never did; with after_restart it does fail again.
    """
    fault = {"rank": 1, "steps": [3, 3], **fault}
    options = {"parallel__timeout_s": 8.0, "checkpoint__interval": 2}
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", process_faults=[fault], **options)
    run_distributed(leave_with_the_code, 2, str(config), init=False, expect_exit=ends)
    (told,) = events_of(tmp_path / "run", "fault", "process")
    assert (told["rank"], told["step"], told["fault"]) == (1, 3, fault["kind"])
    if fault["kind"] == "exit":
        always = [{**fault, "after_restart": True}]
        bad = write_config(tmp_path / "bad.json", data, tmp_path / "run", process_faults=always, checkpoint__interval=2)
        for _ in (1, 2):
            run_distributed(leave_with_the_code, 2, str(bad), init=False, expect_exit=ends)
    _train(config, 2)
    assert _final(tmp_path / "run") == _final(clean)


def test_a_slow_rank(tmp_path: Path, data: Path, clean: Path) -> None:
    """A slow rank says so once and changes nothing but time."""
    slow = {"kind": "slow", "rank": 1, "factor": 1.5, "steps": [2, 3]}
    config = write_config(tmp_path / "slow.json", data, tmp_path / "slow", process_faults=[slow])
    _train(config, 2)
    assert _final(tmp_path / "slow") == _final(clean)
    (told,) = events_of(tmp_path / "slow", "fault", "process")
    assert (told["rank"], told["step"], told["fault"]) == (1, 2, "slow")
