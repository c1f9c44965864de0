"""Archiving checkpoints beside training: a process at idle priority pushes each, one after the other.

Training never waits for it, and no failure of it ends the run. What is archived is found in the checkpoint folder, not
reported by the saver: so a save may end at any time.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.manifest import has_marker, read_manifest
from megasdc.checkpoint.ranks import CheckpointGroup, find_place
from megasdc.checkpoint.verify import read_mark
from megasdc.common.errors import CheckpointError, ConfigError, LaunchError, StorageError
from megasdc.config.sections import CheckpointSection
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.archive.child import PushProcess
from megasdc.ops.archive.record import check_name
from megasdc.ops.archive.store import Store

logger = logging.getLogger(__name__)
END_WAIT_S = 600.0
"""How long the end of a run waits for its last pushes."""
_POLL_S = 1.0


@dataclass(frozen=True)
class _Going:
    """A push that goes on."""

    step: int
    process: PushProcess
    began: float


class Archiver(Hook):
    """Pushes the checkpoints of one folder; on the rank that leads the folder.

    Args:
        section: with an address.
        folder: of the checkpoints.
        run_id: id of the run.
        verified_only: wait for the mark that an audit agreed, since a candidate may be corrupt.
        prunes: whether this rank applies ``archive.keep_last``: one of the run.
        writer: where rank 0 writes; None on other ranks.

    Raises:
        ConfigError: the address is none, or lies in the folder of checkpoints.
        LaunchError: the package for such addresses is not installed.
    """

    def __init__(
        self,
        section: CheckpointSection,
        folder: Path,
        run_id: str,
        *,
        verified_only: bool,
        prunes: bool,
        writer: MetricsWriter | None,
    ) -> None:
        assert section.archive.address is not None, "it is built only where there is one"
        self._address, self._every = section.archive.address, section.archive.every
        _check_address(self._address, folder)
        self._keep_last = section.archive.keep_last if prunes else 0
        self._folder, self._run_id = folder, check_name(run_id, "the id of a run")
        self._verified_only = verified_only
        self._writer = writer
        self._seen: set[int] = set()
        self._waiting: list[int] = []
        self._going: _Going | None = None
        self._changed_ns = 0
        self._failures = 0

    def on_start(self, run: Run) -> None:
        """What an earlier start saved and may not have archived comes first."""
        self._queue_new(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Look for new checkpoints, and for the end of a push; start the next."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            self._queue_new(run)
        self._go_on(run)

    def on_end(self, run: Run) -> None:
        """Wait for what is still to be pushed, for 10 minutes at most; not at all where the run is hurried."""
        self._queue_new(run)
        self._go_on(run)
        if self._going is None:
            return
        if run.end.must_stop_soon:
            logger.info("not archived yet: %s; the next start does it", self._steps_left())
            self.close()
            return
        logger.info("waiting for the archive: %s, for %.0f s at most", self._steps_left(), END_WAIT_S)
        deadline = time.monotonic() + END_WAIT_S
        while self._going is not None and time.monotonic() < deadline:
            run.enter("SAVE")  # shows whoever watches this rank that it is alive
            self._going.process.wait(_POLL_S)
            self._go_on(run)
        if self._going is not None:
            left = self._steps_left()
            self.close()
            remedy = f"megasdc archive push {self._folder} {self._address}"
            self._fail(run, run.step, f"{left} not archived within {END_WAIT_S:.0f} s at the end of the run: {remedy}")

    def close(self) -> None:
        """End a push that goes on, as after an error of the run."""
        if self._going is not None:
            self._going.process.kill()
            self._going = None

    def _steps_left(self) -> str:
        going = [] if self._going is None else [self._going.step]
        return "steps " + ", ".join(map(str, [*going, *self._waiting]))

    def _queue_new(self, run: Run) -> None:
        """Queue the checkpoints that were not there before."""
        for step in list_steps(self._folder):
            if step in self._seen or step in run.skipped_checkpoint_steps or step > run.step:
                continue
            path = self._folder / step_folder(step)
            try:
                manifest = read_manifest(path)
                if not has_marker(path, manifest):
                    continue
            except CheckpointError:  # a resume reports it
                continue
            self._seen.add(step)
            from_archive = manifest.quantized_moments_bits is not None
            if from_archive or not (step % self._every == 0 or run.is_last_step):
                continue
            if manifest.problem is not None:
                self._skip(run, step, manifest.problem)
                continue
            self._waiting.append(step)

    def _go_on(self, run: Run) -> None:
        """Take the answer of the push that goes on; start the next, the oldest first."""
        if self._going is not None:
            if (answer := self._going.process.poll_report()) is None:
                return
            self._report_push(run, self._going, answer)
            self._going = None
        for step in list(self._waiting):
            path = self._folder / step_folder(step)
            if not path.exists():
                self._waiting.remove(step)
                self._skip(run, step, "it was deleted before its turn: raise checkpoint.keep_last or archive.every")
            elif self._is_due(path):
                self._waiting.remove(step)
                self._start(run, step, path)
                return

    def _is_due(self, path: Path) -> bool:
        try:
            return not self._verified_only or read_mark(path) is not None
        except CheckpointError:
            return False

    def _start(self, run: Run, step: int, path: Path) -> None:
        try:
            process = PushProcess(path, self._address, self._run_id, self._keep_last)
        except (OSError, CheckpointError) as error:
            self._fail(run, step, f"the push cannot be started: {error}")
            return
        self._going = _Going(step, process, time.monotonic())

    def _report_push(self, run: Run, going: _Going, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._fail(run, going.step, answer["error"], answer.get("exit_code"))
            return
        told = {name: answer[name] for name in ("size_bytes", "new_bytes", "stored_bytes", "already")}
        seconds = round(time.monotonic() - going.began, 3)
        run.events.emit("archive", "pushed", step=going.step, address=self._address, duration_s=seconds, **told)
        logger.info("step %d is archived in %s, after %.1f s", going.step, self._address, seconds)
        if answer.get("removed"):
            run.events.emit("archive", "pruned", step=going.step, removed=answer["removed"])
        if "not_pruned" in answer:
            self._skip(run, going.step, f"older steps stay in the archive: {answer['not_pruned']}")
        self._write(run, {"archive/push_s": seconds, "archive/stored_bytes": answer["stored_bytes"]})

    def _fail(self, run: Run, step: int, problem: str, exit_code: int | None = None) -> None:
        self._failures += 1
        logger.warning("step %d is not archived, the run goes on: %s", step, problem)
        run.events.emit("archive", "failed", step=step, problem=problem, exit_code=exit_code)
        self._write(run, {"archive/failures": self._failures})

    def _skip(self, run: Run, step: int, reason: str) -> None:
        logger.warning("archive, step %d: %s", step, reason)
        run.events.emit("archive", "skipped", step=step, reason=reason)

    def _write(self, run: Run, values: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(run.step, values)


def build_archiver(
    section: CheckpointSection, folder: Path, run: Run, *, verified_only: bool, writer: MetricsWriter | None
) -> Archiver | None:
    """The hook of this rank; None: no archive is configured, or another rank leads its checkpoint folder.

    Collective: all ranks of the world, where an archive is configured.
    """
    if section.archive.address is None:
        return None
    place = find_place(CheckpointGroup(section.storage, run.host_group))
    if not place.leader:
        return None
    return Archiver(
        section, folder, str(run.events.origin.run), verified_only=verified_only, prunes=place.rank == 0, writer=writer
    )


def _check_address(address: str, folder: Path) -> None:
    """Refuse what no later push could use; whether the archive can be reached now does not matter."""
    field = "megasdc.checkpoint.archive.address"
    try:
        local = Store(address).local
    except (ConfigError, LaunchError) as error:
        text = error.problems[0] if isinstance(error, ConfigError) else str(error)
        raise type(error)(f"{field}: {text}") from error
    except StorageError as error:
        logger.warning("%s: %s; each push tries again", field, error)
        return
    if local is not None and local.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{field}: got {address}, which lies in the checkpoint folder {folder}; name another folder.")
