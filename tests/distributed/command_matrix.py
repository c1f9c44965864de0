"""Every command with files and folders that cannot be read, written or are no files: as root, too.

Permissions do not stop root, so each command runs in a process that has given up the two capabilities that let it pass
them: files without permission bits then stop their owner too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np

MODULES = {"megasdc": "megasdc", "bench": "tools.bench"}
ONCE = "--set megasdc.supervise.failures_per_hour=1 --set megasdc.logging.run_dir={base}/supervised"
"""A host that cannot be reached is tried once more, and no more."""
LITTLE = "--num-ranks 1 --skip data,hosts,storage,steps,resume,cost,spares"
"""Of a preflight: configuration and golden values alone."""
DRY = "--dry-run --set logging.run_dir={base}/guarded"
PASSING = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


@dataclass(frozen=True)
class Command:
    """A command line with one input or one output under test.

    Attributes:
        line: its arguments; ``{in}`` is the input under test, ``{out}`` what it writes, ``{base}`` healthy files.
        source: what lies at ``{in}``, below ``{base}``; None: the command has no input under test.
        unread: the exit code if the input cannot be read or is no such thing.
        done: the exit code with healthy files.
        program: ``bench`` or a script of tools/ instead of ``megasdc``.
        prints: whether the result goes to standard output.
        sibling: an entry beside or in the input that the command does not need, and may not stumble over.
        unwritten: the exit code if the output cannot be written.
        damaged: the exit code if the input is empty or binary; None: that of ``unread``.
    """

    line: str
    source: str | None = None
    unread: int = 0
    done: int = 0
    program: str | None = None
    prints: bool = True
    sibling: str | None = None
    unwritten: int = 77
    damaged: int | None = None

    @property
    def name(self) -> str:
        """The command line as people write it."""
        return f"{self.program or 'megasdc'} {self.line}"


STEP = "run/checkpoints/step_00000004"
COMMANDS = (
    Command("check-config {in}", "run.json", 70),
    Command("config-table --check {in}", "configuration.md", 71, prints=False, damaged=2),
    Command("config-table --write {in}", "configuration.md", 71, damaged=2),
    Command("schema --out {out}", prints=False),
    Command("coverage --config {in} --world-size 2", "run.json", 70),
    Command("verify-data {in}", "data", 71),
    Command("verify-data {base}/data {in}", "data", 71),
    Command("prepare-data --config {in} --out {out}", "text.json", 70),
    Command("prepare-data --config {base}/text.json --set megasdc.data.sources.0.path={in} --out {out}", "texts", 71),
    Command("launch --dry-run --num-ranks 1 --config {in}", "run.json", 70, prints=False),
    Command("launch --dry-run --config {base}/run.json --hostfile {in}", "hostfile", 78, done=78, prints=False),
    Command(f"supervise --config {{in}} --hostfile {{base}}/hostfile {ONCE}", "run.json", 70, done=78, prints=False),
    Command(f"supervise --config {{base}}/run.json --hostfile {{in}} {ONCE}", "hostfile", 78, done=78, prints=False),
    Command(f"preflight {LITTLE},golden --config {{in}}", "run.json", 70),
    Command(f"preflight {LITTLE},golden --config {{base}}/run.json --out {{out}}"),
    Command(f"preflight {LITTLE} --config {{base}}/run.json --golden {{in}}", "golden", 80),
    Command(
        "launch --dry-run --num-ranks 1 --config {base}/run.json --script {in}", "s.py", 78, prints=False, damaged=0
    ),
    Command(f"run {DRY} --config {{in}} -- deepspeed --num_gpus 1 {{base}}/s.py", "guard.json", 70, prints=False),
    Command(f"run {DRY} -- deepspeed --num_gpus 1 {{in}}", "s.py", 78, prints=False, damaged=0),
    Command(f"run {DRY} -- deepspeed --hostfile {{in}} {{base}}/s.py", "hostfile", 78, done=78, prints=False),
    Command("check-determinism --lint-only --config {in}", "run.json", 70),
    Command("inspect-data {in} --at-step 2", "run", 71),
    Command("inspect-data --config {in} --world-size 2 --at-step 2", "run.json", 70),
    Command("triage {in} 9", "run", 71, done=71, prints=False),  # it has four steps, so that nothing is launched
    Command("summary {in}", "run", 71),
    Command("top --once {in}", "run", 71),
    Command("export-metrics {in} --to csv --out {out}", "run", 71),
    Command("verify-checkpoint {in}", STEP, 72, sibling="../step_00000002"),
    Command("verify-checkpoint {in}", "run/checkpoints", 72),
    Command("inspect-checkpoint {in}", STEP, 72, sibling="../step_00000002"),
    Command("inspect-checkpoint {in}", "run/checkpoints", 72),
    Command("manifest {in} --out {out}", STEP, 72, sibling="../step_00000002", damaged=0),  # any one file can be told
    Command("convert-checkpoint {in} --to universal --out {out}", STEP, 72, sibling="../step_00000002"),
    Command("convert-checkpoint {in} --to universal --out {out}", "run/checkpoints", 72, sibling="step_00000002"),
    Command("archive push {in} {out} --run r", STEP, 72, sibling="../step_00000002"),
    Command("archive list {in}", "archive", 72),
    Command("archive verify {in}", "archive", 72),
    Command("archive prune {in}", "archive", 72),
    Command("archive pull {in} {out}", "archive", 72),
    Command("export-hf {in} {out}", STEP, 72, sibling="../step_00000002"),
    Command("export-hf {in} {out}", "run/checkpoints", 72, sibling="step_00000002"),
    Command("export-hf {base}/run/checkpoints {out} --tokenizer {in}", "data/tokenizer", 71),
    Command("import-hf {in} {out}", "exported", 72),
    Command("eval {in} --samples 2", STEP, 72, sibling="../step_00000002"),
    Command("eval {in} --samples 2", "run/checkpoints", 72, sibling="step_00000002"),
    Command("eval {base}/run/checkpoints --samples 2 --config {in}", "run.json", 70),
    Command("eval {base}/run/checkpoints --samples 2 --set megasdc.data.path={in}", "data", 71),
    Command("eval {base}/run/checkpoints --choices {in}", "questions.jsonl", 71),
    Command("eval {base}/run/checkpoints --choices {base}/questions.jsonl --against {in}", STEP, 72),
    Command("generate {in} --prompt a --max-tokens 2", STEP, 72, sibling="../step_00000002"),
    Command("generate {base}/run/checkpoints --prompt a --max-tokens 2 --tokenizer {in}", "data/tokenizer", 71),
    Command("stress --rounds 1 --only gemm --hostfile {in}", "hostfile", 78, done=78),
    Command("stress --rounds 1 --only gemm --golden {in}", "golden", 80),
    Command("stress --rounds 1 --only gemm --out {out}"),
    Command("plan-audit --trials 0 --out {out}"),
    Command("plan-checkpoints --trials 0 --config {in}", "run.json", 70),
    Command("plan-checkpoints --trials 0 --run {in}", "run", 71),
    Command("plan-checkpoints --trials 0 --out {out}"),
    Command("plan-checkpoints --trials 0 --figure {out}"),
    Command("plan-run --days 1 --trials 2 --run {in}", "run", 71, done=71, prints=False),  # it was not supervised
    Command("plan-run --days 1 --trials 2 --out {out}"),
    Command("plan-run --days 1 --trials 2 --figure {out}"),
    Command("study {in}", "study", 71),
    Command("study {base}/study --out {out}"),
    Command("sweep --dry-run {in}", "sweep.json", 70),
    Command("report {in} --out {out}", "run", 71),
    Command("report {base}/again --healthy {in} --out {out}", "run", 71),
    Command("golden record --config {in} --repeats 1 --out {out}", "run.json", 70),
    Command("golden verify {in} --repeats 1 --out {out}", "a.golden", 80),
    Command("golden verify --library {in} --repeats 1", "golden", 80),
    Command("golden verify {base}/a.golden --repeats 1 --faults {in}", "faults.json", 70, done=73),
    Command("dropcompute simulate --latencies {in}", "latencies.npy", 71),
    Command("dropcompute simulate --steps 10 --out {out}"),
    Command("dropcompute simulate --steps 10 --figure {out}"),
    Command("dropcompute threshold {in}", "run", 71),
    Command("dropcompute threshold {base}/run --figure {out}"),
    Command("dropcompute times {in} --figure {out}", "run", 71),
    Command(
        "bound-training --steps 21 --seeds 1 --absolute 1e-3 --spike-aware 100 --data {in}", "data", 71, program="bench"
    ),
    Command("compare {in} {base}/run/checkpoints/step_00000004", STEP, 2),
    Command("compare-traces {in} {base}/again", "run", 2),
    Command("{in} {base}/run/checkpoints/step_00000004", STEP, 2, program="compare_checkpoints"),
    Command("{in} {base}/exported", "exported", 2, program="compare_checkpoints"),
    Command("{in} {base}/a.manifest", "a.manifest", 2, program="compare_checkpoints"),
    Command("{base}/exported {base}/exported --html {out}.html", program="compare_checkpoints", unwritten=2),
    Command(
        "{base}/run/checkpoints/step_00000002 {base}/run/checkpoints/step_00000004 --extract {out}",
        program="compare_checkpoints",
        done=1,
        unwritten=2,
    ),
    Command("--drift {in} {base}/again/checkpoints", "run/checkpoints", 2, program="compare_checkpoints"),
    Command("{in} {base}/again", "run", 2, program="compare_traces"),
    Command("{base}/run {base}/again --picture {out}.html", program="compare_traces", unwritten=2),
    Command("{in} {out}", STEP, 72, program="export_hf"),
    Command("{in} {out}", "exported", 72, program="import_hf"),
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int | None
    stdout: bytes
    stderr: bytes
    leftovers: list[str]

    def complain(self, codes: set[int]) -> str | None:
        """What is wrong with the way it ended, or None."""
        said = self.stderr.decode(errors="replace")
        if self.code is None:
            return f"hangs; {said[-300:]}"
        if "Traceback" in said or "Exception ignored" in said:
            return f"code {self.code}, traceback: {said[-700:]}"
        if self.code not in codes:
            return f"code {self.code}, needed {sorted(codes)}: {said[-300:]}"
        if self.code != 0 and not said.strip() and not self.stdout.strip() and self.code not in (3, 141):
            return f"code {self.code} without a word"
        return f"leaves {self.leftovers}" if self.leftovers else None


def build_base(base: Path) -> None:
    """Everything that commands read: a run, a study, what is made of checkpoints, golden values, files."""
    from whole_runs import prepare_text, train_run, write_config

    repository = Path(__file__).parents[2]
    data = prepare_text(base)
    settings = {"trace__enabled": True, "drop_compute__enabled": True, "drop_compute__threshold": "inf"}
    for name in ("run", "again"):
        config = write_config(
            base / f"{name}.json", data, base / name, training__steps=4, checkpoint__interval=2, **settings
        )
        assert [code for code, _ in train_run(config, 2)] == [0, 0]
    study = {"study__mode": "free_run", "study__replicas": 2, "determinism__enabled": True, "checkpoint": {}}
    config = write_config(base / "study.json", data, base / "study", training__steps=4, **study)
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    shutil.copy(repository / "docs" / "reference" / "configuration.md", base)
    shutil.copy(repository / "launch" / "pretrain_gpt.py", base / "s.py")
    np.save(base / "latencies.npy", np.random.default_rng(1).random((4, 8, 3)))
    (base / "hostfile").write_text("nowhere.invalid slots=1\n")
    (base / "guard.json").write_text("{}")
    (base / "questions.jsonl").write_text('{"prompt": "def ", "choices": ["a", "b"], "answer": 0}\n')
    fault = {"rank": 0, "kind": "scale", "factor": 2.0, "submodule": "*.mlp.linear_fc1"}
    (base / "faults.json").write_text(json.dumps({"faults": [fault]}))
    text = json.loads((base / "run.json").read_text())
    text["megasdc"]["data"] |= {
        "split": [8, 1, 1],
        "sources": [{"kind": "files", "path": str(base / "texts")}],
        "tokenizer": {"vocab_size": 500, "train_characters": 200_000},
    }
    (base / "text.json").write_text(json.dumps(text))
    cells = [{"name": "a", "set": {"optimizer.params.lr": 0.01}}]
    sweep = {"name": "s", "final_steps": 2, "base": str(base / "run.json"), "cells": cells}
    (base / "sweep.json").write_text(json.dumps(sweep))
    checkpoints = base / "run" / "checkpoints"
    for line in (
        ["export-hf", checkpoints, base / "exported"],
        ["import-hf", base / "exported", base / "imported"],
        ["manifest", checkpoints / "step_00000004", "--out", base / "a.manifest"],
        ["archive", "push", checkpoints, base / "archive"],
        ["golden", "record", "--config", base / "run.json", "--out", base / "a.golden", "--repeats", "1"],
    ):
        done = run_command("megasdc", list(map(str, line)), base, base, timeout_s=200)
        assert done.code == 0, done.stderr.decode()
    (base / "golden").mkdir()
    shutil.copy(base / "a.golden", base / "golden")


def run_command(
    program: str, arguments: list[str], cwd: Path, watched: Path, timeout_s: float = 60, stdout: Any = None
) -> Done:
    """Run a command in a fork whose owner is bound by permissions; ``stdout``: an open file, else it is kept."""
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read after the fork has ended
    before = entries(watched)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            forkserver._forkserver.__init__()  # type: ignore[misc,attr-defined] - that of the tests is none of its children
            resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))  # some devices never end
            os.chdir(cwd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout if stdout is not None else out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            bind_to_permissions()
            _become(program, arguments)
        finally:
            os._exit(99)
    code = _wait(child, timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    out.seek(0)
    err.seek(0)
    return Done(code, out.read(), err.read(), sorted(entries(watched) - before))


def preload() -> None:
    """Import once what commands need, so that each fork has it."""
    import importlib

    from harness import PRELOAD

    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in (*PRELOAD, "transformers", "tokenizers", "sentencepiece", "plotly.offline", "jinja2", "pyarrow"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _become(program: str, arguments: list[str]) -> None:
    """End as the command does in a process of its own: with its exit code, its traceback, its last flush."""
    import runpy
    import traceback

    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.argv = [program, *arguments]
    tools = Path(__file__).parents[2] / "tools"
    code: Any = 0
    try:
        if program in MODULES:
            runpy.run_module(MODULES[program], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(tools / f"{program}.py"), run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except BaseException:
        print("Exception ignored in: flush of standard output", file=sys.stderr)
        code = 120
    sys.stderr.flush()
    os._exit(code & 255)


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} if folder.exists() else set()


def _wait(child: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def bind_to_permissions() -> None:
    """Take from this process and what it starts the right of root to pass permissions."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for capability in PASSING:
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        for index in (0, 1, 2):  # effective, permitted, inheritable; the second word of each follows after all three
            sets[index] &= ~(1 << capability)
    libc.capset(header, sets)


def _unreadable(path: Path) -> None:
    path.chmod(0)


def _unreadable_inside(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(0)


def _private_parent(path: Path) -> None:
    path.parent.chmod(0)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        here = os.getcwd()
        os.chdir(path.parent)
        end.bind(path.name)
        os.chdir(here)


HARMS: dict[str, Callable[[Path], Any]] = {
    "unreadable": _unreadable,
    "unreadable parent": _private_parent,
    "fifo": lambda path: _replace(path, os.mkfifo),
    "socket": lambda path: _replace(path, _socket),
    "/dev/null": lambda path: _replace(path, lambda at: at.symlink_to("/dev/null")),
    "/dev/full": lambda path: _replace(path, lambda at: at.symlink_to("/dev/full")),
    "binary": lambda path: _replace(path, lambda at: at.write_bytes(bytes(range(255, -1, -1)) * 20)),
    "empty": lambda path: _replace(path, Path.touch),
    "missing": lambda path: _replace(path, lambda at: None),
    "loop": lambda path: _replace(path, lambda at: at.symlink_to(at.name)),
}
PIPES = {
    STEP: (
        "manifest.json",
        "megasdc.json",
        "layer_00-model_00-model_states.pt",
        "rank_00000_state.pt",
        "verified.json",
    ),
    "run/checkpoints": ("latest", "corruption.json", "step_00000004/manifest.json"),
    "run": ("metrics.jsonl", "resolved.json", "events/rank_00000.jsonl", "step_times/rank_00000.jsonl", "health.json"),
}
"""What may be a pipe in place of a file, by the folder that a command reads; it may need the file or not."""
INSIDE: dict[str, Callable[[Path], Any]] = {
    "files unreadable": _unreadable_inside,
    "empty folder": lambda path: _replace(path, Path.mkdir),
}


def places(scratch: Path, base: Path, command: Command) -> dict[str, str]:
    found = {"{base}": str(base), "{out}": str(scratch / "out" / "result")}
    (scratch / "out").mkdir(parents=True)
    if command.source is not None:
        at = scratch / "in" / command.source
        at.parent.mkdir(parents=True)
        source = base / command.source
        if command.sibling is not None and command.sibling.startswith(".."):
            shutil.copytree(source.parent, at.parent, dirs_exist_ok=True)
        else:
            (shutil.copytree if source.is_dir() else shutil.copy)(source, at)
        found["{in}"] = str(at)
    return found


def attempt(
    command: Command, base: Path, scratch: Path, harm: Callable[[dict[str, str]], Any], codes: set[int], **options: Any
) -> str | None:
    """Run a command with healthy files, then harmed ones."""
    found = places(scratch, base, command)
    harm(found)
    arguments = command.line.split()
    for name, value in found.items():
        arguments = [part.replace(name, value) for part in arguments]
    try:
        done = run_command(command.program or "megasdc", arguments, scratch, scratch, **options)
        if done.code in (command.done, 141) or "stdout" in options:  # the work was done
            done.leftovers.clear()
        kept = (".preparing", "result.hosts")  # the next prepare-data goes on there; what stress knows after each round
        done.leftovers[:] = [name for name in done.leftovers if not any(part in name for part in kept)]
        return done.complain(codes)
    finally:
        for path in [scratch, *scratch.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755)
        for path in scratch.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(scratch, ignore_errors=True)


Case = tuple[Callable[[dict[str, str]], Any], int | set[int], str | None]


def cases(command: Command) -> dict[str, Case]:
    """What is done to a command: name -> (harm to its places, exit code or codes that are right, standard output)."""
    found: dict[str, Case] = {"healthy": (lambda at: None, command.done, None)}
    for name in PIPES.get(command.source or "", ()):
        found[f"in: pipe {name}"] = (_harm_at(_pipe, "{in}", name), {command.done, command.unread}, None)
    if command.source is not None:
        harms = HARMS | (INSIDE if "." not in Path(command.source).name and command.source != "hostfile" else {})
        for name, harm in harms.items():
            damaged = command.damaged is not None and name in ("binary", "empty")
            found[f"in: {name}"] = (_harm_at(harm, "{in}"), command.damaged if damaged else command.unread, None)  # type: ignore[assignment]
    if command.sibling is not None:
        for name in ("unreadable", "fifo", "files unreadable"):
            found[f"sibling: {name}"] = (_harm_at((HARMS | INSIDE)[name], "{in}", command.sibling), command.done, None)
    if "{out}" in command.line:
        outs = OUTS if "--out {out}" in command.line and "convert" not in command.line else FOLDER_OUTS
        for name, harm in (FOLDER_OUTS if "prepare" in command.line else outs).items():
            found[f"out: {name}"] = (_harm_at(harm, "{out}"), command.unwritten, None)
    if command.prints:
        full = 2 if (command.program or "").startswith("compare") else 77
        found["stdout: full"] = (lambda at: None, full, "/dev/full")
        found["stdout: closed"] = (lambda at: None, 141, "closed")
    return found


def _harm_at(harm: Callable[[Path], Any], place: str, beside: str = ".") -> Callable[[dict[str, str]], Any]:
    return lambda at: harm(Path(os.path.normpath(f"{at[place]}/{beside}")))


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def _below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


FOLDER_OUTS: dict[str, Callable[[Path], Any]] = {
    "unwritable": lambda path: path.parent.chmod(0o555),
    "private parent": lambda path: path.parent.chmod(0),
    "below a file": _below_a_file,
}
OUTS = {**FOLDER_OUTS, "/dev/full": lambda path: path.symlink_to("/dev/full")}


def complaint(command: Command, case: str, base: Path, scratch: Path, timeout_s: float = 120.0) -> str | None:
    """Run one case; what is wrong with how the command ended, or None."""
    harm, code, output = cases(command)[case]
    stream = None
    if output == "closed":
        reader, stream = os.pipe()
        os.close(reader)
    elif output is not None:
        stream = os.open(output, os.O_WRONLY)
    try:
        options = {} if stream is None else {"stdout": stream}
        codes = code if isinstance(code, set) else {code}
        return attempt(command, base, scratch, harm, codes, timeout_s=timeout_s, **options)
    finally:
        if stream is not None:
            os.close(stream)
