"""What a guard says of itself: a line and an event when it is attached, and again when it ends.

It ends when it is closed, or with the program. The line is logged; where nobody has set up logging it goes to standard
error, since a guard that says nothing cannot be told from none. `logging.getLogger("megasdc").setLevel("WARNING")`
silences it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megasdc.attached.training import Training
from megasdc.common.credentials import without_credentials
from megasdc.common.words import number_of

logger = logging.getLogger(__name__)


def say(text: str) -> None:
    """Log a line that people want to see also without a logger of their own."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("guard: %s", text)
    elif logging.getLogger("megasdc").level <= logging.INFO:
        print(f"megasdc guard: {text}", file=sys.stderr, flush=True)


def describe_end(steps: int, audits: int, agreed: int, findings: int) -> str:
    """What a guard came to, in words."""
    told = f"{number_of(audits, 'audit')} agreed" if agreed == audits else f"{agreed} of {audits} audits agreed"
    return f"{number_of(steps, 'step')}, {told}, {number_of(findings, 'finding')}"


class Lifetime:
    """Counts what a guard does, on each rank, and tells of its beginning, and once of its end.

    It refers to no engine, so that a model whose guard is forgotten can be freed.

    Args:
        training: that is guarded.
        checks: what the guard looks at, in words.
        says: whether lines are wanted; events are always written.

    Attributes:
        findings: number of findings that were settled.
        candidate: folder of the newest save that no audit has followed; None: there is none.
    """

    def __init__(self, training: Training, checks: Sequence[str], *, says: bool = True) -> None:
        self._events, self._folder = training.events, training.folder
        self._step = training.step - 1
        self.findings = 0
        self.candidate: Path | None = None
        self._steps = self._audits = self._agreed = 0
        self._over, self._says = False, says and training.dims.rank == 0
        names = [one.fqn for one in training.watched]
        layout, interval = str(training.dims), training.settings.audit.interval
        self._events.emit_on_rank_0(
            "guard", "attached", layout=layout, interval=interval, watched=names, checks=list(checks)
        )
        if self._says:
            what = ", ".join(checks) or "nothing is checked"
            say(f"attached after step {self._step} to {layout}: {what}; events and reports are in {self._folder}")

    def took_step(self, step: int, audits: int, agreed: int) -> None:
        """Note a step that was taken, and the number of audits so far and of those in which all ranks agreed."""
        self._step, self._audits, self._agreed = step, audits, agreed
        self._steps += 1

    def fail(self, step: int, exit_code: int, message: str) -> None:
        """Write that a finding ends the training; what ends it afterwards is told no more."""
        self._over = True
        self._events.emit_on_rank_0("end", "failed", step=step, exit_code=exit_code, message=message)

    def cancel(self) -> None:
        """Tell nothing of the end: another guard goes on in this one's place."""
        self._over = True

    def end(self) -> None:
        """Tell of the end: of the guard, or of the program, which an error that nobody caught may have ended."""
        if self._over:
            return
        self._over = True
        if (error := getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)) is not None:
            text = without_credentials(f"{type(error).__name__}: {error}")
            with contextlib.suppress(OSError):  # the error itself was printed
                self._events.emit("end", "failed", step=self._step, exit_code=1, message=text)
            return
        done = {"steps": self._steps, "audits": self._audits, "agreed": self._agreed, "findings": self.findings}
        self._events.emit_on_rank_0("guard", "closed", step=self._step, **done)
        if self._says:
            last = f"; no audit has followed the save {self.candidate}" if self._audits and self.candidate else ""
            say(f"closed after step {self._step}: {describe_end(**done)}{last}; megasdc summary {self._folder}")
