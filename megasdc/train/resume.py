"""Resuming a run: from memory, from a checkpoint on the disk of the same layout or of another one, or from a universal
one.

What every resume carries over besides the engine, whatever it goes on from, stands first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megasdc.checkpoint.host_memory import memory_folder
from megasdc.checkpoint.in_memory import InMemoryCheckpoint, restore
from megasdc.checkpoint.load import (
    LoadedInPartError,
    OpenUniversal,
    load_checkpoint,
    load_universal,
    open_universal,
    place_steps,
)
from megasdc.checkpoint.manifest import (
    Layout,
    find_wrong_place,
    installed_versions,
    read_shared_state,
    uncounted_samples,
)
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.resume import NoneUsableError, SelectedCheckpoint, find_checkpoint, quarantine
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.config.changes import ChangedField, explain_refusal, find_changes, may_change
from megasdc.config.load import RunConfig
from megasdc.config.local_sgd import AGREED_WEIGHTS, LOCAL_SGD
from megasdc.config.sections import StudySection
from megasdc.data.manifest import DataManifest
from megasdc.data.position import stream_end
from megasdc.determinism import restore_rng, seed_generators
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run
from megasdc.metrics.writer import cut_back, set_metrics_aside
from megasdc.optim.zero1 import grouped_parameters
from megasdc.parallel.collectives import gather_objects
from megasdc.train.checkpointer import (
    checkpoint_folder,
    discard_other_steps,
    find_memory_checkpoint,
    remove_step,
    wanted_dims,
)

_PARAMS = "optimizer.params."
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_UNMEASURED: dict[str, Any] = {"tau_s": None, "tuned_at": None, "chosen": None, "aims": [], "owed": 0}
"""State of DropCompute before the choice of a threshold."""


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
        run: the run at step 0; on return it is at the step that was loaded.
        agree: called with the step of the checkpoint found, 0 for none; returns None, or the newest step to search
            again; None: no agreement needed.
        study: section of the study that the run is a replica of; None: the run is not of a study.

    Returns:
        States of the hooks by their names, for hooks that are not built yet; empty at step 0.

    Raises:
        CheckpointError: no checkpoint is usable, one is of another model, layout or configuration, or the configuration
            demands a checkpoint that is not there.

    Collective: all ranks of the world.
    """
    section = config.megasdc.checkpoint
    folder, ranks = checkpoint_folder(config), CheckpointGroup(section.storage, run.host_group, run.events)
    held = find_memory_checkpoint(config, run) if section.memory.interval else None
    only_looks = held is not None and agree is None  # a restart from memory does not wait until the disk is read
    found, unusable = _find_on_disk(config, run, agree, held is not None, verify=section.verify and not only_looks)
    if held is not None and only_looks and found is not None and (found.step > held.step or found.verified_only):
        found, unusable = _find_on_disk(config, run, agree, True, verify=section.verify)
    if held is not None and (found is None or held.step >= found.step):
        chosen = _assemble(run, held)
        if chosen is not None:
            return _resume_from_memory(run, config, held, chosen, found or unusable, study)
        found, unusable = _find_on_disk(config, run, agree, False, verify=section.verify)
    if section.memory.interval:
        discard_other_steps(config, run, None)
    if found is None:
        quarantine(folder, unusable, ranks)
        hooks = start_from_universal(run, config, section.universal) if section.universal is not None else {}
        if run.dims.rank == 0 and (kept := set_metrics_aside(run.folder)) is not None:
            run.events.emit("start", "metrics_set_aside", path=str(kept))
            logger.warning("no checkpoint in %s, so the run starts at step 1; old metrics are now in %s", folder, kept)
        return hooks
    if not section.verify and run.dims.rank == 0:
        run.events.emit("resume", "not_verified", step=found.step, path=str(found.path))
        logger.warning("checkpoint.verify is false: nobody compares %s with its checksums", found.path)
    try:
        return _load(run, config, found, ranks, study, lambda: quarantine(folder, found, ranks))
    except LoadedInPartError:
        if run.dims.rank == 0:
            run.events.emit("resume", "not_loaded", step=found.step, path=str(found.path))
        raise


def _find_on_disk(
    config: RunConfig, run: Run, agree: Callable[[int], int | None] | None, has_other: bool, *, verify: bool
) -> tuple[SelectedCheckpoint | None, NoneUsableError | None]:
    """The newest usable checkpoint of the folder, or the error why those that are there cannot be used.

    Args:
        has_other: whether the run can go on without a checkpoint on the disk.
        verify: whether files are compared with their checksums.
    """
    section = config.megasdc.checkpoint
    folder, ranks = checkpoint_folder(config), CheckpointGroup(section.storage, run.host_group, run.events)
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


def _assemble(run: Run, held: InMemoryCheckpoint) -> SelectedCheckpoint | None:
    """Put a step together from the memory of the hosts, as a checkpoint; None: not possible, which is reported."""
    local = CheckpointGroup("node_local", run.host_group, run.events)
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


def _refuse_wrong_place(run: Run, chosen: SelectedCheckpoint) -> None:
    """Raise a CheckpointError on all ranks where some host's places in the data do not follow from the steps."""
    try:
        wrong = find_wrong_place(read_shared_state(chosen.path))
    except CheckpointError as error:
        wrong = str(error)
    if problem := next((one for one in gather_objects(wrong, run.host_group) if one is not None), None):
        raise CheckpointError(problem)


def _resume_from_memory(
    run: Run,
    config: RunConfig,
    held: InMemoryCheckpoint,
    chosen: SelectedCheckpoint,
    on_disk: SelectedCheckpoint | NoneUsableError | None,
    study: StudySection | None,
) -> dict[str, Any]:
    """Go on from a step in the memory of the hosts; returns states of the hooks by their names.

    Raises:
        LoadedInPartError: the step cannot be loaded, and is removed, so that the next start does not meet it again.
    """
    folder = checkpoint_folder(config)
    local = CheckpointGroup("node_local", run.host_group, run.events)
    disk = CheckpointGroup(config.megasdc.checkpoint.storage, run.host_group, run.events)
    try:
        hooks = _load(run, config, chosen, local, study, lambda: quarantine(folder, on_disk, disk))
    except LoadedInPartError as error:
        remove_step(run, held)
        if run.dims.rank == 0:
            run.events.emit("skip", "memory", step=held.step, reason=str(error))
        raise LoadedInPartError(f"{error}; it is removed from memory: start the run again") from error
    discard_other_steps(config, run, held)
    if on_disk is not None:
        run.skipped_checkpoint_steps |= set(on_disk.skipped) - set(on_disk.candidates)
    if run.dims.rank == 0:
        step = on_disk.step if isinstance(on_disk, SelectedCheckpoint) else None
        run.events.emit("resume", "memory", step=run.step, origin=held.origin, disk_step=step)
        than = "there is none on the disk" if step is None else f"the newest on the disk is of step {step}"
        logger.info("resumed from step %d in %s; %s", run.step, held.origin, than)
    return hooks


def _load(
    run: Run,
    config: RunConfig,
    found: SelectedCheckpoint,
    ranks: CheckpointGroup,
    study: StudySection | None,
    leave: Callable[[], object],
) -> dict[str, Any]:
    """Load a checkpoint of any layout and restore everything besides the engine; returns hooks' states by their names.

    The random generators go on where the layout is the same, and are seeded by ``seed_generators`` where it is another.

    Args:
        leave: called once the checkpoint is loaded, to quarantine others.
    """
    layout, started = found.manifest.layout, time.monotonic()
    is_same = layout == Layout.of(run.dims)
    changed = ChangedSettings(run.engine, config, study if is_same else None)

    def check(saved: dict[str, Any]) -> None:
        changed.check(saved, layout.data, universal=not is_same)
        _move_loader(run, config, saved)
        if not is_same:
            _check_tokenizer(config, saved)

    loaded = load_checkpoint(run.engine, found, run.dims, ranks, check=check)
    leave()
    seconds = time.monotonic() - started
    run.skipped_checkpoint_steps = set(found.skipped) - set(found.candidates)
    hooks = _carry_over(run, config, changed, loaded.shared_state, loaded.rank_state)
    if run.dims.rank == 0:
        dropped = cut_back(run.folder, run.step)
        run.events.emit("resume", "metrics_cut_back", step=run.step, lines=dropped)
        if is_same:
            logger.info("resumed from %s", found.path)
            log_other_versions(run, found.manifest.versions)
        else:
            logger.info("resumed from %s, saved with %s; read in %.1f s", found.path, layout, seconds)
            fields: dict[str, Any] = {"saved_layout": str(layout), "layout": str(run.dims), "seconds": seconds}
            run.events.emit("resume", "other_layout", step=run.step, path=str(found.path), **fields)
        log_quantized(run, found.manifest.quantized_moments_bits)
    return hooks


def start_from_universal(run: Run, config: RunConfig, folder: str) -> dict[str, Any]:
    """Continue a run that was saved at any layout; returns states of the hooks by their names.

    Weights, moments, learning rate schedule and counters are restored. The data continue with any number of replicas,
    micro-batch and global batch: first the samples that only some replicas had consumed, then the rest of the stream.
    The random generators are seeded by ``seed_generators``. The run is at step 0, on return at the step loaded.

    Raises:
        CheckpointError: it is damaged or of another model, or something in it cannot be carried over and is not named
            in ``checkpoint.universal_without``; on all ranks.
    """
    section = config.megasdc.checkpoint
    without = section.universal_without
    found = open_universal(folder, CheckpointGroup(section.storage, run.host_group), verify=section.verify)
    changed = ChangedSettings(run.engine, config, None)

    def check(saved: dict[str, Any]) -> None:
        changed.check(saved, found.manifest.source_layout.data, universal=True)
        _check_tokenizer(config, saved)
        try:
            if "loader" not in without:
                if wrong := find_wrong_place(saved):
                    raise CheckpointError(wrong)
                _move_loader(run, config, saved)
        except CheckpointError as error:
            hint = 'or name "loader" in megasdc.checkpoint.universal_without to start again at the first sample'
            raise CheckpointError(f"{error}; {hint}") from error

    load_universal(run.engine, found, run.dims, check=check)
    state = found.shared_state
    begun_again = {"uncounted_samples": -state["samples"]} if "loader" in without else {}
    hooks = _carry_over(run, config, changed, {**state, **begun_again}, {})
    if run.dims.rank == 0:
        _report_universal(run, config, found)
    return {} if "hooks" in without else hooks


def _move_loader(run: Run, config: RunConfig, saved: dict[str, Any]) -> None:
    """Continue the data where a shared state says; CheckpointError if they are other data."""
    run.loader.move_to(saved["loader"])
    check_skipped_samples(saved, config)


def _check_tokenizer(config: RunConfig, saved: dict[str, Any]) -> None:
    """CheckpointError if the data were prepared with another tokenizer than those of a shared state."""
    data = config.megasdc.data.path
    before, now = saved.get("tokenizer_checksum"), DataManifest.load(data).tokenizer.checksum
    if before not in (None, now):
        raise CheckpointError(
            f"it was trained with a tokenizer of checksum {before}, {data} was prepared with {now}; give data of the "
            "same tokenizer"
        )


def _carry_over(
    run: Run, config: RunConfig, changed: ChangedSettings, state: dict[str, Any], rank_state: dict[str, Any]
) -> dict[str, Any]:
    """Restore what every resume carries over besides engine and loader; returns states of the hooks by their names.

    Args:
        state: shared state of the checkpoint.
        rank_state: this rank's own; empty: another layout saved, and the random generators are seeded anew.
    """
    restore_counters(run, state)
    prolong_stream(run)
    if rank_state:
        restore_rng(rank_state["rng"])
    else:
        seed_generators(config.megasdc.training.seed, run.step, run.dims.rank)
    changed.apply(run)
    hooks = changed.hook_states(state["hooks"])
    if AGREED_WEIGHTS in rank_state and LOCAL_SGD in hooks:
        hooks = {**hooks, LOCAL_SGD: {**hooks[LOCAL_SGD], AGREED_WEIGHTS: rank_state[AGREED_WEIGHTS]}}
    return hooks


def _report_universal(run: Run, config: RunConfig, found: OpenUniversal) -> None:
    """Write the event and log lines of a start from a universal checkpoint; call on rank 0."""
    manifest, without = found.manifest, config.megasdc.checkpoint.universal_without
    batch, saved_batch = run.engine.samples_per_step, found.shared_state["config"].get("train_batch_size")
    run.events.emit(
        "resume",
        "universal",
        step=run.step,
        path=str(found.path),
        source=manifest.source,
        saved_layout=str(manifest.source_layout),
        layout=str(run.dims),
        without=list(without),
        precision=manifest.precision,
        global_batch=batch,
        saved_global_batch=saved_batch,
    )
    logger.info("continuing from step %d of %s, saved at %s", run.step, found.path, manifest.source_layout)
    log_quantized(run, manifest.quantized_moments_bits)
    if run.step >= run.steps:
        run.events.emit("resume", "no_steps_left", step=run.step, steps=run.steps)
        logger.warning(
            "no steps are left: %s is at step %d, megasdc.training.steps is %d; nothing is trained, and no checkpoint "
            "is written at this layout; raise megasdc.training.steps to continue",
            found.path,
            run.step,
            run.steps,
        )
    if "loader" in without:
        logger.warning("the data starts again at its first sample: megasdc.checkpoint.universal_without has loader")
    if "hooks" in without:
        logger.warning("hooks start without their states: megasdc.checkpoint.universal_without has hooks")
    if saved_batch not in (None, "auto", batch):
        logger.warning("the global batch was %s samples and is %d now; the schedule counts steps", saved_batch, batch)


def restore_counters(run: Run, state: dict[str, Any]) -> None:
    """Restore step, tokens, samples, skipped steps and the last finite step from a shared state."""
    run.progress.step, run.progress.tokens, run.progress.samples = state["step"], state["tokens"], state["samples"]
    run.progress.uncounted_samples = _uncounted(run, state)
    run.progress.skipped_steps = state["skipped_steps"]
    run.progress.finite_step = state.get("finite_step", state["step"])  # a checkpoint of an earlier version has none


def _uncounted(run: Run, state: dict[str, Any]) -> int:
    """Number of samples that were given up; from the places in the data, where an earlier version saved without it."""
    known = state.get("uncounted_samples")
    if known is None:
        known = uncounted_samples(state)
        if run.dims.rank == 0:
            run.events.emit("resume", "place_not_known", step=state["step"], samples=state["samples"], uncounted=known)
            logger.info("an earlier version saved step %d: its place in the data cannot be compared", state["step"])
    return int(known)


def prolong_stream(run: Run) -> None:
    """Extend the stream to the run's end, also where earlier steps took more samples than this run's do."""
    own = max(0, run.steps - run.step) * run.engine.train_batch_size() // run.dims.data
    run.loader.extend(own)


def check_skipped_samples(saved: dict[str, Any], config: RunConfig) -> None:
    """Refuse ranges of samples to skip that have changed before the position of a checkpoint.

    Args:
        saved: shared state of the checkpoint.

    Raises:
        CheckpointError: some ranges have changed.
    """
    then, now = saved["config"]["megasdc"]["data"].get("skip", []), config.megasdc.data.skip
    end = stream_end(saved["loader"])
    before = [[[first, min(last, end)] for first, last in ranges if first < end] for ranges in (then, now)]
    if before[0] != before[1]:
        raise CheckpointError(
            f"megasdc.data.skip is {now}, and was {then} when the checkpoint of step {saved['step']} was saved, which "
            f"is past all samples before {end}: set what was before {end} again, or resume from an earlier checkpoint "
            "with megasdc.checkpoint.resume_at_most"
        )


def log_other_versions(run: Run, saved: dict[str, str]) -> None:
    """Warn that the checkpoint was saved by other versions, so results may differ in their bits."""
    here = installed_versions()
    other = {
        name: [version, here[name]] for name, version in sorted(saved.items()) if here.get(name, version) != version
    }
    if other:
        text = "; ".join(f"{name} {then}, here {now}" for name, (then, now) in other.items())
        run.events.emit("resume", "other_versions", step=run.step, versions=other)
        logger.warning("saved with %s: from here on results may be rounded differently than with those versions", text)


def log_quantized(run: Run, bits: int | None) -> None:
    """Warn that the optimizer's moments were quantized to ``bits`` since they were saved; None: they were not."""
    if bits is not None:
        run.events.emit("resume", "quantized_moments", step=run.step, bits=bits)
        logger.warning(
            "the optimizer's moments were quantized to %d bits in the archive: the run does not continue bit for bit",
            bits,
        )


class ChangedSettings:
    """Finds settings changed since a checkpoint was saved, and applies them to a new engine with nothing loaded."""

    def __init__(self, engine: TrainingEngine, config: RunConfig, study: StudySection | None) -> None:
        self._config = config
        if study is not None:
            self._config = replace(config, megasdc=config.megasdc.model_copy(update={"study": study}))
        self._in_study = study is not None
        self._data = engine.dims.data
        optimizer = engine.optimizer
        self._groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._clip = optimizer.clip_grad
        self._scaler: Any = getattr(optimizer, "loss_scaler", None)
        self.changes: list[ChangedField] = []

    def check(self, saved: Mapping[str, Any], data: int, *, universal: bool = False) -> None:
        """Find changes since the shared state ``saved`` by ``data`` replicas; refuse those that are not allowed.

        ``universal``: a new run begins from a universal checkpoint.

        Raises:
            CheckpointError: some changes are not allowed; all of these are named, with the remedy.
        """
        file = dict(saved["config"])
        if self._in_study and saved.get("study") is not None:
            file["megasdc"] = {**file["megasdc"], "study": saved["study"]}
        changes = find_changes(file, self._config, data, self._data)
        if self._in_study and saved.get("study") is None:  # saved by a version that did not store it
            changes = [change for change in changes if not change.path.startswith("megasdc.study.")]
        if refused := [change for change in changes if not may_change(change, self._config.allow_changed, universal)]:
            raise CheckpointError(explain_refusal(refused))
        self.changes = changes

    def apply(self, run: Run) -> None:
        """Apply the changes from the next step on, and report them; call when the checkpoint is loaded."""
        paths = {change.path for change in self.changes}
        optimizer = run.engine.optimizer
        for name in (path.removeprefix(_PARAMS) for path in paths if path.startswith(_PARAMS)):
            for group, fresh in zip(optimizer.param_groups, self._groups, strict=True):
                if name in fresh and name != "lr":
                    group[name] = fresh[name]
        if f"{_PARAMS}fused" in paths:
            place_steps(optimizer.optimizer)
        if "gradient_clipping" in paths:
            optimizer.clip_grad = self._clip
        if any(path.startswith("fp16.") for path in paths):
            rescale(optimizer, self._scaler)
        if f"{_PARAMS}lr" in paths or any(path.startswith("scheduler.") for path in paths):
            _set_rates(run.engine)
        if run.dims.rank == 0:
            self._report(run)

    def _report(self, run: Run) -> None:
        for change in self.changes:
            flagged = change.at_resume == "flag"
            say: Callable[..., None] = logger.warning if flagged else logger.info
            say("%s, from step %d on", change, run.step + 1)
            run.events.emit(
                "resume", "changed", step=run.step, path=change.path, old=change.old, new=change.new, flag=flagged
            )

    def hook_states(self, states: dict[str, Any]) -> dict[str, Any]:
        """Hooks' states to load, by their names; DropCompute's threshold is chosen anew if settings for it changed."""
        paths = {change.path for change in self.changes}
        drops = {path for path in paths if path.startswith("megasdc.drop_compute.")}
        told_only = {"megasdc.drop_compute.record_times", "megasdc.drop_compute.check_agreement"}
        if "DropCompute" not in states or not (drops - told_only or paths & set(_BATCH)):
            return states
        return {**states, "DropCompute": {**states["DropCompute"], **_UNMEASURED}}


def rescale(optimizer: Any, fresh: Any) -> None:
    """Give the loss scaler that was loaded the settings of a fresh one; the scale is kept where both are dynamic."""
    loaded = optimizer.loss_scaler
    if not (loaded.dynamic and fresh.dynamic):
        optimizer.loss_scaler, optimizer.dynamic_loss_scale = fresh, fresh.dynamic
        return
    for name in ("scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"):
        setattr(loaded, name, getattr(fresh, name))
    loaded.cur_hysteresis = min(loaded.cur_hysteresis, loaded.delayed_shift)
    loaded.cur_scale = max(loaded.cur_scale, loaded.min_scale)


def _set_rates(engine: TrainingEngine) -> None:
    """Set the next step's learning rate from the new schedule; the saved one is of the saved schedule."""
    scheduler = engine.lr_scheduler
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_lr(), strict=True):
        group["lr"] = rate
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
