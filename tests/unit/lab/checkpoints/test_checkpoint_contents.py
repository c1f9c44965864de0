"""Does verify-checkpoint find what is wrong in a checkpoint whose files are as they were saved?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hand_made import seal, write_checkpoint
from typer.testing import CliRunner

from megasdc.checkpoint.manifest import read_manifest, write_manifest
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.resume import find_checkpoint
from megasdc.checkpoint.verify import CHECKED, find_incomplete
from megasdc.cli import app
from megasdc.lab.checkpoints.views.contents import verify_contents
from megasdc.parallel.dims import ParallelDims

LAYOUTS = [(1, 1, 1), (2, 2, 2), (1, 1, 3), (2, 1, 1), (1, 2, 2)]
LAYER, NEIGHBOUR = "layer_02-model_00-model_states.pt", "layer_02-model_01-model_states.pt"
SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_right_checkpoint_has_no_problem(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    """At any layout, with and without a vocabulary that needs padding; what files hold was looked at."""
    report = verify_contents(write_checkpoint(tmp_path, layout=layout))
    assert report.problems == []
    assert report.contents == CHECKED


def _optimizer(state: Any, group: int = 0) -> Any:
    return state["optimizer_state_dict"]["base_optimizer_state"]["state"][group]


def _nan_in_moment(state: Any) -> None:
    _optimizer(state)["exp_avg_sq"][5] = float("nan")
    _optimizer(state)["exp_avg_sq"][6] = float("inf")


def _inf_in_weight(state: Any) -> None:
    state["layer.mlp.linear_fc2.weight"][0, 0] = float("-inf")


def _flip_in_weight(state: Any) -> None:
    state["layer.mlp.linear_fc1.weight"].view(torch.int16)[1, 1] ^= 1


def _flip_in_master(state: Any) -> None:
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].view(torch.int32)[3] ^= 1 << 24


def _another_copy(state: Any) -> None:
    state["layer.input_layernorm.weight"][2] += 1


def _another_moment(state: Any) -> None:
    _optimizer(state, 1)["exp_avg"][0] += 1


def _another_step(state: Any) -> None:
    _optimizer(state)["step"] += 1


def _another_stage_step(state: Any) -> None:
    state["global_steps"] += 1


def _short(state: Any) -> None:
    _optimizer(state)["exp_avg"] = _optimizer(state)["exp_avg"][:-2].clone()


def _narrow(state: Any) -> None:
    state["layer.mlp.linear_fc2.weight"] = state["layer.mlp.linear_fc2.weight"][:, :-1].clone()


def _other_type(state: Any) -> None:
    state["layer.mlp.linear_fc2.weight"] = state["layer.mlp.linear_fc2.weight"].half()


def _no_tensor(state: Any) -> None:
    del _optimizer(state)["exp_avg"]


DAMAGES: list[tuple[str, Callable[[Any], None], list[str]]] = [
    (SHARD, _nan_in_moment, ["exp_avg_sq of ", "holds 1 NaN and 1 infinite elements", SHARD, "rank 2 "]),
    (LAYER, _inf_in_weight, ["weight of 2.layer.mlp.linear_fc2.weight holds 0 NaN and 1 infinite", LAYER]),
    (LAYER, _flip_in_weight, ["2.layer.mlp.linear_fc1.weight: 1 of 256 weights are not their master weights", LAYER]),
    (SHARD, _flip_in_master, ["1 of ", "weights are not their master weights, rounded", SHARD]),
    (NEIGHBOUR, _another_copy, ["2.layer.input_layernorm.weight: 1 of 8 elements differ between copies", NEIGHBOUR]),
    (SHARD, _another_moment, ["exp_avg of ", "1 of 8 elements differ between copies", SHARD]),
    (SHARD, _another_step, ["the optimizer's count of steps is 2, but 3: rank 00002/group 0/step", SHARD]),
    ("mp_rank_01_model_states.pt", _another_stage_step, ["the step is 2, but 3: ", "mp_rank_01_model_states.pt"]),
    (SHARD, _short, [SHARD, "holds shape", "needed is"]),
    (LAYER, _narrow, ["weight of 2.layer.mlp.linear_fc2.weight", LAYER, "holds shape"]),
    (LAYER, _other_type, [LAYER, "holds float16, needed is bfloat16"]),
    (SHARD, _no_tensor, [SHARD, "does not hold", "exp_avg"]),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES, ids=[one[1].__name__ for one in DAMAGES])
def test_what_was_wrong_when_it_was_saved_is_found(
    tmp_path: Path, name: str, damage: Callable[[Any], None], said: list[str]
) -> None:
    """Files are as their manifest says, so that the fast check sees nothing; tensor, file and owner are named."""
    path = write_checkpoint(tmp_path, layout=(2, 1, 2))
    state = torch.load(path / name, weights_only=False)
    damage(state)
    torch.save(state, path / name)
    seal(path)
    fast = CliRunner().invoke(app, ["verify-checkpoint", str(path), "--no-contents"])
    assert fast.exit_code == 0
    found = CliRunner().invoke(app, ["verify-checkpoint", str(path), "--json"])
    assert found.exit_code == 72
    (report,) = json.loads(found.stdout)
    assert report["problems"]
    text = "\n".join(report["problems"])
    for words in said:
        assert words in text, text


@pytest.mark.parametrize(
    "lost", [LAYER, SHARD, "mp_rank_01_model_states.pt", "rank_00003_state.pt"], ids=lambda name: name[:9]
)
def test_a_manifest_that_lacks_a_file_is_not_complete(tmp_path: Path, lost: str) -> None:
    """Each kind of file that ranks need, gone from folder and manifest alike, is missed, with the rank."""
    path = write_checkpoint(tmp_path, layout=(2, 1, 2))
    manifest = read_manifest(path)
    assert find_incomplete(manifest) == []
    (path / lost).unlink()
    write_manifest(path, manifest.model_copy(update={"files": [one for one in manifest.files if one.name != lost]}))
    report = verify_contents(path)
    assert any(lost.removeprefix("bf16_") in problem and "not complete" in problem for problem in report.problems)
    assert report.contents != CHECKED


def test_resume_passes_over_a_checkpoint_that_lacks_a_file(tmp_path: Path) -> None:
    """The newest lacks a stage's file, which its manifest does not name either: the one before it is chosen."""
    for step in (2, 3):
        path = write_checkpoint(tmp_path / "checkpoints", step)
    manifest, lost = read_manifest(path), "mp_rank_00_model_states.pt"
    (path / lost).unlink()
    write_manifest(path, manifest.model_copy(update={"files": [one for one in manifest.files if one.name != lost]}))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        chosen = find_checkpoint(path.parent, ParallelDims(1, 1, 1, 0), CheckpointGroup())
    finally:
        dist.destroy_process_group()
    assert chosen is not None
    assert chosen.step == 2
    assert "not complete" in chosen.skipped[3][0]


def test_damaged_files_are_named_first(tmp_path: Path) -> None:
    """Where a file was changed since it was saved, that is said, and not what follows from it."""
    path = write_checkpoint(tmp_path)
    data = bytearray((path / LAYER).read_bytes())
    data[-200] ^= 1
    (path / LAYER).write_bytes(data)
    report = verify_contents(path)
    (problem,) = report.problems
    assert problem.startswith(f"{LAYER} was changed")
    assert "not checked: the files are not as they were saved" in report.render()


def test_a_folder_of_one_node_has_its_files_checked(tmp_path: Path) -> None:
    """Its ranks' files are complete; tensors lie on other nodes too: what they hold is not checked, and told."""
    path = write_checkpoint(tmp_path, layout=(1, 1, 2), storage="node_local")
    manifest = read_manifest(path)
    mine = [one for one in manifest.files if one.rank == 0]
    for one in (one for one in manifest.files if one.rank):
        (path / one.name).unlink()
    write_manifest(path, manifest.model_copy(update={"files": mine, "nodes": {"n": [0], "m": [1]}}))
    (path / "complete").write_text(manifest.save_id)
    report = verify_contents(path)
    assert report.ok
    assert "only the files of node n are here" in report.render()


def test_skipped_steps_and_momentum_resets_are_no_damage(tmp_path: Path) -> None:
    """The optimizer's count may be behind the run's, as long as all ranks and groups agree."""
    path = write_checkpoint(tmp_path, layout=(1, 1, 2))
    for file in path.glob("bf16_zero*.pt"):
        state = torch.load(file, weights_only=False)
        for group in (0, 1):
            _optimizer(state, group)["step"] -= 1
        torch.save(state, file)
    assert verify_contents(seal(path)).problems == []
