"""Step times that a run recorded: the files of all ranks as arrays over the same steps.

``RUN/step_times/rank_NNNNN.jsonl`` is written by the first tensor rank of each stage of each replica: at each start of
the run a line of kind ``layout``, then a line per step, in seconds since the step began on that rank. A resumed run
appends: its lines replace those of the same and later steps. Lines of another layout than that of the last start are
ignored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError
from megasdc.dropcompute.gate import STEP_TIMES_FOLDER

OnProgress = Callable[[str, int, int], None]
_LAYOUT_BEGIN = '{"kind": "layout"'
_LAYOUT_KEYS = ("rank", "dp_rank", "pp_rank", "data", "pipeline", "micro_batches")
_LISTS = ("start_s", "end_s", "busy_s")
_FORWARD = "forward_end_s"
_NUMBERS = ("compute_s", "step_s", "gc_s")


@dataclass(frozen=True)
class StepTimesOfRun:
    """Times of the steps that all ranks have recorded; seconds since the step began on the rank.

    Args:
        steps: their numbers, ascending, [step].
        planned: micro-batches per replica, [step].
        start_s: start time of a micro-batch on a stage, [replica, stage, step, micro-batch]; NaN where it was dropped.
        end_s: end of its backward pass there, likewise.
        busy_s: duration of its forward and backward pass, likewise.
        compute_s: when all micro-batches were done, [replica, stage, step].
        step_s: when the optimizer was done, likewise.
        gc_s: duration of garbage collection in the step, likewise.
        hosts: names, [replica][stage].
        notes: what was ignored, a sentence each.
        layers: transformer layers after which the replica's last backward pass was ended, [replica, step]; -1: it is
            whole.
        forward_end_s: end of its forward pass, as ``end_s``; NaN also where it is not recorded, as of starts whose
            backward passes were all whole.
        of_layers: transformer layers between which the last start's backward passes could end; 0: all were whole.
    """

    run: Path
    steps: NDArray[np.int64]
    planned: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    busy_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    gc_s: NDArray[np.float64]
    hosts: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    layers: NDArray[np.int64]
    forward_end_s: NDArray[np.float64]
    of_layers: int = 0

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Whether the replica's last backward pass was ended, [replica, step]."""
        return self.layers >= 0

    @property
    def ended_too(self) -> str:
        """What is said, after dropped micro-batches, of ended backward passes; empty: there is none."""
        ended = int(self.ended.sum())
        return f" or backward passes ended ({ended:,})" if ended else ""

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """Whether a replica completed all micro-batches as planned, with whole backward passes, [replica, step]."""
        return (self.completed == self.planned) & ~self.ended

    @property
    def busy_of_whole_s(self) -> NDArray[np.float64]:
        """As ``busy_s``; NaN also where the backward pass was ended, whose time is not that of a micro-batch."""
        found = self.busy_s.copy()
        replicas, steps = np.nonzero(self.ended)
        found[replicas, :, steps, self.completed[replicas, steps] - 1] = np.nan
        return found

    @property
    def completed(self) -> NDArray[np.int64]:
        """Micro-batches that a replica completed, [replica, step]."""
        return np.isfinite(self.start_s[:, 0]).sum(axis=2)

    @property
    def described(self) -> str:
        """Run, steps, replicas and stages in one line."""
        replicas, stages, steps = self.compute_s.shape
        return (
            f"{self.run}: {steps:,} steps from {self.steps[0]} to {self.steps[-1]}, {replicas} replica(s) of {stages} "
            "stage(s)"
        )

    def only(self, chosen: NDArray[np.bool_], *notes: str) -> StepTimesOfRun:
        """A subset of the steps by a mask, [step], with at least one True; ``notes`` are added if it excludes any."""
        width = int(self.planned[chosen].max())
        cut = {name: getattr(self, name)[:, :, chosen, :width] for name in (*_LISTS, _FORWARD)}
        cut |= {name: getattr(self, name)[:, :, chosen] for name in _NUMBERS}
        cut["layers"] = self.layers[:, chosen]
        kept = self.notes if chosen.all() else (*self.notes, *notes)
        return replace(self, steps=self.steps[chosen], planned=self.planned[chosen], notes=kept, **cut)


@dataclass
class _File:
    path: Path
    layout: dict[str, Any]
    rows: dict[int, dict[str, Any]]
    notes: list[str]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.layout["data"], self.layout["pipeline"]

    @property
    def place(self) -> tuple[int, int]:
        return self.layout["dp_rank"], self.layout["pp_rank"]


def load_step_times(
    run: Path, first_step: int | None = None, last_step: int | None = None, on_progress: OnProgress | None = None
) -> StepTimesOfRun:
    """Reads the step times of all ranks of a run.

    Args:
        first_step: earlier steps are ignored; None: no limit.
        last_step: later steps are ignored; None: no limit.
        on_progress: called with the activity, the files read and their total.

    Raises:
        DataError: nothing was recorded, a file is damaged or missing, or no step is in all of them.
    """
    folder = run / STEP_TIMES_FOLDER
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        raise DataError(
            f"{folder} holds no step times; record them with megasdc.drop_compute.enabled and "
            'record_times true, with megasdc.drop_compute.threshold "inf" if nothing shall be dropped'
        )
    files = []
    for number, path in enumerate(paths, 1):
        files.append(_read_file(path, first_step or 1, math.inf if last_step is None else last_step))
        if on_progress is not None:
            on_progress("reading step times", number, len(paths))
    by_place, notes = _of_one_layout(folder, files)
    return _as_arrays(run, by_place, notes)


def _of_one_layout(folder: Path, files: Sequence[_File]) -> tuple[dict[tuple[int, int], _File], list[str]]:
    """The files of the run's last start, by (replica, stage)."""
    if files[0].layout["rank"] != 0:
        raise DataError(f"{folder} lacks rank_00000.jsonl, which says how the run ended; copy the files of all hosts")
    replicas, stages = sizes = files[0].sizes
    notes = [note for file in files for note in file.notes]
    by_place: dict[tuple[int, int], _File] = {}
    for file in files:
        if file.sizes != sizes:
            notes.append(f"{file.path.name} is of an earlier start with another layout and was skipped")
        elif by_place.setdefault(file.place, file) is not file:
            other_name = by_place[file.place].path.name
            raise DataError(f"{file.path} and {other_name} are both of replica, stage {file.place}; remove the old one")
    wanted = [(replica, stage) for replica in range(replicas) for stage in range(stages)]
    if missing := [place for place in wanted if place not in by_place]:
        raise DataError(
            f"{folder} lacks the file of replica {missing[0][0]}, stage {missing[0][1]}, {len(missing)} of "
            f"{len(wanted)} in all; copy the files of all hosts"
        )
    return by_place, notes


def _read_file(path: Path, first_step: int, last_step: float) -> _File:
    layout: dict[str, Any] | None = None
    rows: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    for where, line in _lines(path, notes):
        if line.get("kind") == "layout":
            before, layout = layout, _checked_layout(line, where)
            if before is not None and any(before[key] != layout[key] for key in _LAYOUT_KEYS[1:5]) and rows:
                notes.append(f"{path.name}: {len(rows)} steps of an earlier layout were skipped")
                rows.clear()
            continue
        if layout is None:
            raise DataError(f"{where} comes before any line of kind layout; the file is not one of step times")
        row = _checked_row(line, where)
        if rows and row["step"] <= next(reversed(rows)):  # the run resumed from before these steps
            rows = {step: old for step, old in rows.items() if step < row["step"]}
        rows[row["step"]] = row
    if layout is None:
        raise DataError(f"{path} holds no line of kind layout; it is empty or damaged, remove it or copy it again")
    kept = {step: row for step, row in rows.items() if first_step <= step <= last_step}
    return _File(path, layout, kept, notes)


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``path:line``, object) of each line; one that a killed process left incomplete is skipped and noted."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, whole in enumerate(text.splitlines(keepends=True), 1):
        where, line = f"{path}:{number}", whole
        if (again := line.rfind(_LAYOUT_BEGIN)) > 0:  # the next start appended to an incomplete line
            notes.append(f"{path.name}:{number} is torn and was skipped")
            line = line[again:]
        if not line.endswith("\n"):
            notes.append(f"{path.name}:{number} is torn and was skipped")
            continue
        try:
            value = parse_json(line)
        except ValueError as error:  # no JSON, or nested too deeply
            raise DataError(f"{where} is no JSON ({error}); remove the line or copy the file again") from error
        if not isinstance(value, dict):
            raise DataError(f"{where} holds {line[:40]!r}, needed an object")
        yield where, value


def _checked_layout(line: dict[str, Any], where: str) -> dict[str, Any]:
    for key in _LAYOUT_KEYS:
        if not isinstance(line.get(key), int) or line[key] < 0:
            raise DataError(f"{where}: {key} is {line.get(key)!r}, needed a whole number")
    if not isinstance(line.get("of_layers", 0), int) or line.get("of_layers", 0) < 0:
        raise DataError(f"{where}: of_layers is {line['of_layers']!r}, needed a whole number of transformer layers")
    if line["dp_rank"] >= line["data"] or line["pp_rank"] >= line["pipeline"]:
        raise DataError(
            f"{where}: replica {line['dp_rank']} of {line['data']}, stage {line['pp_rank']} of {line['pipeline']}"
        )
    return line


def _checked_row(line: dict[str, Any], where: str) -> dict[str, Any]:
    for key in ("step", "planned"):
        if not isinstance(line.get(key), int) or line[key] < 1:
            raise DataError(f"{where}: {key} is {line.get(key)!r}, needed a whole number above 0")
    for key in _LISTS:
        if not isinstance(line.get(key), list) or len(line[key]) != len(line.get("start_s") or ()):
            raise DataError(f"{where}: {key} is {line.get(key)!r}, needed a list as long as start_s")
    values = [(key, value) for key in _LISTS for value in line[key]] + [(key, line.get(key)) for key in _NUMBERS]
    for key, value in values:
        if not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise DataError(f"{where}: {key} holds {value!r}, needed finite seconds >= 0")
    if (layers := line.get("layers")) is not None and (not isinstance(layers, int) or layers < 0):
        raise DataError(f"{where}: layers is {layers!r}, needed a whole number of transformer layers")
    starts, ends, middles = line["start_s"], line["end_s"], line.get(_FORWARD, line["end_s"])
    if not 1 <= len(starts) <= line["planned"]:
        raise DataError(f"{where}: {len(starts)} micro-batches were completed, of {line['planned']} planned")
    for key in ("start_s", "end_s"):
        if any(later < earlier for earlier, later in pairwise(line[key])):
            raise DataError(f"{where}: {key} is {line[key]}, needed rising values")
    if any(end < start for start, end in zip(starts, ends, strict=True)):
        raise DataError(f"{where}: a micro-batch ended before it started; start_s is {starts}, end_s {ends}")
    if not isinstance(middles, list) or len(middles) != len(starts) or not _lie_between(starts, middles, ends):
        raise DataError(f"{where}: {_FORWARD} is {middles!r}, needed a time within each micro-batch")
    return line


def _lie_between(starts: list[float], middles: list[Any], ends: list[float]) -> bool:
    times = zip(starts, middles, ends, strict=True)
    return all(isinstance(middle, int | float) and start <= middle <= end for start, middle, end in times)


def _as_arrays(run: Path, files: dict[tuple[int, int], _File], notes: list[str]) -> StepTimesOfRun:
    everywhere = set.intersection(*(set(file.rows) for file in files.values()))
    anywhere = set.union(*(set(file.rows) for file in files.values()))
    if not everywhere:
        raise DataError(
            f"{run / STEP_TIMES_FOLDER}: of {len(anywhere)} steps in the range none is in the files of all ranks; give "
            "another range, or wait until a step has ended"
        )
    if left := sorted(anywhere - everywhere):
        notes.append(f"{len(left)} steps, from {left[0]} to {left[-1]}, are not in the files of all ranks: skipped")
    steps = sorted(everywhere)
    first = files[0, 0]
    planned = [first.rows[step]["planned"] for step in steps]
    replicas, stages = first.sizes
    shape = (replicas, stages, len(steps))
    lists = {name: np.full((*shape, max(planned)), np.nan) for name in (*_LISTS, _FORWARD)}
    numbers = {name: np.empty(shape) for name in _NUMBERS}
    layers = np.full((replicas, len(steps)), -1)
    for (replica, stage), file in files.items():
        for place, step in enumerate(steps):
            row = file.rows[step]
            if row.get("layers") is not None:
                layers[replica, place] = row["layers"]
            _check_agreement(file, row, files[replica, 0].rows[step], planned[place])
            for name in lists.keys() & row.keys():
                lists[name][replica, stage, place, : len(row[name])] = row[name]
            for name in _NUMBERS:
                numbers[name][replica, stage, place] = row[name]
    hosts = tuple(tuple(str(files[r, s].layout.get("host")) for s in range(stages)) for r in range(replicas))
    return StepTimesOfRun(
        run,
        np.array(steps),
        np.array(planned),
        **lists,
        **numbers,
        hosts=hosts,
        notes=tuple(notes),
        layers=layers,
        of_layers=int(first.layout.get("of_layers", 0)),
    )


def _check_agreement(file: _File, row: dict[str, Any], first_stage: dict[str, Any], planned: int) -> None:
    done, expected = len(row["start_s"]), len(first_stage["start_s"])
    if row["planned"] != planned or done != expected:
        raise DataError(
            f"{file.path}, step {row['step']}: {done} of {row['planned']} micro-batches; the replica's first stage has "
            f"{expected}, and {planned} are planned on replica 0: the files are of different runs, copy them again"
        )
