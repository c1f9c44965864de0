"""How do tests write the step times of a run that never ran? Arrays in, the files of its ranks out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megasdc.dropcompute.threshold import micro_batch_times


def layout_line(replica: int, stage: int, replicas: int, stages: int, micro_batches: int) -> dict[str, Any]:
    """The line that a start of the run writes, with one tensor rank."""
    return {
        "kind": "layout",
        "rank": stage * replicas + replica,
        "host": f"node{replica}",
        "dp_rank": replica,
        "pp_rank": stage,
        "data": replicas,
        "pipeline": stages,
        "micro_batches": micro_batches,
    }


def file_of(run: Path, rank: int) -> Path:
    """The file of one rank."""
    path = run / "step_times" / f"rank_{rank:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, *lines: dict[str, Any]) -> None:
    """Add lines to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def step_line(
    step: int, starts: np.ndarray, ends: np.ndarray, busy: np.ndarray, *, planned: int = 0, **times: float
) -> dict[str, Any]:
    """The line of one step; ``planned`` 0: all were completed."""
    lists = {"start_s": starts.tolist(), "end_s": ends.tolist(), "busy_s": busy.tolist()}
    times = {"compute_s": float(ends[-1]), "step_s": float(ends[-1]) + 0.5, "gc_s": 0.0} | times
    return {"step": step, "planned": planned or len(starts)} | lists | times


def write_run(
    run: Path,
    latencies: np.ndarray,
    communication_s: float,
    gc_s: np.ndarray | None = None,
    first_step: int = 1,
    of_layers: int = 0,
) -> Path:
    """Write a run in which nothing was left out, or go on with it.

    Args:
        run: the run folder.
        latencies: [replica, step, micro-batch, stage], seconds.
        communication_s: that each step takes beyond its slowest replica.
        gc_s: of a replica's first stage in a step, within the latencies, [replica, step]; null: none.
        first_step: number of the first one.
        of_layers: of the model, where backward passes may end; forward passes then last half of a micro-batch.
    """
    replicas, steps, micro_batches, stages = latencies.shape
    times = [micro_batch_times(latencies[:, step], 1 / 3, finish=False) for step in range(steps)]
    for replica in range(replicas):
        for stage in range(stages):
            path = file_of(run, stage * replicas + replica)
            more = {"of_layers": of_layers} if of_layers else {}
            append(path, layout_line(replica, stage, replicas, stages, micro_batches) | more)
            for step, (starts, ends) in enumerate(times):
                collected = float(gc_s[replica, step]) if gc_s is not None and stage == 0 else 0.0
                line = step_line(
                    first_step + step,
                    starts[replica],
                    ends[replica],
                    latencies[replica, step, :, stage],
                    step_s=float(ends[:, -1].max()) + communication_s,
                    gc_s=collected,
                )
                middles = (starts[replica] + ends[replica]) / 2
                append(path, line | ({"forward_end_s": middles.tolist()} if of_layers else {}))
    return run
