"""Safe loading of pickles: a file is disassembled first, and only the classes listed here may occur in it.

DeepSpeed loads with ``weights_only=False`` (0.19.8), so a pickle could run any code. A file is checked by disassembling
it, and then read through torch's restricted unpickler with the same list, which runs nothing else.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megasdc.common.errors import CheckpointError

ALLOWED_GLOBALS: frozenset[str] = frozenset(
    {
        "_io.BytesIO",  # Transformer Engine's extra state
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    }
)
"""Classes allowed besides those that torch itself considers safe; none has side effects when created."""

MEMBER = "builtins.getattr"
"""Function in the pickles of enum members by Python 3.11.0 to 3.11.3. The real ``getattr`` would give access to
anything; ``enum_member`` replaces it, and only in files that no other unpickler opens."""

_END, _ZIP64_LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")
"""Records at the end of an archive. Source: APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16."""
_ESCAPES = {"builtins", "os", "posix", "subprocess", "sys", "importlib", "runpy", "pty", "shutil", "socket"}


def find_unsafe_classes(path: Path | str, content: BinaryIO | None = None) -> list[str]:
    """Names in a file's pickle that are not on the list; nothing of the file is executed.

    ``content``: the bytes to read instead, where they are part of the file at ``path``. CheckpointError if the file is
    no complete file of ``torch.save``.
    """
    check_regular(path)
    refuse_compressed(path, content)
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(content or str(path))
    except PermissionError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; ask its owner, or read it as the owner"
        ) from error
    except (ValueError, RuntimeError, EOFError, OSError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not a complete file of torch.save: {_first_line(error)}") from error
    except Exception as error:  # the disassembler meets arbitrary bytes; whatever it trips over, the file is refused
        raise CheckpointError(f"{path} has a pickle that cannot be read: {_first_line(error)}") from error
    return sorted(set(found) - ALLOWED_GLOBALS)


def check_regular(path: Path | str) -> None:
    """CheckpointError for an existing path that is not a regular file: opening a pipe would block."""
    if Path(path).exists() and not Path(path).is_file():
        raise CheckpointError(f"{path} is not a file; get it again from where it came from")


def refuse_compressed(path: Path | str, content: BinaryIO | None = None) -> None:
    """CheckpointError for a file with compressed members, which ``torch.save`` never writes.

    A few megabytes could fill the memory: torch decompresses a member before anything else can be known of it.
    ``content``: see ``find_unsafe_classes``.
    """
    try:
        with contextlib.nullcontext(content) if content is not None else open(path, "rb") as file:
            directory = _find_directory(file)
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        if any(one.header_offset + one.compress_size > directory for one in members):
            raise ValueError("a member is not in front of the directory")
    except FileNotFoundError:
        return  # torch will say so
    except PermissionError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; ask its owner, or read it as the owner"
        ) from error
    except (OSError, ValueError, NotImplementedError, struct.error, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not a complete file of torch.save: {_first_line(error)}") from error
    finally:
        if content is not None:
            content.seek(0)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise CheckpointError(
                f"{path} has the compressed member {member.filename!r}, which torch.save never writes: "
                f"{member.compress_size:,} bytes that would become {member.file_size:,}; it was not opened. "
                "Get the file again from where it came from"
            )


def _find_directory(file: BinaryIO) -> int:
    """Byte at which the directory of an archive begins; nothing follows it but the end records.

    ValueError unless it is where they say. ``zipfile`` reads what stands just before the end records, torch
    what stands at the offsets in them, and both search where the file does not end with one, so that two directories
    could hide from one reader what the other one opens.
    """
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("it does not begin with a member of an archive")
    size = file.seek(0, io.SEEK_END)
    file.seek(-min(size, _ZIP64_END.size + _ZIP64_LOCATOR.size + _END.size), io.SEEK_END)
    tail = file.read()
    signature, *_, num_bytes, start, comment = _END.unpack(tail[-_END.size :])
    if signature != b"PK\x05\x06" or comment:
        raise ValueError("it does not end with the end record of an archive")
    end = size - _END.size
    if tail[-_END.size - _ZIP64_LOCATOR.size :][:4] == b"PK\x06\x07":
        _, _, place, _ = _ZIP64_LOCATOR.unpack(tail[-_END.size - _ZIP64_LOCATOR.size : -_END.size])
        end -= _ZIP64_LOCATOR.size + _ZIP64_END.size
        signature, *_, num_bytes, start = _ZIP64_END.unpack(tail[: _ZIP64_END.size])
        if signature != b"PK\x06\x06" or place != end:
            raise ValueError(f"the end record of its directory is said to be at byte {place}, needed is {end}")
    if start + num_bytes != end:
        raise ValueError(f"its directory is said to be at bytes {start} to {start + num_bytes}, its end is at {end}")
    return int(start)


def check_pickle(path: Path | str) -> None:
    """CheckpointError for a file that is not of ``torch.save``, or whose pickle names a class not on the list."""
    _check(path, None, members=False)


def refuse_classes(path: Path | str, unsafe: list[str]) -> CheckpointError:
    """The error for a file whose pickle names classes that are not on the list."""
    grave = " and would run code when loaded" if any(name.split(".")[0] in _ESCAPES for name in unsafe) else ""
    return CheckpointError(
        f"{path} holds {', '.join(unsafe)}, which a checkpoint must not hold{grave}; it was not opened. "
        "Get the file again from where it came from, or resume from another checkpoint."
    )


def load_part(path: Path, start: int, num_bytes: int) -> Any:
    """Check and load a file of ``torch.save`` that is part of another file, through torch's restricted unpickler.

    CheckpointError if it is too short, cannot be read, or the part is unsafe or damaged; FileNotFoundError if there is
    no file.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(num_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) < num_bytes:
        size = start + len(content) if content else path.stat().st_size
        raise CheckpointError(f"{path} is cut off: it has {size} bytes, needed are {start + num_bytes}; copy it again")
    _check(path, io.BytesIO(content), members=True)
    return _load(path, io.BytesIO(content), "cpu", mmap=False, members=True)


def load_checked(path: Path | str, map_location: Any = "cpu", *, mmap: bool = False, members: bool = False) -> Any:
    """Check a file of ``torch.save`` and load it through torch's restricted unpickler.

    Args:
        mmap: whether tensors are mapped instead of read; enough to learn whether the file can be loaded.
        members: whether enumeration members in the form of ``MEMBER`` are accepted; only where DeepSpeed does not open
            the file.

    Raises:
        CheckpointError: the file is unsafe or damaged.
    """
    _check(path, None, members)
    return _load(path, str(path), map_location, mmap=mmap, members=members)


def enum_member(kind: Any, name: Any) -> Any:
    """A member of an enumeration; ValueError for arguments that do not name one."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise ValueError(f"{name!r} of {kind!r} is no member of an enumeration")


def _check(path: Path | str, content: BinaryIO | None, members: bool) -> None:
    if unsafe := [name for name in find_unsafe_classes(path, content) if not (members and name == MEMBER)]:
        raise refuse_classes(path, unsafe)


def _load(path: Path | str, content: Any, map_location: Any, *, mmap: bool, members: bool) -> Any:
    try:
        with ExitStack() as open_files, _allowed_classes(members), _places_noted(map_location):
            if map_location == "meta" and isinstance(content, str):
                content = open_files.enter_context(_WithoutPromise(content))
            return torch.load(content, map_location=map_location, weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {_first_line(error)}") from error


_PROMISE, _NO_PROMISE = b"/.format_version", b"/.format_unknown"


class _WithoutPromise(io.RawIOBase):
    """A file of ``torch.save`` in which torch looks up where each tensor begins, instead of calculating it.

    It calculates where the archive has a member ``.format_version``, as if each member were followed by a descriptor
    of it, as torch's own writer leaves one (2.13, ``torch.serialization._load``). Other writers do not, and then
    offsets would be those of other bytes. So that member has another name here.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115 - closed with this
        self._at = self._find()

    def _find(self) -> int:
        """Byte at which the archive's directory names the member; -1: it does not."""
        try:
            with zipfile.ZipFile(self._file) as archive:
                directory = archive.start_dir
        except zipfile.BadZipFile:  # torch will say so
            return -1
        self._file.seek(directory)
        found = self._file.read().find(_PROMISE)
        self._file.seek(0)
        return -1 if found < 0 else directory + found

    def readable(self) -> bool:
        """Always true: the file can be read."""
        return True

    def seekable(self) -> bool:
        """Always true: the file has positions."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position; returns it."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read from the file, with the member's name replaced."""
        start = self._file.tell()
        count = self._file.readinto(buffer)
        first, end = max(start, self._at), min(start + count, self._at + len(_PROMISE))
        if self._at >= 0 and first < end:
            memoryview(buffer).cast("B")[first - start : end - start] = _NO_PROMISE[first - self._at : end - self._at]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextlib.contextmanager
def _allowed_classes(members: bool) -> Iterator[None]:
    """Let torch's restricted unpickler create the classes on the list."""
    classes: list[Any] = [(enum_member, MEMBER)] if members else []
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger keeps the standard output of its import
        for name in sorted(ALLOWED_GLOBALS):
            module, _, attribute = name.rpartition(".")
            classes.append(getattr(importlib.import_module(module), attribute))
    with torch.serialization.safe_globals(classes):
        yield


@contextlib.contextmanager
def _places_noted(map_location: Any) -> Iterator[None]:
    """Let torch 2.10 load onto ``meta`` as later versions do: nothing is read, storages know their file offset.

    It does so only under a tracing context, which changes nothing else of a load.
    """
    if map_location != "meta" or not torch.__version__.startswith("2.10."):
        yield
        return
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode

    with tracing(TracingContext(FakeTensorMode())):  # type: ignore[no-untyped-call]
        yield


def _first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
