"""What a part found: checks, notes and reasons, written line by line, so that a part that dies leaves what it had."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TAIL_LINES = 25


class Recorder:
    """Writes what one part finds.

    Args:
        path: one JSON line a finding.
        device: ``cuda`` or ``cpu``.
        folder: for the part's files.
        cores: processors that the part may use.
    """

    def __init__(self, path: Path, device: str, folder: Path, cores: int) -> None:
        self.device, self.folder, self.cores = device, folder, cores
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process
        self._started = time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def check(self, name: str, ok: bool, detail: str = "") -> bool:
        """Write whether something holds."""
        self._write(kind="check", name=name, ok=bool(ok), detail=detail)
        return ok

    def check_near(
        self, name: str, found: Sequence[float], expected: Sequence[float], tolerance: float, num_steps: int
    ) -> bool:
        """Write whether two runs have that many losses, none farther apart than the tolerance; a NaN is."""
        far = [abs(a - b) for a, b in zip(found, expected, strict=False)]
        ok = len(found) == len(expected) == num_steps and all(one <= tolerance for one in far)
        return self.check(name, ok, f"off by {max(far, default=math.nan):.2g} nats: {list(found)}, {list(expected)}")

    def note(self, name: str, value: Any) -> None:
        """Write a number or a fact."""
        self._write(kind="note", name=name, value=value)

    def not_run(self, name: str, reason: str) -> None:
        """Write what is not done here, and why."""
        self._write(kind="not run", name=name, reason=reason)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Go on after an exception, which is a failed check."""
        try:
            yield
        except Exception as error:
            text = traceback.format_exc().splitlines()
            said = str(error).splitlines()
            self.check(
                name, False, "\n".join([*text[-6:], *said[-TAIL_LINES:]] if len(said) > 1 else text[-TAIL_LINES:])
            )

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps({**line, "after_s": round(time.monotonic() - self._started, 1)}) + "\n")
        self._file.flush()


def read_findings(path: Path) -> list[dict[str, Any]]:
    """What a part has written, also one that was killed."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of what a process printed."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
