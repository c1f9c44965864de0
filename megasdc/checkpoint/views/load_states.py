"""Loading a checkpoint of another layout into an engine: each rank reads the parts of the states that it owns.

Nothing is converted and nothing written. Weights are those of the masters, as DeepSpeed's load of a universal
checkpoint has them; what it takes over besides is taken over here: moments, steps and settings of the optimizer's
groups, loss scale, learning rate schedule and counters (DeepSpeed 0.19.8, ``DeepSpeedEngine._load_checkpoint`` and
``load_hp_checkpoint_state_from_checkpoint_dir``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.files import SHARD_FILES
from megasdc.checkpoint.load import LoadedInPartError, compare_engine
from megasdc.checkpoint.load_universal import full_shapes, place_steps
from megasdc.checkpoint.manifest import Manifest
from megasdc.checkpoint.pieces import Copy, Piece, PieceError
from megasdc.checkpoint.places import FolderRanks, RankProblem, describe_error, raise_on_all_ranks
from megasdc.checkpoint.tensor_files import ExtentReader
from megasdc.checkpoint.views.deepspeed import States, locate_states
from megasdc.checkpoint.views.view import Slot
from megasdc.common.errors import CheckpointError
from megasdc.model.sharding import Split, take_shard, torch_name
from megasdc.optim.zero1 import Fragment, owned_fragments

MOMENTS: tuple[Slot, ...] = ("exp_avg", "exp_avg_sq")


def load_states(engine: Any, path: Path, manifest: Manifest, precision: str, place: FolderRanks) -> None:
    """Load weights, moments, learning rate schedule and counters into an engine of the same model.

    Args:
        path: folder of the checkpoint, with the files at least that this rank reads (``formats.shard_sizes``).
        precision: of the run that saved it.

    Raises:
        CheckpointError: it is of another model, optimizer or an incompatible precision, or cannot be read; on all
            ranks, and before anything was changed.
        LoadedInPartError: it could be read in part alone; on all ranks.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    here = {name for some in place.gather(sorted(names.values())) for name in some}
    states: States | None = None
    problem: RankProblem | None = None
    try:
        states = locate_states(path, set(names.values()))
        _compare(engine, manifest, states, here, precision)
    except (CheckpointError, OSError) as error:
        problem = replace(describe_error(error, f"read {path}"), storage=False)
    raise_on_all_ranks(problem, place, f"{path} cannot be loaded, nothing was changed")
    assert states is not None, "all ranks have located theirs"
    try:
        with torch.no_grad(), ExtentReader() as reader:
            for fragment in owned_fragments(engine.optimizer):
                _fill(engine, fragment, states, manifest, names[id(fragment.parameter)], reader)
        _restore_rest(engine, path, states)
    except (CheckpointError, PieceError, OSError, KeyError) as error:
        problem = replace(describe_error(error, f"read {path}"), storage=False)
    try:
        raise_on_all_ranks(problem, place, f"{path} was loaded in part, the engine must not be used")
    except CheckpointError as error:
        raise LoadedInPartError(str(error)) from error
    engine.optimizer.update_lp_params()  # a collective, which all ranks reach


def _compare(engine: Any, manifest: Manifest, states: States, here: set[str], precision: str) -> None:
    """Compare the engine with the checkpoint; CheckpointError with both values if they differ."""
    compare_engine(engine, manifest.engine, ("num_layers", "inner_optimizer", "num_param_groups"))
    for name in sorted(here ^ states.shapes.keys()):
        where = "this run does not have" if name in states.shapes else "only this run has"
        raise CheckpointError(f"it is of another model: parameter {name}, which {where}")
    for name, shape in full_shapes(engine).items():
        if shape != states.shapes[name]:
            raise CheckpointError(
                f"it is of another model: saved {name} is {states.shapes[name]}, this run's is {shape}"
            )
    if (precision == "fp16") != bool(engine.fp16_enabled()):
        raise CheckpointError(
            f"it was saved in {precision}, and a loss scale cannot be carried over between fp16 and other precisions; "
            "fp32 and bf16 can follow each other"
        )


def _fill(engine: Any, fragment: Fragment, states: States, manifest: Manifest, name: str, reader: ExtentReader) -> None:
    """Read a fragment's master weights and moments; state that the optimizer does not have yet is made."""
    state = engine.optimizer.optimizer.state[fragment.flat]
    targets: dict[Slot, Tensor] = {"master": fragment.master}
    for slot in MOMENTS:
        if slot not in state:
            state[slot] = torch.zeros_like(fragment.flat)
        targets[slot] = state[slot].narrow(0, fragment.start, fragment.numel)
    for slot, target in targets.items():
        copies = states.copies[torch_name(name), slot]
        values = _read(copies, manifest, engine, fragment, reader)
        target.copy_(values)


def _read(copies: list[Copy], manifest: Manifest, engine: Any, fragment: Fragment, reader: ExtentReader) -> Tensor:
    """A fragment's values of one state, [numel], fp32, on the host."""
    dims, tensor = engine.dims, manifest.layout.tensor
    stages = len(copies) // (tensor if copies[0].split is Split.REPLICATED else 1)
    of_stage = copies[-len(copies) // stages :] if dims.is_last_stage else copies  # a tied one is in two stages
    if tensor != dims.tensor:
        whole = of_stage[0].read()
        shard = take_shard(whole, of_stage[0].split, dims.tensor, dims.tp_rank).reshape(-1)
        return shard[fragment.offset : fragment.offset + fragment.numel]
    if of_stage[0].split is Split.REPLICATED:
        pieces = of_stage[dims.tp_rank].shards[0]
    else:
        pieces = of_stage[0].shards[dims.tp_rank]
    values = torch.empty(fragment.numel, dtype=torch.float32)
    _read_run(pieces, fragment.offset, values, reader)
    return values


def _read_run(pieces: Sequence[Piece], start: int, out: Tensor, reader: ExtentReader) -> None:
    """Read elements of a run of pieces, from ``start`` on, into ``out``; only pieces that hold some are opened."""
    place = 0
    for piece in pieces:
        first, end = max(start, place), min(start + out.numel(), place + piece.numel)
        if first < end:
            if piece.holds:
                raise CheckpointError(f"{piece.file} claims to hold {piece.holds}")
            source, part = piece.find(), out[first - start : end - start]
            if isinstance(source, Tensor):
                part.copy_(source[first - place : end - place])
            else:
                reader.read(source, first - place, part)
        place += piece.numel


def _restore_rest(engine: Any, path: Path, states: States) -> None:
    """Restore what is no tensor of the model: steps, settings of groups, loss scale, schedule, counters."""
    optimizer = engine.optimizer
    saved = states.files.load(sorted(path.glob(SHARD_FILES))[0])["optimizer_state_dict"]
    base = saved["base_optimizer_state"]
    optimizer._load_global_state(saved)
    for index, group in enumerate(optimizer.optimizer.param_groups):
        group.update({key: value for key, value in base["param_groups"][index].items() if key != "params"})
        of_group = optimizer.optimizer.state[group["params"][0]]
        for key, value in base["state"][index].items():
            if key not in MOMENTS:
                of_group[key] = value.clone() if isinstance(value, Tensor) else value
        for slot in MOMENTS:  # also where this rank owns only padding
            of_group.setdefault(slot, torch.zeros_like(group["params"][0]))
    place_steps(optimizer.optimizer)
    engine.lr_scheduler.load_state_dict(states.stage["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, states.stage[name])
