"""The folder in which Inductor keeps the compiled code of fused modules, and files there that cannot be loaded.

The linker writes a library in place, so that a start that is killed meanwhile leaves a part of one, which Inductor
would load in every later start: an error, a bus error, or, in its test of vector instructions, code without them.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from megasdc.common.errors import StorageError
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE, default_extensions_dir

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
_LOCK_TIMEOUT_S = 600.0
"""As Inductor's own: another process compiles meanwhile."""


def use_cache() -> Path:
    """Set up the folder, next to DeepSpeed's operators unless the user set one, and return it; call before compiling.

    A rank compiles in its own process: the functions are few, and a worker pool would take longer to start.
    StorageError if compiled code cannot be kept there.
    """
    default = Path(os.environ.get(EXTENSIONS_VARIABLE, default_extensions_dir())) / "inductor"
    folder = Path(os.environ.setdefault(CACHE_VARIABLE, str(default)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        _remove_cut_libraries(folder)
    except OSError as error:
        remedy = f"set {CACHE_VARIABLE} to a folder that can be written to, or megasdc.model.fuse to false"
        raise StorageError(f"{folder}: code of fused modules cannot be kept there: {error}; {remedy}") from error
    _compile_in_this_process()
    return folder


def _compile_in_this_process() -> None:
    """Set Inductor's number of compiling processes, unless the user did; it reads the variable when it is imported."""
    import torch._inductor.config as inductor

    inductor.compile_threads = int(os.environ.setdefault(THREADS_VARIABLE, "1"))


@cache
def _remove_cut_libraries(folder: Path) -> None:
    """Remove libraries that were not written to their end, once in a process."""
    for path in folder.glob("*/*.so"):
        if _is_cut(path):
            _remove(path, _is_cut)


def remove_unloadable(error: BaseException, folder: Path, began: float) -> bool:
    """Remove the library that an error of loading compiled code names; returns whether it lies in the folder.

    It is compiled again when it is needed. What another process has written since ``began``, when this one began to
    compile, stays.
    """
    cause: BaseException | None = error
    while cause is not None:
        name = cause.path if isinstance(cause, ImportError) else None
        if name and Path(name).is_relative_to(folder):
            _remove(Path(name), lambda path: path.exists() and path.stat().st_mtime < began)
            return True
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    return False


def is_whole(library: Path) -> bool:
    """Whether a library reaches to the end of its table of sections, which a linker writes last.

    FileNotFoundError if it has gone.
    """
    with open(library, "rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (table,) = struct.unpack_from("=Q", header, 0x28)  # of a 64-bit ELF file: offset, then size and number of entries
    entry_bytes, num_entries = struct.unpack_from("=HH", header, 0x3A)
    return 0 < table <= size - entry_bytes * num_entries


def _is_cut(library: Path) -> bool:
    try:
        return not is_whole(library)
    except FileNotFoundError:
        return False  # another process has removed it


def _remove(library: Path, is_bad: Callable[[Path], bool]) -> None:
    """Remove a library that is bad under Inductor's lock of it, so that none is removed while it is written."""
    from filelock import FileLock  # a requirement of PyTorch, which locks by it

    locks = library.parents[1] / "locks"
    locks.mkdir(exist_ok=True)
    key = library.name.partition(".")[0]
    with FileLock(locks / f"{key}.lock", timeout=_LOCK_TIMEOUT_S):
        if is_bad(library):
            library.unlink()
