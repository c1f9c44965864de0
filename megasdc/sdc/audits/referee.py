"""The referee in a training: ranks repeat a disputed result, compute its differing elements in fp64, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.addresses import Address
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.exhibits.calls import Call, Exhibit, kept_calls
from megasdc.sdc.fp64.bounds import Exact
from megasdc.sdc.fp64.referee import agreed, judge
from megasdc.sdc.incidents.opinion import Opinion, Outside

T = TypeVar("T")
ROWS, ELEMENTS = 16, 1024
"""Most rows that are sent, and most elements of them that are computed."""


@dataclass(frozen=True)
class Subject:
    """A submodule whose results may be computed again.

    Args:
        module: whose calls are kept; of a submodule that is no module, the one before it.
        make: makes the exhibit of a result, from its address, the calls, the result, and calls of ``following``; None:
            such results are not computed, or what they were made of was not seen.
        following: the one after a submodule that is no module; None: it is one.
    """

    module: Any
    make: Callable[[Address, Sequence[Call], Tensor, Sequence[Call]], Exhibit | None]
    following: Any = None


class Referee:
    """Keeps the inputs of a submodule and its result while a micro-batch is recomputed, and judges the result.

    Args:
        subject_of: a submodule of this rank, by name; None: it computes none of that name.
        group: of all ranks, on the host.
    """

    def __init__(self, subject_of: Callable[[str], Subject | None], rank: int, group: dist.ProcessGroup | None) -> None:
        self._subject_of = subject_of
        self._rank, self._group = rank, group
        self._wanted: Address | None = None
        self._result: Tensor | None = None

    def listen(self, address: Address, result: Tensor) -> None:
        """A listener, after fault injection: keeps the result that is asked for."""
        if address == self._wanted:
            self._result = result.detach().clone()

    def ask(
        self, address: Address, values: Mapping[int, int], repeat: Callable[[], Mapping[int, int | None]]
    ) -> Opinion:
        """Judge results of equal inputs that differ between ranks.

        Args:
            values: checksums by rank.
            repeat: computes the micro-batch once more, and returns what each of these ranks got this time, None where
                that proves nothing.

        Collective: all ranks of the world.
        """
        asked = self._subject_of(address.fqn) if self._rank in values else None
        own, following = (None, None) if asked is None else (asked.module, asked.following)
        with kept_calls(own) as calls, kept_calls(following) as after:
            result, again = self.keep(None if asked is None else address, repeat)
        mine = None
        if asked is not None and result is not None and again.get(self._rank) == values[self._rank]:
            mine = asked.make(address, calls, result, after)
        return self._compare(address, values, mine)

    def keep(self, address: Address | None, repeat: Callable[[], T]) -> tuple[Tensor | None, T]:
        """Repeat something, and keep this rank's result at an address; None: there is none."""
        self._wanted, self._result = address, None
        again = repeat()
        result, self._wanted, self._result = self._result, None, None
        return result, again

    def _compare(self, address: Address, values: Mapping[int, int], mine: Exhibit | None) -> Opinion:
        shown = gather_objects(None if mine is None else _digests(mine), self._group)
        known = {rank: one for rank in values if (one := shown[rank]) is not None}
        rows = _differing_rows([digests for _, digests in known.values()])
        reason = ""
        if absent := sorted(values.keys() - known.keys()):
            reason = f"ranks {absent} did not repeat their results, or they are none that the referee computes"
        elif len({operands for operands, _ in known.values()}) > 1:
            reason = "what it was made of differs already"
        elif not rows:
            reason = "the results are equal when they are repeated"
        if reason:
            return Opinion(address, {}, reason)
        sent = gather_objects(None if mine is None else mine.result[rows].cpu().double(), self._group)
        results = {rank: part for rank in values if (part := sent[rank]) is not None}
        places = _differing(list(results.values()))[:ELEMENTS]
        own = None if mine is None else mine.compute(torch.tensor(rows)[places[:, 0]], places[:, 1])
        exact = gather_objects(own, self._group)
        reference = agreed([found for rank in values if (found := exact[rank]) is not None])
        if reference is None:
            return Opinion(address, {}, "ranks computed the elements differently in fp64 too", len(places))
        taken = {rank: one[places[:, 0], places[:, 1]] for rank, one in results.items()}
        within = judge(taken, reference)
        if not within:
            return Opinion(address, {}, "rounding explains all results, or none", len(places))
        return Opinion(address, within, "", len(places), _worst(rows, places, taken, within, reference))


def _digests(exhibit: Exhibit) -> tuple[tuple[int, ...], list[int]]:
    """Checksums of what the result was made of, and of its rows."""
    return tuple(map(_digest, exhibit.factors)), [_digest(row) for row in exhibit.result.cpu()]


def _differing_rows(digests: Sequence[Sequence[int]]) -> list[int]:
    """The first rows at which checksums differ between ranks."""
    return [row for row, found in enumerate(zip(*digests, strict=True)) if len(set(found)) > 1][:ROWS]


def _digest(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(content.data)


def _differing(results: Sequence[Tensor]) -> Tensor:
    """Places, [n, 2], at which results differ; NaN is equal to NaN."""
    different = torch.zeros_like(results[0], dtype=torch.bool)
    for one in results[1:]:
        different |= (one != results[0]) & ~(one.isnan() & results[0].isnan())
    return different.nonzero()


def _worst(
    rows: Sequence[int], places: Tensor, results: Mapping[int, Tensor], within: Mapping[int, bool], exact: Exact
) -> Outside:
    wrong = next(rank for rank, right in within.items() if not right)
    distance = ((results[wrong] - exact.values).abs() / exact.bounds).nan_to_num(nan=torch.inf)
    place = int(distance.argmax())
    row, column = places[place].tolist()
    return Outside(
        (rows[row], column),
        exact.values[place].item(),
        exact.bounds[place].item(),
        {rank: repr(one[place].item()) for rank, one in results.items()},
    )
