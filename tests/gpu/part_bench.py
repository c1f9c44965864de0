"""Benchmarks as parts of the run on a GPU: the referee against its libraries, cost of checks, the loop of a profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.record import Recorder


def referee(recorder: Recorder, crew: Crew) -> None:
    """Results of this device's libraries are within the bounds of the referee, and flips of bits are outside."""
    from tools.bench.detection.options import RefereeOptions
    from tools.bench.detection.referee import judge_results

    elements = 8_000 if recorder.on_gpu else 500
    options = RefereeOptions(elements=elements, flips=4, width=512 if recorder.on_gpu else 64, device=recorder.device)
    rows: Iterator[Any] = judge_results(options)
    while True:
        with recorder.attempt("the referee"):
            answer = next(rows, None)
            if answer is None:
                return
            label = f"{answer.kind}, {answer.type}"
            said = f"{answer.accused} of {answer.compared}, nearest {answer.nearest:.2f}"
            recorder.check(f"{label}: no healthy element is accused", not answer.accused, said)
            seen, of = (sum(column) for column in zip(*answer.seen, strict=True))
            recorder.note(label, {"apart": answer.apart, "nearest": round(answer.nearest, 3), "seen": f"{seen}/{of}"})


SIZES = {
    "cuda": {"hidden": 2048, "layers": 8, "sequence": 1024, "micro_batch": 4, "accumulation": 4, "vocab": 32000},
    "cpu": {"hidden": 64, "layers": 2, "sequence": 64, "micro_batch": 2, "accumulation": 2, "vocab": 500},
}
SECONDS, LEAST_BLOCKS = 25.0, 3
"""Blocks, of a step of each kind, are taken for so long."""
MOST_STEPS = 10_000


def cost(recorder: Recorder, crew: Crew) -> None:
    """Steps of one rank with each kind of check and without, in turn; nothing else runs on the device."""
    bench = Bench(recorder, crew)
    options = {**SIZES[recorder.device], "precision": "bf16" if recorder.on_gpu else "fp32"}
    arguments = {"options": options, "folder": str(bench.folder), "seconds": SECONDS if recorder.on_gpu else 0.0}
    (ended,) = crew.run(bench.world("gpu.part_bench:time_checks", 1, arguments), 100.0)
    if recorder.check("steps are timed", ended.code == 0, str(ended)):
        for name, value in ended.value.items():
            recorder.note(name, value)


def time_checks(options: dict[str, Any], folder: str, seconds: float) -> dict[str, Any]:
    """Body of a process: what kinds of checks add to a step, in % of it: median of differences to the step before."""
    from tools.bench.detection.overhead_model import ALWAYS_ON, ALWAYS_ON_ALL, OFF, PERMUTED, ROWS, SLICES
    from tools.bench.detection.overhead_rank import OverheadRank
    from tools.bench.training.options import TrainBenchOptions

    kinds = (ALWAYS_ON, ALWAYS_ON_ALL, ROWS, SLICES, PERMUTED)
    rank = OverheadRank(TrainBenchOptions(ranks=1, **options), Path(folder), MOST_STEPS)
    for name in (OFF, *kinds, OFF):
        rank.step(name)
    added: dict[str, list[float]] = {name: [] for name in (OFF, *kinds)}
    inside: dict[str, list[float]] = {name: [] for name in kinds}
    steps = []
    began = time.monotonic()
    while len(added[kinds[-1]]) < LEAST_BLOCKS or time.monotonic() - began < seconds:
        for name in kinds:
            off, step = rank.step(OFF)["wall_s"], rank.step(name)
            added[name].append(100 * (step["wall_s"] / off - 1))
            inside[name].append(100 * sum(step["parts"].values()) / off)
            steps.append(off)
    added[OFF] = [100 * (one / other - 1) for one, other in zip(steps[1:], steps, strict=False)]
    rank.close()
    return {
        "ms a step without": round(1000 * median(steps), 2),
        "% of a step: median, quarters": {name: [round(one, 2) for one in quantiles(of)] for name, of in added.items()},
        "% of a step inside our calls, host": {name: round(median(of), 2) for name, of in inside.items()},
    }


def build_loop(options: dict[str, Any], folder: Path, model: dict[str, Any]) -> Any:
    """Our loop as benchmarks run it, on samples in memory; ``model`` are further fields of the model."""
    from megasdc.config.checks import check_layout
    from megasdc.config.load import parse_config
    from megasdc.data.loader import MemoryStream
    from megasdc.parallel import groups
    from megasdc.train.build import prepare_run_folder
    from megasdc.train.process import prepare_cpu
    from tools.bench.training.loops import MegasdcLoop
    from tools.bench.training.options import TrainBenchOptions, run_config

    chosen = TrainBenchOptions(ranks=1, **options)
    raw = run_config(chosen, prepare_run_folder(folder)).resolved()
    raw["megasdc"]["model"].update(model)
    config = parse_config(raw, source="the profile's options")
    prepare_cpu(1)
    groups.init_process_group(60.0)
    dims = groups.init_model_parallel(1, 1, 60.0)
    stream = MemoryStream(chosen.vocab, chosen.sequence, 64, 10**6)
    return MegasdcLoop(config, check_layout(config, 1), dims, chosen, stream, folder)
