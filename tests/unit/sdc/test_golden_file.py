"""Is a golden file read back as it was written, and refused when it is not?"""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path

import pytest

from megasdc.common.addresses import Address
from megasdc.common.errors import StorageError, TraceError
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import (
    Case,
    Golden,
    describe_differences,
    key_differences,
    load_golden,
    load_header,
    save_golden,
)
from megasdc.sdc.trace import Trace


def _trace(offset: int) -> Trace:
    addresses = [
        Address(1, 0, "forward", "0.word_embeddings", "output"),
        Address(1, None, "update", "0.word_embeddings", "weight.master"),
    ]
    return Trace(addresses, [offset, (1 << 64) - 1 - offset])


@pytest.fixture
def golden(tmp_path: Path) -> tuple[Path, Golden]:
    """A file of two cases and two ranks, and what was written to it."""
    traces = {(case, rank): _trace(10 * case + rank) for case in range(2) for rank in range(2)}
    key = {"torch": "2.13.0", "threads": 1}
    cases = (Case(0, 32), Case(1, 32))
    contents = Golden(key, {"megasdc": {}}, ParallelDims(2, 1, 1), "xxh3_64.v1", cases, 6, {"host": "a"}, traces)
    path = tmp_path / "a.golden"
    save_golden(path, contents)
    return path, contents


def test_round_trip(golden: tuple[Path, Golden]) -> None:
    """Everything comes back, of all ranks or of one; nothing else is left in the folder."""
    path, contents = golden
    assert load_golden(path) == contents
    assert set(load_golden(path, 1).traces) == {(0, 1), (1, 1)}
    assert [file.name for file in path.parent.iterdir()] == ["a.golden"]


def test_what_is_no_file_is_written_to(golden: tuple[Path, Golden]) -> None:
    """A link stays, and what it leads to is replaced; a device stays too, and one that is full says so."""
    path, contents = golden
    link, device = path.with_name("link"), path.with_name("device")
    link.symlink_to(path.name)
    device.symlink_to("/dev/full")
    before = path.stat().st_ino
    save_golden(link, contents)
    assert link.is_symlink() and load_golden(path) == contents and path.stat().st_ino != before
    with pytest.raises(StorageError, match="device cannot be written: No space left on device"):
        save_golden(device, contents)
    assert device.is_symlink()


def test_truncated_at_any_place(golden: tuple[Path, Golden]) -> None:
    """A file that ends early is refused, wherever it ends."""
    path, _ = golden
    data = path.read_bytes()
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(TraceError, match="damaged or not a golden trace"):
            load_golden(path)


def test_flipped_bits(golden: tuple[Path, Golden]) -> None:
    """A bit that flips anywhere is noticed, or lies where zip keeps what is not read."""
    path, contents = golden
    data = bytearray(path.read_bytes())
    refused = 0
    for place in range(0, len(data), 53):
        data[place] ^= 4
        path.write_bytes(data)
        try:
            assert load_golden(path) == contents
        except TraceError:
            refused += 1
        data[place] ^= 4
    assert refused > 0.8 * len(range(0, len(data), 53))


@pytest.mark.slow
def test_flipped_bits_of_the_zip_directory(golden: tuple[Path, Golden]) -> None:
    """Every one of them: other methods, versions and passwords are refused as damage too, not with zip's own errors."""
    path, contents = golden
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    data = bytearray(path.read_bytes())
    for place in range(start, len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with contextlib.suppress(TraceError):
                assert load_golden(path) == contents
            data[place] ^= 1 << bit


def _edit(path: Path, member: str, change: object) -> None:
    """Rewrite one member with valid checksums of zip, as an editor would."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents[member] = change(contents[member])  # type: ignore[operator]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def test_edited_header(golden: tuple[Path, Golden]) -> None:
    """A key that was changed to fit is refused."""
    path, _ = golden
    _edit(path, "header.json", lambda data: data.replace(b"2.13.0", b"2.14.0"))
    with pytest.raises(TraceError, match="not the one that was written"):
        load_header(path)


def test_exchanged_traces(golden: tuple[Path, Golden]) -> None:
    """The trace of another rank in the place of one is refused, and which it is is named."""
    path, _ = golden
    with zipfile.ZipFile(path) as archive:
        other = archive.read("case_000/rank_00001.arrow")
    _edit(path, "case_000/rank_00000.arrow", lambda data: other)
    with pytest.raises(TraceError, match=r"case_000/rank_00000\.arrow is not the trace"):
        load_golden(path)


def test_other_files(tmp_path: Path, golden: tuple[Path, Golden]) -> None:
    """A missing file says how to make it; another format and an unknown algorithm are named."""
    with pytest.raises(TraceError, match="golden record"):
        load_golden(tmp_path / "none")
    path, contents = golden
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        archive.writestr("header.json", json.dumps({"format": "other"}))
    with pytest.raises(TraceError, match="'other'"):
        load_golden(tmp_path / "b")
    save_golden(path, Golden(**{**vars(contents), "algorithm": "md5"}))
    with pytest.raises(TraceError, match=r"'md5' is unknown here; known are .*xxh3_64\.v1"):
        load_golden(path)


def test_parts_of_keys_that_differ() -> None:
    """Each part that differs, or that one key lacks, is told with both values."""
    found = key_differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    assert found == {"b": (2, 3), "c": (None, 4)} and describe_differences({}) == ""
    assert describe_differences(found) == "b: golden 2, here 3; c: golden None, here 4"
    assert describe_differences(found, 1) == "b: golden 2, here 3; and 1 more"
