"""Loading a universal checkpoint into an engine of any layout: on all ranks or on none.

As with a checkpoint of the same layout, everything that can be known is compared before the engine is changed.
DeepSpeed's load (0.19) ends with a collective, which a rank that failed would never reach while the others wait; so
that part is deferred until all ranks have reported success.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.checks import check_share
from megasdc.checkpoint.load import compare_engine, load_engine
from megasdc.checkpoint.manifest import UniversalManifest, find_unknown, read_shared_state, read_universal_manifest
from megasdc.checkpoint.places import CheckpointGroup, FolderRanks, RankProblem, find_place, raise_on_all_ranks
from megasdc.common.errors import CheckpointError


@dataclass(frozen=True)
class OpenUniversal:
    """A universal checkpoint that was verified.

    Attributes:
        shared_state: the shared state of the checkpoint that it was made from.
        place: which ranks share the folder.
    """

    path: Path
    manifest: UniversalManifest
    shared_state: dict[str, Any]
    place: FolderRanks


def open_universal(folder: Path | str, ranks: CheckpointGroup, *, verify: bool = True) -> OpenUniversal:
    """Verify a universal checkpoint; the ranks that share the folder divide the files among them.

    Args:
        folder: the universal checkpoint; with ``node_local`` storage each node needs a copy.
        verify: compare checksums; otherwise only the list of files, their sizes and their pickles.

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
        _compare(engine, found)
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


def _compare(engine: Any, found: OpenUniversal) -> None:
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
        if getattr(parameter, "tensor_model_parallel", False):
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
