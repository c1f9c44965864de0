"""AdamW in one kernel: PyTorch's, and DeepSpeed's where it can be built."""

from __future__ import annotations

import os
import re
import shutil

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.record import Recorder
from gpu.setting import metrics, precision

KINDS = {
    "torch fused": {"torch_adam": True, "fused": True},
    "torch foreach": {"torch_adam": True, "fused": False, "foreach": True},
    "torch plain": {"torch_adam": True, "fused": False, "foreach": False},
    "DeepSpeed FusedAdam": {"torch_adam": False},
}
TOLERANCE = 1e-4


def optimizers(recorder: Recorder, crew: Crew) -> None:
    """The losses of all kinds agree; milliseconds of each."""
    bench = Bench(recorder, crew)
    kinds = dict(KINDS)
    if reason := _cannot_build(recorder.on_gpu):
        recorder.not_run("DeepSpeed FusedAdam", reason)
        del kinds["DeepSpeed FusedAdam"]
    common = {**precision("fp32"), "training__steps": 8}
    # DeepSpeed reads numbers alone out of this list, and fails with "9.0a".
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    numbers = {"TORCH_CUDA_ARCH_LIST": re.sub("[a-z]", "", listed)} if listed else {}
    worlds = {}
    for name, chosen in kinds.items():
        changes = {f"ds__optimizer__params__{key}": value for key, value in chosen.items()}
        worlds[name] = bench.ranks(bench.config(name.replace(" ", "_"), **common, **changes), 1, environment=numbers)
    bench.train(worlds, timeout_s=200.0)
    losses = {name: bench.losses(name.replace(" ", "_")) for name in kinds}
    expected = losses["torch plain"]
    for name, found in losses.items():
        recorder.check_near(f"{name}: losses of the plain one", found, expected, TOLERANCE, 8)
        seconds = metrics(bench.folder / name.replace(" ", "_"), "time/optimizer_s")
        recorder.note(f"{name}: ms of norm, clip, update, gather", round(1000 * min(seconds, default=0.0), 3))


def _cannot_build(on_gpu: bool) -> str | None:
    """Why DeepSpeed's optimizer is not compiled here."""
    if not on_gpu:
        return "it is compiled when it is first used, for half a minute; its form for processors is tested elsewhere"
    missing = [tool for tool in ("g++", "ninja", "nvcc") if shutil.which(tool) is None]
    if missing == ["nvcc"]:
        from torch.utils.cpp_extension import CUDA_HOME

        missing = [] if CUDA_HOME and shutil.which(f"{CUDA_HOME}/bin/nvcc") else missing
    return f"it is compiled when it is first used, and {', '.join(missing)} is not on PATH" if missing else None
