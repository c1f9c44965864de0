"""Does this rank compute what trusted hardware computed? A golden trace, verified by the ranks of a run under way.

The golden workload is run once, in a second model beside the run's, and its first step's micro-batches are compared:
they do not depend on the number of replicas, so that a trace of one replica serves every replica.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megasdc.addresses import MICRO_BATCH_PHASES
from megasdc.config import parse_config
from megasdc.engine.observer import Listener
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import load_golden, load_header
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import Finding, find
from megasdc.train.golden_key import compare_key
from megasdc.train.workload import Workload

logger = logging.getLogger(__name__)


def unfit_for(path: Path, dims: ParallelDims) -> str | None:
    """Why this rank cannot be compared with a golden trace; null: it can.

    Args:
        path: the golden file.
        dims: layout and place of this rank in the run.

    Raises:
        TraceError: the file is missing or damaged.
    """
    header = load_header(path)
    layout = ParallelDims(**header["layout"])
    if (layout.tensor, layout.pipeline) != (dims.tensor, dims.pipeline):
        return f"the golden trace is of {layout}, the run has {dims}: tensor and pipeline must be equal"
    differences = compare_key(header)[1]
    if differences:
        return "; ".join(f"{name}: golden {a!r}, here {b!r}" for name, (a, b) in differences.items())
    return None


def check_against_golden(path: Path, dims: ParallelDims, before: Sequence[Listener]) -> Finding:
    """Compute the golden workload's first step and compare its micro-batches.

    Args:
        path: the golden file, for which ``unfit_for`` answers null on every rank.
        dims: layout and place of this rank in the run.
        before: listeners that come before the tracer: what harms results on purpose.

    Returns:
        What differs on this rank.

    Collective: all ranks of the world.
    Sync: waits for the device. Needs memory for a second model with its optimizer.
    """
    header = load_header(path)
    layout = ParallelDims(**header["layout"])
    rank = ParallelDims(layout.tensor, layout.pipeline, layout.data, 0)
    place = dims.tp_rank + rank.tensor * rank.data * dims.pp_rank
    golden = load_golden(path, place)
    workload = Workload(parse_config(golden.config), dims)
    # Dropout masks depend on the place of a sample in the batch: on all replicas those of the first one that recorded.
    workload.engine.dims = replace(layout, rank=place)
    worst = Finding(0, 0)
    for number, case in enumerate(golden.cases):
        got = workload.trace(case, golden.algorithm, before)
        finding = find(_first_step(golden.traces[number, place]), _first_step(got), dims)
        if finding.divergences and not worst.divergences:
            worst = finding
        elif not worst.divergences:
            worst = Finding(worst.compared + finding.compared, 0)
    return worst


def _first_step(trace: Trace) -> Trace:
    """What depends on no sum over replicas."""
    kept = [
        (address, value)
        for address, value in zip(trace.addresses, trace.checksums, strict=True)
        if address.step == 1 and address.phase in MICRO_BATCH_PHASES
    ]
    return Trace([address for address, _ in kept], [value for _, value in kept])
