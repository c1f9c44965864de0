"""What a rank of one layout loads of a checkpoint of another one, and of which files."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import MODEL, STATES, make_whole, write_checkpoint

from megasdc.checkpoint import load
from megasdc.checkpoint.files import shard_file, stage_file
from megasdc.checkpoint.manifest import Layout, read_manifest
from megasdc.checkpoint.tensor_files import ExtentReader
from megasdc.checkpoint.views import locate_states, shard_fragments
from megasdc.config.model import ModelSection
from megasdc.model.sharding import parameter_splits, shard_of, split_name
from megasdc.optim.zero1 import Fragment
from megasdc.parallel.dims import ParallelDims

LAYOUTS = [(1, 1, 1), (1, 1, 3), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
"""Tensor, pipeline and data ranks."""
SPLITS = parameter_splits(ModelSection.model_validate(MODEL))


def owned(whole: Any, dims: ParallelDims) -> tuple[dict[str, Fragment], dict[str, torch.Tensor], list[int]]:
    """Fragments of a rank by name, its shards of one slot, and the number of elements of each group."""
    mine = [name for name in SPLITS if dims.pipeline == 1 or (split_name(name)[0] >= 3) == bool(dims.pp_rank)]
    shards = {name: shard_of(whole[name], SPLITS[name], dims.tensor, dims.tp_rank).reshape(-1) for name in mine}
    fragments: dict[str, Fragment] = {}
    totals = []
    for group, names in enumerate(([n for n in mine if "norm" not in n], [n for n in mine if "norm" in n])):
        length, laid = shard_fragments({name: shards[name].shape for name in names}, dims.data)
        begin = 0
        for name in names:
            if name in laid[dims.dp_rank]:
                start, numel = laid[dims.dp_rank][name]
                offset = dims.dp_rank * length + start - begin
                fragments[name] = Fragment(None, None, start, numel, None, offset, group)  # type: ignore[arg-type]
            begin += shards[name].numel()
        totals.append(begin)
    return fragments, shards, totals


@pytest.mark.parametrize("now", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_rank_gets_what_it_owns(
    tmp_path: Path, saved: tuple[int, ...], now: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of masters and moments, from the files alone that are said to be needed; in place or through memory
    of the file's type, a few elements at once.
    """
    monkeypatch.setattr(load, "_CHUNK_BYTES", 64)
    whole = make_whole()
    path = write_checkpoint(tmp_path, layout=saved, whole=whole)  # type: ignore[arg-type]
    for rank in range(prod(now)):
        dims = ParallelDims(*now, rank)
        layout = read_manifest(path).layout
        fragments, _, totals = owned(whole["master"], dims)
        stages = [number for numbers in layout.stages_for(dims) for number in numbers]
        needed = {stage_file(number) for number in stages} | {"manifest.json", "megasdc.json"}
        shards = layout.shards_for(dims, totals)
        needed |= {shard_file(dp_rank, number, "bf16_") for number in stages for dp_rank in shards}
        part = tmp_path / f"{rank}" / path.name
        part.mkdir(parents=True)
        for name in needed:
            (part / name).hardlink_to(path / name)
        states = locate_states(part, dims, fragments)
        assert states.stage["global_steps"] == 2 and states.is_whole == (saved[0] != now[0])
        with ExtentReader() as reader:
            for slot in STATES:
                _, expected, _ = owned(whole[slot], dims)
                for name, one in fragments.items():
                    dtype = torch.float64 if slot == "exp_avg" else torch.float32
                    target = torch.full((one.numel,), torch.nan, dtype=dtype)
                    load._fill(target, states.origins[name, slot], one.offset, dims, reader)  # type: ignore[index]
                    assert torch.equal(target.float(), expected[name][one.offset : one.offset + one.numel]), (
                        name,
                        slot,
                    )
        if layout == Layout.of(dims):
            assert len(shards) == len(stages) == 1, "its own alone"


def test_a_shard_of_another_rank_is_no_own_one(tmp_path: Path) -> None:
    """Parameters that lie elsewhere in the file of this rank's place are noticed."""
    whole = make_whole()
    path = write_checkpoint(tmp_path, layout=(1, 1, 2), whole=whole)
    (path / shard_file(0, 0, "bf16_")).replace(path / "aside")
    (path / shard_file(1, 0, "bf16_")).replace(path / shard_file(0, 0, "bf16_"))
    fragments, _, _ = owned(whole["master"], dims := ParallelDims(1, 1, 2, 0))
    states = locate_states(path, dims, fragments)
    assert all(origin.copy.pieces[0].holds for origin in states.origins.values())
