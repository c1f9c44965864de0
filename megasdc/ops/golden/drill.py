"""Drill of a verification: injected faults in its ranks, to see them detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megasdc.common.errors import ConfigError
from megasdc.config.contradictions import fault_place_problems, fault_problems
from megasdc.config.faults import CHECKPOINT, TOKENS, FaultSpec, ProcessFaultSpec, expand_faults
from megasdc.config.sections import MegasdcSection
from megasdc.engine.hooks import Hook
from megasdc.engine.observer import Listener
from megasdc.faults.injector import Injector
from megasdc.faults.process import ProcessFaults
from megasdc.faults.stored import StateFaults
from megasdc.parallel.dims import ParallelDims
from megasdc.train.detection.golden import Workload
from megasdc.train.detection.golden_key import workload_of

SEEDS_APART = 1_000_003
"""Difference of the seeds of two repeats, so that an intermittent fault is drawn anew in each."""


class DrillFile(BaseModel):
    """A file of faults: lists as in a run's configuration, under the same names; ranks are those of a cell."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: list[FaultSpec] = []
    process_faults: list[ProcessFaultSpec] = []


def load_drill(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Read a file of faults and check it as in a run; profiles are expanded.

    Args:
        header: of the golden file whose workload gets the faults.

    Returns:
        Its contents, in plain values.

    Raises:
        ConfigError: it cannot be read, a fault is invalid, or does not apply to this workload.
        TraceError: this version cannot read the golden trace's configuration.
    """
    try:
        drill = DrillFile.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(f"--faults {path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}" for one in error.errors()]
        raise ConfigError(problems, source=str(path)) from error
    workload, layout = workload_of(header), ParallelDims(**header["layout"])
    lists: dict[str, Any] = {"faults": drill.faults, "process_faults": drill.process_faults}
    sections: MegasdcSection = workload.megasdc.model_copy(update=lists)
    texts = [problem.text for problem in fault_problems(sections, workload.deepspeed)]
    texts += fault_place_problems(sections, layout.tensor, layout.pipeline, layout.data)
    if texts:
        raise ConfigError([text.removeprefix("megasdc.") for text in texts], source=str(path))
    faults = expand_faults(drill.faults)
    unfit = [
        f"faults.{place}.phase: {one.phase}; a golden workload reads no corpus and saves nothing"
        for place, one in enumerate(faults)
        if one.phase in (CHECKPOINT, TOKENS)
    ]
    if unfit:
        raise ConfigError(unfit, source=str(path))
    return json.loads(drill.model_copy(update={"faults": faults}).model_dump_json())  # type: ignore[no-any-return]


class Drill:
    """The faults of one rank of a cell.

    Args:
        contents: from ``load_drill``.
        dims: place in the cell.
        hidden_size: width of the model.
    """

    def __init__(self, contents: dict[str, Any], workload: Workload, dims: ParallelDims, hidden_size: int) -> None:
        drill = DrillFile.model_validate(contents)
        self._specs = drill.faults
        self._workload = workload
        self._dims = dims
        self._hidden_size = hidden_size
        self._num_process_faults = len(drill.process_faults)
        self._process = ProcessFaults(drill.process_faults, dims, lambda *_: None)
        self.changed = [0] * len(drill.faults)

    @property
    def acted(self) -> list[int]:
        """Of each process fault, 1 if it has acted on this rank, else 0."""
        return [int(index in self._process.acted) for index in range(self._num_process_faults)]

    def start(self, repeat: int) -> tuple[list[Listener], list[Hook]]:
        """Listeners and hooks that inject faults into one repeat, drawn anew; a process fault acts once in all."""
        hooks: list[Hook] = [self._process] if self._process.armed else []
        if not self._specs:
            return [], hooks
        specs = [spec.model_copy(update={"seed": spec.seed + repeat * SEEDS_APART}) for spec in self._specs]
        injector = Injector(specs, self._dims, self._hidden_size, self._count)
        return [injector], [*hooks, StateFaults(self._workload.engine, injector)]

    def _count(self, firing: Any) -> None:
        self.changed[firing.spec] += bool(firing.changed)
