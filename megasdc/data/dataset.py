"""Token datasets: Megatron-core's GPTDataset over prepared data, one epoch after the other, and blends of several.

Deliberate differences from Megatron's BlendedMegatronDatasetBuilder:

* One GPTDataset per epoch, each with its own seed. In Megatron all epochs are shuffled together, so that the order
  depends on the length of the run; here it does not, and a run may be extended after a checkpoint. The tokens at the
  end of an epoch that do not fill a sample are not used in that epoch.
* The sample index is built by the first process that needs it, not by rank 0 before a barrier: a file lock lets one
  build while the others wait, and one rename makes the index's folder appear. This needs no collective, works for
  shared and for node-local folders, and a killed process leaves no partial index that a later run would use. Checksums
  of all files are compared when an index is mapped; a damaged one is rebuilt.
* `mask_end_of_document` masks the loss at *targets* that are end-of-document; Megatron's `eod_mask_loss` masks it at
  *inputs*.

The order of samples in a blend is that of Megatron-core's `build_blending_indices`: the next sample comes from the
dataset that is furthest behind its share. Deliberate differences from Megatron's `BlendedDataset`:

* Each part is an endless stream: when all its samples were used it begins its next epoch, in another order. Megatron's
  parts hold a fixed number of samples, drawn with a surplus that a user must guess.
* The order does not depend on the length of the run. Megatron's function chooses each sample from the preceding ones
  only, so that a shorter index is a prefix of a longer one. The index is built for the next multiple of
  `WINDOW_SAMPLES` and cached as the other sample indices are: an extended run reads a longer index with the same
  prefix.

After n samples a part has had at most one sample more than its share of n, and with two parts less than one sample
fewer. The sequence of parts depends only on the weights; the seed orders the samples inside each part. With weights in
the ratio of small numbers the pattern is short, and a replica may see one part more often than another does; all
samples of a step together have the right shares.
"""

from __future__ import annotations

import copy
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
import xxhash
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split, normalize
from megatron.core.tokenizers import MegatronTokenizerBase

from megasdc.common.durable import parse_json, rename_durably, replacing, write_durably
from megasdc.common.errors import DataError
from megasdc.common.program import write_atomically
from megasdc.common.run_lock import open_lock_file
from megasdc.config.data import DataSection, TokenizerSection
from megasdc.data.manifest import (
    BlockChecksums,
    CheckedReader,
    DataManifest,
    DirectReader,
    checksum_file,
    verify_prepared,
)

_INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")

OnDamage = Callable[[Path, str], object]
"""Called with the folder of a rebuilt index and its problem, in the one process that rebuilds it."""


def ignore_problem(folder: Path, problem: str) -> None:
    """Default ``OnDamage``: does nothing beyond the logged warning."""


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of a document in a sample.

    Args:
        document: number of the document in the file of the split, the first is 0.
        first_token: position in the document of the part's first token, the first is 0.
        num_tokens: number of tokens of the part.
    """

    document: int
    first_token: int
    num_tokens: int


@dataclass
class EpochConfig(GPTDatasetConfig):
    """Megatron's config with our cache folder; `path_to_cache` is "", so that Megatron builds in memory."""

    index_cache: Path | None = None
    on_damage: OnDamage = ignore_problem


class EpochDataset(GPTDataset):
    """Samples of one epoch; the index is Megatron's, its cache is ours."""

    def documents(self, index: int) -> list[DocumentPart]:
        """The parts of documents of sample ``index``, in order: its s tokens and the label of the last."""
        row = int(self.shuffle_index[index])
        first, start = map(int, self.sample_index[row])
        last, end = map(int, self.sample_index[row + 1])
        parts = []
        for place in range(first, last + 1):
            document = int(self.document_index[place])
            begin = start if place == first else 0
            stop = end + 1 if place == last else int(self.dataset.sequence_lengths[document])
            parts.append(DocumentPart(document, begin, stop - begin))
        return parts

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        folder = self.config.index_cache / self.unique_description_hash
        documents, samples, shuffle = cached_index(folder, _INDEX_NAMES, self._build_in_memory, self.config.on_damage)
        return documents, samples, shuffle

    def _build_in_memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Megatron warns that the index is not saved, which is intended: cached_index saves it.
        upstream = logging.getLogger("megatron.core.datasets.gpt_dataset")
        level = upstream.level
        upstream.setLevel(logging.ERROR)
        try:
            return super()._build_document_sample_shuffle_indices()
        finally:
            upstream.setLevel(level)


class TokenizerAdapter(MegatronTokenizerBase):
    """Tokenizer interface for GPTDataset: vocabulary size, end-of-document id, and an identity for the cache."""

    def __init__(self, path: str, manifest: DataManifest, identity: str) -> None:
        super().__init__(path, {})
        self._manifest = manifest
        self.unique_identifiers = {"data": identity}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._manifest.tokenizer.vocab_size

    @property
    def eod(self) -> int:
        """The end-of-document id."""
        return self._manifest.tokenizer.end_of_document

    def tokenize(self, text: str) -> list[int]:
        """Not possible here."""
        raise NotImplementedError("prepared data are tokenized already")

    def detokenize(self, ids: list[int]) -> str:
        """Not possible here."""
        raise NotImplementedError("use megasdc.data.tokenizer.load_tokenizer")

    def vocab(self) -> dict[str, int]:
        """Not possible here."""
        raise NotImplementedError("use megasdc.data.tokenizer.load_tokenizer")

    def apply_chat_template(self) -> Any:
        """Not possible."""
        raise NotImplementedError("pretraining has no chat template")


def build_datasets(
    section: DataSection,
    vocab_size: int,
    num_train_samples: int,
    num_eval_samples: int,
    cache_dir: Path | str | None = None,
    verify_checksums: bool = False,
    manifests: list[DataManifest] | None = None,
    on_damage: OnDamage = ignore_problem,
) -> tuple[TokenDataset | BlendedTokens, TokenDataset | BlendedTokens | None]:
    """Build the training and the validation stream.

    Args:
        section: folder or blend of folders, sequence length s, seed, mask.
        vocab_size: number of the model's token ids, padding included.
        num_train_samples: length of the training stream; the data are repeated as often as needed.
        num_eval_samples: length of the validation stream; 0: none is built.
        cache_dir: folder of sample indices; None: a folder in the prepared data. They are not kept if it is read-only.
        verify_checksums: whether every byte of all files is compared, see `verify_prepared`.
        manifests: result of `verify_section_data` for this section; None: the data are checked here.
        on_damage: function called when a damaged sample index is rebuilt.

    Returns:
        Training and validation stream; valid on every rank. Both are blended by the same weights.

    Raises:
        DataError: a folder is incomplete, folders have different tokenizers, the vocabulary is too small, or a split
            holds less than one sample.

    Collective:
        None.
    """
    if manifests is None:
        manifests = verify_section_data(section, verify_checksums)
    _check_vocabulary(section, manifests, vocab_size)
    train = _build_stream(section, manifests, vocab_size, Split.train, num_train_samples, cache_dir, on_damage)
    if num_eval_samples == 0:
        return train, None
    return train, _build_stream(section, manifests, vocab_size, Split.valid, num_eval_samples, cache_dir, on_damage)


def build_split(
    section: DataSection, vocab_size: int, split: str, num_samples: int, cache_dir: Path | str | None = None
) -> TokenDataset | BlendedTokens:
    """Build the stream of one split; arguments and errors as in `build_datasets`.

    Args:
        split: ``train``, ``valid`` or ``test``.
        num_samples: length of the stream.

    Collective:
        None.
    """
    manifests = verify_section_data(section)
    _check_vocabulary(section, manifests, vocab_size)
    return _build_stream(section, manifests, vocab_size, Split[split], num_samples, cache_dir)


def _check_vocabulary(section: DataSection, manifests: list[DataManifest], vocab_size: int) -> None:
    """Check that the model's vocabulary covers every id of the data."""
    needed = manifests[0].tokenizer.vocab_size
    if vocab_size < needed:
        raise DataError(
            f"the model's vocabulary has {vocab_size} ids, the tokenizer of {section.folders[0]} has "
            f"{needed}; enlarge the model's or prepare the data with another tokenizer"
        )


def _build_stream(
    section: DataSection,
    manifests: list[DataManifest],
    vocab_size: int,
    split: Split,
    num_samples: int,
    cache_dir: Path | str | None,
    on_damage: OnDamage = ignore_problem,
) -> TokenDataset | BlendedTokens:
    parts = [
        TokenDataset(
            section.model_copy(update={"path": folder, "blend": []}),
            manifest,
            split,
            num_samples,
            vocab_size,
            _cache_of(folder, cache_dir),
            on_damage,
        )
        for folder, manifest in zip(section.folders, manifests, strict=True)
    ]
    if not section.blend:
        return parts[0]
    weights = [part.weight for part in section.blend]
    return BlendedTokens(parts, weights, num_samples, vocab_size, _cache_of(section.path, cache_dir), on_damage)


def verify_section_data(section: DataSection, checksums: bool = False) -> list[DataManifest]:
    """Check that the prepared data of a section are complete and compatible.

    Args:
        checksums: whether every byte of all files is compared, see `verify_prepared`.

    Returns:
        The manifest of each of `section.folders`; their tokenizers are equal.

    Raises:
        DataError: a folder is incomplete, or they were prepared with different tokenizers; all problems, one a line.
    """
    manifests, problems = [], []
    for folder in section.folders:
        try:
            manifests.append(verify_prepared(folder, quick=not checksums))
        except DataError as error:
            problems.append(str(error))
    if not problems:
        problems = _tokenizer_problems(section, manifests)
    if problems:
        raise DataError("\n".join(problems))
    return manifests


def _cache_of(folder: str, cache_dir: Path | str | None) -> Path:
    return Path(cache_dir) if cache_dir is not None else Path(folder) / CACHE_FOLDER


def _tokenizer_problems(section: DataSection, manifests: list[DataManifest]) -> list[str]:
    """Problems, one for each folder with another tokenizer than the first, or than the section names.

    A section with only default values names no tokenizer: that of the folders is used.
    """
    first, problems = manifests[0].tokenizer, []
    for folder, manifest in zip(section.folders[1:], manifests[1:], strict=True):
        mine = manifest.tokenizer
        if (mine.checksum, mine.vocab_size, mine.end_of_document) != (
            first.checksum,
            first.vocab_size,
            first.end_of_document,
        ):
            problems.append(
                f"megasdc.data.blend: {section.folders[0]} and {folder} have different tokenizers: checksum "
                f"{first.checksum} and {mine.checksum}, {first.vocab_size} and {mine.vocab_size} ids, end of document "
                f"{first.end_of_document} and {mine.end_of_document}; prepare one of them again with "
                f"data.tokenizer.path set to the tokenizer folder of the other"
            )
    for folder, manifest in zip(section.folders, manifests, strict=True):
        if (begins := manifest.settings.get("bos")) != section.bos:
            problems.append(
                f"megasdc.data.bos is {json.dumps(section.bos)}, but {folder} was prepared with {json.dumps(begins)}; "
                "set it to that, or prepare the data again"
            )
    wanted = section.tokenizer.of_tokens()
    used = [
        {name: value for name, value in manifest.settings.get("tokenizer", {}).items() if name != "checksum"}
        for manifest in manifests
    ]
    if wanted not in (*used, TokenizerSection.model_validate({}).of_tokens()):
        problems.append(
            f"megasdc.data.tokenizer is {wanted}, but {section.folders[0]} was prepared with {used[0]}; "
            "prepare the data again, point data.path elsewhere, or remove data.tokenizer"
        )
    return problems


class TokenDataset(torch.utils.data.Dataset):
    """A stream of samples of one split; a position always holds the same sample, whatever the stream's length.

    Attributes:
        path: the ``.bin`` file, for messages.
        identity: checksum of files, seed, sequence length and split, which determine the sample at a position.
    """

    def __init__(
        self,
        section: DataSection,
        manifest: DataManifest,
        split: Split,
        num_samples: int,
        vocab_size: int,
        cache: Path,
        on_damage: OnDamage = ignore_problem,
    ) -> None:
        self.path = Path(section.path) / f"{split.name}.bin"
        self.vocab_size = vocab_size
        self.num_samples = num_samples
        self.sequence_length = section.sequence_length
        record = manifest.splits.get(split.name)
        if record is None:
            raise DataError(
                f"{section.path} has no {split.name} documents: its data.split is {manifest.settings.get('split')}; "
                f"prepare the data again with a share for them"
            )
        if record.num_tokens < section.sequence_length + 1:
            raise DataError(
                f"data.sequence_length is {section.sequence_length}, which needs {section.sequence_length + 1} tokens "
                f"for one sample; {self.path} has {record.num_tokens}; use shorter samples or more text"
            )
        files = [manifest.files[f"{split.name}{ending}"].checksum for ending in (".bin", ".idx")]
        self.identity = xxhash.xxh3_64_hexdigest(
            f"{files} {section.seed} {section.sequence_length} {split.name}".encode()
        )
        self._seed = section.seed
        self._split = split
        self._cache = cache
        self._on_damage = on_damage
        self._mask_end_of_document = section.mask_end_of_document
        self._adapter = TokenizerAdapter(str(self.path), manifest, self.identity)
        self._prefix = str(self.path.with_suffix(""))
        self._tokens = IndexedDataset(self._prefix)
        self._block_bytes, self._size_bytes = manifest.block_bytes, manifest.files[self.path.name].size_bytes
        if (checksums := self._checksums()) is not None:
            self._tokens.bin_reader = CheckedReader(self._tokens.bin_reader, checksums, self._size_bytes)
        self._direct: IndexedDataset | None = None
        self._epochs: dict[int, EpochDataset] = {}
        self.samples_per_epoch = len(self._epoch(0))

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``; existing positions keep their samples."""
        self.num_samples = max(self.num_samples, num_samples)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_distinct(self) -> int:
        """Number of samples before the first is repeated: those of one epoch."""
        return self.samples_per_epoch

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position in [0, len).

        Returns:
            tokens [s] int64, labels [s] int64 (the next token of each), loss_mask [s] float32.
        """
        epoch, index = self._place(position)
        return self._sample(self._epoch(epoch), index)

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position in [0, len), read from the file into fresh memory; shapes as of ``[position]``.

        No memory map, verified block or cache of an earlier read is used, except the index of samples.

        Raises:
            DataError: a block of the file is damaged.
        """
        if self._direct is None:
            self._direct = IndexedDataset(self._prefix)
            self._direct.bin_reader = DirectReader(self.path, self._checksums(), self._size_bytes)
        epoch, index = self._place(position)
        fresh = copy.copy(self._epoch(epoch))
        fresh.dataset, fresh.masks_and_position_ids_are_cached = self._direct, False
        return self._sample(fresh, index)

    def _sample(self, epoch: EpochDataset, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sample = epoch[index]
        tokens, labels, loss_mask = sample["tokens"], sample["labels"], sample["loss_mask"].clone()
        if self._mask_end_of_document:
            loss_mask[labels == self._adapter.eod] = 0.0
        return tokens, labels, loss_mask

    def _checksums(self) -> BlockChecksums | None:
        return None if self._block_bytes is None else BlockChecksums(self.path, self._block_bytes)

    def documents(self, position: int) -> list[DocumentPart]:
        """The parts of documents of the sample at a position in [0, len), in order: its tokens and the last label."""
        epoch, index = self._place(position)
        return self._epoch(epoch).documents(index)

    def _place(self, position: int) -> tuple[int, int]:
        """Epoch of a position, and the sample in it."""
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is not in [0, {self.num_samples}) of {self.path}")
        return divmod(position, self.samples_per_epoch)

    def _epoch(self, number: int) -> EpochDataset:
        """The dataset of an epoch; the latest two epochs are kept in memory."""
        if number not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            config = EpochConfig(
                random_seed=xxhash.xxh32_intdigest(f"{self._seed} {number}".encode()),
                sequence_length=self.sequence_length,
                blend_per_split=[([self._prefix], None) if split is self._split else None for split in Split],
                path_to_cache="",
                tokenizer=self._adapter,
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
                index_cache=self._cache,
                on_damage=self._on_damage,
            )
            documents = np.arange(len(self._tokens), dtype=np.int32)
            self._epochs[number] = EpochDataset(self._tokens, self._prefix, documents, None, self._split, config)
        return self._epochs[number]


WINDOW_SAMPLES = 1 << 20
"""Number of samples of which the index length is a multiple; each takes 10 bytes."""


class OrderedSamples(Protocol):
    """A stream of samples in its own order; `TokenDataset` is one."""

    path: Path
    identity: str

    @property
    def num_distinct(self) -> int:
        """Number of samples before the first is repeated."""
        ...

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``."""

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position, read from the file into fresh memory."""
        ...


class BlendedTokens(torch.utils.data.Dataset):
    """A stream that draws from several streams by weight; a position always holds the same sample.

    Args:
        parts: the streams, each at least `num_samples` long.
        weights: weight of each stream, above 0; only their ratios matter.

    Attributes:
        path: the parts' ``.bin`` files, for messages.
        identity: checksum of the parts' identities and weights, which determine the sample at a position.
        weights: weights of the parts, with sum 1.
    """

    def __init__(
        self,
        parts: Sequence[OrderedSamples],
        weights: Sequence[float],
        num_samples: int,
        vocab_size: int,
        cache: Path,
        on_damage: OnDamage = ignore_problem,
    ) -> None:
        self.parts = list(parts)
        self.weights: list[float] = normalize(list(weights))
        self.num_samples = num_samples
        self.vocab_size = vocab_size
        self.path = " + ".join(str(part.path) for part in parts)
        self.identity = xxhash.xxh3_64_hexdigest(
            f"blend {[(part.identity, weight) for part, weight in zip(parts, self.weights, strict=True)]}".encode()
        )
        self._cache = cache
        self._on_damage = on_damage
        self._load_order()

    def _load_order(self) -> None:
        size = max(1, -(-self.num_samples // WINDOW_SAMPLES)) * WINDOW_SAMPLES
        # The sequence depends only on weights and size, so training and validation share its cached index.
        name = xxhash.xxh3_64_hexdigest(f"{self.weights} {size}".encode())
        self._part_of, self._position_in_part = cached_index(
            self._cache / f"blend-{name}",
            ("part", "position"),
            lambda: blend_order(self.weights, size),
            self._on_damage,
        )

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``; existing positions keep their samples."""
        if num_samples > self.num_samples:
            for part in self.parts:
                part.extend(num_samples)
            self.num_samples = num_samples
            self._load_order()

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_distinct(self) -> int:
        """Number of samples before the first is repeated, when a part begins its next epoch."""
        first = self._first_repeated()
        return self.num_samples if first is None else first

    @property
    def first_used_up(self) -> OrderedSamples | None:
        """The part that repeats first; None if none repeats within the stream."""
        first = self._first_repeated()
        return None if first is None else self.parts[int(self._part_of[first])]

    def _first_repeated(self) -> int | None:
        """Position of the first repeated sample; None if none repeats."""
        ends = np.array([part.num_distinct for part in self.parts])
        part_of, position = self._part_of[: self.num_samples], self._position_in_part[: self.num_samples]
        repeated = np.flatnonzero(position >= ends[part_of])
        return int(repeated[0]) if len(repeated) else None

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position in [0, len).

        Returns:
            tokens [s] int64, labels [s] int64 (the next token of each), loss_mask [s] float32.
        """
        part, inner = self.locate(position)
        return self.parts[part][inner]

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position in [0, len), read from its part's file; see ``TokenDataset.read_again``."""
        part, inner = self.locate(position)
        return self.parts[part].read_again(inner)

    def locate(self, position: int) -> tuple[int, int]:
        """The part that a sample comes from, and its position there."""
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is not in [0, {self.num_samples}) of {self.path}")
        return int(self._part_of[position]), int(self._position_in_part[position])

    def where(self, position: int) -> str:
        """Description of a sample for a message: its file, its position there and in the blend."""
        part, inner = self.locate(position)
        return f"{self.parts[part].path}, sample position {inner} (position {position} of the blend)"


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Megatron-core's order of a blend of ``size`` samples, for weights with sum 1.

    Returns the part of each sample, [size] int16, and its position in that part, [size] int64.
    """
    part_of = np.zeros(size, dtype=np.int16)
    position = np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(part_of, position, np.asarray(weights, dtype=np.float64), len(weights), size, False)
    return part_of, position


logger = logging.getLogger(__name__)

CACHE_FOLDER = ".index_cache"
CHECKSUMS_FILE = "checksums.json"
"""File with the XXH3-64 of each array's file, by name."""
TOLD_S, POLL_S = 10.0, 0.05
"""Seconds of waiting for a lock until it is logged, and between two attempts to take it."""
Arrays = tuple[np.ndarray, ...]


def cached_index(
    folder: Path, names: Sequence[str], build: Callable[[], Arrays], on_damage: OnDamage = ignore_problem
) -> Arrays:
    """The arrays of a cached index, memory-mapped; built and saved if missing or damaged.

    If they cannot be saved, the arrays in memory are returned, with a warning.

    Args:
        folder: folder of the index; its name must identify everything that the content depends on.
        names: names of the arrays.
        build: function that computes the arrays, in the order of ``names``.
        on_damage: function called when a damaged index is rebuilt.

    Collective:
        None.
    """
    try:
        if folder.is_dir():
            return _load(folder, names)
    except ValueError:
        pass  # another process may be rebuilding it; checked again under the lock
    try:
        with _locked(folder.parent / "lock") as alone:
            arrays = None
            try:
                if folder.is_dir():
                    return _load(folder, names)
            except ValueError as problem:
                arrays = build()
                if _add_checksums(folder, names, arrays):
                    return _load(folder, names)
                # Renamed, not removed: a run on another host may have it mapped.
                aside = tempfile.mkdtemp(prefix="damaged-", dir=folder.parent)
                os.rename(folder, aside)
                logger.warning("sample index %s is rebuilt, the old one is %s: %s", folder, aside, problem)
                on_damage(folder, str(problem))
            for left in folder.parent.glob("partial-*") if alone else ():
                shutil.rmtree(left)  # left by a killed process
            _save(folder, names, arrays or build())
        return _load(folder, names)
    except (OSError, ValueError) as error:
        logger.warning("no sample index can be kept in %s (%s); it is rebuilt in every process", folder, error)
        return build()


def _load(folder: Path, names: Sequence[str]) -> Arrays:
    """Memory-map a cached index; ValueError with the problem if it is damaged, or was saved without checksums."""
    paths = [folder / f"{name}.npy" for name in names]
    if not (folder / CHECKSUMS_FILE).exists():
        raise ValueError("an earlier version kept it without checksums, and it has other content")
    try:
        expected = parse_json((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for path in paths:
            if (found := checksum_file(path)) != expected[path.name]:
                raise ValueError(f"{path.name} has checksum {found}, expected {expected[path.name]}")
        return tuple(np.load(path, mmap_mode="r") for path in paths)
    except (OSError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _add_checksums(folder: Path, names: Sequence[str], arrays: Arrays) -> bool:
    """Add checksums to an index of an earlier version without them; returns whether it has the expected content."""
    if (folder / CHECKSUMS_FILE).exists():
        return False
    paths = [folder / f"{name}.npy" for name in names]
    try:
        same = all(np.array_equal(np.load(path), array) for path, array in zip(paths, arrays, strict=True))
    except (OSError, EOFError, ValueError):
        return False
    if same:
        write_atomically(folder / CHECKSUMS_FILE, json.dumps({path.name: checksum_file(path) for path in paths}))
    return same


def _save(folder: Path, names: Sequence[str], arrays: Arrays) -> None:
    """Save an index atomically, by one rename."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        for name, array in zip(names, arrays, strict=True):
            with replacing(partial / f"{name}.npy", "wb") as file:
                np.save(file, array)
        checksums = {path.name: checksum_file(path) for path in partial.iterdir()}
        write_durably(partial / CHECKSUMS_FILE, json.dumps(checksums))
        partial.chmod(0o755)  # mkdtemp makes it private; other users may train on the same data
        rename_durably(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Context with a file lock; yields False if the file system has none: then the rename lets one writer win."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock_file(path) as file:
        yield _lock(file, path)


def _lock(file: IO[Any], path: Path) -> bool:
    """Wait for a lock, with one log message if that takes long; returns False if the file system has no locks."""
    tell_at: float | None = time.monotonic() + TOLD_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if tell_at is not None and time.monotonic() > tell_at:
                logger.warning("waiting for another process, which builds an index of samples and holds %s", path)
                tell_at = None
            time.sleep(POLL_S)
        except OSError as error:
            logger.warning("%s cannot be locked (%s)", path, error)
            return False
