"""Merging of shards into Megatron's files: documents are assigned to splits and written by Megatron-core's builder.

``DocumentOrigins``: where the documents of a split come from: which source, and which of its documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from megasdc.common.errors import DataError
from megasdc.data.indexed import IdSource
from megasdc.data.manifest import SPLITS, DataManifest, SplitRecord
from megasdc.data.shards import Shard, read_shard


def assign_splits(num_documents: int, shares: Sequence[int], seed: int) -> np.ndarray:
    """Assign documents to splits at random, with exact counts; returns each one's split, [num_documents] uint8.

    Counts are the integer ``shares`` rounded by largest remainder; a split with a share gets at least one document,
    taken from the largest. Documents are taken in order of a hash of (seed, index), so that their order in the source
    does not matter. DataError if there are fewer documents than splits with a share above 0, or no such split.
    """
    wanted = [split for split, share in enumerate(shares) if share]
    if not wanted:
        raise DataError(f"data.split is {list(shares)}: at least one share must be above 0")
    if num_documents < len(wanted):
        raise DataError(
            f"{num_documents} document(s) cannot fill {len(wanted)} splits (data.split {list(shares)}); give more "
            f"text, read .txt files by paragraph or line (text_unit), or set shares to 0"
        )
    exact = [num_documents * share / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(wanted, key=lambda split: (counts[split] - exact[split], split))
    for split in by_remainder[: num_documents - sum(counts)]:
        counts[split] += 1
    for split in wanted:
        if counts[split] == 0:
            counts[split] += 1
            counts[counts.index(max(counts))] -= 1
    order = np.argsort(_mix(np.arange(num_documents, dtype=np.uint64), seed), kind="stable")
    splits = np.empty(num_documents, dtype=np.uint8)
    splits[order] = np.repeat(np.arange(len(shares), dtype=np.uint8), counts)
    return splits


def merge_shards(
    parts: Sequence[Path | IdSource],
    splits: np.ndarray,
    folder: Path,
    vocab_size: int,
    advance: Callable[[float], None] = lambda done: None,
) -> tuple[dict[str, SplitRecord], np.ndarray, str]:
    """Write ``train.bin``, ``train.idx`` and so on from shards and sources of ids, documents in stream order.

    ``splits``: split of each document, [documents]; ``vocab_size`` determines the width of a token, by Megatron's rule;
    ``advance`` is called with 1 for each part. Returns the sizes of splits with documents, the frequency of each id
    in the training split, [v] int64, and the NumPy name of the tokens' type.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(vocab_size)
    builders = {
        split: IndexedDatasetBuilder(str(folder / f"{SPLITS[split]}.bin"), dtype=dtype)
        for split in np.unique(splits).tolist()
    }
    totals = np.zeros((len(SPLITS), 3), dtype=np.int64)
    of_ids: set[int] = set()
    frequencies = np.zeros(vocab_size, dtype=np.int64)
    first = 0
    for share, shard in _shards(parts):
        chosen = splits[first : first + len(shard.lengths)]
        first += len(shard.lengths)
        ends = np.cumsum(shard.lengths)
        for split, end, length in zip(chosen.tolist(), ends.tolist(), shard.lengths.tolist(), strict=True):
            builders[split].add_document(shard.tokens[end - length : end], [length])
        for split in builders:
            mine = chosen == split
            num_bytes = 0 if shard.num_bytes is None else shard.num_bytes[mine].sum()
            totals[split] += (mine.sum(), shard.lengths[mine].sum(), num_bytes)
            of_ids |= {split} if shard.num_bytes is None and mine.any() else set()
        in_training = np.repeat(chosen == 0, shard.lengths)
        frequencies += np.bincount(shard.tokens[in_training], minlength=vocab_size)
        advance(share)
    for split, builder in builders.items():
        builder.finalize(str(folder / f"{SPLITS[split]}.idx"))
    records = {
        SPLITS[split]: SplitRecord(
            num_documents=int(totals[split, 0]),
            num_tokens=int(totals[split, 1]),
            num_bytes=None if split in of_ids else int(totals[split, 2]),
        )
        for split in builders
    }
    return records, frequencies, np.dtype(dtype).name


def _shards(parts: Sequence[Path | IdSource]) -> Iterator[tuple[float, Shard]]:
    """Every shard, with its share of its part."""
    for part in parts:
        if isinstance(part, IdSource):
            yield from part.shards()
        else:
            yield 1, read_shard(part)


def entropy_nats(frequencies: np.ndarray) -> float:
    """The entropy of a frequency table, in nats; 0 for an empty one."""
    counts = frequencies[frequencies > 0].astype(np.float64)
    if not counts.size:
        return 0.0
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _mix(values: np.ndarray, seed: int) -> np.ndarray:
    """Hash 64-bit values: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection for each seed."""
    mixed = values + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


class DocumentOrigins:
    """Sources of the documents of one split of prepared data."""

    def __init__(self, manifest: DataManifest, split: str) -> None:
        self._names = [source.source for source in manifest.sources]
        self._ends = list(accumulate(source.num_documents for source in manifest.sources))
        splits = assign_splits(self._ends[-1], manifest.settings["split"], manifest.settings["seed"])
        self._numbers = np.flatnonzero(splits == SPLITS.index(split))

    def of(self, document: int) -> tuple[str, int]:
        """The source of a document of the split, and its number among the documents read there; both first 0."""
        number = int(self._numbers[document])
        source = int(np.searchsorted(self._ends, number, side="right"))
        return self._names[source], number - (self._ends[source - 1] if source else 0)
