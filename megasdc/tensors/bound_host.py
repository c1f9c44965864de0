"""Gradient bounds on the host: one fused pass in C, compiled once for this processor.

The machine's own C compiler builds the library at first use, since the fastest code depends on the processor. It is
kept in the user's cache folder under a hash of source, compiler options and processor, so that a new version or
another kind of node builds its own. Ranks that start at once may each compile; each writes to a temporary folder and
renames, so that none loads an incomplete library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache, lru_cache
from pathlib import Path

from torch import Tensor

from megasdc.common.errors import LaunchError
from megasdc.tensors.bound_limits import DTYPES, NON_FINITE, ElementLimits, limit_factors

SOURCE = Path(__file__).with_name("bound_host.c")
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
"""Not -ffast-math, which ignores NaN and makes the whole process flush subnormal numbers; without contraction, so that
limits are rounded as the formula's are."""
COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120


class _Limits(ctypes.Structure):
    """`struct limits` of the source."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("absolute", "spike", "root_factor", "root_floor")),
        *((name, ctypes.c_double) for name in ("theta", "floor", "v_factor", "scale")),
        ("non_finite", ctypes.c_int32),
    ]


def bound_on_host_(gradient: Tensor, second_moment: Tensor | None, limits: ElementLimits, sums: Tensor) -> None:
    """`megasdc.tensors.bound.bound_` on the host, in one thread; raises as `fused_library`.

    ``squares`` and ``mass`` are summed in fp32 within blocks of 1024, and over blocks in fp64.
    """
    fused_library().megasdc_bound(
        gradient.data_ptr(),
        None if second_moment is None else second_moment.data_ptr(),
        gradient.numel(),
        DTYPES.index(gradient.dtype),
        _limits_of(limits),
        sums.data_ptr(),
    )


@lru_cache(maxsize=64)
def _limits_of(limits: ElementLimits) -> _Limits:
    numbers = limit_factors(limits)
    return _Limits(
        numbers.absolute,
        numbers.spike,
        numbers.root_factor,
        numbers.root_floor,
        limits.spike,
        limits.floor,
        limits.v_factor,
        limits.scale,
        NON_FINITE.index(limits.non_finite),
    )


@cache
def fused_library() -> ctypes.CDLL:
    """The compiled pass; LaunchError as `load_library`."""
    library, pointer = load_library(SOURCE), ctypes.c_void_p
    library.megasdc_bound.argtypes = (
        pointer,
        pointer,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.POINTER(_Limits),
        pointer,
    )
    library.megasdc_bound.restype = None
    return library


def load_library(source: Path) -> ctypes.CDLL:
    """Compile a C file for this processor, unless the cache holds it, and load it.

    Args:
        source: needs nothing but the C library.

    Raises:
        LaunchError: there is no compiler, it fails, or the cache folder cannot be used.
    """
    text = source.read_bytes()
    key = hashlib.sha256(b"\0".join([text, " ".join(OPTIONS).encode(), _processor().encode()])).hexdigest()[:24]
    folder = _cache_folder() / "megasdc" / "compiled"
    library = folder / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise LaunchError(f"{library} cannot be built or loaded: {error}; XDG_CACHE_HOME chooses its folder") from error


def _cache_folder() -> Path:
    """Folder of what can be made again: of the user, or of this Python for one without a home folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = os.path.expanduser("~")  # unchanged without HOME and without an entry in passwd
    return Path(sys.prefix) if home == "~" else Path(home) / ".cache"


def _compile(source: Path, library: Path) -> None:
    names = [os.environ["CC"]] if os.environ.get("CC") else COMPILERS
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise LaunchError(f"no C compiler {', '.join(names)} is on PATH; install gcc, or name one in CC")
    with tempfile.TemporaryDirectory(dir=library.parent) as own:
        made = Path(own) / library.name
        command = [compiler, *OPTIONS, "-o", str(made), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=_COMPILE_S)
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip()[-1000:]
            raise LaunchError(f"{' '.join(command)} ended with {error.returncode}; install gcc: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"{' '.join(command)} did not finish within {_COMPILE_S} s") from error
        made.replace(library)


def _processor() -> str:
    """Name and instruction sets of this processor, as far as Linux reports them."""
    wanted, found = ("vendor_id", "model name", "flags", "Features", "CPU part"), {platform.machine()}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.add(value.strip())
    return "\n".join(sorted(found))
