"""Starts of a run from its events: from which state each went on, what was changed there, what of it still counts.

A start that goes on from step S takes the steps after S again: what earlier starts did there does not count any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError
from megasdc.events import Event, read_events


@dataclass
class RunStart:
    """A start of a run.

    Args:
        step: last step before it; 0: it began anew.
        data: number of replicas.
        universal: the universal checkpoint that it began from; None: it began at step 0, or resumed the run itself.
        changed: values of changed fields in the state that it resumed, by path.
        flagged: those of them that ``--allow-changed`` named.
        versions: of the packages.
        host: of rank 0.
    """

    step: int
    data: int
    universal: str | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    flagged: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    host: str = ""


@dataclass
class RunHistory:
    """What events of a run tell of the steps that it is made of.

    Args:
        starts: those whose steps count, at least one, in ascending order.
        requested: steps that were audited on request.
        saved: steps of checkpoints that were saved, ascending.
        notes: lines that could not be read, a sentence each.
    """

    starts: list[RunStart] = field(default_factory=list)
    requested: set[int] = field(default_factory=set)
    saved: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _met: Event | None = field(default=None, repr=False)
    """A start that is not known to go on yet: it may be refused."""

    def _begin(self, step: int, universal: str | None = None) -> None:
        """The start that was met goes on after a step; what earlier ones did later does not count."""
        if self._met is None:
            return
        fields, host = self._met.fields, self._met.host
        start = RunStart(step, int(fields["layout"]["data"]), universal, versions=fields.get("versions", {}), host=host)
        self.starts = [*(one for one in self.starts if one.step < step), start]
        self.requested = {one for one in self.requested if one <= step}
        self.saved = [one for one in self.saved if one <= step]
        self._met = None

    def add(self, event: Event) -> None:
        """Take the next event of rank 0."""
        name, step, fields = f"{event.kind}/{event.name}", event.step or 0, event.fields
        if name == "start/run":
            self._met = event
        elif name in ("resume/checkpoint", "resume/memory"):
            self._begin(step)
        elif name == "resume/universal":
            self._begin(step, str(fields["path"]))
        elif name == "resume/changed" and self._met is None:  # before that: against the run of a universal checkpoint
            path = str(fields["path"])
            self.starts[-1].changed[path] = fields["old"]
            if fields.get("flag"):
                self.starts[-1].flagged.append(path)
        elif name == "end/failed":
            self._met = None
        elif name in ("start/phases", "audit/requested", "save/checkpoint"):
            self._begin(0)  # it trains, and has resumed nothing
            if name == "audit/requested":
                self.requested.add(step)
            elif name == "save/checkpoint":
                self.saved = sorted({*self.saved, step})


def read_history(run: Path) -> RunHistory:
    """Read the history of a run from the events of rank 0.

    Raises:
        DataError: they tell of no start that trained.
    """
    history = RunHistory()
    try:
        for event in read_events(run, rank=0, broken=history.notes):
            history.add(event)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{run}/events is damaged: {error!r}; copy the run folder again") from error
    if not history.starts:
        raise DataError(
            f"{run}/events tells of no start of a run that trained; give the run folder of rank 0's host, or --config "
            "with --world-size for a run that is planned"
        )
    return history
