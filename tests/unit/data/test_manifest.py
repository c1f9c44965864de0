"""The manifest: every kind of damage to a folder is refused with the file named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megasdc.data.manifest import Manifest, verify_prepared
from megasdc.errors import DataError


@pytest.fixture
def folder(tmp_path, prepared):
    shutil.copytree(prepared.path, tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ["train.bin", "train.idx", "valid.bin", "test.idx", "tokenizer/tokenizer.model"]


@pytest.mark.parametrize("name", FILES)
def test_missing_truncated_and_flipped(folder, name):
    """A missing or shorter file is found at once, a flipped bit by checksums; a tokenizer's always."""
    path = folder / name
    whole = path.read_bytes()
    verify_prepared(folder, quick=False)
    flip(path)
    with pytest.raises(DataError, match=f"{name} has checksum"):
        verify_prepared(folder, quick=name.startswith("tokenizer"))
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{name} has {len(whole) - 1} bytes, its manifest says {len(whole)}"):
        verify_prepared(folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        verify_prepared(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text.replace('"splits"', '"split"'), "is damaged"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 99'), "format version 99"),
        (lambda text: "[]", "is damaged"),
    ],
)
def test_damaged_manifest(folder, damage, message):
    """A manifest that is torn, of another form or another version is refused."""
    path = folder / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=message):
        verify_prepared(folder)


def test_no_manifest(tmp_path):
    """A folder without a manifest is no prepared data; the message says which command makes them."""
    with pytest.raises(DataError, match="run `megasdc prepare-data`"):
        verify_prepared(tmp_path)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_what_is_no_folder_is_named(path):
    """A device or a file as data.path is told as such, not by a traceback."""
    with pytest.raises(DataError, match=f"{path}/manifest.json cannot be read: Not a directory"):
        Manifest.load(path)
