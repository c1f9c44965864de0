"""Layout of a file of ``torch.save`` whose tensors are filled in later, in any order; no torch.

Such a file is a zip archive of uncompressed members: a pickle, a few notes on the format, and the bytes of each tensor,
which begin at multiples of 64 so that they can be mapped. All but the checksums of the tensors is known beforehand.
``seal`` completes the file. Source: the zip format, PKWARE's APPNOTE.TXT 6.3; the members are those of torch 2.13.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")
_WIDE = struct.Struct("<2H2Q")
"""Extra field with both sizes in 64 bits."""
_MARK, _MARK16 = 0xFFFFFFFF, 0xFFFF
"""Instead of a number that is in an extra field or in the 64-bit end."""
_ALIGNMENT = 64
_PADDING = struct.Struct("<2sH")
_OLD_VERSION, _WIDE_VERSION = 20, 45
_DATE = 0x21
"""The first of January 1980, as torch writes."""


@dataclass(frozen=True)
class Member:
    """One member of the archive.

    Attributes:
        name: with the archive's own name before it.
        header_at: offset of its local header.
        offset: of its first byte.
        size_bytes: of its content.
        content: its bytes; None: of a tensor, filled in later.
    """

    name: str
    header_at: int
    offset: int
    size_bytes: int
    content: bytes | None


@dataclass(frozen=True)
class FileLayout:
    """Where everything lies in a file.

    Attributes:
        members: in order of offset.
        directory_at: where the archive's directory begins.
        size_bytes: of the whole file.
    """

    members: tuple[Member, ...]
    directory_at: int
    size_bytes: int

    @property
    def tensors(self) -> tuple[Member, ...]:
        """The members whose bytes are filled in, in the order in which they were given."""
        return tuple(one for one in self.members if one.content is None)

    @property
    def contents(self) -> list[bytes]:
        """The pickle and the notes."""
        return [one.content for one in self.members if one.content is not None]

    def without_contents(self) -> FileLayout:
        """The same, where the pickle and the notes are in the file already."""
        members = (replace(one, content=None if one.content is None else b"") for one in self.members)
        return replace(self, members=tuple(members))

    def write_contents(self, file: memoryview) -> None:
        """Write the pickle and the notes.

        Args:
            file: ``size_bytes``, writable.
        """
        for member in self.members:
            if member.content is not None:
                file[member.offset : member.offset + member.size_bytes] = member.content


def lay_out(archive: str, pickled: bytes, tensor_bytes: Sequence[int]) -> FileLayout:
    """Place a pickle and tensors in a file.

    Args:
        archive: name that all members have in common, that of the file without its ending.
        pickled: refers to the tensors by their index.
        tensor_bytes: size of each tensor, [tensors].
    """
    contents: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickled),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *((f"data/{index}", size) for index, size in enumerate(tensor_bytes)),
        ("version", b"3\n"),
    ]
    members, end = [], 0
    for name, content in contents:
        full = f"{archive}/{name}"
        known = content if isinstance(content, bytes) else None
        size = content if isinstance(content, int) else len(content)
        head = end + _LOCAL.size + len(full.encode()) + _wide_bytes(size) + _PADDING.size
        offset = -(-head // _ALIGNMENT) * _ALIGNMENT
        members.append(Member(full, end, offset, size, known))
        end = offset + size
    directory = sum(len(_central_header(member, 0)) for member in members)
    return FileLayout(tuple(members), end, end + directory + len(_end(len(members), end, directory)))


def seal(file: memoryview, layout: FileLayout) -> None:
    """Write the headers of all members and the archive's directory, once all contents are there.

    Args:
        file: ``layout.size_bytes``, writable.
    """
    place = layout.directory_at
    for member in layout.members:
        checksum = zlib.crc32(file[member.offset : member.offset + member.size_bytes])
        file[member.header_at : member.offset] = _local_header(member, checksum)
        header = _central_header(member, checksum)
        file[place : place + len(header)] = header
        place += len(header)
    file[place:] = _end(len(layout.members), layout.directory_at, place - layout.directory_at)


def _is_wide(number: int) -> bool:
    return number >= _MARK


def _wide_bytes(size: int) -> int:
    return _WIDE.size if _is_wide(size) else 0


def _local_header(member: Member, checksum: int) -> bytes:
    name, wide = member.name.encode(), _is_wide(member.size_bytes)
    extra = _WIDE.pack(1, 16, member.size_bytes, member.size_bytes) if wide else b""
    filling = member.offset - member.header_at - _LOCAL.size - len(name) - len(extra) - _PADDING.size
    extra += _PADDING.pack(b"FB", filling) + b"Z" * filling
    version, size = (_WIDE_VERSION, _MARK) if wide else (_OLD_VERSION, member.size_bytes)
    return _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DATE, checksum, size, size, len(name), len(extra)) + name + extra


def _central_header(member: Member, checksum: int) -> bytes:
    name, extra = member.name.encode(), b""
    size, header_at = member.size_bytes, member.header_at
    if _is_wide(size) or _is_wide(header_at):
        extra = struct.pack("<2H3Q", 1, 24, size, size, header_at)
        size = header_at = _MARK
    version = _WIDE_VERSION if extra else _OLD_VERSION
    numbers = (version, version, 0, 0, 0, _DATE, checksum, size, size, len(name), len(extra), 0, 0, 0, 0, header_at)
    return _CENTRAL.pack(b"PK\1\2", *numbers) + name + extra


def _end(count: int, start: int, size: int) -> bytes:
    """The end of the directory, in 64 bits too."""
    wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    counts = min(count, _MARK16)
    return wide + locator + _END.pack(b"PK\5\6", 0, 0, counts, counts, min(size, _MARK), min(start, _MARK), 0)
