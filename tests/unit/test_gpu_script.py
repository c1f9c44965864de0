"""Does ``tests/gpu.sh`` tell what happened, whatever its parts do, and within its time?"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
MODULE = """
import os, subprocess, sys, time
from gpu.record import Recorder

def fine(recorder, crew):
    recorder.check("holds", True)
    recorder.note("figure", 3)
    recorder.not_run("something", "a reason")

def raises(recorder, crew):
    with recorder.attempt("the first"):
        raise ValueError("not this one")
    recorder.check("the second", True)

def dies(recorder, crew):
    recorder.check("before", True)
    os.abort()

def hangs(recorder, crew):
    recorder.check("before", True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    recorder.note("child", child.pid)
    waits_for_ever()

def waits_for_ever():
    time.sleep(600)
"""


@pytest.fixture
def run_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one function of ``MODULE`` as a part."""
    (tmp_path / "misbehaving.py").write_text(MODULE)
    for path in (TESTS, TESTS / "distributed", tmp_path):
        monkeypatch.syspath_prepend(str(path))
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "distributed"), str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", path)
    from gpu.parts import Part
    from gpu.runner import PartRun

    def run(name: str, limit_s: float) -> dict[str, Any]:
        part = PartRun(Part(name, "a title", 1, f"misbehaving:{name}", ahead=0), tmp_path, "cpu", 1)
        part.go()
        return part.finish(limit_s)

    return run


def test_what_a_part_found_comes_back(run_part: Any) -> None:
    """Checks, figures and reasons; after an attempt that failed the part goes on, and the traceback is told."""
    found = run_part("fine", 60.0)
    assert (found["state"], found["notes"], found["not_run"][0]["reason"]) == ("passed", {"figure": 3}, "a reason")
    found = run_part("raises", 60.0)
    assert [(one["name"], one["ok"]) for one in found["checks"]] == [
        ("the first", False),
        ("the second", True),
        ("the part runs to its end", True),
    ]
    assert found["state"] == "failed" and "ValueError: not this one" in found["checks"][0]["detail"]


@pytest.mark.slow
def test_a_part_that_dies_or_hangs_leaves_what_it_had(run_part: Any) -> None:
    """Its last words name the function; processes that it started are gone, and its limit holds."""
    found = run_part("dies", 60.0)
    assert (found["state"], found["reason"]) == ("failed", "exit code -6")
    assert found["checks"][0]["name"] == "before" and "in dies" in found["output"]
    began = time.monotonic()
    found = run_part("hangs", 6.0)
    assert time.monotonic() - began < 40.0, "it would wait for ever"
    assert (found["state"], found["reason"]) == ("killed", "its time of 6 s was up")
    assert found["checks"][0]["name"] == "before" and "in waits_for_ever" in found["output"]
    assert _is_gone(found["notes"]["child"])


def _is_gone(process: int) -> bool:
    """Whether a process that was killed ends within a moment; nobody waits for it."""
    for _ in range(50):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_a_signal_ends_the_running_part(
    run_part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its processes are gone; what parts before it found is told and written, with exit code 130."""
    from gpu import __main__ as program
    from gpu.parts import Part
    from gpu.record import read_findings

    parts = [Part(name, "a title", 1, f"misbehaving:{name}", ahead=0) for name in ("fine", "hangs")]
    findings = tmp_path / "hangs" / "findings.jsonl"

    def end() -> None:
        while not (findings.exists() and "child" in findings.read_text()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(program, "PARTS", parts)
    monkeypatch.setattr(program, "_facts", lambda device: {"device": "cpu", "cores": 1, "packages": defaultdict(bool)})
    monkeypatch.setattr(program, "BASE", ())
    monkeypatch.setattr(program, "_prepare", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu.sh", "--out", str(tmp_path), "--json", str(tmp_path / "gpu.json")])
    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end, daemon=True).start()
    try:
        assert program.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert _is_gone(next(one["value"] for one in read_findings(findings) if one["name"] == "child"))
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["name"] for one in report["parts"]] == ["fine"] and "signal" in report["stopped"]
    assert "a signal" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_missing_is_named_before_anything_runs(tmp_path: Path) -> None:
    """Without a package that every rank needs: exit code 2, its name, and how to carry it; without torch too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('xxhash', 'hjson'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(TESTS / "gpu.sh"), "--device", "cpu", "--out", str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "not installed here: xxhash, hjson" in done.stderr and "--make-wheels" in done.stderr


def test_without_a_compiler_fused_modules_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part says what is missing, and fails nothing."""
    from megasdc.model import fused as compiled
    from megasdc.model.fused import CACHE_VARIABLE

    for path in (TESTS, TESTS / "distributed"):
        monkeypatch.syspath_prepend(str(path))
    from gpu.part_fused import fused
    from gpu.record import Recorder, read_findings

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "find_compiler", compiled.find_compiler.__wrapped__)
    fused(Recorder(tmp_path / "findings.jsonl", "cpu", tmp_path, 2), None)  # type: ignore[arg-type]
    (found,) = read_findings(tmp_path / "findings.jsonl")
    assert (found["kind"], found["name"]) == ("not run", "fused modules") and "g++ is not on PATH" in found["reason"]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a part on a processor; what it wrote lies in ``findings.jsonl``."""
    for path in (TESTS, TESTS / "distributed"):
        monkeypatch.syspath_prepend(str(path))
    from gpu.record import Recorder

    return Recorder(tmp_path / "findings.jsonl", "cpu", tmp_path, 2)


@pytest.mark.parametrize(
    ("found", "holds"),
    [([1.0, 2.0, 3.1], True), ([1.0, 2.0, 3.3], False), ([1.0, math.nan, 3.0], False), ([1.0, 2.0], False)],
)
def test_losses_that_are_near(recorder: Any, found: list[float], holds: bool) -> None:
    """Every step counts, one that is missing or no number too."""
    assert recorder.check_near("losses", found, [1.0, 2.0, 3.0], 0.2, 3) is holds


class Ranks:
    """Stands for a crew whose first rank ends with the same code in every run, and for its bench."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: [self]


@pytest.mark.parametrize(("code", "ok"), [(75, [True, True]), (79, [False, True]), (78, [False, False])])
def test_a_lost_rank_may_end_the_other_in_two_ways(
    recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ok: list[bool]
) -> None:
    """The name of each check says every exit code that it takes."""
    from gpu import part_timeouts
    from gpu.record import read_findings

    monkeypatch.setattr(part_timeouts, "Bench", lambda *_: Ranks(code))
    part_timeouts.timeouts(recorder, Ranks(code))  # type: ignore[arg-type]
    checks = [one for one in read_findings(tmp_path / "findings.jsonl") if one["kind"] == "check"]
    assert [one["name"] for one in checks] == [
        "hang of one rank: the other ends with 75",
        "sigkill of one rank: the other ends with 79 or 75",
    ]
    assert [one["ok"] for one in checks] == ok


def test_the_interpreter_is_left_out_by_its_own_version(recorder: Any) -> None:
    """Triton up to 3.6 does not know NumPy 2.4; the reason has the versions that are there."""
    from gpu.part_kernels import why_not_interpreted

    reason = why_not_interpreted("3.5.1", "2.4.1")
    assert reason is not None and "(3.5.1)" in reason and "NumPy 2.4.1" in reason
    assert [why_not_interpreted(*one) for one in (("3.7.0", "2.4.1"), ("3.6.0", "2.3.5"))] == [None, None]


def test_a_part_that_waits_is_ended_when_the_time_is_up(
    recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started while the part before it ran; all others are told as not run."""
    from gpu import __main__ as program
    from gpu.parts import Part

    ended, now = [], [0.0]

    class Run:
        def __init__(self, part: Part, *_: Any) -> None:
            self.part = part

        def go(self) -> None:
            now[0] = 100.0

        def finish(self, limit_s: float) -> dict[str, Any]:
            return {"name": self.part.name, "state": "passed", "seconds": 1.0, "checks": []}

        def end(self) -> None:
            ended.append(self.part.name)

    monkeypatch.setattr(program, "PartRun", Run)
    monkeypatch.setattr(program.time, "monotonic", lambda: now[0])
    report: dict[str, Any] = {"parts": []}
    parts = [Part(name, "a title", 1, "a:b") for name in ("first", "second", "third")]
    facts = {"device": "cpu", "cores": program.PRESTART_CORES, "packages": {}}
    program._run_parts(parts, tmp_path, facts, 100.0, report, lambda: None)
    assert ended == ["second"]
    assert [(one["name"], one["state"]) for one in report["parts"]] == [
        ("first", "passed"),
        ("second", "not run"),
        ("third", "not run"),
    ]


STUB = """#!/bin/sh
echo "DS_BUILD_OPS=$DS_BUILD_OPS $*" >>"$CALLS"
touch "$FOLDER/a-1-py3-none-any.whl"
"""


def test_the_wheels_are_the_tested_versions(tmp_path: Path) -> None:
    """DeepSpeed is built without operators, the rest downloaded for the other machine; names are added and left out."""
    stub, calls, folder = tmp_path / "python", tmp_path / "calls", tmp_path / "wheels"
    stub.write_text(STUB)
    stub.chmod(0o755)
    more = ["--make-wheels", str(folder), "--python", "3.13", "--without", "numpy", "--with", "pyarrow"]
    environment = {**os.environ, "PYTHON": str(stub), "CALLS": str(calls), "FOLDER": str(folder)}
    done = subprocess.run(
        ["bash", str(TESTS / "gpu.sh"), *more], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built, downloaded = calls.read_text().splitlines()
    pinned = dict(
        line.strip().split("==")
        for line in (TESTS.parent / "launch" / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert built.startswith("DS_BUILD_OPS=0 -m pip wheel") and built.endswith(f"deepspeed=={pinned['deepspeed']}")
    assert f"megatron-core=={pinned['megatron-core']}" in downloaded and "--python-version 3.13" in downloaded
    assert f"pyarrow=={pinned['pyarrow']}" in downloaded and " numpy==" not in downloaded
    assert "deepspeed" not in downloaded and "1 wheels" in done.stdout


def test_gaps_of_a_profile() -> None:
    """Overlapping kernels count once; what is between them is a gap, by hand."""
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
    try:
        from gpu.part_profile import draw, gaps, kernel_kind
    finally:
        del sys.path[:2]
    spans = [
        (0.0, 10.0, "ampere_sgemm"),
        (5.0, 20.0, "vectorized_elementwise"),
        (40.0, 60.0, "fmha"),
        (61.0, 100.0, "x"),
    ]
    found = gaps(spans)
    assert found["busy"] == 0.79
    assert found["gaps"] == {"number": 2, "over 10 us": 1, "ms in all": 0.021, "longest us": 20.0}
    assert [kernel_kind(name) for _, _, name in spans] == ["matrix product", "elementwise", "attention", "other"]
    facts = {"step_ms": 1, "tokens_per_s": 2, "kernels": 4, "by_group_ms": {}, "longest": [["<x>", 1, 0.039]], **found}
    picture = draw(spans, facts, "a < b")
    assert picture.count("h") > 4 and "&lt;x&gt;" in picture and "a &lt; b" in picture
