"""Time from the launcher's command to the first step, by part.

Starts ``megasdc launch`` and DeepSpeed's own launcher in turn on this machine with a small model and a little prepared
text, several times; or ``megasdc launch`` without fused modules, with them, and with them where no code is kept. Each
rank writes how long its parts took (``megasdc.train.process``); the launcher's own part is from the command to
the start of the last rank's process, both on the clock that counts from the machine's boot.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megasdc.common.errors import MegasdcError
from megasdc.events import read_events
from megasdc.model.fused import CACHE_VARIABLE
from megasdc.parallel.local_ranks import base_environment, free_port
from megasdc.parallel.run_ranks import TAIL_CHARACTERS
from tools.bench.result import Report, table
from tools.bench.small.gpt import prepare_library
from tools.bench.statistics import Estimate, estimate_median

TIMEOUT_S = 600.0
COMMANDS = ("megasdc launch", "deepspeed")
WARM, COLD = "megasdc launch, model.fuse", "megasdc launch, model.fuse, nothing compiled before"
FUSED_COMMANDS = ("megasdc launch", WARM, COLD)
"""Commands that are compared with ``--fuse``."""
SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "pretrain_gpt.py"
PHASES = {
    "launcher": "command until the rank's process starts",
    "imports": "Python, PyTorch, DeepSpeed, Megatron-core; configuration",
    "checks": "layout, prepared data, run folder",
    "groups": "process groups",
    "model": "model",
    "engine": "engine and optimizer",
    "data": "data index and loaders",
    "resume": "looking for a checkpoint",
    "first_step": "hooks and first step",
}
"""Descriptions of the parts."""


def measure_launches(
    commands: Sequence[str],
    repeats: int,
    ranks: int,
    threads: int,
    folder: Path,
    on_progress: Callable[[int], None],
) -> dict[str, Any]:
    """Launch a short run several times by each command in turn; the first, which fill caches, do not count.

    By command, in seconds: ``total``, ``phases`` by name in their order, ``first_launch_s`` of the launch that does not
    count, ``dominates``, and samples. ``on_progress`` gets the number of launches done. MegasdcError if one failed.
    """
    data = prepare_library(folder / "data", 1000, "[at]*.py", characters=200_000)
    samples: dict[str, list[dict[str, float]]] = {command: [] for command in commands}
    for repeat in range(repeats + 1):
        for place, command in enumerate(commands):
            name = f"run_{repeat}_{place}"
            samples[command].append(_launch_once(folder, name, command, data, ranks, threads))
            on_progress(repeat * len(commands) + place + 1)
    return {command: _estimate(found) for command, found in samples.items()}


def _estimate(samples: list[dict[str, float]]) -> dict[str, Any]:
    first, *counted = samples
    phases = {name: estimate_median([sample[name] for sample in counted]) for name in counted[0]}
    total: Estimate = estimate_median([sum(sample.values()) for sample in counted])
    return {
        "total": total,
        "phases": phases,
        "first_launch_s": sum(first.values()),
        "dominates": max(phases, key=lambda name: phases[name].median),
        "samples": counted,
    }


def report_launch(command: str, launch: dict[str, Any]) -> Report:
    """Parts of the time to the first step by one command, from its estimates of ``measure_launches``."""
    total: Estimate = launch["total"]
    rows = []
    for name, value in launch["phases"].items():
        share = f"{100 * value.median / total.median:.1f} %"
        rows.append([name, PHASES.get(name, ""), f"{value.median:.2f}", f"{value.low:.2f} - {value.high:.2f}", share])
    rows.append(["total", "", f"{total.median:.2f}", f"{total.low:.2f} - {total.high:.2f}", ""])
    title = f"seconds from the command `{command}` to the first step, slowest rank"
    yield table(title, ("part", "what", "median", "interval of the median", "share"), rows, total=True)
    yield (
        f"{total.count} launches, interval of the median with coverage {100 * total.coverage:.0f} %; one before them, "
        f"not counted: {launch['first_launch_s']:.2f} s. What dominates: {launch['dominates']}"
    )


def _launch_once(folder: Path, name: str, command: str, data: Path, ranks: int, threads: int) -> dict[str, float]:
    """Launch, wait for the end, and return the seconds of each part of the rank that was last to its first step."""
    config = folder / f"{name}.json"
    settings = _config(data, folder / name, ranks, threads, fuse=command in (WARM, COLD))
    config.write_text(json.dumps(settings), encoding="utf-8")
    argv = [sys.executable, "-m"]
    if command == "deepspeed":
        argv += ["deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", str(free_port()), str(SCRIPT)]
    else:
        argv += ["megasdc", "launch", "--num-ranks", str(ranks)]
    argv += ["--config", str(config)]
    log = folder / f"{name}.log"
    environment = base_environment(threads)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each launch would compile what Python else keeps
    if command == COLD:
        environment[CACHE_VARIABLE] = str(folder / f"{name}_compiled")
    commanded_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    with open(log, "wb") as output:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
            check=False,
        )
    events = list(read_events(folder / name, kind="start", name="phases"))
    if done.returncode or len(events) != ranks:
        text = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
        raise MegasdcError(
            f"the launched run ended with exit code {done.returncode}, and {len(events)} of {ranks} ranks came to "
            f"their first step:\n{text}"
        )
    return slowest_start(commanded_s, [event.fields for event in events])


def slowest_start(commanded_s: float, starts: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by part, in their order and first the launcher's, of the rank that was last to its first step.

    ``commanded_s`` is the launcher's start in seconds from boot; ``starts`` are fields of each rank's event
    ``start/phases``. The parts add up to the whole.
    """
    last = max(starts, key=lambda fields: fields["process_started_boot_s"] + sum(fields["phases"].values()))
    return {"launcher": last["process_started_boot_s"] - commanded_s, **last["phases"]}


def _config(data: Path, run_dir: Path, ranks: int, threads: int, fuse: bool) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * ranks,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megasdc": {
            "protect": "off",
            "model": {"preset": "gpt2-1m", "fuse": fuse},
            "data": {"path": str(data), "sequence_length": 128},
            "parallel": {"threads": threads, "timeout_s": 300.0},
            "training": {"steps": 2},
            "logging": {"run_dir": str(run_dir)},
        },
    }
