"""Prepared data on the disk: the manifest of a folder (counts, origin, sizes, checksums), and its verification.

The manifest holds nothing that differs between two runs on the same input: no times, no host names. It includes its own
checksum, so that a changed byte anywhere in the folder is found. Format version 1 had neither that checksum nor those
of blocks; it is still read, and `megasdc verify-data --add-checksums` updates it.

So that part of a large ``.bin`` file can be checked, checksums of its blocks lie beside it in ``SPLIT.checksums``: the
XXH3-64 of each ``block_bytes`` from the file's start, as little-endian unsigned 64-bit integers; the last block may be
shorter. A block is about the size of the operating system's read-ahead for one sample, so that checking it at its first
read costs microseconds and no further reads.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from megasdc.common.durable import parse_json, sync_path, write_durably
from megasdc.common.errors import DataError, StorageError
from megasdc.data.tokenizer import load_tokenizer

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
SPLITS = ("train", "valid", "test")
TOKENIZER_FOLDER = "tokenizer"
SHORT_TOKENS = 65500
"""Vocabularies with fewer ids have tokens of two bytes, others of four: Megatron-core's `DType.optimal_dtype`."""
_INDEX_HEADER_BYTES = 34
"""Header of Megatron-core's ``.idx``; then a length and a pointer per document, then the bounds of all documents."""


class _Record(BaseModel):
    """Base of the parts of a manifest: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class IdsRecord(_Record):
    """Content of a source of ids before ends and beginnings of documents were added; by the manifest's tokenizer.

    Attributes:
        dtypes: NumPy names of the types of tokens in its files.
        num_ended: number of documents whose last token was the end-of-document id; the others were given one.
        num_ends_within: number of such ids anywhere else.
        num_begun: number of documents whose first token was the beginning-of-sequence token; None: the tokenizer has
            none.
        sample: decoded beginning of the first document.
    """

    num_pairs: int = Field(ge=1)
    dtypes: list[str]
    num_tokens: int = Field(ge=1)
    num_ended: int = Field(ge=0)
    num_ends_within: int = Field(ge=0)
    num_begun: int | None = Field(ge=0)
    sample: str


class SourceRecord(_Record):
    """One source as it was read; `skipped` counts skipped documents by reason, `skipped_at` lists the first of them.

    ``ids``: None of a source of text, whose record is written without it, as before there were others.
    """

    source: str
    licence: str
    num_documents: int = Field(ge=0)
    skipped: dict[str, int]
    skipped_at: dict[str, list[str]] = {}
    ids: IdsRecord | None = None

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content = write(self)
        return {name: value for name, value in content.items() if name != "ids" or value is not None}


class TokenizerRecord(_Record):
    """The tokenizer in the folder."""

    kind: str
    vocab_size: int = Field(gt=0, lt=2**31)
    end_of_document: int = Field(ge=0)
    checksum: str


class RoundTripRecord(_Record):
    """Shares of a sample's characters that the tokenizer changes or does not know, see `RoundTrip`."""

    num_characters: int = Field(gt=0)
    changed_share: float = Field(ge=0, le=1)
    unknown_share: float = Field(ge=0, le=1)


class SplitRecord(_Record):
    """Size of one split; tokens include those that begin and end documents, bytes are those of the UTF-8 text.

    ``num_bytes``: None where ids were copied, whose text was not seen.
    """

    num_documents: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_bytes: int | None = Field(ge=0)


class DataFileRecord(_Record):
    """Size and XXH3-64 of one file."""

    size_bytes: int = Field(ge=0)
    checksum: str


class DataManifest(_Record):
    """Everything known about a folder of prepared data.

    Attributes:
        settings: settings of the preparation; `settings_digest` is the XXH3-64 of their canonical JSON.
        dtype: NumPy name of a token in the ``.bin`` files.
        unigram_entropy_nats: entropy of the token frequencies of the training split, in nats per token: the loss of a
            model that knows only frequencies.
        files: size and checksum of all files but the manifest, by path relative to the folder.
        round_trip: None: there was no text, or the data were prepared by a version that did not measure it.
        block_bytes: see `megasdc.data.manifest`; None: the files have no checksums of blocks (format version 1).
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
    files: dict[str, DataFileRecord]
    block_bytes: int | None = Field(None, gt=0)
    round_trip: RoundTripRecord | None = None

    @model_validator(mode="after")
    def _agrees(self) -> DataManifest:
        if problem := next(_contradictions(self), None):
            raise ValueError(problem)
        return self

    def save(self, folder: Path) -> None:
        """Write `manifest.json` atomically; it is on disk when this returns."""
        content = self.model_dump()
        whole = {**content, "checksum": digest_settings(content)}
        write_durably(folder / MANIFEST_FILE, json.dumps(whole, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path | str) -> DataManifest:
        """Read the manifest of a folder.

        Raises:
            DataError: the folder or the manifest is missing, changed since it was written, inconsistent, or of another
                format version.
        """
        path = Path(folder) / MANIFEST_FILE
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version not in READ_VERSIONS:
                raise DataError(
                    f"{path} has format version {version}, this megasdc reads {' and '.join(map(str, READ_VERSIONS))}"
                )
            if version > 1:
                claimed = content.pop("checksum")
                if (found := digest_settings(content)) != claimed:
                    raise DataError(
                        f"{path} was changed: its content has checksum {found}, expected {claimed}; {REMEDY}"
                    )
            return cls.model_validate(content)
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing: {folder} holds no prepared data; run `megasdc prepare-data`"
            ) from error
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; data.path names a folder of prepared data"
            ) from error
        except ValidationError as error:
            found = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg'].removeprefix('Value error, ')}"
                for one in error.errors()
            )
            raise DataError(f"{path} is damaged: {found}; {REMEDY}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is damaged: {type(error).__name__}: {error}; {REMEDY}") from error


def _contradictions(manifest: DataManifest) -> Iterator[str]:
    """Contradictions in a manifest, by the rules by which the files are written."""
    tokenizer, blocks = manifest.tokenizer, manifest.block_bytes
    if (manifest.format_version > 1) != (blocks is not None):
        yield f"block_bytes is {blocks} with format version {manifest.format_version}"
    if (found := digest_settings(manifest.settings)) != manifest.settings_digest:
        yield f"settings_digest is {manifest.settings_digest}, the settings have {found}"
    if tokenizer.end_of_document >= tokenizer.vocab_size:
        yield f"end_of_document is {tokenizer.end_of_document} of {tokenizer.vocab_size} ids"
    dtype, token_bytes = ("uint16", 2) if tokenizer.vocab_size < SHORT_TOKENS else ("int32", 4)
    if manifest.dtype != dtype:
        yield f"dtype is {manifest.dtype}, tokens with {tokenizer.vocab_size} ids are {dtype}"
    expected: dict[str, int] = {}
    for name, split in manifest.splits.items():
        if name not in SPLITS:
            yield f"splits holds {name}, known are {', '.join(SPLITS)}"
        expected[f"{name}.bin"] = split.num_tokens * token_bytes
        expected[f"{name}.idx"] = _INDEX_HEADER_BYTES + split.num_documents * 12 + (split.num_documents + 1) * 8
        if blocks is not None:
            expected[f"{name}.checksums"] = num_blocks(expected[f"{name}.bin"], blocks) * 8
    if not expected:
        yield "splits is empty"
    for name, size in expected.items():
        if name not in manifest.files:
            yield f"files lacks {name}"
        elif manifest.files[name].size_bytes != size:
            yield f"{name} has {manifest.files[name].size_bytes} bytes by files, {size} by splits"
    others = [PurePosixPath(name) for name in manifest.files if name not in expected]
    for path in others:
        if path.parts[0] != TOKENIZER_FOLDER or ".." in path.parts:
            yield f"files holds {path}, which is no file of prepared data"
    if not others:
        yield f"files lacks those of {TOKENIZER_FOLDER}/"


def digest_settings(settings: dict[str, Any]) -> str:
    """The XXH3-64 of the canonical JSON of settings, or of a manifest."""
    return xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode())


def checksum_file(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """The XXH3-64 of a file's bytes; `advance` is called with the bytes of each piece read."""
    state = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
            advance(len(block))
    return state.hexdigest()


def record_file(path: Path) -> DataFileRecord:
    """Sync a file to disk and return its size and checksum."""
    sync_path(path)
    return DataFileRecord(size_bytes=path.stat().st_size, checksum=checksum_file(path))


def record_files(folder: Path) -> dict[str, DataFileRecord]:
    """Sync all files of a folder to disk and return their sizes and checksums, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): record_file(path) for path in paths}


ADD_CHECKSUMS = "megasdc verify-data --add-checksums"


def verify_prepared(folder: Path | str, quick: bool = True) -> DataManifest:
    """Check that a folder of prepared data is complete and unchanged; returns its manifest.

    Args:
        quick: whether only the size and a few blocks of each ``.bin`` file are checked, and every byte of all others;
            otherwise every byte of all files.

    Raises:
        DataError: a file is missing, has another size or checksum; names it.
    """
    manifest = DataManifest.load(folder)
    if problem := next(_file_problems(Path(folder), manifest, quick), None):
        raise DataError(f"{problem}; {REMEDY}")
    return manifest


def unchecked(folder: Path | str, manifest: DataManifest) -> str | None:
    """Note that data of an earlier version cannot be checked at the start and in the loader; None: they can."""
    if manifest.block_bytes is not None:
        return None
    return (
        f"{folder} was prepared by a version that kept no checksums of blocks nor of the manifest: the tokens that are "
        f"used are not checked; `{ADD_CHECKSUMS} {folder}` checks every byte once and adds them"
    )


@dataclass(frozen=True)
class DataReport:
    """Result of the verification of prepared data; problems are one sentence each; ``note``: see ``unchecked``."""

    folder: str
    problems: list[str]
    num_files: int = 0
    size_bytes: int = 0
    note: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        return {"ok": self.ok, **asdict(self)}

    def render(self) -> str:
        """The result as text."""
        if self.ok:
            lines = [f"{self.folder}: {self.num_files} files, {self.size_bytes:,} bytes, all unchanged"]
        else:
            count = len(self.problems)
            lines = [f"{self.folder}: {count} problem{'s' if count != 1 else ''}"]
            lines += [*(f"  - {problem}" for problem in self.problems), f"  {REMEDY}"]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def check_folder(folder: Path, advance: Callable[[int], None] = lambda size: None) -> DataReport:
    """Verify every byte of prepared data; report all problems, not only the first.

    Args:
        advance: function called with the number of bytes of each piece read.
    """
    try:
        manifest = DataManifest.load(folder)
    except DataError as error:
        return DataReport(str(folder), [str(error).removesuffix(f"; {REMEDY}")])
    problems = list(_file_problems(folder, manifest, False, advance))
    if not problems:
        problems = list(_problems_of_tokenizer(folder, manifest))
    sizes = [record.size_bytes for record in manifest.files.values()]
    return DataReport(str(folder), problems, len(sizes), sum(sizes), unchecked(folder, manifest))


def add_checksums(folder: Path) -> None:
    """Add block checksums to data of an earlier version and update its manifest; run `check_folder` before.

    No other file is changed; running jobs may keep using the data. StorageError if the folder cannot be written.
    """
    manifest = DataManifest.load(folder)
    if manifest.block_bytes is not None:
        return
    files = dict(manifest.files)
    try:
        for name in manifest.splits:
            path = write_checksums(folder / f"{name}.bin")
            files[path.name] = record_file(path)
        _renewed(manifest, files).save(folder)
    except OSError as error:
        raise StorageError(f"no checksums can be added to {folder}: {error}; nothing was changed") from error


def _renewed(manifest: DataManifest, files: dict[str, DataFileRecord]) -> DataManifest:
    content = {name: value for name, value in manifest if name not in ("files", "block_bytes", "format_version")}
    return DataManifest(**content, files=files, block_bytes=BLOCK_BYTES, format_version=FORMAT_VERSION)


def _file_problems(
    root: Path, manifest: DataManifest, quick: bool, advance: Callable[[int], None] = lambda size: None
) -> Iterator[str]:
    """Problems of the files: first all sizes, then checksums, with ``.bin`` files after their ``.checksums``."""
    wrong = set()
    for name, record in manifest.files.items():
        if problem := _size_problem(root / name, record):
            wrong.add(root / name)
            yield problem
    tokens = {root / f"{name}.bin" for name in manifest.splits}
    for name, record in sorted(manifest.files.items(), key=lambda item: root / item[0] in tokens):
        path = root / name
        if path in wrong:
            continue
        if not (quick and path in tokens) and (found := checksum_file(path, advance)) != record.checksum:
            wrong.add(path)
            yield f"{path} has checksum {found}, its manifest says {record.checksum}"
        if path in tokens and manifest.block_bytes is not None and checksums_file(path) not in wrong:
            checksums = BlockChecksums(path, manifest.block_bytes)
            if quick:
                yield from checksums.sample_problems()
            elif path in wrong:
                yield from checksums.find_problems()


def _size_problem(path: Path, record: DataFileRecord) -> str | None:
    """Problem of a file's size; None if it is as expected."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing, its manifest lists {record.size_bytes} bytes"
    return None if size == record.size_bytes else f"{path} has {size} bytes, its manifest says {record.size_bytes}"


def _problems_of_tokenizer(folder: Path, manifest: DataManifest) -> Iterator[str]:
    """Differences between the manifest's record of the tokenizer and the tokenizer."""
    record = manifest.tokenizer
    try:
        tokenizer = load_tokenizer(record.kind, folder / TOKENIZER_FOLDER)
    except (DataError, ValueError) as error:
        yield str(error)
        return
    for name in ("vocab_size", "end_of_document", "checksum"):
        if (found := getattr(tokenizer, name)) != (said := getattr(record, name)):
            yield f"{folder / TOKENIZER_FOLDER} has {name} {found}, the manifest says {said}"


BLOCK_BYTES = 1 << 16
NUM_SAMPLED = 16
"""Number of blocks of each ``.bin`` file that every rank checks at its start."""
REMEDY = "copy the folder again, or prepare the data again with --force; megasdc verify-data names all that is damaged"
_DTYPE = np.dtype("<u8")


def num_blocks(size_bytes: int, block_bytes: int) -> int:
    """Number of blocks of a file."""
    return -(-size_bytes // block_bytes)


def checksums_file(path: Path) -> Path:
    """The file with the checksums of a ``.bin`` file."""
    return path.with_suffix(".checksums")


def write_checksums(path: Path, block_bytes: int = BLOCK_BYTES) -> Path:
    """Write the checksums of a ``.bin`` file beside it; returns the file."""
    found = []
    with open(path, "rb") as file:
        while block := file.read(block_bytes):
            found.append(xxhash.xxh3_64_intdigest(block))
    target = checksums_file(path)
    np.array(found, dtype=_DTYPE).tofile(target)
    return target


class BlockChecksums:
    """The checksums of one ``.bin`` file, in blocks of ``block_bytes``; OSError if they cannot be read."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self._expected: np.ndarray = np.memmap(checksums_file(path), dtype=_DTYPE, mode="r")

    def __len__(self) -> int:
        return len(self._expected)

    def problem(self, number: int, block: bytes | memoryview) -> str | None:
        """Problem of block ``number`` (from 0); None if it has the expected checksum."""
        found, expected = xxhash.xxh3_64_intdigest(block), int(self._expected[number])
        if found == expected:
            return None
        start = number * self.block_bytes
        return (
            f"{self.path} is damaged: block {number} (bytes {start} to {start + len(block) - 1}) has checksum "
            f"{found:016x}, expected {expected:016x}"
        )

    def sample_problems(self) -> Iterator[str]:
        """Problems of the first, the last, and a few random blocks between them, drawn anew in every process.

        Other ranks and later starts thus check other blocks. The draw uses no random generator of training.
        """
        between = range(1, len(self) - 1)
        chosen = {0, len(self) - 1, *random.SystemRandom().sample(between, min(NUM_SAMPLED - 2, len(between)))}
        yield from self._problems(sorted(chosen))

    def find_problems(self) -> Iterator[str]:
        """Problems of all blocks of the file."""
        yield from self._problems(range(len(self)))

    def _problems(self, numbers: Iterable[int]) -> Iterator[str]:
        with open(self.path, "rb", buffering=0) as file:
            for number in numbers:
                file.seek(number * self.block_bytes)
                if text := self.problem(number, file.read(self.block_bytes)):
                    yield text


class BinReader(Protocol):
    """Interface of the reader with which Megatron-core's IndexedDataset reads a ``.bin`` file."""

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """``count`` elements from byte ``offset`` on."""
        ...


class CheckedReader:
    """Reads a ``.bin`` file of ``size_bytes`` and checks every block before its first use in this process."""

    def __init__(self, reader: BinReader, checksums: BlockChecksums, size_bytes: int) -> None:
        self._reader = reader
        self._checksums = checksums
        self._size_bytes = size_bytes
        self._checked = bytearray(len(checksums))

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """``count`` elements from byte ``offset`` on; DataError, which names the block, if one is damaged."""
        size = self._checksums.block_bytes
        first, end = int(offset) // size, num_blocks(int(offset) + int(count) * np.dtype(dtype).itemsize, size)
        if self._checked.count(0, first, end):
            self._check(first, end)
        return self._reader.read(dtype=dtype, count=count, offset=offset)

    def _check(self, first: int, end: int) -> None:
        size = self._checksums.block_bytes
        for number in range(first, end):
            if self._checked[number]:
                continue
            length = min(size, self._size_bytes - number * size)
            block = self._reader.read(dtype=np.uint8, count=length, offset=number * size)
            if text := self._checksums.problem(number, block.data):
                raise DataError(f"{text}; {REMEDY}")
            self._checked[number] = 1


class DirectReader:
    """Reads a ``.bin`` file of ``size_bytes`` into fresh memory, and checks every block each time.

    It shares neither mapping nor record of checked blocks with the reader of training.

    Args:
        checksums: checksums of the file's blocks; None: the data were prepared without, and nothing is checked.
    """

    def __init__(self, path: Path, checksums: BlockChecksums | None, size_bytes: int) -> None:
        self._path = path
        self._checksums = checksums
        self._size_bytes = size_bytes

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """``count`` elements from byte ``offset`` on; DataError, which names the block, if one is damaged."""
        offset, length = int(offset), int(count) * np.dtype(dtype).itemsize
        if self._checksums is None:
            return np.frombuffer(self._bytes(offset, offset + length), dtype=dtype)
        size = self._checksums.block_bytes
        first, end = offset // size, num_blocks(offset + length, size)
        content = self._bytes(first * size, min(end * size, self._size_bytes))
        for number in range(first, end):
            block = memoryview(content)[(number - first) * size : (number - first + 1) * size]
            if text := self._checksums.problem(number, block):
                raise DataError(f"{text}; {REMEDY}")
        return np.frombuffer(content, dtype=dtype, count=int(count), offset=offset - first * size)

    def _bytes(self, start: int, end: int) -> bytes:
        with open(self._path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), end - start, start)
        if len(content) < end - start:
            raise DataError(f"{self._path} ends before byte {end}; {REMEDY}")
        return content
