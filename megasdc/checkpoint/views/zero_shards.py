"""ZeRO-1 shards of master weights and moments, and the other values in DeepSpeed's files of stages and ranks.

The parameters of a stage are concatenated into one flat tensor per group, padded (``formats.shard_sizes``); each rank
has one contiguous shard. Offsets are computed from the
shapes, as in DeepSpeed's own load; the map in each file (``param_slice_mappings``) must agree, or it is another rank's
file. ``BF16_Optimizer`` and ``DeepSpeedZeroOptimizer`` differ in that the second saves the last rank's master weights
without the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.files import shard_elements
from megasdc.checkpoint.pieces import Piece, WriterRank
from megasdc.checkpoint.tensor_files import StateFiles
from megasdc.checkpoint.views.view import Scalar, Slot, flatten
from megasdc.common.errors import CheckpointError

_STAGE_SCALARS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
Fragments = dict[str, tuple[int, int]]
"""For each parameter in a shard: offset in the shard, and number of elements."""


def shard_fragments(shapes: dict[str, torch.Size], replicas: int) -> tuple[int, list[Fragments]]:
    """Elements of each rank's ZeRO-1 shard of a group, with padding, and the fragments in each of ``replicas`` shards.

    ``shapes``: of one stage and tensor rank, in order.
    """
    total = sum(prod(shape) for shape in shapes.values())
    length = shard_elements(total, replicas)
    found: list[Fragments] = [{} for _ in range(replicas)]
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape)
        while offset < end:
            dp_rank, start = divmod(offset, length)
            numel = min(end - offset, length - start)
            found[dp_rank][name] = (start, numel)
            offset += numel
    return length, found


def locate_shards(
    files: StateFiles, shards: Sequence[tuple[Path, WriterRank]], group: int, shapes: dict[str, torch.Size]
) -> tuple[dict[tuple[str, Slot], tuple[Piece, ...]], dict[str, Scalar]]:
    """Locate master weights and moments of a group of a stage's parameters; also step and rate of each rank.

    ``shards``: file and rank of each, by dp rank; ``shapes``: of the group's parameters on this stage and tensor rank,
    in order. CheckpointError if the map in a file is none that ZeRO-1 makes.
    """
    laid = shard_fragments(shapes, len(shards))
    found: dict[tuple[str, Slot], list[Piece]] = {}
    scalars: dict[str, Scalar] = {}
    for dp_rank, (file, owner) in enumerate(shards):
        scalars |= _shard_scalars(files, file, owner, group)
        for name, slot, piece in _shard_pieces(files, file, owner, group, dp_rank, laid):
            found.setdefault((name, slot), []).append(piece)
    return {key: tuple(pieces) for key, pieces in found.items()}, scalars


def _shard_pieces(
    files: StateFiles, file: Path, owner: WriterRank, group: int, dp_rank: int, laid: tuple[int, list[Fragments]]
) -> Iterator[tuple[str, Slot, Piece]]:
    """Yield name, slot and piece of a group's parameters in the file that must hold the shard of ``dp_rank``."""
    length, expected = laid
    holds = _check_map(files, file, group, dp_rank, expected)
    lean = _master_length(files, file, dp_rank, laid)
    state = ("base_optimizer_state", "state", group)
    places: dict[Slot, tuple[int, tuple[Any, ...]]] = {
        "master": (lean, ("single_partition_of_fp32_groups", group)),
        "exp_avg": (length, (*state, "exp_avg")),
        "exp_avg_sq": (length, (*state, "exp_avg_sq")),
    }
    for name, (start, numel) in expected[dp_rank].items():
        for slot, (size, keys) in places.items():
            stored = partial(files.tensor, file, "optimizer_state_dict", *keys)
            yield name, slot, Piece(file, owner, numel, stored, start, (size,), torch.float32, holds)


def _shard_scalars(files: StateFiles, file: Path, owner: WriterRank, group: int) -> dict[str, Scalar]:
    """Step and learning rate of one group in one rank's file; empty if the file cannot be read."""
    try:
        base = files.load(file)["optimizer_state_dict"]["base_optimizer_state"]
        found = {"step": base["state"][group]["step"], "lr": base["param_groups"][group]["lr"]}
    except CheckpointError:
        return {}  # reported when its tensors are read
    except (FileNotFoundError, KeyError, IndexError, TypeError):
        found = {"step": None, "lr": None}
    scalars: dict[str, Scalar] = {}
    for key, value in found.items():
        scalar = Scalar(None if value is None else value_text(value), file, owner)
        scalars[f"rank {owner.rank:05d}/group {group}/{key}"] = scalar
        if owner.rank == 0:
            scalars[f"optimizer/group {group}/{key}"] = scalar
    return scalars


def read_stage(
    files: StateFiles, file: Path, owner: WriterRank, pp_rank: int, tp_rank: int
) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Read the file of a stage: its content, with ``param_shapes`` (shapes by name, for each group), and its counters.

    CheckpointError if it is missing, or lacks required keys.
    """
    try:
        state: dict[str, Any] = files.load(file)
        found = {key: state[key] for key in _STAGE_SCALARS}
        if not all(shape.numel() for shapes in state["param_shapes"] for shape in shapes.values()):
            raise ValueError("a parameter without elements")
    except (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{file} does not say which parameters its stage has: {error!r}") from error
    scalars: dict[str, Scalar] = {}
    for name, value in flatten("", found):
        scalars[f"rank of stage {pp_rank} tensor {tp_rank}/{name}"] = Scalar(value_text(value), file, owner)
        if pp_rank == tp_rank == 0:
            scalars[f"engine/{name}"] = Scalar(value_text(value), file, owner)
    return state, scalars


def value_text(value: Any) -> str:
    """Text of a value that is not a tensor of the model; different values give different texts."""
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.item()) if value.numel() == 1 else state_digest(value)


def state_digest(state: Any) -> str:
    """XXH3-128 of all values of a nested state."""
    found = xxhash.xxh3_128()
    for name, value in flatten("", state):
        content: Any = repr(value).encode()
        if isinstance(value, Tensor):
            content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.update(name.encode() + b"\0" + content)
    return found.hexdigest()


def _check_map(files: StateFiles, file: Path, group: int, dp_rank: int, expected: list[Fragments]) -> str:
    """Name of the other shard that the file claims to hold; empty: the expected one."""
    try:
        mapping = files.load(file)["optimizer_state_dict"]["param_slice_mappings"][group]
        found = {name: (address.start, address.numel) for name, address in mapping.items()}
    except (FileNotFoundError, CheckpointError):
        return ""  # reported when the piece is read
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


def _master_length(files: StateFiles, file: Path, dp_rank: int, laid: tuple[int, list[Fragments]]) -> int:
    """Elements of a group's master weights in one rank's file; only the optimizer that omits the last rank's padding
    saves ``zero_stage``.
    """
    length, expected = laid
    try:
        padded = "zero_stage" not in files.load(file)["optimizer_state_dict"]
    except (FileNotFoundError, CheckpointError, KeyError, TypeError):
        return length  # reported when the piece is read
    if padded or dp_rank != len(expected) - 1:
        return length
    real = sum(numel for fragments in expected for _, numel in fragments.values())
    return max(0, real - length * dp_rank)
