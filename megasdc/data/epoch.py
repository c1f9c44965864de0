"""One epoch of a split as Megatron-core's GPTDataset, with our cache of its index, and the documents of its samples."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers import MegatronTokenizerBase

from megasdc.data.index_cache import OnDamage, kept_index, tell_nobody
from megasdc.data.manifest import Manifest

_INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of a document in a sample.

    Args:
        document: its number in the file of the split, the first is 0.
        first_token: number in the document, the first is 0.
        num_tokens: of the part.
    """

    document: int
    first_token: int
    num_tokens: int


@dataclass
class EpochConfig(GPTDatasetConfig):
    """Megatron's config with our cache folder; `path_to_cache` is "", so that Megatron builds in memory."""

    index_cache: Path | None = None
    on_damage: OnDamage = tell_nobody


class EpochDataset(GPTDataset):
    """One epoch; the index is Megatron's, its cache is ours."""

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
        documents, samples, shuffle = kept_index(folder, _INDEX_NAMES, self._build_in_memory, self.config.on_damage)
        return documents, samples, shuffle

    def _build_in_memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Megatron warns that the index is not saved, which is intended: kept_index saves it.
        upstream = logging.getLogger("megatron.core.datasets.gpt_dataset")
        level = upstream.level
        upstream.setLevel(logging.ERROR)
        try:
            return super()._build_document_sample_shuffle_indices()
        finally:
            upstream.setLevel(level)


class TokenizerAdapter(MegatronTokenizerBase):
    """Tokenizer interface for GPTDataset: vocabulary size, end-of-document id, and an identity for the cache."""

    def __init__(self, path: str, manifest: Manifest, identity: str) -> None:
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
