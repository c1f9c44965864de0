"""Manifest of a folder of prepared data: counts, origin, sizes and checksums.

The manifest holds nothing that differs between two runs on the same input: no times, no host names. It includes its own
checksum, so that a changed byte anywhere in the folder is found. Format version 1 had neither that checksum nor those
of blocks; it is still read, and `megasdc verify-data --add-checksums` updates it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

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
from megasdc.common.errors import DataError
from megasdc.data.blocks import REMEDY, num_blocks

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
    """What a source of ids held, before ends and beginnings of documents were added; by the manifest's tokenizer.

    Attributes:
        dtypes: NumPy names of the types of tokens in its files.
        num_ended: documents whose last token was the end-of-document id; the others were given one.
        num_ends_within: such ids anywhere else.
        num_begun: documents whose first token was the beginning-of-sequence token; None: the tokenizer has none.
        sample: how the first document begins, decoded.
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
    """What the tokenizer keeps of a sample of the sources: shares of its characters, see `RoundTrip`."""

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


class FileRecord(_Record):
    """Size and XXH3-64 of one file."""

    size_bytes: int = Field(ge=0)
    checksum: str


class Manifest(_Record):
    """Everything known about a folder of prepared data.

    Attributes:
        settings: settings of the preparation; `settings_digest` is the XXH3-64 of their canonical JSON.
        dtype: NumPy name of a token in the ``.bin`` files.
        unigram_entropy_nats: entropy of the token frequencies of the training split, in nats per token: the loss of a
            model that knows only frequencies.
        files: all files but the manifest, by path relative to the folder.
        round_trip: None: there was no text, or the data were prepared by a version that did not measure it.
        block_bytes: see `megasdc.data.blocks`; None: the files have no checksums of blocks (format version 1).
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
    block_bytes: int | None = Field(None, gt=0)
    round_trip: RoundTripRecord | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Manifest:
        if problem := next(_contradictions(self), None):
            raise ValueError(problem)
        return self

    def save(self, folder: Path) -> None:
        """Write `manifest.json` atomically; it is on disk when this returns."""
        content = self.model_dump()
        whole = {**content, "checksum": digest_settings(content)}
        write_durably(folder / MANIFEST_FILE, json.dumps(whole, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path | str) -> Manifest:
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


def _contradictions(manifest: Manifest) -> Iterator[str]:
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


def record_file(path: Path) -> FileRecord:
    """Sync a file to disk and return its size and checksum."""
    sync_path(path)
    return FileRecord(size_bytes=path.stat().st_size, checksum=checksum_file(path))


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Sync all files of a folder to disk and return their sizes and checksums, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): record_file(path) for path in paths}
