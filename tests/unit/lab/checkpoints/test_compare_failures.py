"""What does a comparison do where files cannot be read, lead elsewhere, or its result cannot be written?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

from megasdc.checkpoint.views import View
from megasdc.cli.compare import checkpoints_script as app
from megasdc.lab.checkpoints.checkpoints import compare_checkpoints, steps_of_a_run
from megasdc.lab.checkpoints.measure import Measure
from megasdc.lab.checkpoints.report import Options
from megasdc.lab.checkpoints.views.open import open_view

TOOL = Path(__file__).parents[4] / "tools" / "compare_checkpoints.py"
STATE = {"a.weight": torch.arange(12.0).view(3, 4), "b.bias": torch.ones(5)}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, with the same tensors in three formats."""
    path = Path(tempfile.mkdtemp(prefix="compared_"))
    path.chmod(0o755)
    dcp.save(dict(STATE), checkpoint_id=path / "dcp", no_dist=True)
    torch.save(STATE, path / "one.pt")
    save_file(STATE, path / "one.safetensors")
    (path / "one.safetensors").chmod(0o644)
    # What the command imports when it needs it is imported here: another user may not reach the interpreter.
    assert CliRunner().invoke(app, [str(path / "dcp"), str(path / "one.pt")]).exit_code == 0
    yield path
    shutil.rmtree(path)


@contextmanager
def as_another_user() -> Iterator[None]:
    """Give up the rights of root, whom permissions do not stop."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def run(*paths: Path) -> tuple[int, str]:
    """Exit code and all output of the command."""
    with as_another_user():
        result = CliRunner().invoke(app, [str(path) for path in paths])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["dcp/.metadata", "dcp/__0_0.distcp", "one.pt", "one.safetensors"])
def test_a_file_that_may_not_be_read_is_named(folder: Path, name: str) -> None:
    """Exit code 2, the file and that it is a matter of permissions; not that it is damaged."""
    other = folder / ("one.pt" if name != "one.pt" else "one.safetensors")
    named = folder / (name.partition("/")[0])
    assert run(named, other)[0] == 0
    (folder / name).chmod(0)
    code, output = run(named, other)
    assert code == 2
    assert name in output.replace("\n", "")
    assert "ermission denied" in output


def test_a_folder_that_may_not_be_entered_is_named(folder: Path) -> None:
    """Exit code 2 and the folder, whose content cannot even be listed."""
    (folder / "dcp").chmod(0)
    code, output = run(folder / "dcp", folder / "one.pt")
    (folder / "dcp").chmod(0o755)
    assert code == 2
    assert f"{folder}/dcp" in output.replace("\n", "")
    assert "ermission denied" in output


def test_folders_that_are_only_read_will_do(folder: Path) -> None:
    """Nobody may write anywhere; the comparison works, and not a file, size or time is another after it."""

    def look() -> list[tuple[str, int, int]]:
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]

    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = look()
    assert run(folder / "dcp", folder / "one.pt", folder / "one.safetensors")[0] == 0
    assert look() == before
    for path in (folder, folder / "dcp"):
        path.chmod(0o755)


def test_links_out_of_a_folder_are_followed_and_told(folder: Path) -> None:
    """Their files are compared, and a note says how many there are and where one leads; links inside are not told."""
    file = folder / "dcp" / "__0_0.distcp"
    file.rename(folder / "dcp" / "real")
    file.symlink_to("real")
    views = [open_view(folder / "dcp"), open_view(folder / "one.pt")]
    assert compare_checkpoints(views).notes == []
    (folder / "dcp" / "real").rename(folder / "elsewhere")
    file.unlink()
    file.symlink_to(folder / "elsewhere")
    report = compare_checkpoints([open_view(folder / "dcp"), views[1]])
    assert report.num_compared == 2
    (note,) = report.notes
    assert "has 1 links that lead out of it" in note
    assert f"__0_0.distcp -> {folder.resolve()}/elsewhere" in note
    (folder / "elsewhere").unlink()
    findings = compare_checkpoints([open_view(folder / "dcp"), views[1]]).findings
    assert {one.pattern for one in findings} == {"missing"}


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    """A pipe under the name of a file is refused at once by its name, in every place that files are opened."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits for the other end of a pipe")

    before = signal.signal(signal.SIGALRM, give_up)
    for name in ("dcp/__0_0.distcp", "dcp/.metadata", "two.pt"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        signal.alarm(60)
        code, output = run(folder / name.partition("/")[0], folder / "one.pt")
        signal.alarm(0)
        assert code == 2
        said = "".join(output.split())  # a long path is broken anywhere
        assert f"{name}isnotafile" in said or f"{name}isnofileorfolder" in said
    signal.signal(signal.SIGALRM, before)


def _tool(folder: Path, *options: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """The tool as a process of its own, where nothing says which accelerator there is."""
    paths = [str(folder / name) for name in ("one.pt", "one.safetensors")]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, str(TOOL), *paths, *options]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False, **streams)


@pytest.mark.slow
def test_a_full_disk_is_no_verdict(folder: Path) -> None:
    """Where the result cannot be written the exit code is 2, though the checkpoints are equal, and it says why."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = _tool(folder, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "compare_checkpoints: error: the result cannot be written: No space left on device\n"


def test_what_is_allowed_is_told_where_something_is(folder: Path) -> None:
    """The line of counts names a tolerance only where --ulp or --rtol give one."""
    paths = [str(folder / name) for name in ("one.pt", "one.safetensors")]
    exact, loose = (CliRunner().invoke(app, [*paths, *more]).output for more in ([], ["--rtol", "0.1"]))
    assert "2 tensors and values compared" in exact and "allowed" not in exact
    assert "2 tensors and values compared, 0 differ within what is allowed" in loose


def test_steps_of_one_run_are_expected_to_differ(tmp_path: Path) -> None:
    """Two steps in one folder are named; the same step of two runs is not."""
    for place in ("a/step_00000010", "a/step_00000020", "b/step_00000010"):
        (tmp_path / place).mkdir(parents=True)

    def notes(*places: str) -> list[str]:
        return steps_of_a_run([View(tmp_path / place, "a checkpoint", None, ("weight",)) for place in places])

    assert notes("a/step_00000010", "a/step_00000020") == [
        "A is step 10, B is step 20 of one run: differences are expected"
    ]
    assert notes("a/step_00000010", "b/step_00000010") == notes("a/step_00000010", "a/step_00000010") == []


@pytest.mark.slow
def test_json_is_all_that_is_printed(folder: Path) -> None:
    """Standard output is one JSON object, without what DeepSpeed says when it is imported."""
    done = _tool(folder, "--json", stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_compared"] == 2


def test_an_empty_folder_is_named(folder: Path) -> None:
    """Exit code 2, the folder, and what it would have to hold."""
    (folder / "empty").mkdir()
    code, output = run(folder / "empty", folder / "one.pt")
    assert code == 2
    assert f"{folder}/emptyisnocheckpoint" in "".join(output.split())
    assert ".metadata" in output


class _Exhausted(Options):
    """Options that find no memory when a difference is judged."""

    def tolerates(self, found: Measure) -> bool:
        raise MemoryError("no memory to judge")


def test_a_difference_that_cannot_be_judged_is_not_lost(tmp_path: Path) -> None:
    """An error that nobody foresaw in a thread ends the comparison; it does not become "the same"."""
    paths = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for path, value in zip(paths, (1.0, 2.0), strict=True):
        torch.save({"a.weight": torch.full((3,), value)}, path)
    with pytest.raises(MemoryError, match="no memory to judge"):
        compare_checkpoints([open_view(path) for path in paths], _Exhausted())
