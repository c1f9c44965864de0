"""Are folders of ``torch.distributed.checkpoint`` read as torch reads them, is harm found, and does no pickle act?"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from safetensors.torch import save_file
from torch import Tensor, nn

from megasdc.checkpoint.views import View
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.checkpoints import CheckpointMismatch, compare_checkpoints
from megasdc.lab.checkpoints.views.dcp import Blocks, name_and_slot
from megasdc.lab.checkpoints.views.open import open_view

pytestmark = pytest.mark.distributed


def _model() -> nn.Module:
    """Rows and columns that no number of ranks divides."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _train(folder: str) -> dict[tuple[str, str], Tensor]:
    """Three steps of a model that FSDP2 shards, saved; all of the state, gathered by torch, from memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = _model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        torch.manual_seed(4)  # equal samples on all ranks
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    torch.manual_seed(9)
    dcp.save(
        {"model": weights, "optim": states, "counters": {"step": 3}, "rng": torch.get_rng_state()}, checkpoint_id=folder
    )
    found: dict[tuple[str, str], Any] = {(name, "weight"): tensor for name, tensor in weights.items()}
    for name, state in states["state"].items():
        found |= {(name, slot): state[slot] for slot in ("exp_avg", "exp_avg_sq")}
    return {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in found.items()}


def _save_grid(folder: str, divided: bool) -> None:
    """Tensors in blocks of two dimensions, columns, rows, and whole; all of one type of number each."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh("cpu", (2, world // 2) if divided else (1, 1))
    torch.manual_seed(6)
    state = {}
    for name, dtype, places in (
        ("grid", torch.float32, (Shard(0), Shard(1))),
        ("columns", torch.bfloat16, (Replicate(), Shard(1))),
        ("rows", torch.float64, (Shard(0), Replicate())),
        ("whole", torch.float16, (Replicate(), Replicate())),
    ):
        state[name] = distribute_tensor(torch.randn(5, 7).to(dtype), mesh, places)
    dcp.save(state, checkpoint_id=folder)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], Tensor]]:
    """Folders saved by one, two and four ranks, and what torch gathered of that of two."""
    folder = tmp_path_factory.mktemp("dcp")
    found = run_distributed(_train, 2, str(folder / "two"))[0]
    run_distributed(_save_grid, 4, str(folder / "grid"), True)
    run_distributed(_save_grid, 1, str(folder / "alone"), False)
    return folder, found


@pytest.fixture(scope="module")
def made(told: tuple[Path, Any]) -> Path:
    """The folder of all folders."""
    return told[0]


def test_tensors_are_those_of_torch(told: tuple[Path, Any]) -> None:
    """Weights and moments of a model that two ranks sharded are bit for bit what torch gathers; ranks are owners."""
    view = open_view(told[0] / "two")
    assert (view.kind, view.layout) == ("torch DCP", "saved by 2 ranks")
    assert set(view.entries) == set(told[1])
    assert len(told[1]) == 4 * 3
    for (name, slot), wanted in told[1].items():
        assert torch.equal(view.entries[name, slot].copies[0].read(), wanted), (name, slot)  # type: ignore[index]
    (copy,) = view.entries["0.weight", "exp_avg"].copies
    assert [(piece.owner.rank, piece.numel) for piece in copy.pieces] == [(0, 20), (1, 15)]
    assert view.scalars["optimizer state/2.bias/step"].value == "3.0"
    assert view.scalars["counters.step"].value == "3"
    assert len(view.scalars["rng"].value or "") == 32


def test_a_converted_file_is_equal(told: tuple[Path, Any], tmp_path: Path) -> None:
    """Saved again by torch as one folder without ranks, and as safetensors, the same names hold the same bits."""
    import torch.distributed.checkpoint as dcp

    state = {"state": {}}  # type: ignore[var-annotated]
    weights = {name: tensor for (name, slot), tensor in told[1].items() if slot == "weight"}
    for (name, slot), tensor in told[1].items():
        if slot != "weight":
            state["state"].setdefault(name, {"step": torch.tensor(3.0)})[slot] = tensor
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "again", no_dist=True)
    dcp.save(weights, checkpoint_id=tmp_path / "flat", no_dist=True)
    save_file(weights, tmp_path / "model.safetensors")
    paths = [told[0] / "two", tmp_path / "again", tmp_path / "flat", tmp_path / "model.safetensors"]
    report = compare_checkpoints([open_view(path) for path in paths])
    assert report.findings == report.problems == []
    assert report.num_compared == 4 * 3 + 4


def test_blocks_of_any_shape_are_put_together(made: Path) -> None:
    """Four ranks' blocks of two dimensions and columns, of four types of numbers, equal what one rank saved whole."""
    views = [open_view(made / "grid"), open_view(made / "alone")]
    report = compare_checkpoints(views)
    assert report.findings == report.problems == []
    assert report.num_compared == 4
    kinds = {name: type(entry.copies[0]) for (name, _), entry in views[0].entries.items()}
    assert kinds["grid"] is kinds["columns"] is Blocks
    assert len(views[0].entries["grid", "weight"].copies[0].pieces) == 4


def _tamper(folder: Path, name: str, change: Callable[[Tensor], None], offset: tuple[int, ...]) -> None:
    """Change the elements of one block where they lie in its file, found with torch's own reader of metadata."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    place = next(v for k, v in metadata.storage_data.items() if k.fqn == name and tuple(k.offset or ()) == offset)
    file = folder / place.relative_path
    content = bytearray(file.read_bytes())
    part = content[place.offset : place.offset + place.length]
    (folder / "part.pt").write_bytes(part)
    tensor = torch.load(folder / "part.pt")
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert part.count(raw) == 1
    change(tensor)
    at = place.offset + part.index(raw)
    content[at : at + len(raw)] = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    file.write_bytes(content)
    (folder / "part.pt").unlink()


def _one(good: View, harmed: Path) -> CheckpointMismatch:
    (found,) = compare_checkpoints([good, open_view(harmed)]).findings
    return found


def test_a_flip_is_found_in_its_block(made: Path, tmp_path: Path) -> None:
    """Tensor, index in it, bit, file and rank; in rows that FSDP sharded, and in a block of two dimensions."""

    def flip(tensor: Tensor) -> None:
        tensor.view(torch.int32)[1, 2] ^= 1 << 18

    two = Path(shutil.copytree(made / "two", tmp_path / "two"))
    _tamper(two, "optim.state.0.weight.exp_avg", flip, (4, 0))
    found = _one(open_view(made / "two"), two)
    assert (found.fqn, found.slot, found.pattern, found.detail) == ("0.weight", "exp_avg", "bit", "bit 18")
    assert [(one.piece.owner.rank, one.piece.file.name, one.first) for one in found.pieces] == [
        (1, "__1_0.distcp", [5, 2])
    ]
    grid = Path(shutil.copytree(made / "grid", tmp_path / "grid"))
    _tamper(grid, "grid", flip, (3, 4))
    found = _one(open_view(made / "alone"), grid)
    assert (found.fqn, found.detail) == ("grid", "bit 18")
    assert [(one.piece.owner.rank, one.first, one.last) for one in found.pieces] == [(3, [4, 6], [4, 6])]


def _erase(tensor: Tensor) -> None:
    tensor.zero_()


def test_zeros_of_a_rank_are_found(made: Path, tmp_path: Path) -> None:
    """A block that was lost is zeros in the piece of its rank alone."""
    grid = Path(shutil.copytree(made / "grid", tmp_path / "grid"))
    _tamper(grid, "columns", _erase, (0, 4))
    found = _one(open_view(made / "alone"), grid)
    assert (found.fqn, found.pattern) == ("columns", "zeros")
    assert found.measure is not None
    assert (found.measure.first, found.measure.last) == ([0, 4], [4, 6])


def test_a_missing_or_short_file_is_named(made: Path, tmp_path: Path) -> None:
    """Without a rank's file all that lay in it is missing; of one that is cut off the rest is compared."""
    folder = Path(shutil.copytree(made / "two", tmp_path / "two"))
    content = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").unlink()
    found = compare_checkpoints([open_view(made / "two"), open_view(folder)]).findings
    assert {one.pattern for one in found} == {"missing"}
    assert {(one.piece.file.name, one.piece.owner.rank) for finding in found for one in finding.pieces} == {
        ("__1_0.distcp", 1)
    }
    (folder / "__1_0.distcp").write_bytes(content[: len(content) - 500])
    report = compare_checkpoints([open_view(made / "two"), open_view(folder)])
    assert report.findings == []
    assert len(report.problems) == 1
    assert "__1_0.distcp is cut off" in report.problems[0]
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        open_view(folder)


class _Executes:
    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))

    def __init__(self, target: str) -> None:
        self.target = target


def _metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def test_no_code_of_a_pickle_runs(made: Path, tmp_path: Path) -> None:
    """The metadata, a value and a tensor that would act are refused with the file's name; nothing is executed."""
    folder = Path(shutil.copytree(made / "two", tmp_path / "two"))
    good = open_view(made / "two")
    metadata = _metadata(folder)
    metadata.planner_data = _Executes(str(tmp_path / "acted"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata holds posix\.mkdir.* would run code"):
        open_view(folder)
    for name in ("counters.step", "model.0.weight"):
        metadata = _metadata(made / "two")
        torch.save(_Executes(str(tmp_path / "acted")), tmp_path / "bad.pt")
        place = next(v for k, v in metadata.storage_data.items() if k.fqn == name)
        place.relative_path, place.offset, place.length = "bad.distcp", 0, (tmp_path / "bad.pt").stat().st_size
        (tmp_path / "bad.pt").rename(folder / "bad.distcp")
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        report = compare_checkpoints([good, open_view(folder)])
        assert report.findings == []
        (problem,) = report.problems
        assert "bad.distcp" in problem
        assert "would run code" in problem
        assert report.num_compared > 12
    assert not (tmp_path / "acted").exists()


def test_metadata_that_contradict_themselves_are_refused(made: Path, tmp_path: Path) -> None:
    """Cut off, a file of another folder, a block too few, over another or outside, one name twice: each says why."""
    folder = Path(shutil.copytree(made / "grid", tmp_path / "grid"))

    def refuse(change: Callable[[Any], None], why: str) -> None:
        metadata = _metadata(made / "grid")
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=why):
            open_view(folder)

    def chunks(metadata: Any) -> Any:
        return metadata.state_dict_metadata["grid"].chunks

    def place(metadata: Any) -> Any:
        return next(iter(metadata.storage_data.values()))

    def twice(metadata: Any) -> None:
        metadata.planner_data |= {"rows": ("model", "one"), "whole": ("module", "one")}

    refuse(lambda m: setattr(place(m), "relative_path", "../x"), "no file of its folder")
    refuse(lambda m: setattr(place(m), "transform_descriptors", ["zstd"]), "saved with zstd")
    refuse(lambda m: chunks(m).pop(), "of 29 elements together, not 35")
    refuse(lambda m: setattr(chunks(m)[0], "sizes", torch.Size([4, 4])), "overlap")
    refuse(lambda m: setattr(chunks(m)[3], "sizes", torch.Size([2, 5])), "does not lie in it")
    refuse(twice, "compared as one")
    content = (made / "grid" / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        open_view(folder)


def test_names_are_those_of_the_model() -> None:
    """Dictionaries around a model are left out, others and dots in names stay; moments get the parameter's name."""
    assert name_and_slot(("app", "model", "model.norm.weight")) == ("model.norm.weight", "weight")
    assert name_and_slot(("model.norm.weight",)) == ("model.norm.weight", "weight")
    assert name_and_slot(("average", "norm.weight")) == ("average.norm.weight", "weight")
    assert name_and_slot(("optim", "state", "norm.weight", "exp_avg")) == ("norm.weight", "exp_avg")
    assert name_and_slot(("app", "optimizer", "state.norm.weight.step")) == ("norm.weight", "step")
