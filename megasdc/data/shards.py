"""Shards of tokenized documents, named by their content, so that finished ones survive a killed run.

The name of a shard holds a checksum of its texts and of the tokenizer. A shard that exists under its name is thus
complete and correct, whichever run wrote it, and one whose input changed is not found. The division into shards depends
only on the documents, not on the number of workers.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from megasdc.common.durable import replacing
from megasdc.common.errors import DataError
from megasdc.data.tokenizer import Tokenizer

Other = TypeVar("Other")
SHARD_CHARACTERS = 1 << 20
"""Characters of text after which a shard is closed; it ends with a whole document."""


@dataclass(frozen=True)
class Shard:
    """The tokens of consecutive documents, one after the other, [total tokens] int32, or as a source of ids has them.

    ``lengths``: number of tokens of each document, its end-of-document token included, [documents] int64;
    ``num_bytes``: number of UTF-8 bytes of each, [documents] int64; None: its text is not known.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    num_bytes: np.ndarray | None


def group_documents(
    documents: Iterable[str | Other], shard_characters: int = SHARD_CHARACTERS
) -> Iterator[tuple[int, list[str] | Other]]:
    """Cut a stream of documents into shards; yields (index of the shard, its texts). What is no text stands alone."""
    index, held = 0, 0
    texts: list[str] = []
    for document in documents:
        if isinstance(document, str):
            texts.append(document)
            held += len(document)
            if held < shard_characters:
                continue
        if texts:
            yield index, texts
            index, texts, held = index + 1, [], 0
        if not isinstance(document, str):
            yield index, document
            index += 1
    if texts:
        yield index, texts


def shard_path(
    folder: Path, index: int, texts: Sequence[str], tokenizer_checksum: str, beginning: int | None = None
) -> Path:
    """Path of a shard: its index in the stream, and the checksum of its texts, tokenizer and beginning of documents."""
    state = xxhash.xxh3_128(tokenizer_checksum.encode())
    if beginning is not None:
        state.update(f"\0beginning {beginning}\0".encode())
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        state.update(f"{len(content)}\0".encode())
        state.update(content)
    return folder / f"{index:08d}-{state.hexdigest()}.npz"


def write_shard(path: Path, tokenizer: Tokenizer, texts: Sequence[str], beginning: int | None = None) -> None:
    """Tokenize texts and write a shard atomically; it is on disk when this returns.

    ``beginning``: id put before every document; None: none. DataError if the tokenizer returned an id
    outside its own vocabulary.
    """
    ids = tokenizer.encode_arrays(texts)
    if beginning is not None:
        ids = [np.concatenate(([beginning], document)) for document in ids]
    lengths = np.array([len(document) + 1 for document in ids], dtype=np.int64)
    tokens = np.empty(int(lengths.sum()), dtype=np.int32)
    end = 0
    for document in ids:
        begin, end = end, end + len(document) + 1
        tokens[begin : end - 1] = document
        tokens[end - 1] = tokenizer.end_of_document
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise DataError(f"the tokenizer made ids in [{low}, {high}], its vocabulary has {tokenizer.vocab_size} pieces")
    sizes = np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], dtype=np.int64)
    with replacing(path, "wb") as file:
        np.savez(file, name=np.array(path.name), tokens=tokens, lengths=lengths, num_bytes=sizes)


def read_shard(path: Path) -> Shard:
    """Read a shard; CRC32s protect every array, the stored name detects a copy. DataError if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as content:
            if str(content["name"]) != path.name:
                raise ValueError(f"it was written as {content['name']}")
            return Shard(content["tokens"], content["lengths"], content["num_bytes"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"shard {path} is damaged: {error}; delete it and run again") from error
