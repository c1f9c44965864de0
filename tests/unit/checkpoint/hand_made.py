"""A whole checkpoint of a tiny model at any layout, written without an engine, for tests of what reads checkpoints.

Tests of `tests/distributed` do the same to checkpoints that DeepSpeed wrote.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address

from megasdc.checkpoint.files import rank_state_file, step_folder
from megasdc.checkpoint.manifest import (
    FORMAT_VERSION,
    Layout,
    Manifest,
    describe_file,
    installed_versions,
    write_manifest,
    write_marker,
)
from megasdc.checkpoint.snapshot import describe_tensors
from megasdc.checkpoint.views import shard_fragments
from megasdc.config.model import ModelSection
from megasdc.model.sharding import Split, parameter_splits, shard_of, split_name
from megasdc.parallel.dims import ParallelDims

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "ffn_hidden_size": 16,
    "normalization": "RMSNorm",
    "position_embedding": "rope",
    "bias": False,
    "gated_mlp": True,
    "tie_embeddings": False,
}
VOCABULARY, ROWS = 30, 32
"""Real and padded entries."""
STATES = ("master", "exp_avg", "exp_avg_sq")


def make_whole(step: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """The whole state of a model, by slot and name: fp32 masters, moments, and bf16 weights."""
    generator = torch.Generator().manual_seed(step)
    shapes = {name: _shape(name) for name in parameter_splits(ModelSection.model_validate(MODEL))}
    whole = {slot: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for slot in STATES}
    whole["exp_avg_sq"] = {name: tensor.square() for name, tensor in whole["exp_avg_sq"].items()}
    return {"weight": {name: tensor.to(torch.bfloat16) for name, tensor in whole["master"].items()}, **whole}


def write_checkpoint(
    folder: Path,
    step: int = 2,
    *,
    layout: tuple[int, int, int] = (1, 1, 1),
    storage: str = "shared",
    whole: dict[str, dict[str, torch.Tensor]] | None = None,
    **changes: Any,
) -> Path:
    """Write ``folder/step_NNNNNNNN`` as a run of this layout (tensor, pipeline, data) would; returns it.

    Args:
        folder: the checkpoint folder.
        step: optimizer step.
        layout: tensor, pipeline and data ranks.
        storage: where files lie; ``node_local``: all on one node, without the marker.
        whole: see ``make_whole``.
        changes: fields of the manifest.
    """
    path = folder / step_folder(step)
    path.mkdir(parents=True)
    content, writers = whole or make_whole(step), dict[str, int]()
    tensor, pipeline, data = layout
    splits = parameter_splits(ModelSection.model_validate(MODEL))
    tensors: dict[str, dict[str, str]] = {}
    for rank in range(prod(layout)):
        dims = ParallelDims(tensor, pipeline, data, rank)
        mine = [name for name in splits if pipeline == 1 or (split_name(name)[0] >= 3) == bool(dims.pp_rank)]
        if dims.dp_rank == 0:
            for index in sorted({split_name(name)[0] for name in mine} | ({1} if dims.pp_rank == 0 else set())):
                names = [name for name in mine if split_name(name)[0] == index]
                layer = {split_name(n)[1]: _shard(content["weight"][n], splits[n], dims) for n in names}
                file = f"layer_{index:02d}-model_{dims.tp_rank:02d}-model_states.pt"
                torch.save(layer, path / file)
                writers[file], tensors[file] = rank, describe_tensors(layer)
        _write_states(
            path,
            dims,
            [[n for n in mine if "norm" not in n], [n for n in mine if "norm" in n]],
            splits,
            content,
            step,
            writers,
        )
        torch.save({"rng": {"torch": torch.arange(100)}, "rank": rank}, path / rank_state_file(rank))
        writers[rank_state_file(rank)] = rank
    shared = {"step": step, "tokens": 64 * step, "samples": 2 * step, "skipped_steps": 0, "vocab_size": VOCABULARY}
    shared |= {"loader": {"positions": [2 * step]}, "config": {"megasdc": {"model": MODEL}}}
    (path / "megasdc.json").write_text(json.dumps(shared))
    writers["megasdc.json"] = 0
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        state="complete",
        step=step,
        save_id="0123",
        time=1.75e9,
        layout=Layout(tensor=tensor, pipeline=pipeline, data=data),
        world_size=prod(layout),
        storage=storage,  # type: ignore[arg-type]
        nodes={"n": list(range(prod(layout)))},
        node=None if storage == "shared" else "n",
        engine={"optimizer": "BF16_Optimizer", "inner_optimizer": "AdamW", "num_layers": 6, "global_steps": step},
        versions=installed_versions(),
        files=[
            describe_file(path, name, rank=writers[name], node="n", tensors=tensors.get(name))
            for name in sorted(writers)
        ],
    )
    write_manifest(path, manifest.model_copy(update=changes))
    return path


def seal(path: Path) -> Path:
    """Describe changed files anew, so that the manifest says that they were saved so."""
    from megasdc.checkpoint.manifest import read_manifest

    manifest = read_manifest(path)
    files = [describe_file(path, one.name, rank=one.rank, node=one.node, tensors=one.tensors) for one in manifest.files]
    write_manifest(path, manifest.model_copy(update={"files": files}))
    if manifest.storage == "node_local":
        write_marker(path, manifest)
    return path


def _write_states(
    path: Path, dims: ParallelDims, groups: Any, splits: Any, content: Any, step: int, writers: Any
) -> None:
    stage = f"mp_rank_{dims.pp_rank * dims.tensor + dims.tp_rank:02d}"
    shapes = [{n: _shard(content["master"][n], splits[n], dims).shape for n in group} for group in groups]
    if dims.dp_rank == 0:
        counters = {"global_steps": step, "global_samples": 2 * step, "skipped_steps": 0}
        torch.save(
            {"param_shapes": shapes, "lr_scheduler": {"last": step}, **counters}, path / f"{stage}_model_states.pt"
        )
        writers[f"{stage}_model_states.pt"] = dims.rank
    maps, states = [], {slot: [] for slot in STATES}  # type: ignore[var-annotated]
    for group, like in zip(groups, shapes, strict=True):
        length, fragments = shard_fragments(like, dims.data)
        maps.append({n: fragment_address(numel=k, start=at) for n, (at, k) in fragments[dims.dp_rank].items()})
        for slot in STATES:
            flat = torch.cat([_shard(content[slot][n], splits[n], dims).reshape(-1) for n in group])
            padded = torch.cat([flat, torch.zeros(length * dims.data - flat.numel())])
            states[slot].append(padded[length * dims.dp_rank : length * (dims.dp_rank + 1)].clone())
    base = {
        "state": {
            g: {
                "step": torch.tensor(float(step)),
                "exp_avg": states["exp_avg"][g],
                "exp_avg_sq": states["exp_avg_sq"][g],
            }
            for g in range(len(groups))
        },
        "param_groups": [{"lr": 1e-3} for _ in groups],
    }
    optimizer = {
        "single_partition_of_fp32_groups": states["master"],
        "base_optimizer_state": base,
        "param_slice_mappings": maps,
    }
    file = f"bf16_zero_pp_rank_{dims.dp_rank}_{stage}_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer}, path / file)
    writers[file] = dims.rank


def _shard(tensor: torch.Tensor, split: Split, dims: ParallelDims) -> torch.Tensor:
    return shard_of(tensor, split, dims.tensor, dims.tp_rank).contiguous().clone()


def _shape(name: str) -> tuple[int, ...]:
    hidden, ffn = MODEL["hidden_size"], MODEL["ffn_hidden_size"]
    shapes = {"linear_qkv": (3 * hidden, hidden), "linear_proj": (hidden, hidden), "fc1": (2 * ffn, hidden)}
    shapes |= {"fc2": (hidden, ffn), "norm": (hidden,), "word": (ROWS, hidden), "output": (ROWS, hidden)}
    return next(shape for part, shape in shapes.items() if part in name)
