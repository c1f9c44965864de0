"""A gradient hook of a campaign: NaN after some samples, on whatever host and however often they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megasdc.data.loader import MicroBatchLoader
from megasdc.optim.hooks import GradientHook, GradientPart

FIRST, END = 100, 116
"""Positions in the training stream."""
_last: list[int] = []
_read = MicroBatchLoader.read


def _noting(loader: MicroBatchLoader, positions: Sequence[int]) -> Any:
    _last[:] = positions
    return _read(loader, positions)


MicroBatchLoader.read = _noting  # type: ignore[method-assign,assignment]


class Poison(GradientHook):
    """Makes all gradients NaN where the last samples that were read are some of those."""

    def apply(self, part: GradientPart) -> None:
        """See ``GradientHook``."""
        if any(FIRST <= position < END for position in _last):
            part.gradient.fill_(float("nan"))
