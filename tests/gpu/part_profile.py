"""What does one step consist of? Kernels, launches, gaps and how much of the time the device works, as a picture."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew, Job
from gpu.part_bench import build_loop
from gpu.record import Recorder

Span = tuple[float, float, str]
"""Start and end in microseconds, and a name."""

CASES = {"cuda": {"fp32": {}, "bf16": {"precision": "bf16"}}, "cpu": {"fp32": {}}}
SIZES = {
    "cuda": {"hidden": 1024, "layers": 8, "sequence": 1024, "micro_batch": 4, "accumulation": 2, "vocab": 32000},
    "cpu": {"hidden": 64, "layers": 2, "sequence": 64, "micro_batch": 2, "accumulation": 2, "vocab": 500},
}
GROUPS = {
    "matrix product": ("gemm", "cutlass", "mm", "linear", "nvjet", "xmma"),
    "attention": ("fmha", "attention", "flash"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "softmax and loss": ("softmax", "nll", "cross_entropy", "gather", "scatter"),
    "norm": ("norm",),
    "communication": ("nccl", "allreduce", "all_reduce", "allgather"),
    "copy and fill": ("memcpy", "memset", "copy", "fill", "cat"),
    "reduction": ("reduce", "sum"),
    "elementwise": ("elementwise", "mul", "add", "vectorized"),
}
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#994455", "#eecc66", "#000000")


def profile(recorder: Recorder, crew: Crew) -> None:
    """One step of a Llama-like model in each type, after five that warm up."""
    bench = Bench(recorder, crew)
    for name, chosen in CASES[recorder.device].items():
        with recorder.attempt(f"profile {name}"):
            (ended,) = crew.run([profile_job(bench, name, {**SIZES[recorder.device], **chosen})], 100.0)
            if not recorder.check(f"profile {name} is taken", ended.code == 0, str(ended)):
                continue
            found = ended.value
            spans = found.pop("spans")
            picture = recorder.folder / f"step_{name}.svg"
            picture.write_text(draw(spans, found, f"one step, {name}, {SIZES[recorder.device]}"), encoding="utf-8")
            (recorder.folder / f"step_{name}.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
            for key in ("step_ms", "tokens_per_s", "peak_MiB", "launches", "busy", "gaps", "by_group_ms"):
                if found.get(key) is not None:
                    recorder.note(f"{name}: {key}", found[key])
            recorder.note(f"{name}: longest", found["longest"][:6])
            recorder.note(f"{name}: picture", str(picture))


def profile_job(bench: Bench, name: str, options: dict[str, Any], section: dict[str, Any] | None = None) -> Job:
    """A job that takes a profile."""
    folder = bench.folder / f"loop_{name}"
    arguments = {"options": options, "folder": str(folder), "model": section or {}}
    return bench.world("gpu.part_profile:take_profile", 1, arguments)[0]


def take_profile(options: dict[str, Any], folder: str, model: dict[str, Any]) -> dict[str, Any]:
    """Body of a process: warm up, time steps without a profiler, then profile one."""
    import torch

    on_gpu = torch.cuda.is_available()
    loop = build_loop(options, Path(folder), model)
    loop.run(5)
    steps = 10 if on_gpu else 3
    began = time.perf_counter()
    loop.run(steps)
    if on_gpu:
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / steps
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds) as taken:
        loop.run(1)
        if on_gpu:
            torch.cuda.synchronize()
    tokens = options["micro_batch"] * options["accumulation"] * options["sequence"]
    return {
        "losses": [float(one) for one in loop.losses],
        "step_ms": round(1000 * step_s, 3),
        "tokens_per_s": round(tokens / step_s),
        "peak_MiB": round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else None,
        **summarise(taken, on_gpu),
    }


def summarise(taken: Any, on_gpu: bool) -> dict[str, Any]:
    """What a profile holds: spans of kernels, or on a processor of operations."""
    from torch.autograd import DeviceType

    events = taken.events()
    if on_gpu:
        # Ranges that code marks appear on the device's line of time too, around the kernels that they hold.
        chosen = [one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
        launches = sum("LaunchKernel" in one.name for one in events)
    else:
        # Operations that work themselves for the most part, and do not only call others.
        own = [one for one in events if one.name.startswith("aten::")]
        chosen, launches = [one for one in own if 2 * one.self_cpu_time_total > one.cpu_time_total], None
    spans: list[Span] = sorted((one.time_range.start, one.time_range.end, one.name) for one in chosen)
    times: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    groups: defaultdict[str, float] = defaultdict(float)
    for start, end, name in spans:
        times[name] += end - start
        counts[name] += 1
        groups[kernel_kind(name)] += end - start
    longest = sorted(times, key=lambda one: -times[one])[:25]
    return {
        "spans": [(round(a, 1), round(b, 1), name) for a, b, name in spans],
        "kernels": len(spans),
        "launches": launches,
        **(gaps(spans) if on_gpu else {}),
        "by_group_ms": {name: round(groups[name] / 1000, 3) for name in sorted(groups, key=lambda one: -groups[one])},
        "longest": [[name[:90], counts[name], round(times[name] / 1000, 3)] for name in longest],
    }


def gaps(spans: Sequence[Span]) -> dict[str, Any]:
    """How much of the time from the first kernel to the last some kernel runs, and the pauses between."""
    if not spans:
        return {"busy": None, "gaps": None}
    busy, end, pauses = 0.0, spans[0][0], []
    for start, stop, _ in spans:
        if start > end:
            pauses.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    long = [one for one in pauses if one > 10.0]
    told = {"number": len(pauses), "over 10 us": len(long), "ms in all": round(sum(pauses) / 1000, 3)}
    return {"busy": round(busy / whole, 4), "gaps": {**told, "longest us": round(max(pauses, default=0.0), 1)}}


def kernel_kind(name: str) -> str:
    """What kind of work a kernel does, by its name."""
    small = name.lower()
    return next((group for group, signs in GROUPS.items() if any(sign in small for sign in signs)), "other")


def draw(spans: Sequence[Span], found: dict[str, Any], title: str) -> str:
    """A picture without any library: one line a kind of work over time, and the longest kernels below."""
    names = [*GROUPS, "other"]
    first, last = (min(a for a, _, _ in spans), max(b for _, b, _ in spans)) if spans else (0.0, 1.0)
    width, left, row = 1200, 150, 22
    scale = (width - left - 20) / max(last - first, 1e-9)
    parts = [f'<text x="10" y="20" font-size="15">{escape(title)}</text>']
    facts = f"{found['step_ms']} ms a step, {found['tokens_per_s']} tokens/s, {found['kernels']} kernels"
    if found.get("busy") is not None:
        facts += f", device busy {100 * found['busy']:.1f} % of {(last - first) / 1000:.2f} ms, gaps {found['gaps']}"
    parts.append(f'<text x="10" y="40">{escape(facts)}</text>')
    for place, name in enumerate(names):
        y = 60 + place * row
        spent = found["by_group_ms"].get(name, 0.0)
        parts.append(f'<text x="10" y="{y + 14}">{escape(name)} {spent}</text>')
        boxes = [
            (left + (a - first) * scale, max((b - a) * scale, 0.3)) for a, b, one in spans if kernel_kind(one) == name
        ]
        bars = "".join(f"M{x:.1f} {y}h{wide:.1f}v{row - 6}h-{wide:.1f}z" for x, wide in boxes)
        parts.append(f'<path d="{bars}" fill="{COLOURS[place]}"/>')
    for place, (name, count, spent) in enumerate(found["longest"]):
        y = 80 + (len(names) + 1 + place) * 16 + len(names) * 6
        parts.append(f'<text x="10" y="{y}">{spent:9.3f} ms {count:6d} x {escape(name)}</text>')
    height = 100 + (len(names) + 2 + len(found["longest"])) * 16 + len(names) * 6
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
