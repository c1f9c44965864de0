"""Fault drill: installation of a run's injected faults, and their reports during and after it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.checkpoint.manifest import read_manifest
from megasdc.config.faults import CHECKPOINT, TOKENS, ProcessFaultSpec, expand_faults
from megasdc.config.sections import MegasdcSection
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.observer import Watch
from megasdc.events import EventLog, read_events
from megasdc.faults.injector import Firing, Injector, faulty_submodules, why_unfired
from megasdc.faults.process import ProcessFaults
from megasdc.faults.stored import FaultyBatches, inject_into_file
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

EVENT_KIND = "fault"


def build_injector(sections: MegasdcSection, run: Run) -> Injector | None:
    """Build the run's fault injection, and install it in the token stream where faults are to be there.

    Returns:
        None without ``faults``; then the run is not changed.
    """
    if not sections.faults:
        return None
    injector = Injector(
        expand_faults(sections.faults),
        run.launch_dims,
        sections.model.hidden_size,
        lambda firing: _emit(run.events, firing),
        vocab_size=run.loader.dataset.vocab_size,
    )
    if injector.wants(TOKENS):
        run.batches = FaultyBatches(run.batches, injector, run.engine)
    return injector


def build_process_faults(sections: MegasdcSection, run: Run) -> ProcessFaults | None:
    """Build this rank's process faults; None without ``process_faults``."""
    if not sections.process_faults:
        return None
    names = dict(enumerate(spec.model_dump_json() for spec in sections.process_faults))
    told = {
        event.fields["spec"]
        for event in read_events(run.folder, kind=EVENT_KIND, name="process", rank=run.launch_dims.rank)
        if event.fields["as_configured"] == names.get(event.fields["spec"])
    }

    def emit(index: int, spec: ProcessFaultSpec, step: int, micro_batch: int | None) -> None:
        said = {"spec": index, "fault": spec.kind, "phase": spec.phase, "as_configured": names[index]}
        run.events.emit(EVENT_KIND, "process", step=step, micro_batch=micro_batch, **said)

    return ProcessFaults(sections.process_faults, run.launch_dims, emit, fired_before=told)


def _emit(events: EventLog, firing: Firing) -> None:
    address = firing.address
    events.emit(EVENT_KIND, "injected", step=address.step, micro_batch=address.micro_batch, **firing.fields())


def armed_text(faults: int, process_ranks: int) -> str:
    """Text on the armed faults, for messages: those in results and states, and ranks whose process is to fail."""
    results = f"{faults or 'no'} fault{'' if faults == 1 else 's'} in results and states"
    ranks = f"{process_ranks} rank{'' if process_ranks == 1 else 's'}"
    return f"{results}, {f'processes of {ranks}' if process_ranks else 'none in processes'}"


class FaultDrill(Hook):
    """Warns that faults are armed, damages saved checkpoints, saves what has fired, and reports what never did.

    ``group``: a host group of all ranks.
    """

    saved_as = "FaultDrill"

    def __init__(self, injector: Injector | None, process: ProcessFaults | None, checkpoints: Path, group: Any) -> None:
        self._injector = injector
        self._process = process
        self._checkpoints = checkpoints
        self._group = group

    def on_start(self, run: Run) -> None:
        """Warn that faults are armed, where some are."""
        count = len(self._injector.specs) if self._injector is not None else 0
        on_ranks = gather_objects(self._process is not None and self._process.armed, self._group)
        if run.dims.rank == 0:
            if count or any(on_ranks):  # all may be those of other replicas
                logger.warning("FAULTS ARE ARMED: %s", armed_text(count, sum(on_ranks)))
            run.events.emit(EVENT_KIND, "armed", step=run.step, faults=count, process_ranks=sum(on_ranks))

    def after_step(self, run: Run, result: StepResult) -> None:
        """Inject faults into the files that this rank has written, if a checkpoint of this step is complete."""
        if self._injector is None or not self._injector.wants(CHECKPOINT):
            return
        folder = self._checkpoints / step_folder(run.step)
        if not folder.is_dir():
            return
        for record in read_manifest(folder).files:
            if record.rank == run.dims.rank and record.size_bytes:
                inject_into_file(folder / record.name, run.step, self._injector)

    def state_dict(self) -> dict[str, Any]:
        """Number of times that each fault has changed bits on each rank; one with ``once`` does not fire again."""
        mine = ("", {}) if self._injector is None else (str(self._injector.rank), self._injector.state_dict())
        return {"changed": {rank: state for rank, state in gather_objects(mine, self._group) if state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's part of ``state_dict``."""
        if self._injector is not None:
            self._injector.load_state_dict(state["changed"].get(str(self._injector.rank), {}))

    def on_end(self, run: Run) -> None:
        """Report faults that never changed anything, with the reasons."""
        tallies = gather_objects(self._injector.tallies if self._injector is not None else [], self._group)
        waiting = gather_objects(self._process.waiting if self._process is not None else [], self._group)
        if run.dims.rank != 0:
            return
        for index, spec in enumerate(self._injector.specs if self._injector is not None else ()):
            of_spec = [met[index] for met in tallies]
            left_out = run.initial_dims is not None and not any(met.here for met in of_spec)  # it may have fired before
            if not left_out and (reason := why_unfired(spec, of_spec)) is not None:
                logger.warning(
                    "fault %d (%s, phase %s) never changed anything: %s", index, spec.kind, spec.phase, reason
                )
                run.events.emit(EVENT_KIND, "never_fired", step=run.step, spec=index, reason=reason)
        for index in sorted({index for on_rank in waiting for index in on_rank}):
            ranks = [rank for rank, on_rank in enumerate(waiting) if index in on_rank]
            logger.warning(
                "process fault %d never acted on ranks %s: its steps or micro-batches were not reached", index, ranks
            )
            run.events.emit(EVENT_KIND, "process_never_fired", step=run.step, spec=index, ranks=ranks)


def watch_for_faults(injector: Injector, engine: TrainingEngine) -> Watch:
    """The watch of fault injection: submodules that some spec may hit on some rank, in every step."""
    names = frozenset(one.fqn for one in faulty_submodules(injector.specs, list_submodules(engine.module)))
    return Watch(injector, lambda step: names, injects_faults=True)
