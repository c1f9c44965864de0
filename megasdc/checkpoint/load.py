"""Loading a checkpoint into an engine, on all ranks or on none: of the same layout, of another one, or a universal one.

DeepSpeed's load (0.19.8) is not collective: a rank that cannot read its file raises after its parameters were changed
while the others go on. So names, layout, data types, shapes and optimizer classes are compared first, and every file is
opened once as a test; the ranks agree; only then is the engine changed, and they agree again.

A universal checkpoint is treated alike. DeepSpeed's load of one (0.19) ends with a collective, which a rank that failed
would never reach while the others wait; so that part is deferred until all ranks have reported success.

From a checkpoint of another layout each rank reads the parts of the states that it owns (``load_states``). Nothing is
converted and nothing written. Weights are copied from the master weights, as in DeepSpeed's load of a universal
checkpoint, and the same other states are restored: moments, steps and settings of the optimizer's groups, loss scale,
learning rate schedule and counters (DeepSpeed 0.19.8, ``DeepSpeedEngine._load_checkpoint`` and
``load_hp_checkpoint_state_from_checkpoint_dir``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import SHARD_FILES, plain_path, rank_state_file
from megasdc.checkpoint.manifest import (
    Layout,
    Manifest,
    UniversalManifest,
    find_unknown,
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
from megasdc.checkpoint.save import SavedState, describe_engine, describe_tensors
from megasdc.checkpoint.tensor_files import ExtentReader
from megasdc.checkpoint.verify import check_share
from megasdc.checkpoint.views import Copy, Piece, PieceError, Slot, States, locate_states
from megasdc.common.errors import CheckpointError
from megasdc.model.sharding import Split, take_shard, torch_name
from megasdc.optim.zero1 import Fragment, is_copied, owned_fragments
from megasdc.parallel.dims import ParallelDims


class LoadedInPartError(CheckpointError):
    """An engine was changed by a checkpoint that could not be loaded completely."""


@dataclass(frozen=True, kw_only=True)
class LoadedState(SavedState):
    """State saved beside the engine's own; ``step``: optimizer step after which it was saved, first is 1."""

    step: int


def load_checkpoint(
    engine: Any,
    chosen: SelectedCheckpoint,
    dims: ParallelDims,
    ranks: CheckpointGroup,
    *,
    check: Callable[[dict[str, Any]], None] = lambda shared_state: None,
) -> LoadedState:
    """Load a checkpoint into an engine of the same layout and model.

    Args:
        engine: the PipelineEngine.
        chosen: result of ``find_checkpoint``.
        dims: this rank's position in the layout.
        check: function called with ``shared_state`` before anything else is compared; it raises a CheckpointError to
            refuse the checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another layout, model, data type or optimizer, or a file cannot be loaded;
            on all ranks, and before any parameter was changed.
        LoadedInPartError: DeepSpeed failed to load a checkpoint that had passed all checks; on all ranks.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    place = find_place(ranks)
    what = f"{chosen.path} cannot be loaded, nothing was changed"
    shared_state: dict[str, Any] = {}
    rank_state: dict[str, Any] = {}
    problem: RankProblem | None = None
    try:
        shared_state = read_shared_state(chosen.path)
        check(shared_state)
        expected = expected_files(engine, chosen.path, place.rank)
        _compare_files(engine, chosen, dims, expected)
        for name in expected:
            load_checked(chosen.path / name, mmap=True)
        rank_state = load_checked(chosen.path / rank_state_file(place.rank))
    except (CheckpointError, ValueError) as error:
        problem = RankProblem(str(error), storage=False)
    except OSError as error:
        problem = replace(describe_error(error, f"read {error.filename or chosen.path}"), storage=False)
    # No rank changes its engine unless all can load.
    raise_on_all_ranks(problem, place, what)
    problem, client_state = load_engine(engine, chosen.path, chosen.manifest.engine.get("global_steps"))
    try:
        raise_on_all_ranks(problem, place, f"{chosen.path} was loaded in part, the engine must not be used")
    except CheckpointError as error:
        raise LoadedInPartError(str(error)) from error
    place.emit("resume", "checkpoint", step=chosen.step, path=str(chosen.path), skipped=sorted(chosen.skipped))
    return LoadedState(shared_state=shared_state, rank_state=rank_state, client_state=client_state, step=chosen.step)


def expected_files(engine: Any, folder: Path, rank: int) -> dict[str, dict[str, str] | None]:
    """Files that a rank of this engine opens; a layer's file with data type and shape of each tensor, others None."""
    module = engine.module
    files: dict[str, dict[str, str] | None] = {
        Path(engine._get_ckpt_name(str(folder), ".")).name: None,
        Path(engine._get_zero_ckpt_name(str(folder), ".")).name: None,
        rank_state_file(rank): None,
    }
    for index, layer in enumerate(module.forward_funcs):
        if hasattr(layer, "load_state_dict"):
            files[Path(module.ckpt_layer_path(str(folder), index)).name] = describe_tensors(layer.state_dict())
    return files


def _compare_files(
    engine: Any, chosen: SelectedCheckpoint, dims: ParallelDims, expected: dict[str, dict[str, str] | None]
) -> None:
    """Compare the engine with the manifest; CheckpointError with both values if they differ."""
    manifest = chosen.manifest
    if manifest.layout != Layout.of(dims):
        raise CheckpointError(f"it was saved with {manifest.layout}, this run has {dims}")
    compare_engine(engine, manifest.engine, ("num_layers", "optimizer", "inner_optimizer", "num_param_groups"))
    records = manifest.by_name()
    if missing := sorted(expected.keys() - records.keys()):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"it has no {', '.join(missing[:3])}{more}: this run has other layers or another precision than the one "
            "that saved it"
        )
    for name, tensors in expected.items():
        if tensors is not None and tensors != records[name].tensors:
            raise CheckpointError(f"{name} is of another model: {_first_difference(tensors, records[name].tensors)}")


def _first_difference(here: dict[str, str], saved: dict[str, str] | None) -> str:
    """The first tensor by name that differs between two layers."""
    saved = saved or {}
    for name in sorted(here.keys() | saved.keys()):
        if here.get(name) != saved.get(name):
            return f"saved {name} is {saved.get(name, 'absent')}, this run's is {here.get(name, 'absent')}"
    raise AssertionError("the two layers are alike")


def compare_engine(engine: Any, saved: dict[str, Any], keys: Sequence[str]) -> None:
    """Compare properties of an engine with those of the one that saved; CheckpointError with both if they differ."""
    now = describe_engine(engine)
    for key in keys:
        if saved.get(key) != now[key]:
            raise CheckpointError(f"it was saved with {key} {saved.get(key)}, this run has {now[key]}")


class CheckedCheckpointEngine:
    """Replaces DeepSpeed's checkpoint engine during one load: every file is checked against the allow-list.

    Files are mapped into memory, since fresh memory costs more than a copy.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.last: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one file through torch's restricted unpickler."""
        self.last = path
        return load_checked(path, map_location, mmap=True)


def load_engine(engine: Any, folder: Path, steps: int | None) -> tuple[RankProblem | None, dict[str, Any]]:
    """Let DeepSpeed load a folder into a PipelineEngine, each file checked against the allow-list first.

    Returns this rank's problem, None if there is none, and the client state; raises nothing: the ranks must agree.
    ``steps``: number of steps that the engine must have taken after the load; another one is a problem.

    DeepSpeed (0.19.8) reads only this rank's stage file, but expects one for each stage and tensor rank in the folder,
    which may hold only those of a node; so this rank's name is given to it as often. It copies all that it loads except
    moments on the CPU: ``Optimizer.load_state_dict`` keeps tensors that are on the right device, and these must not
    stay mapped to the file.
    """
    problem: RankProblem | None = None
    client_state: dict[str, Any] = {}
    inner = engine.checkpoint_engine
    reader = engine.checkpoint_engine = CheckedCheckpointEngine(inner)
    try:
        with plain_path(folder) as path:
            stage_file = engine._get_ckpt_name(str(path), ".")
            if not engine.load_universal_checkpoint():
                engine._get_all_ckpt_names = lambda *_: [stage_file] * engine.mp_world_size
            loaded, client_state = engine.load_checkpoint(str(path), tag=".")
            _own_memory(engine.optimizer.optimizer)
        if loaded is None:
            problem = RankProblem("DeepSpeed found no checkpoint there", storage=False)
        elif engine.global_steps != steps:
            problem = RankProblem(
                f"the engine is at step {engine.global_steps} after it, saved was {steps}", storage=False
            )
    except Exception as error:  # reported to every rank: the others would go on
        problem = replace(describe_error(error, f"load {reader.last or folder} into the engine"), storage=False)
    finally:
        engine.checkpoint_engine = inner
        vars(engine).pop("_get_all_ckpt_names", None)  # uncovers the method of the class
    return problem, client_state


def _own_memory(optimizer: torch.optim.Optimizer) -> None:
    """Copy an optimizer's moments on the CPU, which are those of a file, into memory of its own."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                state[name] = value.clone()


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


def load_universal(engine: Any, found: OpenUniversal) -> None:
    """Load weights, moments, learning rate schedule and counters into an engine of the same model.

    Later saves and loads use the engine's own layout.

    Raises:
        CheckpointError: the checkpoint is of another model, optimizer or an incompatible precision, or cannot be
            loaded; on all ranks, and before any parameter was changed unless the message says otherwise.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    problem: RankProblem | None = None
    try:
        _compare_universal(engine, found)
    except CheckpointError as error:
        problem = RankProblem(str(error), storage=False)
    raise_on_all_ranks(problem, found.place, f"{found.path} cannot be loaded, nothing was changed")
    with _universal_load(engine) as finish:
        problem, _ = load_engine(engine, found.path, found.manifest.engine.get("global_steps"))
        raise_on_all_ranks(problem, found.place, f"{found.path} was loaded in part, the engine must not be used")
        place_steps(engine.optimizer.optimizer)
        finish()  # a collective; all ranks reach it, since all agreed above


@contextmanager
def _universal_load(engine: Any) -> Iterator[Any]:
    """Switch DeepSpeed to universal checkpoints for one load; yields its last collective, which is deferred.

    It copies master weights into the model. ``load_universal_checkpoint`` reads the switch from the configuration at
    every call.
    """
    settings, optimizer = engine._config, engine.optimizer
    before, finish = settings.load_universal_checkpoint, optimizer.update_lp_params
    settings.load_universal_checkpoint = True
    optimizer.update_lp_params = lambda: None
    try:
        yield finish
    finally:
        settings.load_universal_checkpoint = before
        del optimizer.update_lp_params  # uncovers the method of the class


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Move step counters to the device for torch's fused and capturable optimizers, as their own load does."""
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)


def _compare_universal(engine: Any, found: OpenUniversal) -> None:
    """Compare the engine with the manifest; CheckpointError with both values if they differ.

    All ranks find the same, except for this rank's own parameters.

    Collective: all ranks.
    """
    manifest, shapes = found.manifest, full_shapes(engine)
    here = {name for names in found.place.gather(sorted(shapes)) for name in names}
    compare_engine(engine, manifest.engine, ("num_layers", "inner_optimizer", "num_param_groups"))
    for name in sorted(here ^ manifest.parameters.keys()):
        where = "this run does not have" if name in manifest.parameters else "only this run has"
        raise CheckpointError(f"it is of another model: parameter {name}, which {where}")
    for name, shape in shapes.items():
        if shape != manifest.parameters[name]:
            raise CheckpointError(
                f"it is of another model: saved {name} is {manifest.parameters[name]}, this run's is {shape}"
            )
    if (manifest.precision == "fp16") != bool(engine.fp16_enabled()):
        raise CheckpointError(
            f"it was saved in {manifest.precision}, and a loss scale cannot be carried over between fp16 and other "
            "precisions; fp32 and bf16 can follow each other"
        )
    _check_partitions(engine.optimizer)


def full_shapes(engine: Any) -> dict[str, list[int]]:
    """Unsharded shapes of this stage's parameters, by name."""
    shapes = {}
    for name, parameter in engine.module.named_parameters():
        shape = list(parameter.shape)
        if not is_copied(parameter):
            shape[parameter.partition_dim] *= engine.dims.tensor
        shapes[name] = shape
    return shapes


def _check_partitions(optimizer: Any) -> None:
    """Refuse a replica that owns only padding of a parameter group, which DeepSpeed 0.19 cannot load."""
    groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    for index, parameters in enumerate(groups):
        if all(parameter._hp_mapping is None for parameter in parameters):
            raise CheckpointError(
                f"with so many replicas this one owns no element of parameter group {index}, which DeepSpeed cannot "
                "load; use fewer replicas"
            )


MOMENTS: tuple[Slot, ...] = ("exp_avg", "exp_avg_sq")


def load_states(engine: Any, path: Path, manifest: Manifest, precision: str, place: FolderRanks) -> None:
    """Load weights, moments, learning rate schedule and counters into an engine of the same model.

    Args:
        path: folder of the checkpoint, with at least the files that this rank reads (``formats.shard_sizes``).
        manifest: the checkpoint's manifest.
        precision: precision of the run that saved it: ``fp32``, ``bf16`` or ``fp16``.
        place: the ranks that load together.

    Raises:
        CheckpointError: it is of another model, optimizer or an incompatible precision, or cannot be read; on all
            ranks, and before anything was changed.
        LoadedInPartError: only part of it could be read; on all ranks.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    here = {name for some in place.gather(sorted(names.values())) for name in some}
    states: States | None = None
    problem: RankProblem | None = None
    try:
        states = locate_states(path, set(names.values()))
        _compare_states(engine, manifest, states, here, precision)
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


def _compare_states(engine: Any, manifest: Manifest, states: States, here: set[str], precision: str) -> None:
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
    """Values of a fragment in one state (master weight or moment), [numel], fp32, on the host."""
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
    """Restore the states other than tensors of the model: steps, group settings, loss scale, schedule, counters."""
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
