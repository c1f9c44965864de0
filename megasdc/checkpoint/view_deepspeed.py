"""Where do the tensors of a checkpoint of DeepSpeed's pipeline engine with ZeRO-1 lie, at any layout?

Weights: one file a pipeline layer and tensor rank. Master weights and moments: each rank has a run of the flat tensor
into which its stage's parameters are laid, group by group, padded to a multiple of 2 x replicas (DeepSpeed 0.19.8,
``nccl_start_alignment_factor``). Where a run lies is computed from the shapes, as DeepSpeed itself loads by place; the
map in each file (``param_slice_mappings``) must say the same, or it is another rank's file.
"""

from __future__ import annotations

import json
import re
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError
from torch import Tensor

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import SHARED_STATE_FILE, rank_state_file
from megasdc.checkpoint.manifest import Manifest, read_manifest
from megasdc.checkpoint.sources import find_missing
from megasdc.checkpoint.state_files import StateFiles
from megasdc.checkpoint.view import Copy, Entry, Owner, Piece, Scalar, Slot, View, flatten, whole_shape
from megasdc.config import ModelSection
from megasdc.errors import CheckpointError
from megasdc.model.sharding import TIED_EMBEDDING, Split, parameter_splits, split_name, torch_name
from megasdc.parallel.dims import ParallelDims

_ALIGNMENT = 2
_SHAPE = re.compile(r"(\w+)\[([\d, ]*)\]")
_STAGE_SCALARS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
_SHARED_SCALARS = ("step", "tokens", "samples", "skipped_steps", "vocab_size", "tokenizer_checksum", "loader")
_Fragments = dict[str, tuple[int, int]]
"""Of each parameter that a shard has elements of: first element in the shard, and number."""


def open_deepspeed(path: Path) -> View:
    """Find every piece of a checkpoint.

    Args:
        path: its folder, ``step_NNNNNNNN``.

    Raises:
        CheckpointError: the manifest, ``megasdc.json`` or the file of a stage cannot be read, files of other nodes are
            not here, or parameters are laid out in a way that is not known.
    """
    return _Opening(path).view()


def shared_scalars(path: Path) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """Counters and position of the loader in ``megasdc.json`` of a checkpoint, and all that it holds.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = path / SHARED_STATE_FILE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        found = {key: state[key] for key in _SHARED_SCALARS if key in state}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    names = {name if name.startswith("loader/") else f"run/{name}": value for name, value in flatten("", found)}
    return {name: Scalar(repr(value), file, Owner()) for name, value in names.items()}, state


def model_of(state: dict[str, Any], path: Path) -> ModelSection:
    """The model section in the content of ``megasdc.json``.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return ModelSection.model_validate(state["config"]["megasdc"]["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{path / SHARED_STATE_FILE} does not hold the model's section: {error!r}") from error


class _Opening:
    """The work of ``open_deepspeed``."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, StateFiles()
        manifest = read_manifest(path)
        self.layout, self.manifest = manifest.layout, manifest
        self.hosts = {rank: node for node, ranks in manifest.nodes.items() for rank in ranks}
        self.records = manifest.by_name()
        for other in (read_manifest(path, file.name) for file in sorted(path.glob("manifest.*.json"))):
            _same_save(path, manifest, other)
            self.records |= other.by_name()
        if manifest.storage == "node_local" and (lacking := find_missing(path, manifest, set(self.records))):
            raise CheckpointError("; ".join(lacking))
        self.scalars, state = shared_scalars(path)
        self.real_rows = int(state["vocab_size"]) if state.get("vocab_size") else None
        model = model_of(state, path)
        self.splits = {torch_name(name): split for name, split in parameter_splits(model).items()}
        shard = next((name for name in self.records if name.endswith("_optim_states.pt")), "")
        self.prefix = shard.partition("zero_pp_rank_")[0]  # bf16_ where weights are bf16
        self.copies: dict[tuple[str, Slot], list[Copy]] = {}
        self.problems: list[str] = []

    def view(self) -> View:
        """All of it."""
        for pp_rank in range(self.layout.pipeline):
            stages = [self._stage(pp_rank, tp_rank) for tp_rank in range(self.layout.tensor)]
            self._add_weights(stages[0]["param_shapes"], pp_rank)
            for group in range(len(stages[0]["param_shapes"])):
                self._add_states([stage["param_shapes"][group] for stage in stages], pp_rank, group)
        self._add_rng()
        self._add_empty_layers()
        return View(
            path=self.path,
            kind="DeepSpeed pipeline with ZeRO-1",
            layout=str(self.layout),
            slots=("weight", "master", "exp_avg", "exp_avg_sq", "scalar"),
            entries={
                key: Entry(tuple(copies), self.real_rows if self.splits[key[0]] is Split.VOCABULARY else None)
                for key, copies in self.copies.items()
            },
            scalars=self.scalars,
            problems=self.problems,
            records={self.path / name: record for name, record in self.records.items()},
        )

    def _owner(self, pp_rank: int, dp_rank: int, tp_rank: int) -> Owner:
        rank = (pp_rank * self.layout.data + dp_rank) * self.layout.tensor + tp_rank
        return Owner(rank, dp_rank, pp_rank, tp_rank, self.hosts.get(rank))

    def _writer(self, name: str) -> Owner:
        record = self.records.get(name)
        if record is None:
            return Owner()
        dims = ParallelDims(self.layout.tensor, self.layout.pipeline, self.layout.data, record.rank)
        return Owner(record.rank, dims.dp_rank, dims.pp_rank, dims.tp_rank, record.node)

    def _stage(self, pp_rank: int, tp_rank: int) -> dict[str, Any]:
        file = self.path / f"mp_rank_{pp_rank * self.layout.tensor + tp_rank:02d}_model_states.pt"
        try:
            state: dict[str, Any] = self.files.load(file)
            found = {key: state[key] for key in _STAGE_SCALARS}
            if not all(shape.numel() for shapes in state["param_shapes"] for shape in shapes.values()):
                raise ValueError("a parameter without elements")
        except (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{file} does not say which parameters its stage has: {error!r}") from error
        for name, value in flatten("", found):
            place = f"stage {pp_rank} tensor {tp_rank}"
            self.scalars[f"rank of {place}/{name}"] = Scalar(repr(value), file, self._writer(file.name))
            if pp_rank == tp_rank == 0:
                self.scalars[f"engine/{name}"] = Scalar(repr(value), file, self._writer(file.name))
        return state

    def _add_weights(self, groups: list[dict[str, torch.Size]], pp_rank: int) -> None:
        for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
            if name == TIED_EMBEDDING and pp_rank:
                continue  # saved once, by the first stage
            index, key = split_name(name)
            pieces = [self._weight(index, key, tp_rank, tuple(shape)) for tp_rank in range(self.layout.tensor)]
            self._add(name, "weight", tuple(shape), [(piece,) for piece in pieces])

    def _weight(self, index: int, key: str, tp_rank: int, shape: tuple[int, ...]) -> Piece:
        name = f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"
        saved = _SHAPE.fullmatch(((self.records[name].tensors or {}) if name in self.records else {}).get(key, ""))
        return Piece(
            self.path / name,
            self._writer(name),
            prod(shape),
            partial(self.files.tensor, self.path / name, key),
            shape=shape,
            dtype=getattr(torch, saved[1]) if saved else None,
        )

    def _add_states(self, shapes_of: list[dict[str, torch.Size]], pp_rank: int, group: int) -> None:
        """Master weights and moments of one group of a stage's parameters."""
        pieces: dict[tuple[str, Slot], list[tuple[Piece, ...]]] = {}
        for tp_rank, shapes in enumerate(shapes_of):
            length, expected = lay_out(shapes, self.layout.data)
            found: dict[tuple[str, Slot], list[Piece]] = {}
            for dp_rank, fragments in enumerate(expected):
                owner = self._owner(pp_rank, dp_rank, tp_rank)
                stage = f"mp_rank_{pp_rank * self.layout.tensor + tp_rank:02d}"
                file = self.path / f"{self.prefix}zero_pp_rank_{dp_rank}_{stage}_optim_states.pt"
                holds = self._check_map(file, group, dp_rank, expected)
                self._add_step(file, group, owner)
                for name, (start, numel) in fragments.items():
                    for slot, keys in _places(group).items():
                        stored = partial(self.files.tensor, file, "optimizer_state_dict", *keys)
                        piece = Piece(file, owner, numel, stored, start, (length,), torch.float32, holds)
                        found.setdefault((name, slot), []).append(piece)
            for key, one in found.items():
                pieces.setdefault(key, []).append(tuple(one))
        for (name, slot), shards in pieces.items():
            self._add(name, slot, tuple(shapes_of[0][name]), shards)

    def _check_map(self, file: Path, group: int, dp_rank: int, expected: list[_Fragments]) -> str:
        """Whose shard a file says that it is, if it is another's.

        Raises:
            CheckpointError: its map is none that ZeRO-1 makes.
        """
        try:
            mapping = self.files.load(file)["optimizer_state_dict"]["param_slice_mappings"][group]
            found = {name: (address.start, address.numel) for name, address in mapping.items()}
        except (FileNotFoundError, CheckpointError):
            return ""  # said when the piece is read
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} does not say which parameters it has: {error!r}") from error
        if found == expected[dp_rank]:
            return ""
        if found in expected:
            return f"the shard of dp rank {expected.index(found)}"
        if set(found) & {name for fragments in expected for name in fragments}:
            raise CheckpointError(
                f"{file} has parameters elsewhere than ZeRO-1 lays them by default; parameter_alignment and "
                "round_robin_gradients are not supported"
            )
        return "the shard of another stage"

    def _add_step(self, file: Path, group: int, owner: Owner) -> None:
        """The optimizer's counter and rate of one group in one file."""
        try:
            base = self.files.load(file)["optimizer_state_dict"]["base_optimizer_state"]
            found = {"step": base["state"][group]["step"], "lr": base["param_groups"][group]["lr"]}
        except CheckpointError:
            return  # said when its tensors are read
        except (FileNotFoundError, KeyError, IndexError, TypeError):
            found = {"step": None, "lr": None}
        for key, value in found.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            text = None if number is None else repr(number)
            self.scalars[f"rank {owner.rank:05d}/group {group}/{key}"] = Scalar(text, file, owner)
            if owner.rank == 0:
                self.scalars[f"optimizer/group {group}/{key}"] = Scalar(text, file, owner)

    def _add_rng(self) -> None:
        for rank in range(self.manifest.world_size):
            file = self.path / rank_state_file(rank)
            value: str | None = None
            try:
                if file.exists():
                    value = _digest(load_checked(file))
            except CheckpointError as error:
                self.problems.append(str(error))
                continue
            self.scalars[f"rank {rank:05d}/random generators"] = Scalar(value, file, self._writer(file.name))

    def _add_empty_layers(self) -> None:
        """Files of layers without parameters: DeepSpeed needs them to be there."""
        for name, record in self.records.items():
            if record.tensors == {}:
                value = "is there" if (self.path / name).exists() else None
                self.scalars[f"rank {record.rank:05d}/{name}"] = Scalar(value, self.path / name, self._writer(name))

    def _add(self, name: str, slot: Slot, local: tuple[int, ...], shards: list[tuple[Piece, ...]]) -> None:
        fqn = torch_name(name)
        if fqn not in self.splits:
            raise CheckpointError(f"{self.path} has a parameter {name}, which its model has not")
        split, tensor = self.splits[fqn], self.layout.tensor
        copies = self.copies.setdefault((fqn, slot), [])
        if split is Split.REPLICATED:
            copies += [Copy(local, (shard,)) for shard in shards]
        else:
            copies.append(Copy(whole_shape(local, split, tensor), tuple(shards), split))


def lay_out(shapes: dict[str, torch.Size], replicas: int) -> tuple[int, list[_Fragments]]:
    """Where ZeRO-1 lays the parameters of a group.

    Args:
        shapes: of one stage and tensor rank, in order.
        replicas: ranks that share them.

    Returns:
        Elements of each rank's shard, the padding with them, and what lies in each.
    """
    total = sum(prod(shape) for shape in shapes.values())
    length = -(-total // (_ALIGNMENT * replicas)) * _ALIGNMENT
    found: list[_Fragments] = [{} for _ in range(replicas)]
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape)
        while offset < end:
            dp_rank, start = divmod(offset, length)
            numel = min(end - offset, length - start)
            found[dp_rank][name] = (start, numel)
            offset += numel
    return length, found


def _places(group: int) -> dict[Slot, tuple[Any, ...]]:
    state = ("base_optimizer_state", "state", group)
    return {
        "master": ("single_partition_of_fp32_groups", group),
        "exp_avg": (*state, "exp_avg"),
        "exp_avg_sq": (*state, "exp_avg_sq"),
    }


def _same_save(path: Path, manifest: Manifest, other: Manifest) -> None:
    if other.save_id != manifest.save_id:
        raise CheckpointError(f"{path}: the manifest of node {other.node} is of another save of this step")


def _digest(state: Any) -> str:
    """XXH3-128 of all values of a rank's own state."""
    found = xxhash.xxh3_128()
    for name, value in flatten("", state):
        content = value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        found.update(name.encode() + b"\0" + content)
    return found.hexdigest()
