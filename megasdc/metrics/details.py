"""What each step was made of: losses of samples; gradients, updates and moments of parameters (``details.jsonl``).

A line a step, from rank 0. Numbers keep every bit; NaN and infinities are written as ``NaN`` and ``Infinity``, which
Python's own reader takes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megasdc.common.durable import LineFile, parse_json
from megasdc.common.errors import DataError

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
        gradient_norm: before bounds and clip.
        largest_gradient: largest magnitude of an element.
        non_finite: NaN and Inf in the gradient.
        weight_norm: of the fp32 weights before the update.
        update_norm: of their change.
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
    """What one step was made of; ``loss`` and ``grad_norm``: of the whole step, bit by bit; ``parameters``: by name."""

    step: int
    loss: float
    grad_norm: float
    samples: list[SampleLosses]
    parameters: dict[str, ParameterDetails]


class DetailsWriter:
    """Appends to the file of a run; used by rank 0 alone."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / DETAILS_FILE)

    def write(self, details: StepDetails) -> None:
        """Write one step."""
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
