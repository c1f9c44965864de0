"""Does inspect-checkpoint say what is in a checkpoint of any format, without reading its tensors?"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import make_whole, write_checkpoint
from safetensors.torch import save_file
from typer.testing import CliRunner

from megasdc.checkpoint.views import Copy
from megasdc.cli import app
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.views.inspect import inspect_checkpoint


def run(*arguments: object) -> Any:
    """The real command."""
    return CliRunner().invoke(app, ["inspect-checkpoint", *map(str, arguments)])


def test_everything_about_a_checkpoint_is_said(tmp_path: Path) -> None:
    """Numbers are those of the state that was written; people get the same facts."""
    path = write_checkpoint(tmp_path, layout=(2, 1, 2))
    answer = run(path, "--json")
    assert answer.exit_code == 0
    (found,) = json.loads(answer.stdout)
    whole = make_whole()
    for slot, width in (("weight", 2), ("master", 4), ("exp_avg", 4), ("exp_avg_sq", 4)):
        one = found["slots"][slot]
        parameters = sum(tensor.numel() for tensor in whole[slot].values())
        norms = sum(tensor.numel() for name, tensor in whole[slot].items() if "norm" in name)
        assert (one["num_tensors"], one["num_parameters"]) == (len(whole[slot]), parameters)
        assert one["size_bytes"] == width * (parameters + norms), "norms are held by both tensor ranks"
        assert list(one["by_dtype"]) == ["bfloat16" if slot == "weight" else "float32"]
        assert one["by_kind"]["qkv"]["num_parameters"] == 2 * prod(whole[slot][QKV].shape)
    assert found["layout"] == {"tensor": 2, "pipeline": 1, "data": 2}
    assert found["written_by"]["n"]["ranks"] == [0, 1, 2, 3]
    assert found["states"]["random_generators"] == {"ranks": 4, "missing": 0}
    assert found["states"]["optimizer_steps"] == ["2.0"]
    assert found["model"]["hidden_size"] == 8
    assert found["time"] == "2025-06-15T15:06:40+00:00"
    assert found["age_s"] > 86400
    shown = run(path).stdout
    for words in (
        "TP2 x PP1 x DP2",
        "ranks 0-3 wrote",
        "generators of 4 of 4 ranks",
        "bfloat16",
        "positions/0 4",
        " days ago",
    ):
        assert words in shown


QKV = "2.layer.self_attention.linear_qkv.weight"


def test_no_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tensor would be put together, inspecting fails; it does not."""
    path = write_checkpoint(tmp_path)

    def refuse(self: Any) -> Any:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Copy, "read", refuse)
    assert inspect_checkpoint(path)["unread"] == []


def test_single_files_are_inspected(tmp_path: Path) -> None:
    """Types and sizes of a .pt and a .safetensors file."""
    state = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    for name in ("x.pt", "x.safetensors"):
        weight = inspect_checkpoint(tmp_path / name)["slots"]["weight"]
        assert (weight["num_parameters"], weight["size_bytes"]) == (17, 58)
        assert set(weight["by_dtype"]) == {"float32", "bfloat16"}
        assert run(tmp_path / name).exit_code == 0


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A lost stage: the manifest's facts are shown, the file is named, exit code 72; nothing at all is refused."""
    path = write_checkpoint(tmp_path)
    (path / "mp_rank_00_model_states.pt").unlink()
    answer = run(path)
    assert answer.exit_code == 72
    assert "NOT READ" in answer.stdout
    assert "mp_rank_00_model_states.pt" in answer.stdout
    assert "TP1 x PP1 x DP1" in answer.stdout
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("x")
    for place in ("empty", "absent", "note.txt"):
        assert isinstance(run(tmp_path / place).exception, CheckpointError)
