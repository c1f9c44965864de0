"""Does a guard tell what a rank is doing, name who is slow, and take part in trials?"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed

import megasdc
from megasdc.attached.settings import TRIAL_VARIABLE
from megasdc.events import read_events
from megasdc.ops.health.attached import GuardStragglers
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.program_health import ProgramHealth
from megasdc.sdc.trace import read_folder
from tools.trainings.engines import MICRO_BATCHES, SIDE, deepspeed_config, llama_engine, pipeline_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
OFF = {"audit": {"enabled": False}, "nonfinite": {"enabled": False}}


def _slow(folder: str) -> None:
    """Body of a rank: by its clock, rank 1 takes twice as long for each forward pass, but not from step 30 on."""
    engine, chance = llama_engine(deepspeed_config(1, "fp32")), random.Random(dist.get_rank())
    now = [0.0]

    def mark(_: GuardStragglers) -> float:
        is_slow = dist.get_rank() == 1 and engine.global_steps < 30
        now[0] += (2.0 if is_slow else 1.0) * chance.uniform(0.97, 1.03)
        return now[0]

    GuardStragglers._mark = mark  # type: ignore[method-assign]
    guard = megasdc.attach(engine, {"logging": {"run_dir": folder}, "health": {"slow_ratio": 1.2}, **OFF})
    train(engine, 90, guard.dims.dp_rank)
    guard.close()


def test_a_slow_rank_is_named_and_recovers(tmp_path: Path) -> None:
    """Of three replicas the one that is slower is named, nobody else, and is named as fast again later."""
    run_distributed(_slow, 3, str(tmp_path))
    told = list(read_events(tmp_path, kind="health"))
    assert [(one.name, one.fields["ranks"]) for one in told] == [("straggler", [1]), ("recovered", [1])]
    assert told[0].step is not None and told[0].step <= 24
    assert json.loads((tmp_path / "health" / "suspects.json").read_text())["suspects"] == []


def _phases(folder: str, stages: int) -> list[tuple[int, int, Phase]]:
    """Body of a rank: what its record says at each change of phase in two steps."""
    config = deepspeed_config(1, "fp32")
    engine = llama_engine(config) if stages == 1 else pipeline_engine(config, stages)
    rank = dist.get_rank()
    health = ProgramHealth({"here": [0, 1]}, rank, Path(folder), "launch", (60, 900, 10), (), lambda code, text: None)
    found, recorder = [], health.recorder

    def noting(phase: Phase) -> Any:
        enter = recorder(phase)

        def note(step: int, micro_batch: int) -> None:
            found.append((step, micro_batch, phase))
            enter(step, micro_batch)

        return note

    health.recorder = noting  # type: ignore[method-assign]
    guard = megasdc.attach(engine, {"logging": {"run_dir": folder}, **OFF})
    assert health.is_reported
    train(engine, 2, guard.dims.dp_rank)
    told = list(found)
    if stages > 1:
        engine.eval_batch(iter([(torch.randn(2, 3, SIDE, SIDE), torch.zeros(2, dtype=torch.long))] * MICRO_BATCHES))
    assert found[-1][2] == Phase.BETWEEN, "what follows is the user's code"
    guard.close()
    assert not health.is_reported and "backward" not in vars(engine) and "_INSTRUCTION_MAP" not in vars(engine)
    count = len(found)
    train(engine, 1, guard.dims.dp_rank)
    assert len(found) == count, "after close nothing is told"
    health.close()
    return told


def test_phases_of_a_plain_loop(tmp_path: Path) -> None:
    """Each micro-batch has its forward and backward pass, each step its optimizer; between them is the user's code."""
    for told in run_distributed(_phases, 2, str(tmp_path), 1):
        kinds = [one for one in told if one[2] != Phase.BETWEEN]
        assert kinds == [
            *((1, 0, Phase.FORWARD), (1, 0, Phase.BACKWARD), (1, 1, Phase.FORWARD), (1, 1, Phase.BACKWARD)),
            (1, -1, Phase.OPTIMIZER),
            *((2, 0, Phase.FORWARD), (2, 0, Phase.BACKWARD), (2, 1, Phase.FORWARD), (2, 1, Phase.BACKWARD)),
            (2, -1, Phase.OPTIMIZER),
        ]


def test_phases_of_a_pipeline(tmp_path: Path) -> None:
    """Transfers are told by their direction: who waits in one is not taken for who computes."""
    first, last = run_distributed(_phases, 2, str(tmp_path), 2)
    assert sum(one[2] == Phase.SEND_ACTIVATION for one in first) == 2 * MICRO_BATCHES
    assert sum(one[2] == Phase.RECEIVE_GRADIENT for one in first) == 2 * MICRO_BATCHES
    assert sum(one[2] == Phase.RECEIVE_ACTIVATION for one in last) == 2 * MICRO_BATCHES
    assert {one[2] for one in last} >= {Phase.FORWARD, Phase.BACKWARD, Phase.SEND_GRADIENT, Phase.OPTIMIZER}


def _tried(folder: str) -> tuple[Any, int, bool]:
    """Body of a rank: a trial of two steps, in a training that would take more and saves."""
    os.environ[TRIAL_VARIABLE] = json.dumps({"folder": f"{folder}/trial", "steps": 2})
    engine = llama_engine(deepspeed_config(1, "fp32"))
    megasdc.attach(engine, {"logging": {"run_dir": f"{folder}/own"}})
    code = None
    try:
        for _ in range(5):
            train(engine, 1, dist.get_rank())
            engine.save_checkpoint(f"{folder}/saved")
    except SystemExit as error:
        code = error.code
    return code, engine.global_steps, "save_checkpoint" in vars(engine)


def test_a_trial_traces_saves_nothing_and_ends(tmp_path: Path) -> None:
    """It writes to its own folder, takes the steps asked for, and leaves with exit code 0, the guard closed."""
    assert set(run_distributed(_tried, 2, str(tmp_path))) == {(0, 2, False)}
    assert not (tmp_path / "saved").exists() and not (tmp_path / "own").exists()
    found = read_folder(tmp_path / "trial" / "trace")
    assert {address.step for _, trace in found.values() for address in trace.addresses} == {1, 2}
    assert [one.step for one in read_events(tmp_path / "trial", kind="guard", name="not_saved")] == [1]
