"""Ranks of a replica that are suspects together, where their results may be sums over them, or made of such."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megasdc.common.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.verdict import INCONCLUSIVE, NOT_REPRODUCED, RankVerdict


def tensor_ranks(rank: int, layout: ParallelDims) -> tuple[int, ...]:
    """The ranks that compute a stage of a replica together with one, itself too."""
    first = rank - rank % layout.tensor
    return tuple(range(first, first + layout.tensor))


def suspect_together(
    rulings: Sequence[RankVerdict], layout: ParallelDims, alone: Collection[tuple[int, Address]] = ()
) -> tuple[RankVerdict, ...]:
    """Rulings on results that may be sums over tensor ranks: of these none is named, and all are suspects.

    Args:
        alone: ranks that have computed a result, at an address, from what is known and was alike, without another rank:
            what is wrong there is of their own.
    """
    if layout.tensor == 1:
        return tuple(rulings)
    kept: list[RankVerdict] = []
    wider: dict[tuple[int, ...], list[RankVerdict]] = {}
    for one in rulings:
        ranks = one.suspects if one.rank is None else (one.rank,)
        if one.address is None or all((rank, one.address) in alone for rank in ranks):
            kept.append(one)
        else:
            suspects = sorted({other for rank in ranks for other in tensor_ranks(rank, layout)})
            wider.setdefault(tuple(suspects), []).append(one)
    return (*kept, *(merged_rulings(some, suspects) for suspects, some in wider.items()))


def merged_rulings(rulings: Sequence[RankVerdict], suspects: tuple[int, ...]) -> RankVerdict:
    """One ruling on ranks of which none can be named, in the place of several; what none repeated stays so."""
    first = rulings[0]
    harmless = all(one.verdict == NOT_REPRODUCED for one in rulings)
    return RankVerdict(
        *(None, NOT_REPRODUCED if harmless else INCONCLUSIVE, first.basis, first.address),
        wrong=max(one.wrong for one in rulings),
        repeats=min(one.repeats for one in rulings),
        rate_bound=first.rate_bound if harmless else None,
        suspects=suspects,
        expected=first.expected,
        got={rank: value for one in rulings for rank, value in one.got.items()},
    )
