"""A unit of a device that is always wrong: it spoils one place of what products of matrices of some sizes compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Operations, and the place of their first factor among the arguments."""


class BrokenUnit(TorchDispatchMode):
    """Inside, one element of each product of given sizes is wrong, always at the same place of the result.

    Entered before everything else it is below all other modes: it sees operands as a device would, with elements in
    other places where they are moved.

    Args:
        sizes: rows of the first factor, columns of it, columns of the second; None: any number.
        place: row and column in the result, modulo its size.
        factor: by which the element is off.
    """

    def __init__(
        self, sizes: tuple[int | None, int | None, int | None], place: tuple[int, int], factor: float = 1.5
    ) -> None:
        super().__init__()
        self._sizes, self._place, self._factor = sizes, place, factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        result = func(*args, **(kwargs or {}))
        first = _PRODUCTS.get(func)
        if first is not None and isinstance(result, Tensor):
            found = (*args[first].shape, args[first + 1].shape[1])
            if all(size in (None, one) for size, one in zip(self._sizes, found, strict=True)):
                row, column = (place % size for place, size in zip(self._place, result.shape, strict=True))
                result[row, column] *= self._factor
        return result
