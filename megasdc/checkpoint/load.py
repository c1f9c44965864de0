"""Loading a checkpoint into an engine of the same layout: on all ranks or on none.

DeepSpeed's load (0.19.8) is not collective: a rank that cannot read its file raises after its parameters were changed
while the others go on. So names, layout, data types, shapes and optimizer classes are compared first, and every file is
opened once as a test; the ranks agree; only then is the engine changed, and they agree again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import plain_path, rank_state_file
from megasdc.checkpoint.manifest import Layout, read_shared_state
from megasdc.checkpoint.places import CheckpointGroup, RankProblem, describe_error, find_place, raise_on_all_ranks
from megasdc.checkpoint.resume import SelectedCheckpoint
from megasdc.checkpoint.save import SavedState, describe_engine
from megasdc.checkpoint.writer import describe_tensors
from megasdc.common.errors import CheckpointError
from megasdc.parallel.dims import ParallelDims


class LoadedInPartError(CheckpointError):
    """An engine was changed by a checkpoint that it could not load to its end."""


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
        chosen: what ``find_checkpoint`` returned.
        check: called with ``shared_state`` before anything else is compared; raises CheckpointError to refuse it.

    Raises:
        CheckpointError: the checkpoint is of another layout, model, data type or optimizer, or a file cannot be loaded;
            on all ranks, and before any parameter was changed.
        LoadedInPartError: DeepSpeed failed to load what all these comparisons have found right; on all ranks.

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
        _compare(engine, chosen, dims, expected)
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
    """Files that a rank of this engine opens; for a layer's file data type and shape of each tensor, else None."""
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


def _compare(
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

    Returns this rank's problem, None if there is none, and the client state; raises nothing: the ranks must agree. The
    engine must have taken ``steps`` steps afterwards.

    DeepSpeed (0.19.8) reads this rank's stage file alone, but wants as many as there are stages and tensor ranks in the
    folder, where only those of a node may be; so it gets this rank's as often. It copies what it loads but for moments
    on the CPU: ``Optimizer.load_state_dict`` moves tensors to another device, and keeps those that are there, which
    must not stay those of a file.
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
