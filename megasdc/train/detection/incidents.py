"""Reports of findings in the run folder, and marks on checkpoints for the next start.

The mark for the next start is written first and needs only its own file; errors in a report are logged.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.manifest import installed_versions, read_complete
from megasdc.checkpoint.places import CheckpointGroup, FolderRanks, find_place
from megasdc.checkpoint.snapshots.held import find_held, memory_folder, read_line
from megasdc.checkpoint.verification_marks import list_verified, mark_corruption, mark_verified
from megasdc.common.errors import StorageError
from megasdc.common.user_code import alert
from megasdc.config.load import RunConfig
from megasdc.engine.hooks import Run
from megasdc.events import read_events
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.finding import Finding, gather_places
from megasdc.sdc.incident import (
    FAULT_FIELDS,
    Environment,
    Incident,
    RankPlace,
    write_incident,
)
from megasdc.train.saving.memory import mark_memory
from megasdc.train.saving.saver import checkpoint_folder

logger = logging.getLogger(__name__)

SHOWN_EVENTS = 20
SHOWN_GAPS = 5


class Incidents:
    """Reports findings and marks checkpoints."""

    def __init__(self, config: RunConfig, run: Run) -> None:
        self._config = config
        self._run = run
        self._checkpoints = checkpoint_folder(config)
        self._ranks: list[RankPlace] = []
        self._place: FolderRanks | None = None
        self._unmarked: dict[int, str] = {}  # steps whose checkpoints stay candidates, and why, as it was told
        self._agreed: tuple[int, int] | None = None  # newest step that an audit has agreed on, and that audit's

    def on_start(self) -> None:
        """Gather the place of every rank.

        Collective: all ranks of the world.
        """
        dims, group = self._run.dims, self._run.host_group
        self._ranks = gather_places(self._run.engine.device, dims, group)
        self._place = find_place(CheckpointGroup(self._config.megasdc.checkpoint.storage, group))

    def mark(self, step: int, see: str | None = None, *, any_rank: bool = False) -> None:
        """Restrict the next start to verified checkpoints; a mark that cannot be written is logged.

        It calls no collective, so it may be called after an exception.

        Args:
            step: in which corruption was found.
            see: where people find more; None: the run folder.
            any_rank: write it from every rank, since the rank that usually writes it may have gone.
        """
        if self._place is None:
            return
        place = replace(self._place, ranks=[self._place.rank]) if any_rank else self._place
        try:
            mark_corruption(self._checkpoints, step, see or self._run.folder, place)
        except StorageError as error:
            logger.error("%s", error)

    @property
    def way_back(self) -> str:
        """Where a run that is halted goes on, as a sentence without its full stop; by what this host holds."""
        if self._config.megasdc.checkpoint.require_verified == "never":
            return "The next start goes on from the newest save, since megasdc.checkpoint.require_verified is never"
        try:
            saves = read_complete(self._checkpoints).keys() - self._run.skipped_checkpoint_steps
            verified = saves & set(list_verified(self._checkpoints))
            in_memory = self._verified_in_memory()
        except OSError as error:
            return f"Where the next start goes back to is not known, since the checkpoints cannot be listed: {error}"
        if newest := max(verified | in_memory, default=0):
            where = "in memory" if newest in in_memory else f"in {self._checkpoints / step_folder(newest)}"
            return f"The next start goes back to the newest verified save, of step {newest}, {where}"
        if saves:
            return "No save is verified: the next start ends with exit code 72, and says which candidates there are"
        return "Nothing is saved that is verified: the next start begins at step 1"

    def _verified_in_memory(self) -> set[int]:
        """Steps in this host's memory after which an audit has agreed."""
        if not self._config.megasdc.checkpoint.memory.interval:
            return set()
        run = self._run.events.origin.run
        folder = memory_folder(run)
        line, held = read_line(folder), find_held(folder, run)[0]
        return {one.record.step for one in held if line.verifies(one.record)}

    def report(self, step: int, found: Finding, action: str) -> str | None:
        """Write the reports; before a halt, name the page in the mark for the next start.

        Returns:
            Path of the page, on all ranks; None: it could not be written, which was logged.

        Collective: all ranks of the world.
        """
        path = None
        if self._run.dims.rank == 0:
            try:
                data, page = write_incident(self._describe(step, found, action))
                path = str(page)
                self._alert(step, data)
            except StorageError as error:
                logger.error("%s", error)
            except Exception:  # any error in the evidence: the other ranks wait in the gather below
                logger.exception("the incident of step %d cannot be reported", step)
        path = gather_objects(path, self._run.host_group)[0]
        if action in ("halt", "isolate") and path is not None:
            self.mark(step, path)
        return path

    def _alert(self, step: int, incident: Path) -> None:
        """Alert of an incident; other ranks wait meanwhile, so that a launch does not end before it is sent."""
        if problem := alert(self._config.megasdc.health.alert_command, incident, incident.read_text()):
            logger.warning("%s", problem)
            self._run.events.emit("health", "alert_failed", step=step, problem=problem)

    def verified(self, last: int, audit_step: int) -> None:
        """Mark checkpoints up to the step ``last`` as verified, after an audit agreed."""
        assert self._place is not None, "on_start comes first"
        self._agreed = (last, audit_step)
        self.mark_saved()
        if (
            self._config.megasdc.checkpoint.memory.interval
            and self._place.rank == self._place.nodes[self._place.node][0]
        ):
            mark_memory(memory_folder(self._run.events.origin.run), last)

    def mark_saved(self) -> None:
        """Mark what is saved: a save beside training may be done after the audit that has agreed on it."""
        assert self._place is not None, "on_start comes first"
        if self._agreed is not None:
            skipped_checkpoint_steps, events = self._run.skipped_checkpoint_steps, self._run.events
            mark_verified(
                *(self._checkpoints, *self._agreed, self._place),
                skipped_checkpoint_steps=skipped_checkpoint_steps,
                events=events,
                told=self._unmarked,
            )

    def _describe(self, step: int, found: Finding, action: str) -> Incident:
        sections, engine = self._config.megasdc, self._run.engine
        gaps: list[str] = []
        earlier = tuple(read_events(self._run.folder, kind="sdc", broken=gaps))[-SHOWN_EVENTS:]
        verified, saved = self._list_checkpoints(gaps)
        if len(gaps) > SHOWN_GAPS:
            gaps[SHOWN_GAPS:] = [f"and {len(gaps) - SHOWN_GAPS} more"]
        newest = max(set(saved) - set(verified), default=None)
        return found.incident(
            *(self._run.folder, step, action, self._ranks),
            environment=Environment(installed_versions(), engine.dims.layout, self._config.precision),
            earlier=earlier,
            attempt=self._run.events.origin.attempt,
            golden=sections.sdc.golden,
            verified_checkpoint=self._folder(max(verified, default=None)),
            newest_candidate=self._folder(newest if newest is not None and newest > max(verified, default=0) else None),
            not_read=tuple(gaps),
            injected=tuple(name for name in FAULT_FIELDS if getattr(sections, name.rpartition(".")[2])),
        )

    def _list_checkpoints(self, gaps: list[str]) -> tuple[list[int], list[int]]:
        """Steps of the verified and of all checkpoints; read errors are added to ``gaps``."""
        try:
            return list_verified(self._checkpoints), list_steps(self._checkpoints)
        except OSError as error:
            gaps.insert(0, f"checkpoints cannot be listed: {error}")
            return [], []

    def _folder(self, step: int | None) -> str | None:
        return None if step is None else str(self._checkpoints / step_folder(step))
