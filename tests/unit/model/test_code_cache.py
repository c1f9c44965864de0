"""The folder of compiled code: damaged files are compiled again, or the folder to delete is named; who compiles."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megasdc.common.errors import LaunchError
from megasdc.model import fused
from megasdc.model.fused import CACHE_VARIABLE, THREADS_VARIABLE, is_whole

pytestmark = pytest.mark.slow

START = """
import torch
from megasdc.model import fused

x = torch.arange(8.0)
torch.testing.assert_close(fused.Fused(lambda x: x.sin() + 0.5)(x), x.sin() + 0.5)
"""


def _start(folder: Path) -> None:
    environment = {**os.environ, CACHE_VARIABLE: str(folder)}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"


@pytest.mark.full  # a minute of compiling; ``test_a_library_that_is_not_the_function`` has the rule
def test_a_start_after_one_that_was_killed_compiles_again(tmp_path: Path) -> None:
    """Whatever the linker had written: a part (which is a bus error when it is loaded), nothing, zeros at the start.

    The libraries by which Inductor tests vector instructions too, without which it would generate other code.
    """
    _start(tmp_path)
    libraries = sorted(tmp_path.glob("*/*.so"), key=lambda path: ".main." not in path.name)
    assert [".main." in path.name for path in libraries[:2]] == [True, False] and all(map(is_whole, libraries))
    expected = {path: path.stat().st_size for path in libraries}
    for number, path in enumerate(libraries):
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes([whole[:5000], b"", bytes(64) + whole[64:]][number % 3])
    _start(tmp_path)
    assert {path: path.stat().st_size for path in tmp_path.glob("*/*.so")} == expected


def test_a_library_that_is_not_the_function_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is whole, but cannot be imported; where the compiler makes no other, the error names the folder."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    _tripled()(torch.arange(5.0))
    (library,) = (tmp_path / "cache").glob("*/*.main.so")
    wrong = Path(torch._C.__file__)
    _put(wrong, library)
    torch.testing.assert_close(_tripled()(torch.arange(5.0)), torch.arange(5.0) * 3 + 1)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo compiler 1.0 && exit 0\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {wrong} "$2"\n'
    )
    compiler.chmod(0o755)
    fused.find_compiler.cache_clear()
    monkeypatch.setenv("CXX", str(compiler))
    refused = pytest.raises(LaunchError, match=rf"(?s)tripled was not compiled.*delete the folder {tmp_path}/cache")
    try:
        with (
            importlib.import_module("torch._inductor.config").patch({"cpp.cxx": (None, str(compiler))}),
            refused as error,
        ):
            _tripled()(torch.arange(6.0))
    finally:
        fused.find_compiler.cache_clear()
    assert error.value.exit_code == 78


def _put(source: Path, target: Path) -> None:
    """Replace a library as an older one, by a file of its own: the old one is in use."""
    target.unlink()
    shutil.copy(source, target)
    os.utime(target, (1.0, 1.0))


def _tripled() -> fused.Fused:
    """A function that no other test compiles, as in a new process."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache

    CppPythonBindingsCodeCache.cache_clear()
    PyCodeCache.cache_clear()

    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3 + 1

    return fused.Fused(tripled)


ORDER = """
import torch
torch._utils.cpu_count = lambda: 4
from megasdc.train.main import compiled_when_called
with compiled_when_called():
    import megasdc.train.build
import sys
print(sys.modules["torch._inductor.config"].compile_threads)
megasdc.train.build.require_compiler("cpu")
print(sys.modules["torch._inductor.config"].compile_threads)
"""


@pytest.mark.parametrize(("given", "printed"), [({}, ["4", "1"]), ({THREADS_VARIABLE: "3"}, ["3", "3"])])
def test_a_rank_compiles_in_its_own_process(tmp_path: Path, given: dict[str, str], printed: list[str]) -> None:
    """Inductor's settings are imported before a start sets them; what the user set stays."""
    environment = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    environment |= {CACHE_VARIABLE: str(tmp_path), **given}
    done = subprocess.run([sys.executable, "-c", ORDER], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-2:] == printed, done.stderr[-3000:]
