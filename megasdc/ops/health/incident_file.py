"""Incidents of runs that were stuck, as the run folder keeps them: read for the summary, reports and live views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megasdc.common.durable import parse_json
from megasdc.ops.health.incident import INCIDENT_FOLDER
from megasdc.ops.health.rank_state import RankState


@dataclass(frozen=True)
class SharedStack:
    """A stack, and the threads that all have it, as ``rank 3 MainThread``."""

    threads: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class HangIncident:
    """One standstill of a run.

    Args:
        path: its file.
        kind: as ``hang/behind``.
        run: name of the start in which it was.
        time: seconds since the epoch, by the clock of the host that wrote it.
        message: the cause in a sentence.
        ranks: the cause; empty where nobody is named.
        hosts: the cause; empty where nobody is named.
        waits: by rank, what it waited for.
        states: of all ranks of which something was known.
        stacks: those of most threads first.
        launch: id of the launch; None: without ``megasdc launch``, or of an earlier version.

    Raises:
        ValueError: the time is no date, the start has no number that can be read, or a rank is below 0.
    """

    path: Path
    kind: str
    run: str
    time: float
    message: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    waits: Mapping[int, str]
    states: tuple[RankState, ...]
    stacks: tuple[SharedStack, ...]
    launch: str | None = None

    def __post_init__(self) -> None:
        try:
            _ = self.attempt, self.date
        except (OverflowError, OSError, ValueError) as error:
            raise ValueError(f"time is {self.time!r} and run {self.run[:80]!r}, needed a date and a number") from error
        if min(self.ranks, default=0) < 0:
            raise ValueError(f"ranks are {self.ranks}, needed numbers from 0")

    @property
    def date(self) -> datetime:
        """``time`` as a date, UTC."""
        return datetime.fromtimestamp(self.time, UTC)

    @property
    def attempt(self) -> int:
        """Number of the start of the run; 0: its name does not say."""
        number = self.run.split(".")[1:2]
        return int(number[0]) if number and number[0].isdigit() else 0

    @property
    def named(self) -> list[RankState]:
        """States of the ranks that are the cause."""
        return [one for one in self.states if one.rank in self.ranks]

    @property
    def who(self) -> str:
        """The cause in a few words."""
        if self.named:
            return ", ".join(one.label for one in self.named)
        return f"host {', '.join(self.hosts)}" if self.hosts else "nobody is named"

    @property
    def step(self) -> int:
        """In which the cause was, or the rank that was behind all others; 0: before the first."""
        return min((one.step for one in self.named or self.states), default=0)


def load_hangs(run_folder: Path) -> tuple[tuple[HangIncident, ...], list[str]]:
    """Standstills of a run, oldest first: by the number of the start, in which there is one.

    Returns:
        The incidents, and a sentence for each file that cannot be read.
    """
    folder, hangs, notes = run_folder / "health" / INCIDENT_FOLDER, list[HangIncident](), list[str]()
    try:
        paths = list(folder.glob("hang_*.json"))
    except OSError as error:
        return (), [f"health/{INCIDENT_FOLDER} is left out: {error!r}"]
    for path in paths:
        try:
            hangs.append(_hang_of(path, parse_json(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError) as error:
            notes.append(f"health/{INCIDENT_FOLDER}/{path.name} is left out: {error!r}")
    return tuple(sorted(hangs, key=lambda one: (one.attempt, one.time))), notes


_ADAPTER = TypeAdapter(HangIncident)


def _hang_of(path: Path, raw: Mapping[str, Any]) -> HangIncident:
    """Raises ValueError, TypeError or KeyError where a value is missing or of another kind."""
    stacks = [{"threads": one["of"], "lines": one["stack"]} for one in raw["stacks"]]
    return _ADAPTER.validate_python({**raw, "path": path, "stacks": stacks})
