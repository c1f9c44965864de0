"""What share of the device's peak does a whole run reach, and what does protection cost it?"""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.part_detection import verdicts
from gpu.record import Recorder
from gpu.setting import metrics, precision

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "model__num_layers": 24,
        "model__hidden_size": 2048,
        "model__num_attention_heads": 16,
        "model__max_positions": 2048,
        "model__vocab_multiple": 32000,
        "data__sequence_length": 2048,
        "ds__train_micro_batch_size_per_gpu": 4,
        "ds__train_batch_size": 32,
        "training__steps": 11,
    },
    "cpu": {"ds__train_batch_size": 2, "training__steps": 12},
}
WARM_UP = 5
"""Steps that are not counted: kernels are chosen, and a run with checks times itself."""
STEADY = {"determinism__enabled": True}
CHECKS = {**STEADY, "sdc__always_on": {"enabled": True, "rows": True, "slice_elements": 16384}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"model__fuse": False},
    "fused": {},
    "deterministic": STEADY,
    "checks": CHECKS,
}
"""All but the first have fused modules."""


def speed(recorder: Recorder, crew: Crew) -> None:
    """One run after the other, each alone on the device: median step, MFU, memory, and the ratio to the first.

    The last two differ in the checks alone.
    """
    bench = Bench(recorder, crew)
    medians: dict[str, float] = {}
    common = {**SIZES[recorder.device], **precision("bf16" if recorder.on_gpu else "fp32")}
    if recorder.on_gpu:
        common["model__fuse"] = True
    else:
        recorder.not_run("fused modules", "they are compiled for a minute; part `fused` times them")
    for name, changes in CASES.items():
        if name == "fused" and not recorder.on_gpu:
            continue
        (ended,) = bench.train({name: bench.ranks(bench.config(name, **{**common, **changes}), 1)})[name]
        if ended.code != 0:
            continue
        run_dir = bench.folder / name
        seconds = metrics(run_dir, "speed/step_s")[WARM_UP:]
        found = verdicts(run_dir)
        recorder.check(f"{name}: no verdict", not found, str(found))
        medians[name] = median(seconds)
        low, _, high = quantiles(seconds)
        told: dict[str, Any] = {"ms a step": round(1000 * medians[name], 2)}
        told["quarters"] = [round(1000 * low, 2), round(1000 * high, 2)]
        for key in ("speed/tflops_per_device", "speed/mfu_ratio", "sdc/cost_share"):
            if values := metrics(run_dir, key)[WARM_UP:]:
                told[key] = round(median(values), 4)
        if peak := ended.value["peak_bytes"]:
            told["peak GiB"] = round(peak / 2**30, 2)
        told["over the first"] = round(medians[name] / next(iter(medians.values())), 4)
        recorder.note(name, told)
    if medians.keys() >= {"deterministic", "checks"}:
        recorder.note("checks alone: step over without", round(medians["checks"] / medians["deterministic"], 4))
