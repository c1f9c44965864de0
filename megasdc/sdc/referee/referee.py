"""The referee in a training: ranks repeat a disputed result, compute its differing elements in fp64, and compare.

Which of several results is wrong follows from the bound of its rounding (``judge_rounding``); nobody is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.incident import Opinion, Outside
from megasdc.sdc.referee.recompute import Call, Exhibit, Trust, record_calls
from megasdc.sdc.referee.rounding import Exact, NoiseBudget, Unfit

T = TypeVar("T")
Hearing = Generator[Any, Sequence[Any], Opinion]
ROWS, ELEMENTS = 16, 1024
"""Largest numbers of rows that are sent, of those that differ and of those that agree, and of elements computed."""
TELLING = 8
"""Smallest number of agreeing elements, larger than their rounding, that show what the ranks have computed."""


Make = Callable[[Address, Sequence[Sequence[Call]], Tensor], Exhibit | str | None]
"""Makes the exhibit of a result, from its address, the calls of each of a subject's modules, and the result. A text:
such results are not computed, and why; None: what they were made of was not seen, or they are of no kind that is known.
"""
NO_KIND = "it is no result that the referee computes"
DIFFERS = "what it was made of differs already"
FP64 = "ranks computed the elements differently in fp64 too"


@dataclass(frozen=True)
class Subject:
    """A submodule whose results may be recomputed.

    Args:
        modules: modules whose calls are kept; for a submodule that is no module, the one before it and the one after
            it. None: there is none.
        makes: makers of exhibits of a result; the next one is tried where one decides nothing.
    """

    modules: Sequence[Any]
    makes: Sequence[Make]


class Referee:
    """Keeps the inputs of a submodule and its result while a micro-batch is recomputed, and judges the result.

    Args:
        subject_of: returns a submodule of this rank, by name; None: it computes none of that name.
        group: host group of all ranks.
    """

    def __init__(self, subject_of: Callable[[str], Subject | None], rank: int, group: dist.ProcessGroup | None) -> None:
        self._subject_of = subject_of
        self._rank, self._group = rank, group
        self._wanted: Address | None = None
        self._result: Tensor | None = None

    def listen(self, address: Address, result: Tensor) -> None:
        """Listener, after fault injection, that keeps the requested result."""
        if address == self._wanted:
            self._result = result.detach().clone()

    def judge(
        self, address: Address, values: Mapping[int, int], repeat: Callable[[], Mapping[int, int | None]]
    ) -> Opinion:
        """Judge results of equal inputs that differ between ranks.

        Args:
            values: checksums by rank.
            repeat: computes the micro-batch once more, and returns the new checksum of each of these ranks, None where
                it proves nothing.

        Collective: all ranks of the world.
        """
        asked = judge_exhibits(address, values, self.exhibits(address, values, repeat))
        own = next(asked)
        while True:
            try:
                own = asked.send(gather_objects(own, self._group))
            except StopIteration as end:
                opinion: Opinion = end.value
                return opinion

    def exhibits(
        self, address: Address, values: Mapping[int, int], repeat: Callable[[], Mapping[int, int | None]]
    ) -> Iterator[Exhibit | str]:
        """Repeat a result; returns this rank's exhibits of it, or texts why there is none; see ``judge``."""
        subject = _tried(partial(self._subject_of, address.fqn)) if self._rank in values else None
        kept: list[list[Call]] | str = []
        with ExitStack() as stack:
            if isinstance(subject, Subject):
                modules = subject.modules
                kept = _tried(lambda: [stack.enter_context(record_calls(one)) for one in modules])
            result, again = self.capture_result(None if subject is None else address, repeat)
        repeated = again.get(self._rank) == values.get(self._rank)
        for text in (subject, kept):
            if isinstance(text, str):
                return iter([text])
        assert not isinstance(subject, str) and not isinstance(kept, str), "returned"
        return shown_by(subject, address, kept, result, repeated=repeated)

    def capture_result(self, address: Address | None, repeat: Callable[[], T]) -> tuple[Tensor | None, T]:
        """Repeat work; returns this rank's result at an address, None: there is none, and what the work returned."""
        self._wanted, self._result = address, None
        again = repeat()
        result, self._wanted, self._result = self._result, None, None
        return result, again


def shown_by(
    subject: Subject | None,
    address: Address,
    kept: Sequence[Sequence[Call]],
    result: Tensor | None,
    *,
    repeated: bool,
) -> Iterator[Exhibit | str]:
    """Exhibits of a rank for a result, or texts why there is none; later ones are used where the first decide nothing.

    Args:
        subject: submodule of the result; None: the rank computes none of that name.
        kept: calls of the subject's modules.
        result: result of the repeat; None: it has none.
        repeated: whether the result was equal in the repeat.
    """
    if subject is None:
        yield NO_KIND
    elif not repeated or result is None:
        yield "it did not repeat"
    else:
        for make in subject.makes:
            yield _tried(partial(_made, make, address, kept, result))


def _made(make: Make, address: Address, kept: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str:
    return make(address, kept, result) or NO_KIND


def judge_exhibits(address: Address, ranks: Collection[int], mine: Iterator[Exhibit | str]) -> Hearing:
    """Judge a result from the exhibits of all ranks; yields values to gather from all ranks, and receives them.

    Args:
        ranks: ranks that differ.
        mine: this rank's exhibits, from ``shown_by``; not used on a rank that does not differ.
    """
    opinion, reasons, budget, alone = Opinion(address, {}), list[str](), NoiseBudget(), tuple[int, ...]()
    while True:
        one = next(mine, None)
        shown = yield one if one is None or isinstance(one, str) else _tried(partial(_digests, one))
        by_rank = {rank: shown[rank] for rank in ranks}
        if any(found is None for found in by_rank.values()):
            return replace(opinion, reason="; ".join(dict.fromkeys(reasons)), alone=alone)
        if texts := {rank: found for rank, found in by_rank.items() if isinstance(found, str)}:
            reasons.append(_join_reasons(texts))
            continue
        opinion = yield from _compared(address, by_rank, one if isinstance(one, Exhibit) else None, budget)
        if not opinion.reason:
            return opinion
        reasons.append(opinion.reason)
        alone = alone or opinion.alone


def _join_reasons(texts: Mapping[int, str]) -> str:
    """Text of the reasons of ranks, each reason once."""
    of_reason = {text: [rank for rank, other in texts.items() if other == text] for text in texts.values()}
    return ", ".join(f"{_ranks(some)}: {text}" for text, some in of_reason.items())


def _ranks(some: Sequence[int]) -> str:
    return f"rank {some[0]}" if len(some) == 1 else f"ranks {sorted(some)}"


def _compared(address: Address, known: Mapping[int, Any], mine: Exhibit | None, budget: NoiseBudget) -> Hearing:
    """Opinion from one exhibit of each rank; ``known``: digests of these, by rank."""
    if len({operands for operands, *_ in known.values()}) > 1:
        return Opinion(address, {}, _differs(list(known.values())))
    rows, agreeing_rows = _rows([digests for _, digests, _ in known.values()])
    if not rows:
        return Opinion(address, {}, "the results are equal when they are repeated")
    rows = [*rows, *agreeing_rows]
    sent = yield None if mine is None else _tried(partial(_sent, mine, rows))
    if texts := {rank: sent[rank] for rank in known if isinstance(sent[rank], str)}:
        return Opinion(address, {}, _join_reasons(texts))
    results, trust = {rank: sent[rank][0] for rank in known}, sent[next(iter(known))][1]
    different = _different(list(results.values()))
    places = different.nonzero()[:ELEMENTS]
    if not len(places):
        return Opinion(address, {}, "the rows that were sent differ in signs of zeros, or bits of NaN, alone")
    agreeing = _some((~different).nonzero(), ELEMENTS) if trust.compared else places[:0]
    both = torch.cat((places, agreeing))
    exact = yield None if mine is None else _computed(mine, torch.tensor(rows)[both[:, 0]], both[:, 1], budget)
    if texts := {rank: exact[rank] for rank in known if isinstance(exact[rank], str)}:
        return Opinion(address, {}, _join_reasons(texts), len(places))
    reference = agreed([exact[rank] for rank in known])
    if reference is None:
        return Opinion(address, {}, FP64, len(places))
    count = len(places)
    alike = next(iter(results.values()))[agreeing[:, 0], agreeing[:, 1]]
    alike_exact, reference = _part(reference, slice(count, None)), _part(reference, slice(count))
    if not is_within(alike, alike_exact, trust.inner).all():
        return Opinion(address, {}, "elements that agree are not what the referee takes them for", count)
    outer = trust.outer
    if trust.compared and (alike.abs() > trust.inner * alike_exact.bounds).sum() < TELLING:
        outer = trust.alone
    if outer == math.inf:
        return Opinion(address, {}, "ranks agree on too few elements to show what they have computed", count)
    taken = {rank: one[places[:, 0], places[:, 1]] for rank, one in results.items()}
    within = judge_rounding(taken, reference, trust.inner, outer)
    if not within:
        known_bounds = bool(reference.bounds.isfinite().all())
        fits = known_bounds and all(bool(is_within(one, reference, trust.inner).all()) for one in taken.values())
        own = tuple(known) if fits else ()
        return Opinion(address, {}, "rounding explains all results, or none", count, alone=own)
    worst = _worst(rows, places, taken, within, reference)
    return Opinion(address, within, "", count, worst, trust.basis, tuple(known))


def _sent(mine: Exhibit, rows: Sequence[int]) -> tuple[Tensor, Trust]:
    return mine.result[rows].cpu().double(), mine.trust


def _computed(mine: Exhibit, rows: Tensor, columns: Tensor, budget: NoiseBudget) -> Exact | str:
    """Elements of an exhibit in fp64; a text: why there are none."""
    with budget.spent():
        return _tried(lambda: mine.compute(rows, columns))


def _tried(make: Callable[[], T]) -> T | str:
    """Result of a function over tensors and code of any kind; a text: its error.

    So a rank with an error answers as often as the others, which would wait.
    """
    try:
        return make()
    except Unfit as error:
        return str(error)
    except Exception as error:  # of any class: tensors and code are not ours
        return f"it cannot be judged: {type(error).__name__}: {error}"


def _part(exact: Exact, some: slice) -> Exact:
    return Exact(exact.values[some], exact.bounds[some])


def _digests(exhibit: Exhibit) -> tuple[tuple[int, ...], list[int], tuple[str, ...]]:
    """Checksums of a result's operands, with its shape, and of its rows; names of the submodule's own operands."""
    operands = (*exhibit.result.shape, *map(_digest, exhibit.factors))
    return operands, [_digest(row) for row in exhibit.result.cpu()], exhibit.held


def _differs(known: Sequence[tuple[tuple[int, ...], Any, tuple[str, ...]]]) -> str:
    """Text that ranks had different operands, with the names of those that are the submodule's own."""
    names = known[0][2]
    operands = [one[len(one) - len(names) :] for one, *_ in known]
    if not names or any(other != names for *_, other in known):
        return DIFFERS
    own = [name for name, *values in zip(names, *operands, strict=True) if len(set(values)) > 1]
    return f"{DIFFERS}: of the submodule {', '.join(own[:5])}" if own else DIFFERS


def _rows(digests: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Numbers of the first rows whose checksums differ between ranks, and of some whose checksums are equal."""
    equal = [len(set(found)) == 1 for found in zip(*digests, strict=True)]
    different = [row for row, same in enumerate(equal) if not same]
    return different[:ROWS], _some([row for row, same in enumerate(equal) if same], ROWS)


def _some(all_of_them: T, most: int) -> T:
    """At most ``most`` elements, from the first on, at equal distances."""
    return all_of_them[:: max(len(all_of_them) // most, 1)][:most]  # type: ignore[index,arg-type,no-any-return]


def _digest(tensor: Tensor) -> int:
    alone = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element may have any stride
    content = alone.reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(content.data)


def _different(results: Sequence[Tensor]) -> Tensor:
    """Whether results differ, by element; NaN is equal to NaN."""
    different = torch.zeros_like(results[0], dtype=torch.bool)
    for one in results[1:]:
        different |= (one != results[0]) & ~(one.isnan() & results[0].isnan())
    return different


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


def judge_rounding(
    results: Mapping[int, Tensor], exact: Exact, inner: float = 1.0, outer: float = 1.0
) -> dict[int, bool]:
    """Whether the results of each rank are what rounding allows.

    Args:
        results: elements in which ranks differ, [n], by rank.
        inner: largest error of a right result, in bounds.
        outer: error that a wrong result exceeds in some element, in bounds. A result between the two is neither.

    Returns:
        True: all are within the bound. False: some are not, or are NaN or Inf, and another rank's all are within: the
        rank is wrong for certain. Empty: none is outside, so that any may be right; or all are, so that the elements
        are not what the referee takes them for.
    """
    found = {rank: bool(is_within(values.double(), exact, inner).all()) for rank, values in results.items()}
    wrong = {rank: not is_within(values.double(), exact, outer).all() for rank, values in results.items()}
    if any(not right and not wrong[rank] for rank, right in found.items()):
        return {}
    return found if len(set(found.values())) == 2 else {}


def is_within(values: Tensor, exact: Exact, times: float = 1.0) -> Tensor:
    """Whether rounding allows each element, [n]; ``times``: factor of the bounds."""
    inside = (values - exact.values).abs() <= times * exact.bounds  # NaN is not
    return inside | ~exact.bounds.isfinite()


def agreed(found: Sequence[Exact]) -> Exact | None:
    """Elements in fp64 that several ranks have computed, if their bits are equal; else None: one rank is not right."""
    first = found[0]
    same = all(torch.equal(one.values, first.values) and torch.equal(one.bounds, first.bounds) for one in found)
    return first if same else None
