"""A run from its configuration, in the order of the start: groups, locks on its folders, engine, data, resume, hooks.

A ``Start`` is what hooks are built from, by ``megasdc.features``, which adds what the storeys above the core have. The
folders of a launch are locked on every host before anything there is read or changed.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megasdc.checkpoint.files import Fence
from megasdc.checkpoint.manifest import installed_versions
from megasdc.common.durable import wait_for_room, write_durably
from megasdc.common.errors import ConfigError, MegasdcError, StorageError, error_of_rank
from megasdc.common.origin import CONFIG_FILE, LAUNCH_ID_VARIABLE, Origin, count_start
from megasdc.common.run_lock import (
    ENDED_LAUNCHES_VARIABLE,
    STALE_S,
    Holder,
    LockedFolders,
    RunLock,
    acquire_lock,
    join_lock,
)
from megasdc.common.versions import component_versions, untested_versions
from megasdc.config.checks import BatchLayout, check_layout, own_faults, replica_config
from megasdc.config.contradictions import detects
from megasdc.config.data import DataSection
from megasdc.config.load import RunConfig
from megasdc.config.sections import MegasdcSection, ParallelSection, StudySection
from megasdc.data.dataset import TokenDataset, build_datasets, verify_section_data
from megasdc.data.loader import EvalLoader, MicroBatch, MicroBatchLoader, StepBatches, StreamShare
from megasdc.data.manifest import DataManifest, unchecked
from megasdc.data.position import Order, Position
from megasdc.determinism import set_deterministic
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run, RunProgress
from megasdc.engine.step_times import TimeSplit
from megasdc.events import EventLog
from megasdc.model.fused import require_compiler
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims, ReplicaWorld
from megasdc.parallel.groups import device_uuid
from megasdc.parallel.rendezvous import AskedRanks
from megasdc.train.build_engine import build_training_engine, check_memory_here
from megasdc.train.checkpointer import checkpoint_folder
from megasdc.train.isolation import SurvivingRanks
from megasdc.train.process import StartClock, prepare_cpu
from megasdc.train.report import FILE_SINKS, replica_of, sink_folder
from megasdc.train.resume import resume
from megasdc.train.signals import StopSignals

if TYPE_CHECKING:
    from megasdc.faults.delay import DelayReport
    from megasdc.faults.injector import Injector
    from megasdc.faults.process import ProcessFaults


class SharedLaunch(Protocol):
    """Part of a rank in a launch of several whole runs, the replicas of a study.

    Attributes:
        section: the study's section of the configuration.
        world: place of this rank in the launch.
        folder: the launch's folder.
        store: key-value store of all ranks of the launch; valid once they have met.
    """

    section: StudySection
    world: ReplicaWorld
    folder: Path

    @property
    def store(self) -> Any:
        """Key-value store of all ranks of the launch; valid once they have met."""

    def meet(self, section: ParallelSection, on_met: Callable[[], None]) -> None:
        """Join the process group of this rank's run, and connect to the ranks at the same place of the others.

        Collective: all ranks of the launch.
        """

    def agree_on_checkpoint(self, step: int) -> int | None:
        """Compare the step of the checkpoint that each run has found, 0: none; returns None if all are equal, else the
        earliest, from which each run searches again.

        Collective: the ranks of equal place in all runs.
        """


@dataclass(frozen=True)
class Injection:
    """Fault injection of a run: faults in tensors, faults in this rank's process, and delays; None: not configured."""

    injector: Injector | None
    process_faults: ProcessFaults | None
    delays: DelayReport | None


@dataclass(frozen=True)
class Start:
    """Objects that hooks are built from: a run at the step from which it continues, without hooks, and its services.

    Attributes:
        manifest: manifest of the training data.
        eval_loader: loader of the evaluation data; None: the run does not evaluate.
        batches: store of a step's micro-batches, for checks that read them again; None: no check does.
        split: time of a step by part, on rank 0; None on other ranks.
        locks: locks on the run's folders.
        fence: fence of the folder of checkpoints, by this launch's token.
        remaining: the ranks that are left of the launch; None: all.
        shared: this rank's part in the launch of a study; None: the run is not of a study.
    """

    config: RunConfig
    run: Run
    manifest: DataManifest
    eval_loader: EvalLoader | None
    batches: StepBatches | None
    split: TimeSplit | None
    clock: StartClock
    signals: StopSignals
    injection: Injection
    locks: Sequence[RunLock]
    fence: Fence
    remaining: SurvivingRanks | None
    shared: SharedLaunch | None

    @property
    def sections(self) -> MegasdcSection:
        """The configuration's own sections."""
        return self.config.megasdc


@dataclass(frozen=True)
class Features:
    """Features that an entry point adds to the core.

    Attributes:
        build_hooks: makes the hooks of a run, in the order in which they are called. All ranks of the world call it.
        share_launch: makes this rank's part in a launch of several runs, from the study, its place and the folder of
            the launch.
    """

    build_hooks: Callable[[Start], list[Hook]]
    share_launch: Callable[[StudySection, ReplicaWorld, Path], SharedLaunch]


logger = logging.getLogger(__name__)


def build_run(
    config: RunConfig,
    clock: StartClock,
    signals: StopSignals,
    held: LockedFolders,
    features: Features,
    world: ReplicaWorld | None = None,
    remaining: SurvivingRanks | None = None,
) -> Run:
    """Build everything that a training rank needs, and resume from a checkpoint where there is one.

    Args:
        clock: records the end of each part of the start.
        signals: stop signals received by this rank since it started.
        held: gets the folders that this rank locks; they are released when the run has ended.
        features: features that are added to the core.
        world: place of this rank in a launch of several replicas; None without a study.
        remaining: the ranks that are left of the launch; None: all.

    Returns:
        The run with its hooks, at the step from which it continues.

    Raises:
        MegasdcError: the run cannot start; each cause has its own subclass.

    Collective: all ranks of the world.
    """
    clock.mark("imports")
    place = _place(config, world, features)
    config, sections = place.config, place.config.megasdc
    layout, manifests = _check_host(config, None if remaining is None else remaining.launch_size)
    clock.mark("checks")
    _meet(place, signals)
    shared = place.shared
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, sections.parallel.timeout_s)
    clock.mark("groups")
    launch = (dims.rank, dims.world_size) if world is None else (world.launch_rank, world.launch_size)
    store = groups.default_store() if shared is None else shared.store
    folders = _own_folders(place.whole)
    locks = lock_folders(folders, store, *launch, sections.parallel.timeout_s, held)
    assert held.token is not None, "the folders are held"
    fence = Fence(folders[-1], held.token)
    held.origin = _count_start(sections, dims.rank)
    events = EventLog(Path(sections.logging.run_dir), dims.rank, held.origin)
    if dims.rank == 0:
        _report_start(events, dims, speaks=launch[0] == 0, remaining=remaining)
        _report_unchecked(sections.data, manifests, events)
    engine = build_training_engine(config, layout, dims, manifests[0].tokenizer.vocab_size, clock)
    loader, eval_loader = _build_loaders(config, layout, dims, manifests, events)
    clock.mark("data")
    split = TimeSplit(engine.device) if dims.rank == 0 else None
    run, kept = _assemble(config, engine, loader, events, split, remaining)
    injection = _build_injection(sections, run)
    agree, study = (None, None) if shared is None else (shared.agree_on_checkpoint, shared.section)
    hook_states = resume(run, config, agree, study)
    _deal_from_here(run)
    if dims.rank == 0:  # only now: a refused resume must not change the run folder
        _write_resolved(place)
    clock.mark("resume")
    run.hooks = features.build_hooks(
        Start(
            config=config,
            run=run,
            manifest=manifests[0],
            eval_loader=eval_loader,
            batches=kept,
            split=split,
            clock=clock,
            signals=signals,
            injection=injection,
            locks=locks,
            fence=fence,
            remaining=remaining,
            shared=shared,
        )
    )
    _load_hooks(run, hook_states)
    return run


@dataclass(frozen=True)
class _Place:
    """Configurations of this rank's run (``config``) and of the launch (``whole``), which differ in a study."""

    config: RunConfig
    whole: RunConfig
    shared: SharedLaunch | None


def _place(whole: RunConfig, world: ReplicaWorld | None, features: Features) -> _Place:
    if whole.megasdc.model.fuse:
        require_compiler("cuda" if torch.cuda.is_available() else "cpu")
    if world is None:
        return _Place(whole, whole, None)
    folder = prepare_run_folder(Path(whole.megasdc.logging.run_dir))
    return _Place(
        replica_config(whole, world.replica), whole, features.share_launch(whole.megasdc.study, world, folder)
    )


def _check_host(config: RunConfig, launch_size: int | None) -> tuple[BatchLayout, list[DataManifest]]:
    """Check layout, data, memory and folders, and prepare this process; returns the layout and the data's manifests."""
    sections = config.megasdc
    layout = check_layout(config, int(os.environ.get("WORLD_SIZE", "1")), launch_size)
    manifests = verify_section_data(sections.data)
    check_memory_here(config, layout, manifests[0].tokenizer.vocab_size)
    prepare_run_folder(Path(sections.logging.run_dir))
    if int(os.environ.get("RANK", "0")) == 0:
        prepare_sink_folders(config.deepspeed, replica_of(config))
    prepare_cpu(sections.parallel.threads)
    set_deterministic(sections.determinism)
    return layout, manifests


def _meet(place: _Place, signals: StopSignals) -> None:
    """Join the process group of this run, and in a study the other replicas.

    Collective: all ranks of the launch.
    """
    section, shared = place.config.megasdc.parallel, place.shared
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if shared is not None:
        rank, size = shared.world.launch_rank, shared.world.launch_size
    on_met = (lambda: None) if signals.start is None else partial(signals.start.met, AskedRanks(rank, size))
    if shared is not None:
        shared.meet(section, on_met)
        return
    groups.init_process_group(
        section.timeout_s,
        run_dir=place.config.megasdc.logging.run_dir,
        on_met=on_met,
        share_devices=section.share_devices,
    )


def _count_start(sections: MegasdcSection, rank: int) -> Origin:
    """Count this start in the run folder of rank 0, and return the origin of this rank's events.

    Raises:
        ConfigError: ranks have other words `protect`, which a host without the run folder cannot know; on all ranks.
        StorageError: the count is damaged or cannot be written; on all ranks.

    Collective: all ranks of the run.
    """
    identity, problem, folder = None, "", Path(sections.logging.run_dir)
    if rank == 0:
        try:
            identity = count_start(folder)
        except StorageError as error:
            problem = str(error)
    gathered = gather_objects((identity, problem, sections.protect))
    identity, problem, word = gathered[0]
    if others := [number for number, (_, _, one) in enumerate(gathered) if one != word]:
        told = f"megasdc.protect: is {word} on rank 0, and {gathered[others[0]][2]} on rank {others[0]}"
        remedy = f"start all ranks with --set megasdc.protect={word}, or give the file the word"
        why = f"the run in {folder} goes on with its word, which a host without that folder cannot know"
        raise ConfigError([f"{told}; {why}; {remedy}."])
    if identity is None:
        raise StorageError(problem)
    return Origin(identity.run, identity.attempt, device_uuid())


def _report_start(events: EventLog, dims: ParallelDims, *, speaks: bool, remaining: SurvivingRanks | None) -> None:
    """Write the events of a start; where ``speaks``, untested versions are logged, too."""
    events.emit("start", "run", layout=dims.layout, world_size=dims.world_size, versions=installed_versions())
    _report_untested(events, speaks)
    if remaining is not None:
        remaining.report(events, dims.data)


def _report_untested(events: EventLog, speaks: bool) -> None:
    """Write the event ``start/untested_versions``, and with ``speaks`` log a warning, for untested versions."""
    versions = component_versions()
    warning = untested_versions(versions, torch.cuda.is_available())
    if warning is None:
        return
    events.emit("start", "untested_versions", versions=versions, message=warning)
    if speaks:
        logger.warning("%s", warning)


def _load_hooks(run: Run, states: dict[str, Any]) -> None:
    """Restore the states of hooks.

    Unused and missing states are reported: a section was turned off or on, or a hook was renamed.
    """
    left = {name: state for name, state in states.items() if state}
    stateful = {hook.saved_as for hook in run.hooks if hook.saved_as}
    for hook in run.hooks:
        if hook.saved_as and (state := left.pop(hook.saved_as, None)):
            hook.load_state_dict(state)
    if left and run.dims.rank == 0:
        names = ", ".join(sorted(left))
        logger.warning(
            "the checkpoint holds states of %s, which this run does not have: its next checkpoint will not hold them; "
            "enable their sections of the configuration to keep them",
            names,
        )
        run.events.emit("resume", "hook_states_unused", step=run.step, hooks=sorted(left))
    new = sorted(stateful - states.keys()) if states else []
    if new and run.dims.rank == 0:
        logger.warning("the checkpoint holds no states of %s, which start as in a new run", ", ".join(new))
        run.events.emit("resume", "hook_states_missing", step=run.step, hooks=new)


def _assemble(
    config: RunConfig,
    engine: TrainingEngine,
    loader: MicroBatchLoader,
    events: EventLog,
    split: TimeSplit | None,
    remaining: SurvivingRanks | None,
) -> tuple[Run, StepBatches | None]:
    """Make the run without its hooks, and the store of a step's micro-batches; None: no check reads them again."""
    sections = config.megasdc
    host_group = dist.new_group(backend="gloo") if torch.cuda.is_available() else dist.group.WORLD
    groups.set_all_timeouts(sections.parallel.timeout_s)
    batches: Iterator[MicroBatch] = loader if split is None else split.watch(loader)
    kept = StepBatches(loader, batches) if detects(sections) else None
    run = Run(
        folder=Path(sections.logging.run_dir),
        dims=engine.dims,
        engine=engine,
        loader=loader,
        batches=batches if kept is None else kept,
        events=events,
        host_group=host_group,
        progress=RunProgress(sections.training.steps),
        initial_dims=None if remaining is None else remaining.place_of(engine.dims),
    )
    return run, kept


def _deal_from_here(run: Run) -> None:
    """Where replicas take different numbers of micro-batches, begin with the first that this order of samples has."""
    deal = run.engine.deal
    if deal is None:
        return
    run.engine.deal = replace(deal, before=run.loader.position.order.before // run.loader.micro_batch_size)
    if run.dims.rank == 0:
        least, more = divmod(deal.micro_batches, deal.replicas)
        logger.info(
            "%d micro-batches of a step on %d replicas: %d take %d and the others %d, others in each step",
            *(deal.micro_batches, deal.replicas, more, least + 1, least),
        )


def _build_loaders(
    config: RunConfig, layout: BatchLayout, dims: ParallelDims, manifests: list[DataManifest], events: EventLog
) -> tuple[MicroBatchLoader, EvalLoader | None]:
    sections = config.megasdc
    eval_samples = sections.training.eval_samples if sections.training.eval_interval else 0
    replicas = sections.local_sgd.replicas or 1
    train, valid = build_datasets(
        sections.data,
        manifests[0].tokenizer.vocab_size,
        sections.training.steps * layout.train_batch_size * replicas,
        eval_samples,
        manifests=manifests,
        on_damage=lambda folder, problem: events.emit("data", "index_rebuilt", folder=str(folder), problem=problem),
    )
    epoch = train.samples_per_epoch if isinstance(train, TokenDataset) and replicas == 1 else None
    loader = MicroBatchLoader(
        train if replicas == 1 else StreamShare(train, sections.local_sgd.replica, replicas),
        layout.micro_batch_size,
        dims.dp_rank,
        dims.data,
        samples_per_epoch=epoch,
        position=Position(order=Order(together=layout.dealt_together)),
        skip=[range(first, end) for first, end in sections.data.skip],
    )
    if sections.data.skip and dims.rank == 0:
        logger.warning("samples of the stream that are never trained on: %s (megasdc.data.skip)", sections.data.skip)
        events.emit("skip", "samples", ranges=sections.data.skip)
    if valid is None:
        return loader, None
    return loader, EvalLoader(valid, layout.micro_batch_size, dims.dp_rank, dims.data, eval_samples)


def _report_unchecked(section: DataSection, manifests: list[DataManifest], events: EventLog) -> None:
    for folder, manifest in zip(section.folders, manifests, strict=True):
        if text := unchecked(folder, manifest):
            logger.warning("%s", text)
            events.emit("data", "unchecked", folder=folder, format_version=manifest.format_version)


def prepare_sink_folders(deepspeed: dict[str, Any], replica: int | None = None) -> None:
    """Create the folders of sinks that write files; call on rank 0. StorageError: one cannot be written."""
    for key in FILE_SINKS:
        if (folder := sink_folder(deepspeed, key, replica)) is not None:
            prepare_run_folder(folder, f"{key}.output_path")


def prepare_run_folder(folder: Path, field: str = "megasdc.logging.run_dir") -> Path:
    """Create a folder of the run.

    Args:
        field: its configuration field, for the message.

    Raises:
        StorageError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(f"{field}: {folder} is not writable ({error.strerror}); choose another folder") from error
    return folder


def _own_folders(config: RunConfig) -> list[Path]:
    """The folders that a launch locks; one inside the other is locked with it."""
    folder, checkpoints = Path(config.megasdc.logging.run_dir), checkpoint_folder(config)
    inside = checkpoints.resolve().is_relative_to(folder.resolve())
    return [folder] if inside else [folder, checkpoints]


def _build_injection(sections: MegasdcSection, run: Run) -> Injection:
    if not (sections.faults or sections.process_faults or sections.delay):
        return Injection(None, None, None)
    from megasdc.faults.delay import DelayReport
    from megasdc.faults.drill import build_injector, build_process_faults

    own, first = own_faults(sections, run.dims.data), sections.local_sgd.replica * run.dims.data
    return Injection(
        build_injector(own, run),
        build_process_faults(own, run),
        DelayReport(sections.delay, sections.logging.interval, run, first) if sections.delay else None,
    )


def _write_resolved(place: _Place) -> None:
    """Write the configuration into the run's folder, and the launch's into that of the study."""
    configs = {Path(place.config.megasdc.logging.run_dir): place.config}
    if place.shared is not None and place.shared.world.launch_rank == 0:
        configs[place.shared.folder] = place.whole
    for folder, config in configs.items():
        write_durably(folder / CONFIG_FILE, json.dumps(config.resolved(), indent=2) + "\n")


def lock_folders(
    folders: Sequence[Path], store: dist.Store, rank: int, world_size: int, timeout_s: float, held: LockedFolders
) -> list[RunLock]:
    """Lock the folders of a launch and return this rank's locks, or end all ranks with one error that names the holder.

    Rank 0 takes the locks. A rank that sees them held by its own launch shares them; else, with folders local to each
    node, the first rank of a host locks that host's.

    Folders are created if absent. ``timeout_s``: seconds to wait for another rank, besides the time that it may watch a
    lock of another host. ``held`` gets this rank's locks and the launch's token.

    Raises:
        LaunchError: another launch holds a folder; on all ranks.
        StorageError: a folder cannot be written; on all ranks.

    Collective: all ranks of the launch.
    """
    call = store.add(f"run_lock/calls of {rank}", 1)  # in one process there may be several with one store
    store = dist.PrefixStore(f"run_lock/{call}", store)
    wait = datetime.timedelta(seconds=timeout_s + 2 * STALE_S * len(folders))
    if rank == 0:
        held.token = token = secrets.token_hex(8)
        locks, refusal = _try_all(folders, _holder(token), acquire_lock, held)
        store.set("first", json.dumps({"token": token, "refusal": refusal}))
        refusals = [refusal, *(_get(store, f"rank_{other}", wait) for other in range(1, world_size) if not refusal)]
        verdict = next((text for text in refusals if text), "")
        store.set("verdict", verdict)
    else:
        first = json.loads(_get(store, "first", wait))
        held.token = token = first["token"]
        locks, refusal = [], first["refusal"]
        if not refusal:
            locks, refusal = _try_all(folders, _holder(token), join_lock, held)
            store.set(f"rank_{rank}", refusal)
        verdict = refusal or _get(store, "verdict", wait)
    if verdict:
        found = json.loads(verdict)
        raise error_of_rank(found["exit_code"])(found["message"])
    for lock in locks:
        if lock.replaced is not None:
            logger.warning("%s: took over the lock that %s did not release", lock.folder, lock.replaced)
    return locks


def _holder(token: str) -> Holder:
    return Holder.this_process(token, os.environ.get(LAUNCH_ID_VARIABLE))


def _try_all(
    folders: Sequence[Path],
    holder: Holder,
    hold: Callable[[Path, Holder, Callable[[str], None], Collection[str]], RunLock | None],
    held: LockedFolders,
) -> tuple[list[RunLock], str]:
    """Lock every folder; returns the locks, and why a folder could not be locked as a text, empty on success."""
    locks = []
    ended = os.environ.get(ENDED_LAUNCHES_VARIABLE, "").split(",")
    try:
        for folder in folders:
            wait_for_room(partial(folder.mkdir, parents=True, exist_ok=True), folder, logger.warning)
            lock = wait_for_room(partial(hold, folder, holder, logger.warning, ended), folder, logger.warning)
            if lock is not None:
                held.add(lock)
                locks.append(lock)
    except MegasdcError as error:
        return locks, json.dumps({"exit_code": error.exit_code, "message": str(error)})
    except OSError as error:
        problem = StorageError(f"{error.filename or folders[0]} cannot be written: {error.strerror}")
        return locks, json.dumps({"exit_code": problem.exit_code, "message": str(problem)})
    return locks, ""


def _get(store: dist.Store, key: str, wait: datetime.timedelta) -> str:
    store.wait([key], wait)
    return store.get(key).decode()
