"""Records of an archive, and where its files lie.

| file | what |
|---|---|
| ``archive.json`` | that this is an archive, and of which version |
| ``blocks/AB/DIGEST`` | a block, see ``megasdc.ops.archive.block`` |
| ``runs/RUN/step_NNNNNNNN/PART.json`` | a part: files of one checkpoint folder, and their blocks |
| ``receipts/RUN/step_NNNNNNNN/PART.json`` | digest of the part's record, so that a lost one is noticed |
| ``leases/ID.json`` | a push or a prune that goes on |

PART is ``all`` with shared storage; with node-local storage each node has its own, ``node-NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeVar

import xxhash
from pydantic import BaseModel, Field, model_validator

from megasdc.checkpoint.files import MANIFEST_FILE, VERIFIED_FILE, step_folder
from megasdc.checkpoint.manifest import KnownState
from megasdc.checkpoint.records import Count, Inside, Record, Time, Xxh3, read_text, record_text
from megasdc.common.errors import CheckpointError, ConfigError, StorageError
from megasdc.ops.archive.cut import BlockPiece, count_blocks, cut
from megasdc.ops.archive.store import Store

FORMAT_VERSION = 1
MARK_FILE = "archive.json"
BLOCKS, RUNS, RECEIPTS, LEASES = "blocks", "runs", "receipts", "leases"
LARGEST_RECORD = 1 << 28
DIGEST_DIGITS = 32
WHOLE = "all"
"""Part of a checkpoint in shared storage."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART_PATH = re.compile(r"(\w+)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/step_(\d{8,})/([A-Za-z0-9._-]+)\.json")
R = TypeVar("R", bound=BaseModel)


class Mark(Record):
    """``archive.json``."""

    format_version: int
    kind: Literal["archive of checkpoints"]


class Span(Record):
    """A range of a file that has blocks of its own."""

    offset: Count
    size_bytes: int = Field(ge=1)


class ArchivedFile(Record):
    """A file as blocks.

    Attributes:
        name: path relative to the checkpoint's folder.
        xxh3_128: of its bytes.
        spans: ranges with blocks of their own, in order; all other bytes have blocks together.
        blocks: names of its blocks, in the order of ``megasdc.ops.archive.cut.cut``, each of 32 digits.
    """

    name: Inside
    size_bytes: Count
    xxh3_128: Xxh3
    spans: list[Span]
    blocks: Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        end = 0
        for span in self.spans:
            if span.offset < end or span.offset + span.size_bytes > self.size_bytes:
                raise ValueError(f"a span of {self.name} from byte {span.offset} on is not in order, or not in it")
            end = span.offset + span.size_bytes
        if len(self.blocks) != DIGEST_DIGITS * count_blocks(self.size_bytes, self.spans):
            raise ValueError(f"{self.name} has {self.size_bytes} bytes and not the blocks of so many")
        return self

    def digests(self) -> list[str]:
        """Names of its blocks."""
        return [self.blocks[place : place + DIGEST_DIGITS] for place in range(0, len(self.blocks), DIGEST_DIGITS)]

    def pieces(self) -> Iterator[tuple[str, BlockPiece]]:
        """Name and place in the file of each block."""
        return zip(self.digests(), cut(self.size_bytes, self.spans), strict=True)


class Quantized(Record):
    """That the moments of a checkpoint were quantized, and how far they are from what they were.

    ``largest_error``: over the largest number of its group; ``mean_error``: over the mean number.
    """

    bits: Literal[8]
    largest_error: Annotated[float, Field(ge=0)]
    mean_error: Annotated[float, Field(ge=0)]

    def __str__(self) -> str:
        return (
            f"moments quantized to {self.bits} bits (error: mean {self.mean_error:.2%}, largest "
            f"{self.largest_error:.2%} of the largest number of its group)"
        )


class Part(KnownState):
    """One checkpoint folder: a whole checkpoint, or one node's files of it.

    Attributes:
        run: id of the run.
        node: None with shared storage.
        nodes: all nodes with node-local storage, else empty: the step is complete when each has its part.
        save_id: of the checkpoint's manifest.
        time: of the push, in seconds since the epoch.
        layout: for people.
        quantized: None: every bit is as it was saved.
        files: in order of name, the checkpoint's manifest among them.
    """

    format_version: int
    run: Name
    step: Count
    node: Name | None
    nodes: list[Name]
    save_id: Name
    time: Time
    layout: str
    quantized: Quantized | None
    files: list[ArchivedFile]

    @model_validator(mode="after")
    def _names_are_different(self) -> Self:
        names = [file.name for file in self.files]
        if names != sorted(set(names)):
            raise ValueError("its files are not in order of name, each once")
        if (self.node is None) == bool(self.nodes) or (self.node is not None and self.node not in self.nodes):
            raise ValueError(f"node {self.node} is none of {self.nodes}")
        return self

    @property
    def name(self) -> str:
        """Name of the part in its step."""
        return part_name(self.node)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def blocks(self) -> dict[str, int]:
        """Names and sizes of all its blocks."""
        return {digest: piece.size_bytes for file in self.files for digest, piece in file.pieces()}

    def needed(self) -> list[str]:
        """Names of the parts of which the step consists."""
        return [part_name(node) for node in self.nodes] or [WHOLE]

    def content(self) -> dict[str, str]:
        """Digests of what the run saved, by file: not of the manifest with its time and ``save_id``, nor of marks."""
        own = (MANIFEST_FILE, VERIFIED_FILE)
        return {file.name: file.xxh3_128 for file in self.files if file.name not in own}


class Receipt(Record):
    """That a part was pushed: the XXH3-128 of its record."""

    format_version: int
    run: Name
    step: Count
    part: str
    record: Xxh3


class Lease(Record):
    """A push or a prune that goes on; it is written again every minute. ``what``: for people."""

    format_version: int
    kind: Literal["push", "prune"]
    what: str


def check_name(name: str, what: str) -> str:
    """The name of a run or a node, if it can be part of a path in the archive; ConfigError else."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f'got "{name}" as {what}; needed: letters, digits, dots, dashes and underscores, at most 128, the first a '
            "letter or a digit"
        )
    return name


def part_name(node: str | None) -> str:
    """Name of a node's part; None: shared storage."""
    return WHOLE if node is None else f"node-{node}"


def part_file(run: str, step: int, part: str) -> str:
    """Where a part's record lies."""
    return f"{RUNS}/{run}/{step_folder(step)}/{part}.json"


def receipt_file(run: str, step: int, part: str) -> str:
    """Where its receipt lies."""
    return f"{RECEIPTS}/{run}/{step_folder(step)}/{part}.json"


def block_file(digest: str) -> str:
    """Where a block lies."""
    return f"{BLOCKS}/{digest[:2]}/{digest}"


def parse_part_file(name: str) -> tuple[str, int, str] | None:
    """Run, step and part of a record's or a receipt's name; None: it is none."""
    match = _PART_PATH.fullmatch(name)
    return (match[2], int(match[3]), match[4]) if match else None


def text_of(record: BaseModel) -> bytes:
    """A record as it is stored."""
    return record_text(record, indent=None).encode()


def receipt_of(part: Part, stored: bytes) -> Receipt:
    """The receipt of a part, whose record is stored as these bytes."""
    return Receipt(
        format_version=FORMAT_VERSION,
        run=part.run,
        step=part.step,
        part=part.name,
        record=xxhash.xxh3_128_hexdigest(stored),
    )


def parse_record(store: Store, name: str, stored: bytes | None, kind: type[R]) -> R:
    """Check and parse a stored record; CheckpointError if it is missing, damaged or too large."""
    where = f"{store.address}/{name}"
    if stored is None:
        raise CheckpointError(f"{where} is missing")
    if len(stored) > LARGEST_RECORD:
        raise CheckpointError(f"{where} has more than {LARGEST_RECORD} bytes: it is no record of an archive")
    try:
        text = stored.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    return read_text(where, text, kind, FORMAT_VERSION)


def open_archive(address: str, *, create: bool = False) -> Store:
    """Open an archive, or make an empty one.

    Raises:
        CheckpointError: there is none, or of another version, or this machine's folder cannot be read.
        StorageError, ConfigError, LaunchError: as ``Store``.
    """
    store = Store(address, StorageError if create else CheckpointError)
    stored = store.read(MARK_FILE, LARGEST_RECORD)
    if stored is None and create:
        mark = Mark(format_version=FORMAT_VERSION, kind="archive of checkpoints")
        store.write(MARK_FILE, text_of(mark))
        return store
    if stored is None:
        raise CheckpointError(
            f"{store.address} is no archive: it has no {MARK_FILE}; check the address. The first `megasdc archive "
            "push` makes one"
        )
    parse_record(store, MARK_FILE, stored, Mark)
    return store
