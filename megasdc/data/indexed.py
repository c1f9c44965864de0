"""Megatron's indexed datasets as a source: documents of token ids in pairs of ``PREFIX.bin`` and ``PREFIX.idx``.

Megatron-LM and NeMo write them. Ids are copied and never become text. An ``.idx`` is a header, the length of each
sequence, where it begins in the ``.bin`` (bytes), and at which sequence each document begins, with the number of all
sequences at the end; in multimodal data also the mode of each sequence. Nothing in it is believed: counts are compared
with the size of the file before anything is read by them, and places with lengths.

Both files are read in blocks, not mapped: where one is cut off meanwhile, a map would kill the process.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megasdc.common.errors import DataError
from megasdc.config.data import SourceSection
from megasdc.data.formats import LeftOut
from megasdc.data.manifest import IdsRecord, SourceRecord, TokenizerRecord
from megasdc.data.shards import Shard
from megasdc.data.sources import describe_source, list_pairs
from megasdc.data.tokenizer import Tokenizer

BLOCK_TOKENS = 1 << 22
"""Number of tokens that are read at once; more if one document has more."""
BLOCK_ENTRIES = 1 << 20
"""Number of entries of an index that are read at once."""
MAX_DOCUMENT_TOKENS = 2**31 - 3
"""Maximum number of tokens of a document, to which two may be added; Megatron's index has its length as int32."""
SAMPLE_TOKENS = 64
SAMPLE_CHARACTERS = 200

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES = {code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8"), 1)} | {
    8: np.dtype("<u2")
}
_FLOATS = {6: "float64", 7: "float32"}
_AGAIN = "copy both files again, or make them again with Megatron's tools/preprocess_data.py"


@dataclass(frozen=True)
class Pair:
    """One pair whose index fits its tokens.

    ``tokens``: the ``.bin``; ``ends``: where each document ends there, in tokens, [documents] int64.
    """

    tokens: Path
    dtype: np.dtype
    ends: np.ndarray


@dataclass(frozen=True)
class _Block:
    """Consecutive documents of a pair, from number ``first`` on; ``lengths``: tokens of each, [documents], some 0."""

    pair: Pair
    first: int
    tokens: np.ndarray
    lengths: np.ndarray


class IdSource:
    """The documents of one source of kind ``megatron``; every id is checked when it is built.

    Args:
        beginning: id with which every document begins; None: any.
        advance: function called with the number of tokens of each block that is checked.

    Attributes:
        num_documents: number of documents with tokens, at most `max_documents`.
        skipped: counts of skipped empty pairs and documents, and of other files of a folder.
        record: counts of the files' content.

    Raises:
        DataError: a file is missing, damaged or of another format; an id is not one of the tokenizer's; no document.
    """

    def __init__(
        self,
        section: SourceSection,
        tokenizer: Tokenizer,
        beginning: int | None,
        advance: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.skipped = LeftOut()
        self._tokenizer = tokenizer
        self._beginning = beginning
        self._pairs, self.num_documents = self._open(section)
        if not self.num_documents:
            raise DataError(
                f"source {describe_source(section)} holds no tokens; skipped: {dict(self.skipped) or 'nothing'}"
            )
        self.record = self._check(advance)

    def shards(self) -> Iterator[tuple[float, Shard]]:
        """All documents, each with its beginning and end, and the share of the tokens that each shard holds."""
        for block in self._blocks():
            if block.lengths.any():
                yield len(block.tokens) / self.record.num_tokens, self._completed(block)

    def _open(self, section: SourceSection) -> tuple[list[Pair], int]:
        pairs, num_documents = [], 0
        for prefix in list_pairs(section, self.skipped):
            pair = open_pair(prefix)
            lengths = np.diff(pair.ends, prepend=0)
            full = np.flatnonzero(lengths)
            if section.max_documents is not None and num_documents + len(full) > section.max_documents:
                full = full[: section.max_documents - num_documents]
                pair = replace(pair, ends=pair.ends[: full[-1] + 1 if len(full) else 0])
            elif not len(full):
                self.skipped.add("empty files", f"file {pair.tokens}")
            num_documents += len(full)
            for number in np.flatnonzero(lengths[: len(pair.ends)] == 0).tolist() if len(full) else ():
                self.skipped.add("empty documents", f"file {pair.tokens}, document {number}")
            pairs.append(pair)
            if num_documents == section.max_documents:
                break
        return pairs, num_documents

    def _check(self, advance: Callable[[int], None]) -> IdsRecord:
        """Read all; DataError for an id that is not one of the tokenizer's."""
        end, start = self._tokenizer.end_of_document, self._tokenizer.beginning_of_document
        num_tokens = num_ended = num_begun = num_ends = 0
        sample = None
        for block in self._blocks():
            advance(len(block.tokens))
            ends = np.cumsum(block.lengths)[block.lengths > 0]
            starts = (np.cumsum(block.lengths) - block.lengths)[block.lengths > 0]
            if sample is None and len(ends):
                sample = self._tokenizer.decode(block.tokens[: min(SAMPLE_TOKENS, ends[0])].tolist())
            num_tokens += len(block.tokens)
            num_ends += int(np.count_nonzero(block.tokens == end))
            num_ended += int(np.count_nonzero(block.tokens[ends - 1] == end))
            num_begun += 0 if start is None else int(np.count_nonzero(block.tokens[starts] == start))
        return IdsRecord(
            num_pairs=len(self._pairs),
            dtypes=sorted({pair.dtype.name for pair in self._pairs}),
            num_tokens=num_tokens,
            num_ended=num_ended,
            num_ends_within=num_ends - num_ended,
            num_begun=None if start is None else num_begun,
            sample=(sample or "")[:SAMPLE_CHARACTERS],
        )

    def _blocks(self) -> Iterator[_Block]:
        for pair in self._pairs:
            first = start = 0
            while first < len(pair.ends):
                stop = max(first + 1, int(np.searchsorted(pair.ends, start + BLOCK_TOKENS, side="right")))
                ends = pair.ends[first:stop]
                tokens = _read(pair.tokens, pair.dtype, int(ends[-1]) - start, start * pair.dtype.itemsize)
                block = _Block(pair, first, tokens, np.diff(ends, prepend=start))
                self._check_range(block)
                yield block
                first, start = stop, int(ends[-1])

    def _check_range(self, block: _Block) -> None:
        size = self._tokenizer.vocab_size
        if not len(block.tokens) or (block.tokens.min() >= 0 and int(block.tokens.max()) < size):
            return
        at = int(np.flatnonzero((block.tokens < 0) | (block.tokens >= size))[0])
        ends = np.cumsum(block.lengths)
        number = int(np.searchsorted(ends, at, side="right"))
        token = at - int(ends[number] - block.lengths[number])
        raise DataError(
            f"file {block.pair.tokens}, document {block.first + number}, token {token} (all count from 0) is id "
            f"{block.tokens[at]}, the tokenizer has ids 0 to {size - 1}; "
            "give the tokenizer that the file was made with as data.tokenizer.path"
        )

    def _completed(self, block: _Block) -> Shard:
        """The documents that hold tokens, each with one end and, where asked for, one beginning."""
        lengths = block.lengths[block.lengths > 0]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        end, beginning = self._tokenizer.end_of_document, self._beginning
        no_end = block.tokens[ends - 1] != end
        no_start = np.zeros(len(ends), bool) if beginning is None else block.tokens[starts] != beginning
        if not (no_end.any() or no_start.any()):
            return Shard(block.tokens, lengths, None)
        # At one place the end of a document comes before the beginning of the next: np.insert keeps this order.
        places = np.concatenate([ends[no_end], starts[no_start]])
        values = np.repeat([end, end if beginning is None else beginning], [no_end.sum(), no_start.sum()])
        return Shard(np.insert(block.tokens.astype(np.int32), places, values), lengths + no_end + no_start, None)


def describe_ids(source: SourceRecord, tokenizer: TokenizerRecord, path: str | None, bos: bool) -> list[str]:
    """Sentences on the ids copied from a source, and on what was assumed about them.

    Args:
        path: path of the tokenizer in the settings.
        bos: `data.bos`.
    """
    ids = source.ids
    assert ids is not None, "only of sources of ids"
    total = source.num_documents
    begun = ids.num_begun or 0
    lines = [
        f"{ids.num_tokens:,} ids ({', '.join(ids.dtypes)}) of {total:,} documents in {ids.num_pairs} pair(s) were "
        f"copied; the files name no tokenizer, and were taken for ids of {path} ({tokenizer.vocab_size:,} ids)",
        f"by it the first document begins with {ids.sample!r}",
        f"{_share(ids.num_ended, total)} ended with its end-of-document id {tokenizer.end_of_document}, "
        + _added(ids.num_ended, total),
    ]
    if ids.num_ends_within:
        lines.append(f"{ids.num_ends_within:,} more of these ids are within documents, and stay there")
    if bos:
        lines.append(f"{_share(begun, total)} began with its beginning-of-sequence token, {_added(begun, total)}")
    elif begun:
        lines.append(
            f"{_share(begun, total)} began with its beginning-of-sequence token, which stays, though data.bos is null; "
            "where all should, set it to true"
        )
    return [f"{source.source}: {line}" for line in lines]


def _share(count: int, total: int) -> str:
    return "no document" if not count else "every document" if count == total else f"{count:,} of {total:,} documents"


def _added(count: int, total: int) -> str:
    if count == total:
        return "none was added"
    return "one was added to each" if not count else f"one was added to each of the other {total - count:,}"


def open_pair(prefix: Path) -> Pair:
    """Read the index of a pair and compare it with the sizes of both files.

    Raises:
        DataError: one cannot be read, is cut off, contradicts itself or the other, or holds anything but token ids.
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    dtype, num_sequences, num_bounds = _read_header(index)
    at = _HEADER.size + 12 * num_sequences
    bounds = _read(index, np.dtype("<i8"), num_bounds, at)
    if bounds[0] != 0 or bounds[-1] != num_sequences or (bounds[1:] < bounds[:-1]).any():
        raise DataError(
            f"file {index} is damaged: its documents reach from sequence {bounds[0]} to {bounds[-1]}, needed are all "
            f"{num_sequences} sequences, each in one document, in their order; {_AGAIN}"
        )
    if _size(index) > at + 8 * num_bounds:
        _refuse_modes(index, num_sequences, at + 8 * num_bounds)
    ends = _document_ends(index, num_sequences, bounds, dtype.itemsize, tokens)
    lengths = np.diff(ends, prepend=0)
    if (long := np.flatnonzero(lengths > MAX_DOCUMENT_TOKENS)).size:
        raise DataError(
            f"file {tokens}, document {long[0]} (from 0) has {lengths[long[0]]:,} tokens, at most "
            f"{MAX_DOCUMENT_TOKENS:,} can be written as one; divide it"
        )
    return Pair(tokens, dtype, ends)


def _read_header(index: Path) -> tuple[np.dtype, int, int]:
    """Type of a token, number of sequences and of bounds of documents; these fit the size of the file."""
    size = _size(index)
    content = _read(index, np.dtype("u1"), min(size, _HEADER.size), 0).tobytes()
    if content.startswith(_OLD_MAGIC):
        raise DataError(
            f"file {index} has the old format of fairseq ('TNTIDX'), which Megatron's implementations 'lazy' and "
            "'cached' wrote; make it again from the text with Megatron's tools/preprocess_data.py (of old versions: "
            '--dataset-impl mmap), or give the text as a source of kind "files"'
        )
    if not content.startswith(_MAGIC[: len(content)]):
        raise DataError(
            f"file {index} is no index of Megatron's: it begins with {content[:9]!r}, needed is {_MAGIC!r}; {_AGAIN}"
        )
    if len(content) < _HEADER.size:
        raise DataError(f"file {index} is cut off: it has {size} bytes, its header {_HEADER.size}; {_AGAIN}")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(content)
    if version != _VERSION:
        raise DataError(f"file {index} has version {version} of the format, only {_VERSION} is known; {_AGAIN}")
    if code not in _DTYPES:
        found = _FLOATS.get(code, f"a type of number {code}, which is not known")
        known = ", ".join(dtype.name for dtype in _DTYPES.values())
        raise DataError(f"file {index} holds {found}; token ids are {known}; give files of token ids")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_bounds < 1 or size not in (expected, expected + num_sequences):
        raise DataError(
            f"file {index} is cut off or damaged: it has {size} bytes; the {num_sequences} sequences "
            f"and {num_bounds} bounds of documents of its header have {expected}, with modes "
            f"{expected + num_sequences}; {_AGAIN}"
        )
    return _DTYPES[code], num_sequences, num_bounds


def _refuse_modes(index: Path, num_sequences: int, start: int) -> None:
    """DataError if a sequence has another mode than 0."""
    for first in range(0, num_sequences, BLOCK_ENTRIES):
        modes = _read(index, np.dtype("i1"), min(BLOCK_ENTRIES, num_sequences - first), start + first)
        if modes.any():
            at = int(np.flatnonzero(modes)[0])
            raise DataError(
                f"file {index} is multimodal: sequence {first + at} has mode {modes[at]}; only text (mode 0) can be "
                "trained on; write its sequences of text into a pair of their own"
            )


def _document_ends(index: Path, num_sequences: int, bounds: np.ndarray, item: int, tokens: Path) -> np.ndarray:
    """Ends of documents in a ``.bin``, in tokens of ``item`` bytes, [documents]; DataError if they do not fit."""
    num_bytes = _size(tokens)
    ends = np.zeros(len(bounds), np.int64)
    total = 0
    for first in range(0, num_sequences, BLOCK_ENTRIES):
        count = min(BLOCK_ENTRIES, num_sequences - first)
        sizes = _read(index, np.dtype("<i4"), count, _HEADER.size + 4 * first).astype(np.int64)
        places = _read(index, np.dtype("<i8"), count, _HEADER.size + 4 * num_sequences + 8 * first)
        stops = total + np.cumsum(sizes)
        if (wrong := np.flatnonzero((sizes < 0) | (places != (stops - sizes) * item))).size:
            at = int(wrong[0])
            raise DataError(
                f"file {index} is damaged: sequence {first + at} has {sizes[at]} tokens from byte {places[at]} on, "
                f"those before it end at byte {(stops - sizes)[at] * item}; {_AGAIN}"
            )
        total = int(stops[-1])
        if total * item > num_bytes:
            break
        low, high = np.searchsorted(bounds, [first, first + count], side="right")
        ends[low:high] = stops[bounds[low:high] - first - 1]
    if total * item != num_bytes:
        raise DataError(
            f"file {tokens} has {num_bytes} bytes, its index {index.name} is for "
            f"{'at least ' if total * item > num_bytes else ''}{total * item}: one of them is cut off, or of another "
            f"pair; {_AGAIN}"
        )
    return ends[1:]


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    """Some entries of a file that is large enough; DataError if it is not any more."""
    try:
        values = np.fromfile(path, dtype, count, offset=offset)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(values) < count:
        raise DataError(
            f"file {path} was cut off while it was read: {offset} + {count * dtype.itemsize} bytes were there"
        )
    return values


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"file {path} cannot be read: {error.strerror}; ask its owner for read permission")
