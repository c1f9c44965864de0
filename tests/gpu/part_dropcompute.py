"""Does DropCompute leave late micro-batches out on this device, with all ranks of a replica agreeing?"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.record import Recorder
from gpu.setting import precision

STEPS = 8
# Delays are far above a micro-batch's own time on either kind of device, so that drops do not depend on its speed.
LATE = {"kind": "bounded_lognormal", "mean_s": 0.15, "seed": 3}
DROPPING = {"enabled": True, "warmup_steps": 1, "max_drop_rate": 1.0, "check_agreement": True, "record_times": True}


def dropcompute(recorder: Recorder, crew: Crew) -> None:
    """Drops at lag 0 and 1, decisions that are replayed, and nothing dropped without a threshold."""
    bench = Bench(recorder, crew)
    common = {
        **precision("bf16" if recorder.on_gpu else "fp32"),
        "training__steps": STEPS,
        "determinism__enabled": True,
    }
    layouts: dict[str, tuple[dict[str, Any], int]] = {"dp2": ({}, 2)}
    if recorder.on_gpu:
        layouts["pp2 dp2"] = ({"parallel__pipeline": 2}, 4)
    late = {}
    for layout, (changes, ranks) in layouts.items():
        for lag in (0, 1) if recorder.on_gpu else (1,):
            name = f"late_{layout.replace(' ', '_')}_lag{lag}"
            section = {**DROPPING, "threshold": 0.3, "device_lag": lag}
            late[name] = bench.ranks(bench.config(name, **common, **changes, delay=[LATE], drop_compute=section), ranks)
    if recorder.on_gpu:
        section = {**DROPPING, "threshold": "inf"}
        late["never"] = bench.ranks(bench.config("never", **common, drop_compute=section), 2)
        late["off"] = bench.ranks(bench.config("off", **common), 2)
    bench.train(late)
    for name in [one for one in late if one.startswith("late")]:
        counts = decisions(bench.folder / name)
        dropped = sum(8 - sum(step) for step in counts.values())
        planned = 8 * len(counts)
        recorder.check(
            f"{name}: some are left out, not all", 0 < dropped < planned, f"{dropped} of {planned}: {counts}"
        )
        _check_times(recorder, bench.folder / name, name)
    _replay(recorder, bench, common, layouts)
    if not recorder.on_gpu:
        return
    losses = bench.losses("never"), bench.losses("off")
    recorder.check("no threshold: the losses of a run without", len(losses[0]) == STEPS and losses[0] == losses[1])


def _replay(
    recorder: Recorder, bench: Bench, common: dict[str, Any], layouts: dict[str, tuple[dict[str, Any], int]]
) -> None:
    """What was decided by the clock, decided again from the log."""
    changes, ranks = layouts["dp2"]
    replay = {"enabled": True, "replay_decisions": str(bench.folder / "late_dp2_lag1" / "decisions.jsonl")}
    bench.train({"again": bench.ranks(bench.config("again", **common, **changes, drop_compute=replay), ranks)})
    losses = bench.losses("late_dp2_lag1"), bench.losses("again")
    recorder.check("replayed decisions give the same losses", len(losses[0]) == STEPS and losses[0] == losses[1])


def decisions(run_dir: Path) -> dict[int, list[int]]:
    """Micro-batches that each replica completed, by step."""
    path = run_dir / "decisions.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {line["step"]: line["completed"] for line in lines if "step" in line}


def _check_times(recorder: Recorder, run_dir: Path, name: str) -> None:
    """Marks, which are CUDA events on a GPU, come in the order in which they were made; none is negative or missing."""
    wrong, steps = [], 0
    for path in sorted((run_dir / "step_times").glob("rank_*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "step" not in line:
                continue
            steps += 1
            marks = [*line["end_s"], line["compute_s"], line["step_s"]]
            pairs = zip(line["start_s"], line["end_s"], strict=True)
            # Events have half a microsecond, the host's clock has none.
            ordered = all(a <= b + 1e-6 for a, b in pairwise(marks))
            if not (ordered and all(-1e-6 <= start < end for start, end in pairs) and min(line["busy_s"]) > 0):
                wrong.append(line)
    recorder.check(
        f"{name}: times of micro-batches are in order", steps >= STEPS and not wrong, f"{steps} steps, {wrong[:1]}"
    )
