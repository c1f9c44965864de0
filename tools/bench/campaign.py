"""Campaigns: cases are drawn from a seed, run and judged one after another, kept in a log, and counted in tables.

A campaign that was ended goes on from its log: the cases are drawn again, the same ones, and the first that are not in
it are run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import TypeAdapter
from rich.table import Table

from megasdc.common.errors import ConfigError, StorageError
from tools.bench.options import Options, option, parse_layouts
from tools.bench.rank import Progress, run_in_ranks, scratch_folder
from tools.bench.result import table

Layout = tuple[int, int, int]
"""Tensor, pipeline, data."""
Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class CampaignOptions(Options):
    """Size of a campaign of kinds and layouts in turn; ``known``: its kinds."""

    known: ClassVar[Collection[str]]

    drills: int
    kinds: str
    layouts: str
    seed: int = option(1, "Seed of ranks, steps and moments.", min=0)

    def problems(self) -> list[str]:
        """Kinds that are not known."""
        return [f"--kinds: {one!r} is none of {', '.join(self.known)}" for one in self.drawn if one not in self.known]

    @property
    def drawn(self) -> list[str]:
        """Kinds that are drawn."""
        return [one.strip() for one in self.kinds.split(",")]

    @property
    def sizes(self) -> tuple[Layout, ...]:
        """All layouts."""
        return parse_layouts(self.layouts)


class CampaignLog(Generic[Outcome]):
    """Keeps outcomes, in a file of JSON lines where one is given.

    Args:
        path: the file; None keeps them in memory.
        kind: dataclass of an outcome.

    Raises:
        ConfigError: the file is of other options.
        StorageError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, options: Any, kind: type[Outcome]) -> None:
        self._path = path
        self.outcomes: list[Outcome] = []
        if path is None:
            return
        head, lines = json.loads(json.dumps(asdict(options))), []
        try:
            if path.exists() and path.stat().st_size:
                whole = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
                found, *lines = [json.loads(line) for line in whole]
                if found != head:
                    raise ConfigError(f"--log: {path} has runs of other options, {found}; name another, or remove it")
            self.outcomes = [TypeAdapter(kind).validate_python(line) for line in lines]
            kept = "".join(json.dumps(line) + "\n" for line in (head, *lines))
            path.write_text(kept, encoding="utf-8")  # without a line that was not written whole
        except (OSError, ValueError) as error:
            raise StorageError(f"--log: {path} cannot be used ({error}); name another file, or remove it") from error

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome."""
        self.outcomes.append(outcome)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")  # type: ignore[call-overload]


@dataclass(frozen=True)
class Campaign(Generic[Case, Outcome]):
    """A campaign.

    Args:
        what: name of the cases in progress bars.
        cases: all of them, in the order in which they are run; the same whenever they are drawn again.
        run: runs some of them, each with its number among all, and calls back with each outcome, in their order.
        log: outcomes so far.
    """

    what: str
    cases: Sequence[Case]
    run: Callable[[Sequence[tuple[int, Case]], Callable[[Outcome], None]], None]
    log: CampaignLog[Outcome]

    def finish(self, on_progress: Progress) -> list[Outcome]:
        """Run the cases that are not in the log yet; returns the outcomes of all."""
        done, total = len(self.log.outcomes), len(self.cases)
        on_progress(self.what, done, total)

        def add_outcome(outcome: Outcome) -> None:
            self.log.add(outcome)
            on_progress(self.what, len(self.log.outcomes), total)

        if left := list(enumerate(self.cases))[done:]:
            self.run(left, add_outcome)
        return self.log.outcomes


def run_cells(function: Callable[..., None], options: Any, counts: dict[str, int], on_progress: Progress) -> list[Any]:
    """Run all layouts and types of a campaign whose ranks draw their cases themselves, and return all trials.

    The ranks run ``function``, which sends ``trials`` after each of its cases. Its request is one of the ``cells`` of
    the options, ``counts``, and a seed; it also has ``folder``, and ``name`` for progress.
    """
    trials = []
    for number, cell in enumerate(options.cells):
        name = f"{'x'.join(map(str, cell['layout']))} {cell['precision']}"
        with scratch_folder() as folder:
            request = {**cell, **counts, "seed": options.seed * 1000 + number, "folder": str(folder), "name": name}
            ranks = math.prod(cell["layout"])
            found = run_in_ranks(function, {"request": request}, ranks, folder, on_progress=on_progress)
        trials += [trial for message in found for trial in message["trials"]]
    return trials


class _HasLayout(Protocol):
    @property
    def layout(self) -> Layout: ...


def layout_text(one: _HasLayout) -> str:
    """The layout of a case or outcome, as ``2x1x2``."""
    return "x".join(map(str, one.layout))


def tables(
    what: str,
    outcomes: Sequence[Outcome],
    keys: Mapping[str, Callable[[Outcome], str]],
    columns: Sequence[str],
    row_of: Callable[[Sequence[Outcome]], Iterable[object]],
) -> Iterator[Table]:
    """A table of outcomes for each grouping, each with a row for all.

    Args:
        keys: the group of an outcome, by the title of the grouping.
        columns: but for the first, which names the group.
        row_of: cells of a row, but for the first, from the outcomes that it is of.
    """
    for title, key in keys.items():
        rows = [(name, *map(str, row_of(found))) for name, found in grouped(outcomes, key).items()]
        yield table(f"{what} by {title}", (title, *columns), [*rows, ("all", *map(str, row_of(outcomes)))], total=True)


def median_and_most(values: Iterable[float], form: str = "") -> str:
    """Of what the outcomes of a row took; ``form``: how a value is shown."""
    found = sorted(values)
    return f"{found[len(found) // 2]:{form}}, {found[-1]:{form}}" if found else "-"


def grouped(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    """Outcomes by group, in the order of the groups' names."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(key(one), []).append(one)
    return dict(sorted(groups.items()))
