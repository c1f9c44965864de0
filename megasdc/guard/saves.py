"""Checkpoints of a guarded training: which of them an audit has agreed on since, to go on from."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any

from megasdc.durable import write_durably
from megasdc.guard.training import Part, Training

logger = logging.getLogger(__name__)

MARK = "megasdc_verified.json"
FORMAT = "megasdc.guard_verified.v1"


class SaveMarks(Part):
    """Notes what ``engine.save_checkpoint`` saves, and marks it once an audit of a later step has agreed.

    Args:
        saves: false: nothing is saved at all.

    Attributes:
        verified: folder of the newest marked checkpoint; None: there is none.
        candidate: folder of the newest one that is not marked; None: likewise.
    """

    def __init__(self, training: Training, *, saves: bool) -> None:
        self._engine = engine = training.engine
        self._tell, self._writes, self._saves = training.tell, training.dims.rank == 0, saves
        self._save = engine.save_checkpoint
        self._waiting: list[tuple[int, Path]] = []
        self.verified: Path | None = None
        engine.save_checkpoint = self._noting

    def close(self) -> None:
        """Give the engine back its own method."""
        vars(self._engine).pop("save_checkpoint", None)

    @property
    def candidate(self) -> Path | None:
        """See the class."""
        return self._waiting[-1][1] if self._waiting else None

    def _noting(self, save_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        step = int(self._engine.global_steps)
        if not self._saves:
            self._tell("guard", "not_saved", step=step)
            return True
        result = self._save(save_dir, tag, *args, **options)
        self._waiting.append((step, Path(save_dir) / (f"global_step{step}" if tag is None else str(tag))))
        return result

    def agreed(self, audit_step: int) -> None:
        """All replicas have agreed in an audit before an optimizer step; what holds only earlier steps is verified."""
        found = [one for one in self._waiting if one[0] < audit_step]
        self._waiting = self._waiting[len(found) :]
        for step, folder in found:
            self.verified = folder
            if self._writes:
                self._mark(folder, step, audit_step)

    def _mark(self, folder: Path, step: int, audit_step: int) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {"format": FORMAT, "step": step, "audit_step": audit_step, "time": now}
        try:
            write_durably(folder / MARK, json.dumps(content) + "\n")
        except OSError as error:  # it was removed, or the disk is full: training goes on
            logger.warning("%s is not marked as verified: %s", folder, error)
            self._tell("warning", "checkpoint_not_marked", step=step, message=str(error))
            return
        self._tell("verify", "checkpoint", step=step, path=str(folder), audit_step=audit_step)
