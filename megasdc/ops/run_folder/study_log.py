"""Log of a study: JSON lines, one file per rank in ``study/`` of the run folder; written and read here.

Every line has ``kind``, ``step``, ``replica`` and ``rank`` (in the launch); NaN and infinity are null. The kinds:

start: a rank started, or resumed after ``step``; mode, replicas, trusted, replica_rank, dp_rank, pp_rank, tp_rank,
    host.
compared: in ``steps`` steps up to ``step``, ``results`` results of one (fqn, phase, slot) with ``elements`` elements
    were compared with the trusted replica's.
mismatch: one result differs; micro_batch, fqn, phase, slot, dtype, shape and the fields of ``compare.Mismatch``.
gradient, parameters: fqn (``*``: the whole model), difference_norm, trusted_norm, ratio.
loss: loss, trusted_loss.
evaluation: loss, trusted_loss, tokens, disagreeing, correct, trusted_correct: of the validation tokens.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasdc.common.durable import LineFile, rename_durably, replacing
from megasdc.common.errors import DataError

STUDY_FOLDER = "study"
WHOLE = "*"
"""In place of a submodule's name: the whole model."""
Line = dict[str, Any]


class StudyLog:
    """Appends to the file of this rank; lines of steps after the one from which the run resumes are removed.

    Args:
        rank: in the launch.
        replica: of this rank.
        step: last completed step; at 0 an older file is renamed.
    """

    def __init__(self, run_dir: Path, rank: int, replica: int, step: int) -> None:
        folder = run_dir / STUDY_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank:05d}.jsonl"
        if path.exists() and step == 0:
            rename_durably(path, folder / f"until_{time.strftime('%Y%m%d-%H%M%S')}_{path.name}")
        elif path.exists():
            _cut_back(path, step)
        self._file = LineFile(path)
        self._same = {"replica": replica, "rank": rank}

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Writes a line of a kind, with its fields, see the module; step: first is 1."""
        line = {"kind": kind, "step": step, **self._same, **fields}
        self._file.add((json.dumps({name: _finite(value) for name, value in line.items()}) + "\n").encode())

    def flush(self) -> None:
        """Flushes all lines to the file."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def torn_files(run_dir: Path | str) -> list[Path]:
    """Files of a study with an incomplete last line: it is being written, or the process was killed."""
    found = []
    for path in sorted((Path(run_dir) / STUDY_FOLDER).glob("rank_*.jsonl")):
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                found.append(path)
    return found


def read_study(run_dir: Path | str, *kinds: str) -> Iterator[Line]:
    """Yields the lines of a study, file by file in rank order.

    An incomplete last line is ignored; ``torn_files`` lists the files that have one.

    Args:
        run_dir: folder of the launch.
        *kinds: only these; none: all.

    Raises:
        DataError: there is no study in the folder, or a complete line is damaged.
    """
    folder = Path(run_dir) / STUDY_FOLDER
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        raise DataError(
            f"{run_dir} holds no study: {folder} has no rank_*.jsonl; give the megasdc.logging.run_dir of a run with "
            "megasdc.study.mode"
        )
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.endswith("\n") and (line := _line(path, number, text)) and (not kinds or line["kind"] in kinds):
                    yield line


def _line(path: Path, number: int, text: str) -> Line:
    """Parses a complete line.

    Raises:
        DataError: it is damaged.
    """
    try:
        line: Line = json.loads(text)
        line["kind"], int(line["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}:{number} is not a line of a study: {error}") from error
    return line


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_back(path: Path, step: int) -> None:
    """Drops the lines of later steps, and an incomplete last one; the file is replaced by one rename."""
    with open(path, encoding="utf-8") as old, replacing(path) as new:
        numbered = enumerate(old, 1)
        new.writelines(text for at, text in numbered if text.endswith("\n") and _line(path, at, text)["step"] <= step)
