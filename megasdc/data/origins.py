"""Where the documents of a split come from: which source, and which of its documents."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from megasdc.data.manifest import SPLITS, Manifest
from megasdc.data.merge import assign_splits


class DocumentOrigins:
    """Sources of the documents of one split of prepared data."""

    def __init__(self, manifest: Manifest, split: str) -> None:
        self._names = [source.source for source in manifest.sources]
        self._ends = list(accumulate(source.num_documents for source in manifest.sources))
        splits = assign_splits(self._ends[-1], manifest.settings["split"], manifest.settings["seed"])
        self._numbers = np.flatnonzero(splits == SPLITS.index(split))

    def of(self, document: int) -> tuple[str, int]:
        """The source of a document of the split, and its number among the documents read there; both first 0."""
        number = int(self._numbers[document])
        source = int(np.searchsorted(self._ends, number, side="right"))
        return self._names[source], number - (self._ends[source - 1] if source else 0)
