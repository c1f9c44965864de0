"""Does a process keep the memory that it frees, and do settings of the user's stay as they are?"""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megasdc.train import process

PROGRAM = """
import ctypes, resource, sys
from megasdc.train.process import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use():
    block = c.malloc(64 << 20)
    c.memset(block, 1, 64 << 20)
    c.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(keep: str, **environment: str) -> tuple[str, int]:
    """What the program said, and pages that four more uses of 64 MiB asked the system for."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, keep], env=environment, capture_output=True, text=True, check=True
    )
    kept, faults = ran.stdout.splitlines()[-1].split()  # DeepSpeed prints on import
    return kept, int(faults)


@pytest.fixture(autouse=True)
def _glibc() -> None:
    if not sys.platform.startswith("linux") or "glibc" not in platform.libc_ver()[0]:
        pytest.skip("the settings are glibc's")


@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    """Without, every use faults all pages in again; with it hardly any."""
    pages = 4 * (64 << 20) // 4096
    assert _faults("leave")[1] > 0.9 * pages
    kept, faults = _faults("keep")
    assert kept == "True"
    assert faults < 0.01 * pages


def test_an_older_glibc_keeps_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses blocks over 32 MiB; smaller ones are kept then, and an allocator that takes neither says False."""
    for largest, kept in ((2**25, True), (0, False)):
        taken: list[tuple[int, int]] = []

        def mallopt(name: int, value: int, largest: int = largest, taken: list[tuple[int, int]] = taken) -> int:
            taken.append((name, value))
            return int(name == process.M_TRIM_THRESHOLD or value <= largest)

        monkeypatch.setattr(process.ctypes, "CDLL", lambda name, mallopt=mallopt: SimpleNamespace(mallopt=mallopt))
        assert process.keep_freed_memory({}) is kept
        assert taken[-1] == (process.M_MMAP_THRESHOLD, 2**25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_come_first(name: str) -> None:
    """They are left as they are."""
    value = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"}.get(name, "65536")
    assert _faults("keep", **{name: value})[0] == "False"
