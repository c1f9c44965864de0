"""CSV: a file a metric, named and laid out as DeepSpeed's ``csv_monitor`` does.

Differences: one head line a file, not one a start; rows after the step from which a run goes on are dropped; ``nan``
stands for what ``metrics.jsonl`` has as null.
"""

from __future__ import annotations

import csv
from pathlib import Path

from megasdc.common.durable import LineFile, replacing
from megasdc.metrics.names import METRICS
from megasdc.metrics.sinks.sink import Sink, Values, number_of_value


def csv_path(folder: Path, name: str) -> Path:
    """File of a metric."""
    return folder / f"{name.replace('/', '_')}.csv"


class CsvSink(Sink):
    """Appends ``step,value`` to a file for each metric.

    Args:
        folder: of the files; created if absent.
        step: from which the run goes on.
    """

    name = "csv_monitor"

    def __init__(self, folder: Path | str, step: int) -> None:
        self._folder = Path(folder)
        self._files: dict[str, LineFile] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in METRICS:
            _cut_back(csv_path(self._folder, name), step)

    def write(self, step: int, at: float, values: Values) -> None:
        """Append a row for each value."""
        for name, value in values.items():
            if name not in self._files:
                self._files[name] = LineFile(csv_path(self._folder, name))
            file = self._files[name]
            rows = csv.writer(file)
            if file.is_new:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([step, number_of_value(value)])

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _cut_back(path: Path, step: int) -> None:
    """Keep the head line and the whole rows up to a step."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[:1] + [line for line in lines[1:] if line.endswith(b"\n") and _step_of(line) <= step]
    if len(kept) < len(lines):
        with replacing(path, "wb") as file:
            file.writelines(kept)


def _step_of(row: bytes) -> float:
    """Step of a row; infinite for what is none, such as a second head line of DeepSpeed's."""
    first = row.split(b",", 1)[0]
    return int(first) if first.isdigit() else float("inf")
