"""Are fused modules as right as unfused ones, and how much faster?"""

from __future__ import annotations

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.part_profile import SIZES, profile_job
from gpu.record import Recorder

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


def fused(recorder: Recorder, crew: Crew) -> None:
    """The same steps with and without `model.fuse`: losses, time, memory, kernels."""
    from megasdc.common.errors import LaunchError, StorageError
    from megasdc.model.fused import require_compiler

    try:
        require_compiler(recorder.device)
    except (LaunchError, StorageError) as error:
        recorder.not_run("fused modules", str(error))
        return
    bench = Bench(recorder, crew)
    for kind in ("fp32", "bf16") if recorder.on_gpu else ("fp32",):
        found = {}
        for name, section in {"unfused": {}, "fused": {"fuse": True}}.items():
            options = {**SIZES[recorder.device], "precision": kind}
            (ended,) = crew.run([profile_job(bench, f"{name}_{kind}", options, section)], 170.0)
            if recorder.check(f"{name} {kind} trains", ended.code == 0, str(ended)):
                found[name] = ended.value
        if len(found) < 2:
            continue
        losses = [found[name]["losses"] for name in ("fused", "unfused")]
        recorder.check_near(f"{kind}: fused losses agree", *losses, TOLERANCE[kind], len(losses[1]))
        ratio = found["fused"]["step_ms"] / found["unfused"]["step_ms"]
        recorder.note(f"{kind}: step time, fused over unfused", round(ratio, 3))
        for name, value in found.items():
            told = {key: value[key] for key in ("step_ms", "peak_MiB", "kernels", "busy") if value.get(key) is not None}
            recorder.note(f"{kind} {name}", told)
