"""How do tokens become samples? Megatron-core's GPTDataset over prepared data, one epoch after the other.

Differences from Megatron's BlendedMegatronDatasetBuilder, on purpose:

* One GPTDataset an epoch, each with its own seed. In Megatron all epochs are shuffled together, so that the order
  depends on the length of the run; here it does not, and a run may be prolonged after a checkpoint. The tokens that
  fill no whole sample at the end of an epoch (fewer than a sample) are left out of that epoch.
* The sample index is kept in a cache folder by whoever comes first, under a file lock and by one rename, instead of by
  rank 0 before a barrier. This needs no collective, works for shared and for node-local folders, and a killed process
  leaves no half index that a later run takes for whole.
* With `mask_end_of_document` the loss at *targets* that are end-of-document is left out; Megatron's `eod_mask_loss`
  leaves it out at *inputs*.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizerBase

from megasdc.config.sections import DataSection, TokenizerSection
from megasdc.data.manifest import Manifest, verify_prepared
from megasdc.errors import DataError

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".index_cache"
_INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")


def build_datasets(
    section: DataSection,
    vocab_size: int,
    num_train_samples: int,
    num_eval_samples: int,
    cache_dir: Path | str | None = None,
    verify_checksums: bool = False,
) -> tuple[TokenDataset, TokenDataset | None]:
    """Build the training and the validation stream.

    Args:
        section: folder, sequence length s, seed, mask.
        vocab_size: ids that the model knows; padding included.
        num_train_samples: length of the training stream; the data are repeated as often as that needs.
        num_eval_samples: length of the validation stream; 0: none is built.
        cache_dir: where sample indices are kept; null: in the folder of prepared data, or nowhere if it is read-only.
        verify_checksums: compare the checksums of all files, not only their sizes.

    Returns:
        Training and validation stream; valid on every rank.

    Raises:
        DataError: the folder is not whole, the vocabulary is too small, or a split holds less than one sample.

    Collective:
        None.
    """
    manifest = verify_prepared(section.path, quick=not verify_checksums)
    if vocab_size < manifest.tokenizer.vocab_size:
        raise DataError(
            f"the model's vocabulary has {vocab_size} ids, the tokenizer of {section.path} has "
            f"{manifest.tokenizer.vocab_size}; enlarge the model's or prepare the data with another tokenizer"
        )
    _check_tokenizer(section, manifest)
    cache = Path(cache_dir) if cache_dir is not None else Path(section.path) / CACHE_FOLDER
    train = TokenDataset(section, manifest, Split.train, num_train_samples, vocab_size, cache)
    if num_eval_samples == 0:
        return train, None
    return train, TokenDataset(section, manifest, Split.valid, num_eval_samples, vocab_size, cache)


def build_split(
    section: DataSection, vocab_size: int, split: str, num_samples: int, cache_dir: Path | str | None = None
) -> TokenDataset:
    """Build the stream of one split.

    Args:
        section: as in `build_datasets`.
        vocab_size: as in `build_datasets`.
        split: ``train``, ``valid`` or ``test``.
        num_samples: length of the stream.
        cache_dir: as in `build_datasets`.

    Raises:
        DataError: as `build_datasets`.

    Collective:
        None.
    """
    manifest = verify_prepared(section.path)
    if vocab_size < manifest.tokenizer.vocab_size:
        raise DataError(
            f"the model's vocabulary has {vocab_size} ids, the tokenizer of {section.path} has "
            f"{manifest.tokenizer.vocab_size}; give data of the model's own tokenizer"
        )
    _check_tokenizer(section, manifest)
    cache = Path(cache_dir) if cache_dir is not None else Path(section.path) / CACHE_FOLDER
    return TokenDataset(section, manifest, Split[split], num_samples, vocab_size, cache)


def _check_tokenizer(section: DataSection, manifest: Manifest) -> None:
    """Refuse data that were prepared with another tokenizer than the configuration names.

    A section that says nothing but defaults names none: the folder's own tokenizer is meant.
    """
    wanted = section.tokenizer.model_dump(mode="json")
    used = manifest.settings.get("tokenizer")
    if wanted in (used, TokenizerSection.model_validate({}).model_dump(mode="json")):
        return
    raise DataError(
        f"megasdc.data.tokenizer is {wanted}, but {section.path} was prepared with {used}; "
        "prepare the data again, point data.path elsewhere, or leave data.tokenizer out"
    )


class TokenDataset(torch.utils.data.Dataset):
    """A stream of samples of one split; position p is always the same sample, however long the stream is.

    Args:
        section: see `build_datasets`.
        manifest: of the folder.
        split: which split.
        num_samples: length of the stream.
        vocab_size: ids that the model knows.
        cache: folder of sample indices.

    Attributes:
        path: the ``.bin`` file, for messages.
        identity: checksum of all that decides which sample is at a position: files, seed, sequence length, split.
    """

    def __init__(
        self, section: DataSection, manifest: Manifest, split: Split, num_samples: int, vocab_size: int, cache: Path
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
        self._mask_end_of_document = section.mask_end_of_document
        self._adapter = _TokenizerAdapter(str(self.path), manifest, self.identity)
        self._prefix = str(self.path.with_suffix(""))
        self._tokens = IndexedDataset(self._prefix)
        self._epochs: dict[int, GPTDataset] = {}
        self.samples_per_epoch = len(self._epoch(0))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return one sample.

        Args:
            position: in [0, len).

        Returns:
            tokens [s] int64, labels [s] int64 (the next token of each), loss_mask [s] float32.
        """
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is not in [0, {self.num_samples}) of {self.path}")
        epoch, index = divmod(position, self.samples_per_epoch)
        sample = self._epoch(epoch)[index]
        tokens, labels, loss_mask = sample["tokens"], sample["labels"], sample["loss_mask"].clone()
        if self._mask_end_of_document:
            loss_mask[labels == self._adapter.eod] = 0.0
        return tokens, labels, loss_mask

    def _epoch(self, number: int) -> GPTDataset:
        """Return the dataset of an epoch; the last two asked for are kept."""
        if number not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            config = _EpochConfig(
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
            )
            documents = np.arange(len(self._tokens), dtype=np.int32)
            self._epochs[number] = _EpochDataset(self._tokens, self._prefix, documents, None, self._split, config)
        return self._epochs[number]


@dataclass
class _EpochConfig(GPTDatasetConfig):
    """Megatron's config and our cache folder; `path_to_cache` is "", with which Megatron builds in memory."""

    index_cache: Path | None = None


class _EpochDataset(GPTDataset):
    """One epoch; the index is Megatron's, the way it is kept is ours (see the module's docstring)."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        folder = self.config.index_cache / self.unique_description_hash
        if found := _load_index(folder):
            return found
        try:
            with _locked(folder.parent / "lock") as alone:
                if found := _load_index(folder):
                    return found
                for left in folder.parent.glob("partial-*") if alone else ():
                    shutil.rmtree(left)  # of a killed process
                _save_index(folder, self._build_in_memory())
        except OSError as error:
            logger.warning("no sample index can be kept in %s (%s); it is built again in every process", folder, error)
            return self._build_in_memory()
        found = _load_index(folder)
        assert found is not None, f"{folder} was just written"
        return found

    def _build_in_memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Megatron warns that nothing is saved, which is what we want here.
        upstream = logging.getLogger("megatron.core.datasets.gpt_dataset")
        level = upstream.level
        upstream.setLevel(logging.ERROR)
        try:
            return super()._build_document_sample_shuffle_indices()
        finally:
            upstream.setLevel(level)


class _TokenizerAdapter(MegatronTokenizerBase):
    """What GPTDataset asks a tokenizer for: its size, the end-of-document id, and an identity for the cache."""

    def __init__(self, path: str, manifest: Manifest, identity: str) -> None:
        super().__init__(path, {})
        self._manifest = manifest
        self.unique_identifiers = {"data": identity}

    @property
    def vocab_size(self) -> int:
        return self._manifest.tokenizer.vocab_size

    @property
    def eod(self) -> int:
        return self._manifest.tokenizer.end_of_document

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError("prepared data are tokenized already")

    def detokenize(self, ids: list[int]) -> str:
        raise NotImplementedError("use megasdc.data.tokenizer.load_tokenizer")

    def vocab(self) -> dict[str, int]:
        raise NotImplementedError("use megasdc.data.tokenizer.load_tokenizer")

    def apply_chat_template(self) -> Any:
        raise NotImplementedError("pretraining has no chat template")


def _load_index(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Map a kept index into memory; None where there is none.

    Raises:
        DataError: it is damaged.
    """
    if not folder.is_dir():
        return None
    try:
        first, second, third = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _INDEX_NAMES)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"sample index {folder} is damaged: {error}; delete the folder, it is built again") from error
    return first, second, third


def _save_index(folder: Path, arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Keep an index by one rename."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        for name, array in zip(_INDEX_NAMES, arrays, strict=True):
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        partial.chmod(0o755)  # mkdtemp makes it private; other users may train on the same data
        os.rename(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file lock; yields false where the file system has none, and the rename lets one writer win."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            logger.warning("%s cannot be locked (%s)", path, error)
            alone = False
        yield alone
