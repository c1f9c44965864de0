"""Does training run at all? One rank, and TP, PP, DP as two ranks of one device, in every type."""

from __future__ import annotations

import math
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.record import Recorder
from gpu.setting import metrics, precision

LAYOUTS = {"tp2": {"parallel__tensor": 2}, "pp2": {"parallel__pipeline": 2}, "dp2": {}}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}
"""Of a layout's losses against those of one rank, nats; sums are added in another order."""
SCALED = {"ds__fp16__initial_scale_power": 32, "ds__fp16__hysteresis": 1, "training__steps": 30}
"""A loss scale that overflows at first, and steps enough to come down."""


def smoke(recorder: Recorder, crew: Crew) -> None:
    """Six steps each on made-up data; losses fall, layouts agree."""
    bench = Bench(recorder, crew)
    kinds = ["fp32", "bf16", "fp16"]
    if not recorder.on_gpu and not _processor_has_fp16():
        kinds.remove("fp16")
        recorder.not_run("fp16", "this processor has no AVX512-FP16, without which DeepSpeed refuses fp16 on a CPU")
    wanted = {f"one rank {kind}": bench.ranks(bench.config(f"one_{kind}", **precision(kind)), 1) for kind in kinds}
    for kind in kinds if recorder.on_gpu else kinds[:1]:
        for name, layout in LAYOUTS.items():
            wanted[f"{name} {kind}"] = bench.ranks(bench.config(f"{name}_{kind}", **precision(kind), **layout), 2)
    if "fp16" in kinds:
        wanted["overflow fp16"] = bench.ranks(bench.config("overflow_fp16", **precision("fp16"), **SCALED), 1)
    # The simplest first, so that it is known whatever the others do.
    ended = bench.train({name: jobs for name, jobs in wanted.items() if len(jobs) == 1})
    if recorder.on_gpu:
        for name, (rank, *_) in ended.items():
            if rank.code == 0:
                recorder.note(f"{name}: peak MiB", round((rank.value["peak_bytes"] or 0) / 2**20))
    for kind in kinds:
        _check_falls(recorder, bench, f"one_{kind}")
    bench.train({name: jobs for name, jobs in wanted.items() if len(jobs) > 1})
    for kind in kinds if recorder.on_gpu else kinds[:1]:
        for name in LAYOUTS:
            losses = [bench.losses(f"{run}_{kind}") for run in (name, "one")]
            recorder.check_near(f"{name} {kind} agrees with one rank", *losses, TOLERANCE[kind], 6)
    if "fp16" in kinds:
        _check_scaling(recorder, bench)


def _check_falls(recorder: Recorder, bench: Bench, name: str) -> None:
    losses = bench.losses(name)
    ok = len(losses) == 6 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    recorder.check(f"{name.replace('_', ' ')}: loss falls", ok, f"losses {losses}")
    seconds = metrics(bench.folder / name, "speed/step_s")
    if seconds:
        recorder.note(f"{name.replace('_', ' ')}: ms a step", round(1000 * min(seconds), 2))


def _check_scaling(recorder: Recorder, bench: Bench) -> None:
    skipped, losses = metrics(bench.folder / "overflow_fp16", "train/skipped_steps"), bench.losses("overflow_fp16")
    ok = bool(skipped) and 0 < skipped[-1] < 30 and math.isfinite(losses[-1])
    recorder.check("fp16: overflows are skipped until the scale fits", ok, f"skipped {skipped[-1:]}, {losses[-1:]}")


def _processor_has_fp16() -> bool:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return "avx512_fp16" in file.read()


def determinism(recorder: Recorder, crew: Crew) -> None:
    """Two runs of the same configuration give the same losses and the same bits."""
    bench = Bench(recorder, crew)
    steady = {
        "determinism__enabled": True,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
        "checkpoint__interval": 6,
    }
    cases: dict[str, tuple[dict[str, Any], int]] = {"bf16 tp2": ({**precision("bf16"), **LAYOUTS["tp2"]}, 2)}
    if recorder.on_gpu:
        cases |= {kind: (precision(kind), 1) for kind in ("fp32", "bf16")}
        # Without dropout attention is one fused kernel, whose backward pass is the one to watch.
        none = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
        cases |= {f"{kind} fused attention": ({**precision(kind), **none}, 1) for kind in ("fp32", "bf16", "fp16")}
    wanted = {
        f"{name} {turn}": bench.ranks(bench.config(f"{name.replace(' ', '_')}_{turn}", **{**steady, **changes}), ranks)
        for name, (changes, ranks) in cases.items()
        for turn in ("a", "b")
    }
    bench.train(wanted)
    pairs = {}
    for name in cases:
        folders = [bench.folder / f"{name.replace(' ', '_')}_{turn}" for turn in ("a", "b")]
        losses = [metrics(one) for one in folders]
        recorder.check(f"{name}: same losses", len(losses[0]) == 6 and losses[0] == losses[1], f"{losses}")
        pairs[f"{name}: same bits"] = tuple(one / "checkpoints" / "step_00000006" for one in folders)
    bench.compare(pairs)  # type: ignore[arg-type]
