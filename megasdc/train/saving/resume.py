"""Resuming a run: from memory, from a checkpoint on the disk, or from a universal one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megasdc.checkpoint.aside import leave_behind
from megasdc.checkpoint.formats.shared_state import find_wrong_place, read_shared_state
from megasdc.checkpoint.load import LoadedInPartError, load_checkpoint
from megasdc.checkpoint.manifest import Layout
from megasdc.checkpoint.places import Ranks
from megasdc.checkpoint.resume import Chosen, NoneUsableError, find_checkpoint
from megasdc.checkpoint.snapshots.held import memory_folder
from megasdc.checkpoint.snapshots.recover import Found, restore
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.config import RunConfig, StudySection
from megasdc.determinism import restore_rng
from megasdc.engine.run import Run
from megasdc.metrics.writer import cut_back, set_aside
from megasdc.optim.zero1 import grouped_parameters
from megasdc.parallel.collectives import gather_objects
from megasdc.train.changed_settings import ChangedSettings
from megasdc.train.saving.carried import (
    check_skipped_samples,
    prolong_stream,
    restore_counters,
    tell_other_versions,
    tell_quantized,
)
from megasdc.train.saving.memory import keep_only, look_in_memory, remove_step
from megasdc.train.saving.other_layout import load_other_layout, start_from_universal
from megasdc.train.saving.saver import checkpoint_folder, wanted_dims

logger = logging.getLogger(__name__)


def resume(
    run: Run,
    config: RunConfig,
    agree: Callable[[int], int | None] | None = None,
    study: StudySection | None = None,
) -> dict[str, Any]:
    """Resume from the newest usable checkpoint, if there is one and the configuration asks for it.

    Without one the run starts from the universal checkpoint that the configuration names, or from step 0. Changes of
    the configuration since the checkpoint are refused, or applied from the next step on and reported.

    Args:
        run: at step 0; on return at the step that was loaded.
        agree: called with the step of the checkpoint found, 0 for none; returns None, or the newest step to search
            again; None: no agreement needed.
        study: that the run is a replica of; None: none.

    Returns:
        States of the hooks by class name, for hooks that are not built yet; empty at step 0.

    Raises:
        CheckpointError: none is usable, one is of another model, layout or configuration, or the configuration demands
            what is not there.

    Collective: all ranks of the world.
    """
    section = config.megasdc.checkpoint
    folder, ranks = checkpoint_folder(config), Ranks(section.storage, run.host_group, run.events)
    held = look_in_memory(config, run) if section.memory.interval else None
    only_looks = held is not None and agree is None  # a restart from memory does not wait until the disk is read
    found, unusable = _find_on_disk(config, run, agree, held is not None, verify=section.verify and not only_looks)
    if held is not None and only_looks and found is not None and (found.step > held.step or found.verified_only):
        found, unusable = _find_on_disk(config, run, agree, True, verify=section.verify)
    if held is not None and (found is None or held.step >= found.step):
        chosen = _put_together(run, held)
        if chosen is not None:
            return _resume_from_memory(run, config, held, chosen, found or unusable, study)
        found, unusable = _find_on_disk(config, run, agree, False, verify=section.verify)
    if section.memory.interval:
        keep_only(config, run, None)
    if found is None:
        leave_behind(folder, unusable, ranks)
        hooks = start_from_universal(run, config, section.universal) if section.universal is not None else {}
        if run.dims.rank == 0 and (kept := set_aside(run.folder)) is not None:
            run.events.emit("start", "metrics_set_aside", path=str(kept))
            logger.warning("no checkpoint in %s, so the run starts at step 1; old metrics are now in %s", folder, kept)
        return hooks
    if not section.verify and run.dims.rank == 0:
        run.events.emit("resume", "not_verified", step=found.step, path=str(found.path))
        logger.warning("checkpoint.verify is false: nobody compares %s with its checksums", found.path)
    try:
        return _load(run, config, found, ranks, study, lambda: leave_behind(folder, found, ranks))
    except LoadedInPartError:
        if run.dims.rank == 0:
            run.events.emit("resume", "not_loaded", step=found.step, path=str(found.path))
        raise


def _find_on_disk(
    config: RunConfig, run: Run, agree: Callable[[int], int | None] | None, has_other: bool, *, verify: bool
) -> tuple[Chosen | None, NoneUsableError | None]:
    """The newest usable checkpoint of the folder, or why those that are there cannot be used.

    Args:
        has_other: the run can go on without one.
        verify: compare checksums.
    """
    section = config.megasdc.checkpoint
    folder, ranks = checkpoint_folder(config), Ranks(section.storage, run.host_group, run.events)
    needs_none = has_other or section.universal
    at_most: int | None = None
    while True:
        try:
            found = find_checkpoint(
                folder,
                wanted_dims(config, run),
                ranks,
                verify=verify,
                resume="auto" if needs_none and section.resume == "must" else section.resume,
                require_verified=section.require_verified,
                at_most=at_most,
                newest=section.resume_at_most,
            )
        except CheckpointError as error:
            unusable = error if isinstance(error, NoneUsableError) else None
            if not has_other and not (unusable is not None and unusable.too_new):
                if unusable is not None and run.dims.rank == 0:
                    run.events.emit("resume", "none_usable", steps=sorted(unusable.skipped))
                raise
            logger.warning("%s", error)
            return None, unusable
        at_most = None if agree is None else agree(0 if found is None else found.step)
        if at_most is None:
            return found, None


def _put_together(run: Run, held: Found) -> Chosen | None:
    """What the hosts hold of a step, as a checkpoint; None: that is not possible, which is reported."""
    local = Ranks("node_local", run.host_group, run.events)
    try:
        groups = grouped_parameters(run.engine.optimizer)
        totals = [sum(parameter.numel() for parameter in group) for group in groups]
        chosen = restore(held, memory_folder(run.events.origin.run), run.dims, local, totals)
        _refuse_wrong_place(run, chosen)
        return chosen
    except (StorageError, CheckpointError) as error:
        if run.dims.rank == 0:
            logger.warning("%s; the checkpoint on the disk is taken", error)
            run.events.emit("skip", "memory", step=held.step, reason=str(error))
        return None


def _refuse_wrong_place(run: Run, chosen: Chosen) -> None:
    """Raise a CheckpointError on all ranks where some host holds places in the data that do not follow."""
    try:
        wrong = find_wrong_place(read_shared_state(chosen.path))
    except CheckpointError as error:
        wrong = str(error)
    if problem := next((one for one in gather_objects(wrong, run.host_group) if one is not None), None):
        raise CheckpointError(problem)


def _resume_from_memory(
    run: Run,
    config: RunConfig,
    held: Found,
    chosen: Chosen,
    on_disk: Chosen | NoneUsableError | None,
    study: StudySection | None,
) -> dict[str, Any]:
    """Go on from what the hosts hold in memory; returns states of the hooks by class name.

    Raises:
        LoadedInPartError: it cannot be loaded, and is removed, so that the next start does not meet it again.
    """
    folder = checkpoint_folder(config)
    local = Ranks("node_local", run.host_group, run.events)
    disk = Ranks(config.megasdc.checkpoint.storage, run.host_group, run.events)
    try:
        hooks = _load(run, config, chosen, local, study, lambda: leave_behind(folder, on_disk, disk))
    except LoadedInPartError as error:
        remove_step(run, held)
        if run.dims.rank == 0:
            run.events.emit("skip", "memory", step=held.step, reason=str(error))
        raise LoadedInPartError(f"{error}; it is removed from memory: start the run again") from error
    keep_only(config, run, held)
    if on_disk is not None:
        run.passed_over |= set(on_disk.skipped) - set(on_disk.candidates)
    if run.dims.rank == 0:
        step = on_disk.step if isinstance(on_disk, Chosen) else None
        run.events.emit("resume", "memory", step=run.step, origin=held.origin, disk_step=step)
        than = "there is none on the disk" if step is None else f"the newest on the disk is of step {step}"
        logger.info("resumed from step %d in %s; %s", run.step, held.origin, than)
    return hooks


def _load(
    run: Run,
    config: RunConfig,
    found: Chosen,
    ranks: Ranks,
    study: StudySection | None,
    leave: Callable[[], object],
) -> dict[str, Any]:
    """Load a checkpoint and restore everything besides the engine; returns states of the hooks by class name.

    Args:
        leave: called once it is loaded.
    """
    if found.manifest.layout != Layout.of(run.dims):
        hooks = load_other_layout(run, config, found, leave)
        run.passed_over = set(found.skipped) - set(found.candidates)
        _cut_metrics_back(run)
        return hooks
    changed = ChangedSettings(run.engine, config, study)
    data = found.manifest.layout.data

    def check(saved: dict[str, Any]) -> None:
        changed.check(saved, data)
        check_skipped_samples(saved, config)

    loaded = load_checkpoint(run.engine, found, run.dims, ranks, check=check)
    leave()
    run.passed_over = set(found.skipped) - set(found.candidates)
    state = loaded.shared_state
    restore_counters(run, state)
    run.loader.move_to(state["loader"])
    prolong_stream(run)
    restore_rng(loaded.rank_state["rng"])
    changed.apply(run)
    _cut_metrics_back(run)
    if run.dims.rank == 0:
        logger.info("resumed from %s", found.path)
        tell_other_versions(run, found.manifest.versions)
        tell_quantized(run, found.manifest.quantized_moments_bits)
    return changed.hook_states(state["hooks"])


def _cut_metrics_back(run: Run) -> None:
    if run.dims.rank == 0:
        dropped = cut_back(run.folder, run.step)
        run.events.emit("resume", "metrics_cut_back", step=run.step, lines=dropped)
