"""What is in a folder of prepared data, and is it whole? The manifest: counts, origin, sizes and checksums.

The manifest holds nothing that differs between two runs on the same input: no times, no host names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from megasdc.errors import DataError

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
SPLITS = ("train", "valid", "test")
TOKENIZER_FOLDER = "tokenizer"


class _Record(BaseModel):
    """Base of the parts of a manifest: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class SourceRecord(_Record):
    """One source as it was read."""

    source: str
    licence: str
    num_documents: int
    skipped: dict[str, int]


class TokenizerRecord(_Record):
    """The tokenizer in the folder."""

    kind: str
    vocab_size: int
    end_of_document: int
    checksum: str


class SplitRecord(_Record):
    """Size of one split; the tokens include one end-of-document token a document, the bytes are UTF-8 text."""

    num_documents: int
    num_tokens: int
    num_bytes: int


class FileRecord(_Record):
    """Size and XXH3-64 of one file."""

    size_bytes: int
    checksum: str


class Manifest(_Record):
    """Everything known about a folder of prepared data.

    Attributes:
        settings: what was asked for; `settings_digest` is the XXH3-64 of its canonical JSON.
        dtype: NumPy name of a token in the ``.bin`` files.
        unigram_entropy_nats: entropy of the token frequencies of the training split, in nats a token: the loss of a
            model that knows frequencies and nothing else.
        files: by path relative to the folder, all files but the manifest.
    """

    format_version: int
    settings: dict[str, Any]
    settings_digest: str
    sources: list[SourceRecord]
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    dtype: str
    unigram_entropy_nats: float
    versions: dict[str, str]
    files: dict[str, FileRecord]

    def save(self, folder: Path) -> None:
        """Write `manifest.json` in one rename, on disk when this returns."""
        partial = folder / (MANIFEST_FILE + ".partial")
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(self.model_dump(), file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / MANIFEST_FILE)
        sync_folder(folder)

    @classmethod
    def load(cls, folder: Path | str) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            DataError: the folder or the manifest is missing, damaged, or of another format version.
        """
        path = Path(folder) / MANIFEST_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version != FORMAT_VERSION:
                raise DataError(f"{path} has format version {version}, this megasdc reads {FORMAT_VERSION}")
            return cls.model_validate(content)
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing: {folder} holds no prepared data; run `megasdc prepare-data`"
            ) from error
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; data.path names a folder of prepared data"
            ) from error
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise DataError(f"{path} is damaged: {error}; prepare the data again") from error


def digest_settings(settings: dict[str, Any]) -> str:
    """Return the XXH3-64 of the canonical JSON of settings."""
    return xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode())


def checksum_file(path: Path) -> str:
    """Return the XXH3-64 of a file's bytes."""
    state = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Put all files of a folder on disk and return their sizes and checksums, by relative path."""
    records = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        records[path.relative_to(folder).as_posix()] = FileRecord(
            size_bytes=path.stat().st_size, checksum=checksum_file(path)
        )
    return records


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_prepared(folder: Path | str, quick: bool = True) -> Manifest:
    """Check that prepared data are whole.

    Args:
        folder: the folder of prepared data.
        quick: compare sizes of all files and checksums of the tokenizer only; false: checksums of all files.

    Returns:
        The manifest.

    Raises:
        DataError: a file is missing, has another size or another checksum; the message names it.
    """
    root = Path(folder)
    manifest = Manifest.load(root)
    for name, record in manifest.files.items():
        path = root / name
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing, its manifest lists {record.size_bytes} bytes; {_REMEDY}") from error
        if size != record.size_bytes:
            raise DataError(f"{path} has {size} bytes, its manifest says {record.size_bytes}; {_REMEDY}")
        if not quick or name.startswith(TOKENIZER_FOLDER + "/"):
            checksum = checksum_file(path)
            if checksum != record.checksum:
                raise DataError(f"{path} has checksum {checksum}, its manifest says {record.checksum}; {_REMEDY}")
    return manifest


_REMEDY = "prepare the data again with force, or copy them again"
