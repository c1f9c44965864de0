"""How commands start and end: Ctrl-C, ASCII, closed pipes, full disks, what cannot be read, files half written."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common import program
from megasdc.common.errors import CheckpointError, MegasdcError, StorageError
from megasdc.interchange.import_hf import import_hf

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "configs" / "smoke.json"


def megasdc(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "timeout": 120, **options}
    return subprocess.run([sys.executable, "-m", "megasdc", *map(str, arguments)], check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "code"),
    [
        ([sys.executable, "-m", "megasdc", "check-config", str(SMOKE)], 77),
        ([sys.executable, "-m", "megasdc", "--help"], 77),
        ([sys.executable, str(ROOT / "tools" / "compare_traces.py"), "--help"], 2),
    ],
)
def test_a_result_that_cannot_be_printed_has_one_exit_code(start: list[str], code: int) -> None:
    """A full disk: 77, of comparisons 2, with the reason; a closed pipe: 141, without a word."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (code, 1)
    assert b"error: the result cannot be written: No space left on device" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(start, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_streams_of_ascii_alone() -> None:
    """What ASCII has no letter for is printed escaped, in help, results and messages."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    for arguments, code in ((["--help"], 0), (["summary", "größe"], 71), (["plan-audit", "--trials", "0"], 0)):
        done = megasdc(*arguments, env=environment)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr
        assert max(done.stdout + done.stderr) < 128


@pytest.mark.parametrize("program", [("megasdc.cli",), ("megasdc.cli.compare", "compare_traces_main")])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, program: tuple[str, ...]) -> None:
    """At every moment from the first line of our own code on: exit code 130 and not a word."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom megasdc.common.program import start\nsys.argv = ['x', '--help']\n"
        "class First:\n    def find_spec(self, *_):\n        sys.meta_path.remove(self)\n"
        f"        print(end='go', flush=True)\nsys.meta_path.insert(0, First())\nstart(*{program})\n"
    )
    for delay_ms in (0, 30, 60, 90):
        with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read(2) == b"go"
            threading.Event().wait(delay_ms / 1000)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
        assert process.returncode in (0, 130), said  # 0: it was faster
        assert said == b""


@pytest.mark.parametrize("moment", ["reconfigure", "flush"])
def test_ctrl_c_before_and_after_the_work(tmp_path: Path, moment: str) -> None:
    """While the streams are set up, and while the result is written out: 130 and not a word."""
    (tmp_path / "work.py").write_text(
        "import io, os, signal, sys\nfrom megasdc.common.program import run_program\nclass Stream(io.StringIO):\n"
        f"    def reconfigure(self, **_): pass\n    def {moment}(self, **_): os.kill(os.getpid(), signal.SIGINT)\n"
        "def main():\n    sys.stdout = Stream()\n    run_program(lambda: None, 'x')\n"
    )
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in background jobs
    code = f"{hears}; from megasdc.common.program import start; start('work')"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("module", ["megasdc.ops.launch.runner", "megasdc.ops.launch.node"])
def test_ctrl_c_while_a_launch_imports_torch(module: str) -> None:
    """The processes between front and ranks end at once and without a word, for they have started nothing."""
    env = {**os.environ, "DS_ACCELERATOR": "mps"}  # or launch.py would be imported alone
    with subprocess.Popen([sys.executable, "-m", module], stderr=subprocess.PIPE, cwd=ROOT, env=env) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert b"KeyboardInterrupt" not in process.stderr.read()
    assert process.returncode == 130


def test_ctrl_c_while_a_launch_imports_launch_py(tmp_path: Path) -> None:
    """The same on the usual way, where launch.py is imported alone and no PyTorch."""
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy, sys, time\nclass First:\n    def find_spec(self, name, *_):\n"
        "        if name == 'deepspeed.launcher.launch':\n"
        "            print('torch' in sys.modules, end='', flush=True)\n            time.sleep(60)\n"
        "sys.meta_path.insert(0, First())\nrunpy.run_module('megasdc.ops.launch.node', run_name='__main__')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5) == b"False", process.stderr.read()
        process.send_signal(signal.SIGINT)
        assert (process.stderr.read(), process.wait()) == (b"", 130)


def test_ctrl_c_after_the_imports(tmp_path: Path) -> None:
    """Once modules are imported a command may clean up: it is not ended where it stands."""
    (tmp_path / "work.py").write_text(
        "import time\nfrom megasdc.common import program\ndef work():\n    try:\n        print(end='go', flush=True)\n"
        "        time.sleep(60)\n    finally:\n        print(end='cleaned', flush=True)\n"
        "main = lambda: program.run_program(work, 'x')\n"
    )
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # not so in a background job
    command = [sys.executable, "-c", f"{heeded}; from megasdc.common.program import start; start('work')"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(2) == b"go"
        process.send_signal(signal.SIGINT)
        assert (process.stdout.read(), process.stderr.read(), process.wait()) == (b"cleaned", b"", 130)


def test_ctrl_c_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    """The command cleans up as Python does, and then ends with 130 and without a traceback."""
    seen = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            seen.append("cleaned")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as ended:
        program.run_program(work, "x")
    signal.signal(signal.SIGINT, before)
    assert (ended.value.code, seen, capsys.readouterr().err) == (130, ["cleaned"], "")


@pytest.mark.parametrize(
    ("inside", "number", "kind"),
    [
        ("step/file", errno.EACCES, CheckpointError),
        ("step/file", errno.EIO, CheckpointError),
        ("step/file", errno.ENOSPC, StorageError),
        ("out/file", errno.EISDIR, StorageError),
        ("elsewhere", errno.EACCES, StorageError),
        ("elsewhere", errno.ENOENT, OSError),
    ],
)
def test_errors_of_the_file_system_have_the_code_of_their_place(
    tmp_path: Path, inside: str, number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in an input has the input's, what lies in an output or needs space 77; a surprise stays one."""
    from megasdc.cli.app import Application, input_argument, output_folder

    small = Application()

    @small.command("read")
    def read(
        source: Path = input_argument(CheckpointError), out: Path = typer.Argument(..., **output_folder())
    ) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / inside))

    (tmp_path / "step").mkdir()
    done = CliRunner().invoke(small, [str(tmp_path / "step"), str(tmp_path / "out")])
    assert type(done.exception) is kind or (kind is OSError and isinstance(done.exception, OSError))
    assert str(tmp_path / inside) in str(done.exception)


def test_what_is_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    """A named pipe, a device and a socket are named at once; a pipe without a name is read, as of <(command)."""
    os.mkfifo(tmp_path / "pipe")
    for path, arguments in (
        (tmp_path / "pipe", ["check-config"]),
        (Path("/dev/null"), ["check-config"]),
        (Path("/dev/full"), ["launch", "--dry-run", "--config"]),
    ):
        done = CliRunner().invoke(app, [*arguments, str(path)])
        assert isinstance(done.exception, MegasdcError) and done.exception.exit_code == 70
        assert f"{path} is neither a file nor a folder" in str(done.exception)
    reader, writer = os.pipe()
    os.write(writer, SMOKE.read_bytes())
    os.close(writer)
    done = megasdc("check-config", f"/dev/fd/{reader}", pass_fds=[reader])
    os.close(reader)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Inside a folder that is read, too: told with its path, where the file is needed; writing and <(command) go on."""
    (tmp_path / "run" / "step_00000001").mkdir(parents=True)
    for name in ("metrics.jsonl", "step_00000001/manifest.json"):
        os.mkfifo(tmp_path / "run" / name)
    for command, code, told in (
        (["summary", tmp_path / "run"], 71, "metrics.jsonl"),
        (["verify-checkpoint", tmp_path / "run"], 72, "manifest.json"),
    ):
        done = megasdc(*command)
        assert done.returncode == code
        assert f"{told} " in (said := (done.stdout + done.stderr).decode()) and "a pipe, not a file" in said
        assert "Traceback" not in said


def test_every_path_of_the_command_line_is_checked() -> None:
    """No command has an argument or option that names a file or folder and goes unchecked."""
    todo, seen, unchecked = [app], 0, []
    while todo:
        application = todo.pop()
        todo += [group.typer_instance for group in application.registered_groups]
        for command in application.registered_commands:
            for name, hint in get_type_hints(command.callback, include_extras=True).items():
                if not re.search(r"pathlib\.(_local\.)?Path\b", str(hint)):  # _local: Python 3.13
                    continue
                seen += 1
                (settings,) = hint.__metadata__
                if settings.callback is None or settings.readable:
                    unchecked.append(f"{command.name} {name}")
    assert seen > 30
    assert unchecked == []


def test_a_missing_checkpoint_is_told_before_anything_is_imported(tmp_path: Path) -> None:
    """Neither eval nor generate spends seconds on imports to say that a folder is not there."""
    for command in (["eval"], ["generate", "--prompt", "a"]):
        done = megasdc(*command, tmp_path / "none", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})
        assert done.returncode == 72
        assert f"{tmp_path}/none is not there" in done.stderr.decode()
        assert b" torch\n" not in done.stderr


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Where writing fails the old content is there, and nothing else; links and permissions stay, devices are kept."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    with pytest.raises(UnicodeEncodeError):
        program.write_atomically(file, "half" * 100_000 + "\ud800")
    assert (file.read_text(), sorted(os.listdir(tmp_path))) == ("old", ["file", "link"])
    program.write_atomically(link, "new")
    assert (file.read_text(), link.is_symlink(), file.stat().st_mode & 0o777) == ("new", True, 0o640)
    with pytest.raises(OSError, match="No space left"):
        program.write_atomically(Path("/dev/full"), "x")
    assert Path("/dev/full").is_char_device()


def test_a_model_to_import_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    """Of a path it is said that nothing lies there, or that it is a file; no network, no nested message."""
    (tmp_path / "file").touch()
    for name, why in (("a/b", "is not there"), ("file", "is a file")):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/{name} {why}"):
            import_hf(tmp_path / name, tmp_path / "out")


def test_tables_in_pipes_are_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Headings and cells are whole, whatever width a terminal has said."""
    from rich.console import Console
    from rich.table import Table

    from megasdc.cli.app import print_result

    monkeypatch.setenv("COLUMNS", "80")
    words = [
        f"{name} of a benchmark"
        for name in ("injected", "found", "named", "passed", "seconds", "verdict", "host", "rank")
    ]
    result = SimpleNamespace(as_dict=dict)

    def render(_: object, console: Console) -> None:
        table = Table(*words)
        table.add_row(*(word.upper() for word in words))
        console.print(table)

    print_result(result, render, out=None, as_json=False)
    printed = capsys.readouterr().out
    assert all(word in printed and word.upper() in printed for word in words)
