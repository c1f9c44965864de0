"""Do the checks of a run find a fault on this device, and nothing in a clean run? Traces and golden traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew, rank_base
from gpu.record import TAIL_LINES, Recorder
from gpu.setting import precision

CHECKED = {
    "determinism__enabled": True,
    "sdc__always_on": {"enabled": True, "coverage": "all"},
    "audit": {"enabled": True, "interval": 2},
    "ds__pipeline__activation_checkpoint_interval": 1,
    "ds__train_batch_size": 6,
    "checkpoint__interval": 6,
}
FAULT = {"submodule": "*.linear_fc2", "once": True}
# On two ranks: one that was wrong before is halted, whatever its repeats say.
FAULTS = [
    {**FAULT, "phase": "backward", "rank": 1, "steps": [4, 4], "micro_batches": [0]},
    {**FAULT, "phase": "forward", "rank": 2, "steps": [5, 5], "micro_batches": [1]},
]


def detection(recorder: Recorder, crew: Crew) -> None:
    """Three replicas: clean, and with a fault that the audit finds and one that the recompute check finds."""
    bench = Bench(recorder, crew)
    kind = precision("bf16" if recorder.on_gpu else "fp32")
    worlds = {
        name: bench.ranks(bench.config(name, **CHECKED, **kind, faults=faults), 3)
        for name, faults in {"clean": [], "harmed": FAULTS}.items()
    }
    bench.train(worlds)
    found = verdicts(bench.folder / "clean")
    recorder.check("clean run: no verdict", len(bench.losses("clean")) == 6 and not found, str(found))
    found = verdicts(bench.folder / "harmed")
    named = {(one["step"], one["tier"], one["rank"]) for one in found}
    expected = {(4, "audit", 1), (5, "recompute", 2)}
    recorder.check("both faults are named by their check, and nobody else", named == expected, str(found))
    ends = tuple(bench.folder / name / "checkpoints" / "step_00000006" for name in ("clean", "harmed"))
    bench.compare({"repaired: the bits of the clean run": ends})  # type: ignore[dict-item]


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    """What a run's checks have said."""
    from megasdc.events import read_events

    return [{"step": one.step, **one.fields} for one in read_events(run_dir, kind="sdc", name="verdict")]


def golden(recorder: Recorder, crew: Crew) -> None:
    """Traces of two runs agree; a golden trace is recorded and verified, and a drill's fault is found by it."""
    bench = Bench(recorder, crew)
    kind = precision("bf16" if recorder.on_gpu else "fp32")
    traced = {**kind, "trace__enabled": True, "trace__granularity": "gemm", "determinism__enabled": True}
    with recorder.attempt("traces"):
        bench.train({name: bench.ranks(bench.config(name, **traced), 1) for name in ("a", "b")})
        _compare_traces(recorder, bench)
    with recorder.attempt("golden traces"):
        _record_and_verify(recorder, bench, kind)


def _compare_traces(recorder: Recorder, bench: Bench) -> None:
    from megasdc.sdc.trace_file import read_folder

    (header, one), (_, other) = (read_folder(bench.folder / name / "trace")[0] for name in ("a", "b"))
    recorder.note("checksum algorithm of traces", header["algorithm"])
    equal = one.addresses == other.addresses and one.checksums == other.checksums
    recorder.check("two runs have the same trace", len(one) > 100 and equal, f"{len(one)} and {len(other)} results")


def _record_and_verify(recorder: Recorder, bench: Bench, kind: dict[str, Any]) -> None:
    config = bench.config("golden", **kind)
    file, drill = bench.folder / "gpu.golden", bench.folder / "drill.json"
    faults = [{"submodule": "*.linear_fc1", "phase": "forward", "steps": [1, None], "rank": 0}]
    drill.write_text(json.dumps({"faults": faults}), encoding="utf-8")
    calls = {
        "golden record": (["golden", "record", "--config", str(config), "--out", str(file), "--repeats", "2"], 0),
        "golden verify": (["golden", "verify", str(file), "--repeats", "2"], 0),
        "golden verify --local": (["golden", "verify", str(file), "--local", "0", "--repeats", "1"], 0),
        "golden verify with a fault": (["golden", "verify", str(file), "--repeats", "1", "--faults", str(drill)], 73),
    }
    for name, (arguments, code) in calls.items():
        ended = command(arguments, recorder.device)
        said = "\n".join((ended.stdout + ended.stderr).splitlines()[-TAIL_LINES:])
        if not recorder.check(f"{name}: exit code {code}", ended.returncode == code, f"got {ended.returncode}: {said}"):
            break


def command(arguments: list[str], device: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Call megasdc."""
    return subprocess.run(
        [sys.executable, "-m", "megasdc", *arguments],
        env=rank_base(device),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
