"""Numbers of a run in its folder: ``metrics.jsonl``, with the sinks that show it, and ``details.jsonl``.

The details of a step are losses of samples, and gradients, updates and moments of parameters; one line a step, from
rank 0. Their numbers keep every bit; NaN and infinities are written as ``NaN`` and ``Infinity``, which Python's own
reader accepts.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megasdc.common.durable import LineFile, parse_json, rename_durably, replacing, write_durably
from megasdc.common.errors import DataError
from megasdc.metrics.names import METRICS
from megasdc.metrics.sinks import OnFailure, Sink, describe

METRICS_FILE = "metrics.jsonl"
PLACE = ("step", "time", "monotonic", "attempt")
"""Keys of a line besides its metrics."""
REACHED_FILE = "metrics.reached"
"""Name of the file with the newest step whose line a resume has dropped: whoever was shown it has that step already."""
_NEVER: dict[str, Any] = {"step": math.inf}

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one JSON line ``{"step", "time", "monotonic", "attempt", name: value, ...}`` per call; by rank 0 alone.

    The file is written first: later where it has no room (``megasdc.common.durable``); another error in it is raised. A
    sink gets the line as the file has it; one that fails is reported and gets no more.

    Args:
        sinks: sinks that show the metrics; the writer closes them.
        on_failure: function called with the name of a sink that failed, and the reason.
        attempt: number of this start of the run; None: starts are not counted.
    """

    def __init__(
        self,
        run_dir: Path | str,
        sinks: Sequence[Sink] = (),
        on_failure: OnFailure | None = None,
        attempt: int | None = None,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self._sinks, self._attempt = list(sinks), attempt
        self._on_failure = on_failure or _warn
        self._file = LineFile(self.path)

    def write(self, step: int, values: dict[str, float | int]) -> None:
        """Write the metrics of one step.

        Args:
            step: optimizer step, first is 1.
            values: values by name; every name is declared in ``METRICS``. NaN and Inf, which JSON lacks, become null.

        Raises:
            ValueError: a name is not declared.
        """
        unknown = sorted(set(values) - set(METRICS))
        if unknown:
            raise ValueError(f"metrics {unknown} are not declared in megasdc.metrics.names")
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        now = time.time()
        place = {"step": step, "time": now, "monotonic": time.monotonic(), "attempt": self._attempt}
        self._file.write(json.dumps({**place, **finite}) + "\n")
        for sink in tuple(self._sinks):
            self._try(sink, partial(sink.write, step, now, finite))

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker raises: the numbers are in the file, and the run goes on
            self._sinks.remove(sink)
            self._on_failure(sink.name, describe(error))

    def close(self) -> None:
        """Close the file and the sinks."""
        self._file.close()
        for sink in tuple(self._sinks):
            self._try(sink, sink.close)
        self._sinks.clear()


def _warn(name: str, problem: str) -> None:
    logger.warning("metrics are shown no more in %s: %s", name, problem)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """All complete, undamaged lines of a run's metrics, in order; empty where there is no file."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [_row_of(line) for line in lines if line.endswith(b"\n")]
    if damaged := rows.count(None):
        logger.warning("%s: %d damaged lines are left out", path, damaged)
    return [row for row in rows if row is not None]


def cut_back(run_dir: Path | str, step: int) -> int:
    """Drop the lines after a step, so that a resumed run does not report steps twice.

    Args:
        step: last step that is kept; 0 drops all.

    Returns:
        Number of lines dropped, incomplete and damaged ones included. The file is replaced by one rename; before, the
        newest step is kept that any resume has dropped.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and (_row_of(line) or _NEVER)["step"] <= step]
    if len(kept) < len(lines):
        newest = max(row["step"] for line in lines if (row := _row_of(line) or {"step": 0}))
        if newest > max(step, reached_step(run_dir)):
            write_durably(path.with_name(REACHED_FILE), f"{newest}\n")
        with replacing(path, "wb") as file:
            file.writelines(kept)
    return len(lines) - len(kept)


def reached_step(run_dir: Path | str) -> int:
    """Newest step whose line a resume of this run has dropped; 0: none was, or the file is damaged."""
    try:
        text = (Path(run_dir) / REACHED_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0


def metrics_row(row: dict[str, Any]) -> dict[str, Any]:
    """The object of a line of metrics, checked.

    Raises:
        ValueError, TypeError, KeyError: it has no step or time, or a value that is no number of 64 bits.
    """
    if not isinstance(row["step"], int) or row["step"] < 0 or row["time"] is None:
        raise ValueError("no step or time")
    if not all(value is None or _is_number(value) for value in row.values()):
        raise ValueError("no number")
    return row


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _row_of(line: bytes) -> dict[str, Any] | None:
    """A line's object; None if the line is damaged."""
    try:
        row = parse_json(line)
        return metrics_row(row) if isinstance(row, dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def set_metrics_aside(run_dir: Path | str) -> Path | None:
    """Rename the metrics of an earlier run in the same folder, so that a new run does not append to them.

    Returns:
        The new path; None if there were none.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists() or path.stat().st_size == 0:
        return None
    kept = path.with_name(f"metrics.until_{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    rename_durably(path, kept)
    path.with_name(REACHED_FILE).unlink(missing_ok=True)
    return kept


DETAILS_FILE = "details.jsonl"


@dataclass(frozen=True)
class SampleLosses:
    """Mean loss over all tokens of each sample of a micro-batch, [b], in nats."""

    replica: int
    micro_batch: int
    losses: list[float]


@dataclass(frozen=True)
class ParameterDetails:
    """One parameter in a step, whole, over all ranks that own parts of it; norms are 2-norms.

    Args:
        gradient_norm: norm of the gradient before bounds and clip.
        largest_gradient: largest magnitude of an element of the gradient.
        non_finite: number of NaN and Inf in the gradient.
        weight_norm: norm of the fp32 weights before the update.
        update_norm: norm of their change.
        moment_norm: square root of the sum of Adam's second moments before the update; 0: there are none.
    """

    gradient_norm: float
    largest_gradient: float
    non_finite: int
    weight_norm: float
    update_norm: float
    moment_norm: float


@dataclass(frozen=True)
class StepDetails:
    """Details of one step; ``loss`` and ``grad_norm``: those of the whole step, bit by bit; ``parameters``: by name."""

    step: int
    loss: float
    grad_norm: float
    samples: list[SampleLosses]
    parameters: dict[str, ParameterDetails]


class DetailsWriter:
    """Appends to a run's ``details.jsonl``; used by rank 0 alone."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / DETAILS_FILE)

    def write(self, details: StepDetails) -> None:
        """Write the details of one step."""
        self._file.write(json.dumps(asdict(details)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_details(run_dir: Path) -> dict[int, StepDetails]:
    """All complete lines of a run, by step; of steps that were taken again the later ones.

    Raises:
        DataError: there is no such file, or it is damaged.
    """
    path = run_dir / DETAILS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return {one.step: one for one in (_parse(line) for line in lines if line.endswith("\n"))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}; megasdc.trace.details writes it") from error


def _parse(line: str) -> StepDetails:
    raw = parse_json(line)
    samples = [SampleLosses(**one) for one in raw["samples"]]
    parameters = {name: ParameterDetails(**one) for name, one in raw["parameters"].items()}
    return StepDetails(raw["step"], raw["loss"], raw["grad_norm"], samples, parameters)
