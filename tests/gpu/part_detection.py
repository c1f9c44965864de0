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
FAULTS: dict[str, dict[str, Any]] = {
    "audit": {**FAULT, "phase": "backward", "rank": 1, "steps": [4, 4], "micro_batches": [0]},
    "recompute": {**FAULT, "phase": "forward", "rank": 2, "steps": [5, 5], "micro_batches": [1]},
}
"""By the check that finds it. Of each run one: ranks may share a device, and what was wrong twice is halted."""


def detection(recorder: Recorder, crew: Crew) -> None:
    """Three replicas: clean, and with a fault that the audit finds or one that the recompute check finds."""
    bench = Bench(recorder, crew)
    kind = precision("bf16" if recorder.on_gpu else "fp32")
    check_faults(recorder, bench, "", {**CHECKED, **kind}, FAULTS)


def check_faults(
    recorder: Recorder, bench: Bench, label: str, changes: dict[str, Any], faults: dict[str, dict[str, Any]]
) -> None:
    """Train three replicas for six steps, clean and with each fault: it alone is named, and put right.

    Args:
        label: in front of what is checked.
        changes: the checks, as of ``write_config``.
        faults: by the name of the check that is to find it.
    """
    cases: dict[str, list[dict[str, Any]]] = {"clean": [], **{name: [fault] for name, fault in faults.items()}}
    folders = {name: bench.folder / f"{label}{name}".replace(" ", "_") for name in cases}
    bench.train(
        {
            f"{label}{name}": bench.ranks(bench.config(folders[name].name, **changes, faults=of_case), 3)
            for name, of_case in cases.items()
        }
    )
    found = verdicts(folders["clean"])
    steps = len(bench.losses(folders["clean"].name))
    recorder.check(f"{label}clean run: six steps, no verdict", steps == 6 and not found, f"{steps}: {found}")
    ends = {name: folder / "checkpoints" / "step_00000006" for name, folder in folders.items()}
    for name, fault in faults.items():
        found = verdicts(folders[name])
        named = [(one["step"], one["tier"], one["rank"]) for one in found]
        wanted = [(fault["steps"][0], name, fault["rank"])]
        recorder.check(f"{label}{name}: names the rank, and nobody else", named == wanted, str(found))
    if faults:
        bench.compare({f"{label}{name}: put right, to the bit": (ends["clean"], ends[name]) for name in faults})


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
    from megasdc.sdc.trace import read_folder

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
