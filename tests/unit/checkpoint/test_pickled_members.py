"""Are members of enumerations read in each form that Pythons write them in, and is it no way to anything else?"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megasdc.checkpoint.allowlist import (
    check_pickle,
    load_checked,
    load_part,
    refuse_classes,
    refuse_compressed,
)
from megasdc.common.errors import CheckpointError


class _Attribute:
    """Pickled as the call that Python 3.11.0 to 3.11.3 write for a member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def _saved(path: Path, owner: Any, name: str) -> Path:
    torch.save({"zero_stage": _Attribute(owner, name), "x": torch.ones(3)}, path)
    return path


def test_a_member_is_read(tmp_path: Path) -> None:
    """Where nothing but the restricted unpickler opens the file; else it is refused, since others would run it."""
    file = _saved(tmp_path / "state.pt", ZeroStageEnum, "optimizer_states")
    assert load_checked(file, members=True)["zero_stage"] is ZeroStageEnum.optimizer_states
    for refuse in (check_pickle, load_checked):
        with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
            refuse(file)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ZeroStageEnum, "__class__"), (ZeroStageEnum, "mro"), (fragment_address, "__init__"), (fragment_address, "numel")],
)
def test_nothing_else_is(tmp_path: Path, owner: Any, name: str) -> None:
    """Other attributes of enumerations, and those of other classes, are not reached."""
    with pytest.raises(CheckpointError, match="is no member of an enumeration"):
        load_checked(_saved(tmp_path / "state.pt", owner, name), members=True)


def test_one_name_that_would_run_code_is_enough_to_say_so() -> None:
    """Among harmless strangers too; of those alone it is not said."""
    for names, grave in (
        (["posix.system", "some.Thing"], True),
        (["some.Thing", "os.x"], True),
        (["some.Thing"], False),
    ):
        assert ("would run code" in str(refuse_classes("a.pt", names))) == grave


def test_a_compressed_member_is_not_opened(tmp_path: Path) -> None:
    """``torch.save`` writes none, and torch would decompress it whole: 4 GiB of zeros are 4 MiB in the file."""
    whole, packed = tmp_path / "whole.pt", tmp_path / "packed.pt"
    torch.save({"x": torch.zeros(1 << 20)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    assert packed.stat().st_size < 1 << 17
    for action in (
        lambda: check_pickle(packed),
        lambda: load_checked(packed),
        lambda: load_checked(packed, "meta"),
        lambda: load_part(packed, 0, packed.stat().st_size),
    ):
        with pytest.raises(CheckpointError, match="compressed member"):
            action()
    assert load_checked(whole)["x"].numel() == 1 << 20


def _packed_behind_another_directory(whole: bytes, elsewhere: bool) -> bytes:
    """A file that Python's ``zipfile`` takes for uncompressed, and torch decompresses.

    Its first directory is that of compressed members, where the end record says that it is; its second one, of the same
    size and just before the end record, says that they are not. ``elsewhere``: the zip64 record, which is twofold
    instead.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
        target.fp.flush()  # type: ignore[union-attr]
    packed = made.getvalue()
    size, start = struct.unpack("<LL", packed[-10:-2])
    members, true = packed[:start], packed[start : start + size]
    count = struct.unpack("<H", packed[-12:-10])[0]
    false, at = bytearray(true), 0
    while at < size:
        name, extra, comment = struct.unpack_from("<HHH", false, at + 28)
        false[at + 10 : at + 12] = b"\0\0"
        false[at + 24 : at + 28] = false[at + 20 : at + 24]
        at += 46 + name + extra + comment
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, start, 0)
    if not elsewhere:
        return members + true + bytes(false) + end

    def zip64(offset: int) -> bytes:
        return struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)

    first = members + true + zip64(start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    return first + bytes(false) + zip64(len(first)) + locator + end


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_second_directory_does_not_hide_compressed_members(tmp_path: Path, elsewhere: bool) -> None:
    """``zipfile`` reads the directory before the end record, torch the one at the offset that the record states."""
    buffer, packed = io.BytesIO(), tmp_path / "packed.pt"
    torch.save({"x": torch.zeros(1 << 20)}, buffer)
    packed.write_bytes(_packed_behind_another_directory(buffer.getvalue(), elsewhere))
    assert torch.load(packed, weights_only=True)["x"].numel() == 1 << 20
    for action in (
        lambda: check_pickle(packed),
        lambda: load_checked(packed),
        lambda: load_part(packed, 0, packed.stat().st_size),
        lambda: refuse_compressed("a batch", io.BytesIO(packed.read_bytes())),
    ):
        with pytest.raises(CheckpointError, match=r"not a complete file of torch.save: .*directory"):
            action()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content + b"\0" * 22, "end"),
        (lambda content: content[:-2] + b"\3\0abc", "end"),
        (lambda content: b"\0" * 64 + content, "begin"),
    ],
)
def test_bytes_around_the_members_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    """Where readers of archives search, they differ."""
    buffer, path = io.BytesIO(), tmp_path / "changed.pt"
    torch.save({"x": torch.ones(3)}, buffer)
    path.write_bytes(buffer.getvalue())
    assert load_checked(path)["x"].numel() == 3
    path.write_bytes(change(buffer.getvalue()))
    with pytest.raises(CheckpointError, match=f"not a complete file of torch.save: .*{words}"):
        refuse_compressed(path)
