"""Zip archives whose header holds the SHA-256 of every member and of itself: a truncated or edited one is refused."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.common.errors import TraceError
from megasdc.common.program import write_atomically
from megasdc.sdc.trace import Trace
from megasdc.sdc.trace_file import TraceWriter, read_trace
from megasdc.tensors.checksum import ALGORITHMS

_HEADER = "header.json"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, ValueError, OSError, RecursionError)
"""Exceptions that reading a damaged zip file may raise."""


def write_sealed(path: Path, header: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write an archive atomically; its folder is created if absent.

    Args:
        path: replaced if it exists; of a link the target is replaced; a device or pipe is written to.
        header: plain values, among them ``format`` and the checksum ``algorithm`` of the traces.
        members: by name.

    Raises:
        OSError: it cannot be written.
    """
    sealed: dict[str, Any] = {**header, "sha256": {}}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            sealed["sha256"][name] = hashlib.sha256(data).hexdigest()
            archive.writestr(name, data)
        sealed["digest"] = header_digest(sealed)
        archive.writestr(_HEADER, json.dumps(sealed, indent=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def read_sealed_header(path: Path, wanted: Sequence[str], remedy: str) -> dict[str, Any]:
    """Read the header of an archive and check its digest.

    Args:
        wanted: formats that it may have.
        remedy: what makes the file, for the message where it is missing.

    Raises:
        TraceError: the file is missing, truncated, edited or of another format, or names an unknown algorithm.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(_stored(archive, _HEADER))
        if header.get("format") not in wanted:
            raise TraceError(f"{path}: the format is {header.get('format')!r}, needed is {' or '.join(wanted)}")
        if header.pop("digest", None) != header_digest(header):
            raise TraceError(f"{path}: the header is not the one that was written; record the golden trace again")
    except FileNotFoundError as error:
        raise TraceError(f"{path} does not exist; {remedy}") from error
    except (*_DAMAGED, AttributeError) as error:
        raise TraceError(f"{path} is damaged or not a golden trace: {error}; copy or record it again") from error
    if header["algorithm"] not in ALGORITHMS:
        raise TraceError(
            f"{path}: checksum algorithm {header['algorithm']!r} is unknown here; known are {', '.join(ALGORITHMS)}"
        )
    found: dict[str, Any] = header
    return found


def read_members(path: Path, header: Mapping[str, Any], names: Iterable[str]) -> dict[str, bytes]:
    """Read some members, and check the digest of each.

    Raises:
        TraceError: the file is truncated or edited.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                data = _stored(archive, name)
                if hashlib.sha256(data).hexdigest() != header["sha256"].get(name):
                    raise TraceError(f"{path}: {name} is not the trace that was written")
                found[name] = data
    except _DAMAGED as error:
        raise TraceError(f"{path} is damaged: {error}; copy or record it again") from error
    return found


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """Content of a member; ValueError for a compressed one, which was not written so and could fill the memory."""
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"{name} is compressed")
    return archive.read(member)


def trace_to_bytes(trace: Trace) -> bytes:
    """A trace as the content of a trace file."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace"
        writer = TraceWriter(file, {})
        writer.append(trace)
        writer.close()
        return file.read_bytes()


def trace_from_bytes(data: bytes) -> Trace:
    """A trace from the content of a trace file.

    Raises:
        TraceError: it is not one, or the folder of temporary files cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "trace"
            file.write_bytes(data)
            return read_trace(file)[1]
    except OSError as error:
        raise TraceError(
            f"{tempfile.gettempdir()} cannot be written, which reading a golden trace needs: {error}"
        ) from error


def header_digest(header: Mapping[str, Any]) -> str:
    """SHA-256 of a header, and so of the whole file, since the header holds the digests of all members."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
