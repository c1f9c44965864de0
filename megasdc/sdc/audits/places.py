"""Which operations can be computed with their elements in other places, as the first audit of a start finds out.

It tries every operation both ways on the real numbers. Where all ranks that computed one get other bits, its kernel
does not treat all places alike: it is computed as it is from then on, and named. Where one rank alone computed it, that
is said of differences as small as rounding, or in many elements. What only some ranks see, or one rank in few elements,
is no property of a kernel, and is left to the audit.

Results of such a kernel may be equal by chance, with the numbers of the first audit: few elements, or a type that hides
most differences. So operations are tried again before anything is ruled; what differs then on all ranks that compute
the same, or on one alone as little as another order of summation explains, is not moved any more, either.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import torch.distributed as dist

from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.permuted import Permuted, Signature, Trial, Tried, Unequal

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANY = 0.1
"""Share of a result's elements that no single unit computes."""
ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-5, "float16": 2.0**-8}
"""Differences, as a share of the largest element, that another order of summation explains."""


class PermutableOps:
    """Computes work with the elements of all operations in other places, but for those that are not moved.

    Args:
        dims: layout and place of this rank.
        group: of all ranks, on the host.
        tell: writes an event, from its kind, name and fields; called on rank 0 alone.

    Attributes:
        without: operations that are not moved; None: not known yet.
    """

    def __init__(self, dims: ParallelDims, group: dist.ProcessGroup | None, tell: Callable[..., object]) -> None:
        self._dims, self._group, self._tell = dims, group, tell
        self.without: Collection[Signature] | None = None

    def compute(self, step: int, work: Callable[[], T]) -> T:
        """Compute work so, the first time of a start after a trial of its operations.

        Collective: all ranks of the world, the first time.
        """
        if self.without is None:
            found = self._try(work)
            without = places_matter(found)
            self.without = frozenset(without)
            self._report(step, found, without)
        with Permuted(self.without):
            return work()

    def learn(self, step: int, work: Callable[[], T]) -> bool:
        """Try the operations of work again; whether some more are not moved from now on.

        Collective: all ranks of the world.
        """
        known, found = frozenset(self.without or ()), self._try(work)
        rows = enumerate(found)
        by_position = groupby(sorted(rows, key=self._position), self._position)
        more = order_matters([[one for _, one in of_position] for _, of_position in by_position], known)
        self.without = known | more.keys()
        if more:
            self._report(step, found, more)
        return bool(more)

    def _position(self, row: tuple[int, Tried]) -> int:
        return self._dims.at(row[0]).first_replica_rank

    def _try(self, work: Callable[[], T]) -> Sequence[Tried]:
        """What each rank has seen."""
        with Trial() as trial:
            work()
        return gather_objects(trial.tried, self._group)

    def _report(self, step: int, found: Sequence[Tried], without: Mapping[Signature, Unequal]) -> None:
        moved, left = Counter[str](), Counter[str]()
        for of_rank in found:
            left.update(of_rank.left)
            for (name, *_), count in of_rank.moved.items():
                moved[name] += count
        not_kept = {" ".join(signature): vars(one) for signature, one in without.items()}
        if self._dims.rank:
            return
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


def places_matter(found: Sequence[Tried]) -> Mapping[Signature, Unequal]:
    """Operations whose kernels do not treat all places alike, from what each rank has tried."""
    return {
        signature: one
        for signature, one in _totals(found).items()
        if _is_of_kernel(signature, one, [of_rank for of_rank in found if signature in of_rank.moved])
    }


def order_matters(found: Sequence[Sequence[Tried]], known: Collection[Signature] = ()) -> Mapping[Signature, Unequal]:
    """Operations whose results differ on all ranks that compute the same, or on one alone as little as rounding.

    Args:
        found: what each rank has tried, by what they compute.
        known: operations that are not asked for.
    """
    return {
        signature: one
        for signature, one in _totals([one for alike in found for one in alike]).items()
        if signature not in known and all(_is_of_order(signature, alike) for alike in found)
    }


def _is_of_order(signature: Signature, alike: Sequence[Tried]) -> bool:
    ran = [one for one in alike if signature in one.moved]
    unequal = [one.unequal[signature] for one in ran if signature in one.unequal]
    return not unequal or (len(unequal) == len(ran) and (len(ran) > 1 or not unequal[0].far))


def _totals(found: Sequence[Tried]) -> dict[Signature, Unequal]:
    unequal: dict[Signature, Unequal] = {}
    for of_rank in found:
        for signature, one in of_rank.unequal.items():
            total = unequal.setdefault(signature, Unequal())
            total.elements, total.of, total.far = total.elements + one.elements, total.of + one.of, total.far + one.far
            total.largest = max(total.largest, one.largest)
    return unequal


def _is_of_kernel(signature: Signature, total: Unequal, ran: Sequence[Tried]) -> bool:
    """Whether a difference is of the kernel, or of how it is moved here, and not of a device."""
    rounding = max(ROUNDING.get(text.partition("(")[0], 0.0) for text in signature)
    explained = len(ran) > 1 or total.largest <= rounding or total.elements > MANY * total.of
    return explained and all(signature in of_rank.unequal for of_rank in ran)
