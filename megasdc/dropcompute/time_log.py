"""Log of micro-batch times: one file a rank, read by the reports of step times.

``step_times/rank_NNNNN.jsonl`` is written by the first tensor rank of each stage of each replica. Each start of the
run writes a line ``{"kind": "layout", ...}``; then each step writes a line of seconds since it began on that rank.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasdc.common.durable import LineFile
from megasdc.engine.step_times import StepRecord
from megasdc.parallel.dims import ParallelDims

STEP_TIMES_FOLDER = "step_times"


class TimeLog:
    """Appends to the file of this rank.

    Args:
        micro_batches: of a replica's step, as configured.
    """

    def __init__(self, run_dir: Path, dims: ParallelDims, micro_batches: int) -> None:
        folder = run_dir / STEP_TIMES_FOLDER
        self._file = LineFile(folder / f"rank_{dims.rank:05d}.jsonl")
        self._write(
            {
                "kind": "layout",
                "rank": dims.rank,
                "host": socket.gethostname(),
                "dp_rank": dims.dp_rank,
                "pp_rank": dims.pp_rank,
                "data": dims.data,
                "pipeline": dims.pipeline,
                "micro_batches": micro_batches,
            }
        )

    def add(self, step: int, planned: int, record: StepRecord, gc_s: float) -> None:
        """Write the times of a step, with the micro-batches planned in it and the seconds of garbage collection."""
        self._write({"step": step, "planned": planned, **asdict(record), "gc_s": gc_s})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
