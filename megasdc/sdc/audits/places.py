"""Which operations can be computed with their elements in other places, as the first audit of a start finds out.

It tries every operation both ways on the real numbers. Where all ranks that computed one get other bits, its kernel
does not treat all places alike: it is computed as it is from then on, and named. Where one rank alone computed it, that
is said of differences as small as rounding, or in many elements. What only some ranks see, or one rank in few elements,
is no property of a kernel, and is left to the audit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from megasdc.parallel.collectives import gather_objects
from megasdc.tensors.permuted import Permuted, Signature, Trial, Tried, Unequal

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANY = 0.1
"""Share of a result's elements that no single unit computes."""
ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-5, "float16": 2.0**-8}
"""Differences, as a share of the largest element, that another order of summation explains."""


class Places:
    """Computes work with the elements of all operations in other places, but for those that are not moved.

    Args:
        rank: of this process in the group.
        group: of all ranks, on the host.
        tell: writes an event, from its kind, name and fields; called on rank 0 alone.

    Attributes:
        without: operations that are not moved; None: not known yet.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None, tell: Callable[..., object]) -> None:
        self._rank, self._group, self._tell = rank, group, tell
        self.without: Collection[Signature] | None = None

    def compute(self, step: int, work: Callable[[], T]) -> T:
        """Compute work so, the first time of a start after a trial of its operations.

        Collective: all ranks of the world, the first time.
        """
        if self.without is None:
            with Trial() as trial:
                work()
            self.without = self._agree(step, trial.tried)
        with Permuted(self.without):
            return work()

    def _agree(self, step: int, tried: Tried) -> Collection[Signature]:
        """Operations that no rank permutes from now on."""
        found: Sequence[Tried] = gather_objects(tried, self._group)
        without = places_matter(found)
        moved, left = Counter[str](), Counter[str]()
        for of_rank in found:
            left.update(of_rank.left)
            for (name, *_), count in of_rank.moved.items():
                moved[name] += count
        not_kept = {" ".join(signature): vars(one) for signature, one in without.items()}
        if self._rank == 0:
            self._tell("audit", "permuted", step=step, moved=moved, left=left, not_kept=not_kept)
            logger.info("permuted replay: %d of %d operations move", moved.total(), moved.total() + left.total())
            for signature, one in without.items():
                logger.warning(
                    "permuted replay: %s is computed as it is: moved, %d of %d elements differ, by up to %.2g of the "
                    "largest",
                    " ".join(signature),
                    one.elements,
                    one.of,
                    one.largest,
                )
        return without


def places_matter(found: Sequence[Tried]) -> Mapping[Signature, Unequal]:
    """Operations whose kernels do not treat all places alike, from what each rank has tried."""
    unequal: dict[Signature, Unequal] = {}
    for of_rank in found:
        for signature, one in of_rank.unequal.items():
            total = unequal.setdefault(signature, Unequal())
            total.elements, total.of = total.elements + one.elements, total.of + one.of
            total.largest = max(total.largest, one.largest)
    return {
        signature: one
        for signature, one in unequal.items()
        if _is_of_kernel(signature, one, [of_rank for of_rank in found if signature in of_rank.moved])
    }


def _is_of_kernel(signature: Signature, total: Unequal, ran: Sequence[Tried]) -> bool:
    """Whether a difference is of the kernel, or of how it is moved here, and not of a device."""
    rounding = max(ROUNDING.get(text.partition("(")[0], 0.0) for text in signature)
    explained = len(ran) > 1 or total.largest <= rounding or total.elements > MANY * total.of
    return explained and all(signature in of_rank.unequal for of_rank in ran)
