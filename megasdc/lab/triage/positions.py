"""Position of every replica in the data before a step of a run: from the nearest saved one, step by step.

It begins at the newest checkpoint before the step, the run's start if there is none, and follows what the steps in
between took: all micro-batches, or those that ``decisions.jsonl`` says; in an audited step one of another replica. The
next checkpoint after the step, where there is one, must hold what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import SHARED_STATE_FILE, step_folder
from megasdc.checkpoint.manifest import (
    Manifest,
    UniversalManifest,
    read_manifest,
    read_shared_state,
    read_universal_manifest,
)
from megasdc.checkpoint.verify import check_file
from megasdc.common.errors import CheckpointError, DataError
from megasdc.data.loader import SampleStream
from megasdc.data.position import Position, StepWork, advance, position_for
from megasdc.dropcompute.gate import DECISIONS_FILE, StepDecisions
from megasdc.lab.triage.history import RunHistory
from megasdc.lab.triage.step_settings import StepSettings


@dataclass(frozen=True)
class RunPast:
    """What is known of the steps of a run.

    Args:
        name: of the run, for messages.
        history: its starts.
        settings: of each start.
        decisions: micro-batches that steps started, where any were logged.
        checkpoints: folder of its checkpoints.
        without_loader: whether a universal checkpoint was used without its position in the data.
        rows: lines of its metrics.
    """

    name: str
    history: RunHistory
    settings: Sequence[StepSettings]
    decisions: Mapping[int, StepDecisions]
    checkpoints: Path
    without_loader: bool = False
    rows: Sequence[Mapping[str, Any]] = ()

    @property
    def last_step(self) -> int:
        """The last step that is known to have been run; 0: none."""
        return max([*self.decisions, *self.history.saved, *(int(row["step"]) for row in self.rows), 0])

    def settings_at(self, step: int) -> StepSettings:
        """The settings of a step."""
        return next(one for one in reversed(self.settings) if one.start < step)

    def work(self, step: int) -> StepWork:
        """What a step takes.

        Raises:
            DataError: micro-batches may have been dropped, and it is not known which.
        """
        settings = self.settings_at(step)
        decided = self.decisions.get(step) if settings.drops.enabled else None
        if settings.drops.enabled and decided is None and any(later > step for later in self.decisions):
            raise DataError(
                f"{self.name}: {DECISIONS_FILE} has no line of step {step}, although megasdc.drop_compute was enabled, "
                "so that it is not known which micro-batches were dropped; copy the file again from the run's host"
            )
        return settings.work(step, decided, requested=step in self.history.requested)


@dataclass(frozen=True)
class StepPositions:
    """Positions before a step.

    Args:
        before: of each replica.
        since: step of the state that they were followed from; 0: the run's beginning.
        confirmed_by: step of the next checkpoint, which holds what follows from them; None: there is none.
    """

    before: list[Position]
    since: int
    confirmed_by: int | None


def follow_positions(
    past: RunPast, step: int, stream: SampleStream, epoch: int | None, notes: list[str]
) -> StepPositions:
    """Positions of all replicas before a step.

    Args:
        stream: the training data.
        epoch: samples per epoch; None: the stream has no common epochs.
        notes: gets a sentence for each checkpoint that cannot be used.

    Raises:
        CheckpointError: the data are not those of the run, or the universal checkpoint that it began from is damaged.
        DataError: the step is not of this run; its positions do not agree with the next checkpoint.
    """
    first = past.history.starts[0]
    if step <= first.step:
        raise DataError(
            f"step {step} is not of {past.name}: it began after step {first.step}, from {first.universal}; ask the "
            "run that was saved there"
        )
    num_replicas = past.settings_at(step).data
    states = (_saved(past, saved, notes) for saved in reversed(past.history.saved) if saved < step)
    since, state = next((found for found in states if found), (first.step, None))
    if state is None and first.universal is not None and not past.without_loader:
        state = _checked_state(Path(first.universal), read_universal_manifest(Path(first.universal)))
    before = [Position()] * num_replicas
    if state is not None:
        before = [position_for(state["loader"], replica, num_replicas, stream) for replica in range(num_replicas)]
    before = _advance(past, before, since, step - 1, epoch)
    later = (_saved(past, saved, notes) for saved in past.history.saved if saved >= step)
    confirmed_by, state = next((found for found in later if found), (None, None))
    if state is not None and confirmed_by is not None:
        after = _advance(past, before, step - 1, confirmed_by, epoch)
        _compare(past, after, confirmed_by, state["loader"], stream)
    return StepPositions(before, since, confirmed_by)


def _advance(past: RunPast, before: list[Position], since: int, until: int, epoch: int | None) -> list[Position]:
    """Positions after step ``until`` from those after step ``since``."""
    step = since
    while step < until:
        settings = past.settings_at(step + 1)
        num_steps = 1
        if settings.are_plain and not any(one.again for one in before):
            num_steps = min([until, *(one.start for one in past.settings if one.start > step)]) - step
        work = past.work(step + 1)
        if num_steps > 1:
            planned = num_steps * work.planned
            work = StepWork(work.size, planned, (planned,) * settings.data, skip=work.skip)
        before = advance(before, work, epoch)
        step += num_steps
    return before


def _saved(past: RunPast, step: int, notes: list[str]) -> tuple[int, dict[str, Any]] | None:
    """The state of a checkpoint with its step; None: it is not there, or damaged, which is noted."""
    folder = past.checkpoints / step_folder(step)
    if not folder.is_dir():
        return None
    try:
        return step, _checked_state(folder, read_manifest(folder))
    except CheckpointError as error:
        notes.append(f"the checkpoint of step {step} is not used: {error}")
        return None


def _checked_state(folder: Path, manifest: Manifest | UniversalManifest) -> dict[str, Any]:
    """The shared state in a checkpoint, with the checksum that its manifest says; CheckpointError if it has another."""
    records = [record for record in manifest.files if record.name == SHARED_STATE_FILE]
    problems = [problem for record in records for problem in check_file(folder, record, manifest)]
    if problems or not records:
        raise CheckpointError(f"{folder}: {'; '.join(problems) or f'its manifest has no {SHARED_STATE_FILE}'}")
    return read_shared_state(folder)


def _compare(past: RunPast, after: list[Position], step: int, loader: Mapping[str, Any], stream: SampleStream) -> None:
    """Raise a DataError where a checkpoint does not hold the positions that were followed to its step."""
    for replica, position in enumerate(after):
        saved = position_for(loader, replica, len(after), stream)
        if position != saved:
            raise DataError(
                f"{past.name}: what its files tell of its steps does not lead to the checkpoint of step {step}: "
                f"replica {replica} would have consumed {position.consumed} samples there and be to take "
                f"{len(position.again)} again, saved are {saved.consumed} and {len(saved.again)}; copy events and "
                f"{DECISIONS_FILE} again from the run's host"
            )
