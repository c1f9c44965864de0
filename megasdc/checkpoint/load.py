"""Loading a checkpoint into an engine, on all ranks or on none: of any layout, or a universal one.

One function says where each state of a rank's parameters is (``locate_states``, ``locate_universal``), and one fills
them from there. Each rank reads the parts of the states that it owns: at the layout that saved those of its own file,
else of others. Nothing is converted and nothing written.

Names, layout, shapes, precision and optimizer classes are compared and the files are opened first; the ranks agree;
only then is the engine changed, and they agree again. So no rank waits in a collective for one that failed.

Restored is what DeepSpeed restores (0.19.8, ``DeepSpeedEngine.load_checkpoint``, which tests compare with): master
weights, moments, steps and settings of the optimizer's groups, loss scale, learning rate schedule and counters. Weights
are copied from the master weights, as in its load of a universal checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import rank_state_file, shard_file, stage_number
from megasdc.checkpoint.manifest import (
    Layout,
    UniversalManifest,
    describe_engine,
    find_unknown,
    model_of,
    read_shared_state,
    read_universal_manifest,
)
from megasdc.checkpoint.ranks import (
    CheckpointGroup,
    FolderRanks,
    RankProblem,
    describe_error,
    find_place,
    raise_on_all_ranks,
)
from megasdc.checkpoint.resume import SelectedCheckpoint
from megasdc.checkpoint.snapshot import SavedState
from megasdc.checkpoint.tensor_files import ExtentReader
from megasdc.checkpoint.verify import check_share
from megasdc.checkpoint.views import (
    OPTIMIZER_SLOTS,
    PieceError,
    States,
    TensorSource,
    locate_states,
    locate_universal,
)
from megasdc.common.errors import CheckpointError
from megasdc.config.deepspeed import precision_of
from megasdc.model.sharding import Split, shard_of
from megasdc.optim.zero1 import Fragment, grouped_parameters, is_copied, master_partitions, owned_fragments
from megasdc.parallel.dims import ParallelDims

MOMENTS = OPTIMIZER_SLOTS[1:]
_CHUNK_BYTES = 16 << 20
"""Largest number of bytes that are read at once for another device or type; fresh memory costs more than a copy."""


class LoadedInPartError(CheckpointError):
    """An engine was changed by a checkpoint that could not be loaded completely."""


@dataclass(frozen=True, kw_only=True)
class LoadedState(SavedState):
    """State saved beside the engine's own; ``step``: optimizer step after which it was saved, first is 1.

    ``rank_state`` is empty if another layout saved.
    """

    step: int


def _accept(shared_state: dict[str, Any]) -> None:
    """Refuse no checkpoint."""


def load_checkpoint(
    engine: Any,
    chosen: SelectedCheckpoint,
    dims: ParallelDims,
    ranks: CheckpointGroup,
    *,
    check: Callable[[dict[str, Any]], None] = _accept,
) -> LoadedState:
    """Load a checkpoint of any layout into an engine of the same model.

    Args:
        engine: the PipelineEngine.
        chosen: result of ``find_checkpoint`` or ``restore``; its folder has at least the files that this rank reads
            (``Layout.stages_for``, ``Layout.shards_for``).
        dims: this rank's position in the layout.
        check: function called with ``shared_state`` before anything else is compared; it raises a CheckpointError to
            refuse the checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another model, optimizer or an incompatible precision, or a file cannot be
            read; on all ranks, and before any parameter was changed.
        LoadedInPartError: only part of it could be read; on all ranks.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    place, manifest = find_place(ranks), chosen.manifest
    is_same = manifest.layout == Layout.of(dims)
    shared_state: dict[str, Any] = {}
    rank_state: dict[str, Any] = {}

    def locate(fragments: Mapping[str, Fragment]) -> States:
        shared_state.update(read_shared_state(chosen.path))
        check(shared_state)
        if is_same:
            _compare_engine(engine, manifest.engine, "optimizer")
            own = shard_file(dims.dp_rank, stage_number(dims), "bf16_" if engine.bfloat16_enabled() else "")
            if own not in manifest.by_name():
                raise CheckpointError(
                    f"it has no {own}: this run has other layers or another precision than the one that saved it"
                )
            rank_state.update(load_checked(chosen.path / rank_state_file(place.rank)))
        else:
            _compare_engine(engine, manifest.engine)
            _compare_precision(engine, precision_of(shared_state["config"]))
        return locate_states(chosen.path, dims, fragments)

    _load(engine, place, chosen.path, manifest.engine.get("global_steps"), dims, locate)
    if is_same:
        place.emit("resume", "checkpoint", step=chosen.step, path=str(chosen.path), skipped=sorted(chosen.skipped))
    return LoadedState(shared_state=shared_state, rank_state=rank_state, step=chosen.step)


@dataclass(frozen=True)
class OpenUniversal:
    """A universal checkpoint that was verified.

    Attributes:
        path: its folder.
        shared_state: the shared state of the checkpoint that it was made from.
        place: the ranks that share the folder.
    """

    path: Path
    manifest: UniversalManifest
    shared_state: dict[str, Any]
    place: FolderRanks


def open_universal(folder: Path | str, ranks: CheckpointGroup, *, verify: bool = True) -> OpenUniversal:
    """Verify a universal checkpoint; the ranks that share the folder divide the files among them.

    Args:
        folder: folder of the universal checkpoint; with ``node_local`` storage each node needs a copy.
        verify: whether checksums are compared; otherwise only the list of files, their sizes and their pickles.

    Raises:
        CheckpointError: a file is missing, changed or refused; on all ranks.

    Collective: all ranks of the world.
    """
    path, place = Path(folder), find_place(ranks)
    manifest: UniversalManifest | None = None
    shared_state: dict[str, Any] = {}
    problems: list[str] = []
    try:
        manifest = read_universal_manifest(path)
        if place.leader:
            problems += find_unknown(path, manifest)
        problems += check_share(path, manifest, manifest.files, place, checksums=verify)
        shared_state = read_shared_state(path)
    except (CheckpointError, ValueError, OSError) as error:
        problems.append(str(error))
    answers = place.gather((manifest.conversion_id if manifest else None, problems))
    everybody = list(dict.fromkeys(line for _, lines in answers for line in lines))
    if not everybody and len({identity for identity, _ in answers}) > 1:
        everybody.append("the nodes hold different conversions of it")
    if everybody:
        shown = "\n".join(f"  - {line}" for line in everybody[:10])
        # Without a manifest it may be another kind of folder, which the problem names.
        remedy = "\nMake it again with megasdc convert-checkpoint." if any(made for made, _ in answers) else ""
        raise CheckpointError(f"{path} cannot be used, nothing was changed:\n{shown}{remedy}")
    assert manifest is not None, "a checkpoint without problems has a manifest"
    return OpenUniversal(path, manifest, shared_state, place)


def load_universal(
    engine: Any, found: OpenUniversal, dims: ParallelDims, *, check: Callable[[dict[str, Any]], None] = _accept
) -> None:
    """Load a universal checkpoint into an engine of the same model; arguments and errors as of ``load_checkpoint``.

    Later saves and loads use the engine's own layout.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    manifest = found.manifest

    def locate(fragments: Mapping[str, Fragment]) -> States:
        check(found.shared_state)
        _compare_engine(engine, manifest.engine)
        _compare_precision(engine, manifest.precision)
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        groups = [[names[id(one)] for one in group] for group in grouped_parameters(engine.optimizer)]
        return locate_universal(found.path, manifest, model_of(found.shared_state, found.path), dims, groups)

    _load(engine, found.place, found.path, manifest.engine.get("global_steps"), dims, locate)


def _load(
    engine: Any,
    place: FolderRanks,
    path: Path,
    steps: int | None,
    dims: ParallelDims,
    locate: Callable[[Mapping[str, Fragment]], States],
) -> None:
    """Load what ``locate`` finds for the parts of parameters that this rank owns; errors as of ``load_checkpoint``.

    ``steps``: number of steps that the engine has taken after the load; ``locate`` raises a CheckpointError to refuse
    the checkpoint.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    here = {name for some in place.gather(sorted(names.values())) for name in some}
    fragments = {names[id(one.parameter)]: one for one in owned_fragments(engine.optimizer)}
    states: States | None = None
    problem: RankProblem | None = None
    try:
        states = locate(fragments)
        _compare_parameters(engine, dims, states, here)
        if states.stage["global_steps"] != steps:
            raise CheckpointError(f"its stage file is of step {states.stage['global_steps']}, its manifest of {steps}")
    except (CheckpointError, ValueError) as error:
        problem = RankProblem(str(error), storage=False)
    except OSError as error:
        problem = replace(describe_error(error, f"read {error.filename or path}"), storage=False)
    # No rank changes its engine unless all can load.
    raise_on_all_ranks(problem, place, f"{path} cannot be loaded, nothing was changed")
    assert states is not None, "all ranks have located theirs"
    try:
        _restore_rest(engine, states)
        with torch.no_grad(), ExtentReader() as reader:
            for name, fragment in fragments.items():
                for slot, target in _targets(engine, fragment).items():
                    _fill(target, states.origins[name, slot], fragment.offset, dims, reader)
    except (PieceError, CheckpointError) as error:
        problem = RankProblem(str(error), storage=False)
    except Exception as error:  # reported to every rank: the others would go on
        problem = replace(describe_error(error, f"load {path} into the engine"), storage=False)
    try:
        raise_on_all_ranks(problem, place, f"{path} was loaded in part, the engine must not be used")
    except CheckpointError as error:
        raise LoadedInPartError(str(error)) from error
    engine.optimizer.update_lp_params()  # a collective, which all ranks reach


def _compare_engine(engine: Any, saved: dict[str, Any], *more: str) -> None:
    """Compare properties of an engine with those of the one that saved; CheckpointError with both if they differ."""
    now = describe_engine(engine)
    for key in ("num_layers", *more, "inner_optimizer", "num_param_groups"):
        if saved.get(key) != now[key]:
            raise CheckpointError(f"it was saved with {key} {saved.get(key)}, this run has {now[key]}")


def _compare_precision(engine: Any, precision: str) -> None:
    """CheckpointError unless the loss scale of a run of ``precision`` (fp32, bf16, fp16) can be carried over."""
    if (precision == "fp16") != bool(engine.fp16_enabled()):
        raise CheckpointError(
            f"it was saved in {precision}, and a loss scale cannot be carried over between fp16 and other precisions; "
            "fp32 and bf16 can follow each other"
        )


def _compare_parameters(engine: Any, dims: ParallelDims, states: States, here: set[str]) -> None:
    """Compare names, shapes and places of this rank's parameters; CheckpointError with both values if they differ.

    ``here``: names of the parameters of all ranks.
    """
    shapes = {}
    for name, parameter in engine.module.named_parameters():
        shapes[name] = list(parameter.shape)
        if states.is_whole and not is_copied(parameter):
            shapes[name][parameter.partition_dim] *= dims.tensor
    for name in sorted((shapes.keys() - states.shapes.keys()) | (states.shapes.keys() - here)):
        where = "this run does not have" if name in states.shapes else "only this run has"
        raise CheckpointError(f"it is of another model: parameter {name}, which {where}")
    for name, shape in shapes.items():
        if shape != states.shapes[name]:
            raise CheckpointError(
                f"it is of another model: saved {name} is {states.shapes[name]}, this run's is {shape}"
            )
    for piece in (piece for origin in states.origins.values() for piece in origin.copy.pieces):
        if piece.holds:
            raise CheckpointError(f"{piece.file} claims to hold {piece.holds}")


def _restore_rest(engine: Any, states: States) -> None:
    """Restore what is not a tensor of the model: steps, group settings, loss scale, schedule, counters.

    Moments that the optimizer does not have yet are made; it has none where it had taken no step when it was saved.
    """
    optimizer, base = engine.optimizer, states.optimizer["base_optimizer_state"]
    optimizer._load_global_state(states.optimizer)
    flats = master_partitions(optimizer)
    for index, (group, flat) in enumerate(zip(optimizer.optimizer.param_groups, flats, strict=True)):
        group.update({key: value for key, value in base["param_groups"][index].items() if key != "params"})
        if (saved := base["state"].get(index)) is None:
            optimizer.optimizer.state.pop(flat, None)
            continue
        state = optimizer.optimizer.state[flat]
        for slot in MOMENTS:
            if slot not in state:
                state[slot] = torch.zeros_like(flat, dtype=saved.get(slot, flat).dtype)
        for key, value in saved.items():
            if key not in MOMENTS:
                state[key] = value.clone() if isinstance(value, Tensor) else value
    place_steps(optimizer.optimizer)
    engine.lr_scheduler.load_state_dict(states.stage["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, states.stage[name])


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Move step counters to the device for torch's fused and capturable optimizers, as their own load does."""
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)


def _targets(engine: Any, fragment: Fragment) -> dict[Any, Tensor]:
    """The states of a fragment to fill, [numel], by slot."""
    states = fragment.states(engine.optimizer)
    return {"master": fragment.master} | {slot: states[slot] for slot in MOMENTS if slot in states}


def _fill(target: Tensor, origin: TensorSource, offset: int, dims: ParallelDims, reader: ExtentReader) -> None:
    """Fill a fragment's state, [numel], from its origin; ``offset``: its first element in this tensor rank's shard."""
    if origin.split is not Split.REPLICATED:
        shard = shard_of(origin.copy.read(), origin.split, dims.tensor, dims.tp_rank).reshape(-1)
        target.copy_(shard[offset : offset + target.numel()])
        return
    found, first = origin.copy.open(), offset - origin.first
    is_alike = (target.device.type, target.dtype) == ("cpu", found.dtype)
    room = torch.empty(0 if is_alike else min(_CHUNK_BYTES, target.numel() * found.dtype.itemsize), dtype=torch.uint8)
    for start, stop in found.ranges(_CHUNK_BYTES, first, first + target.numel()):
        part = target[start - first : stop - first]
        if is_alike:
            found.fill(start, part, reader)
            continue
        values = room[: part.numel() * found.dtype.itemsize].view(found.dtype)
        found.fill(start, values, reader)
        part.copy_(values)
