"""Audits in any training: rulings on results that differ between replicas, or that changed with elements elsewhere.

Methods of ``AuditFindings`` are called by all ranks at the same point. They gather the traces of all ranks, have the
work repeated, and ask the referee. Where results may be sums over tensor ranks, or made of such, these ranks are
suspects together.

Which operations can be computed with their elements elsewhere the first audit of a start finds out
(``PermutableOps``). It tries every operation both ways on the real numbers. Where all ranks that computed one get other
bits, its kernel does not treat all places alike: it is computed as it is from then on, and named. Where one rank alone
computed it, that is said of differences as small as rounding, or in more elements than a unit spoils. What only some
ranks see, or one rank in few elements, is no property of a kernel, and is left to the audit.

Results of such a kernel may be equal by chance, with the numbers of the first audit: few elements, or a type that hides
most differences. So operations are tried again before anything is ruled; what differs then on all ranks that compute
the same, or on one alone as little as another order of summation explains, is not moved any more, either.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding
from megasdc.sdc.golden import DIVERGENT, compare_run, judge_cell
from megasdc.sdc.incident import Opinion
from megasdc.sdc.referee.referee import Referee
from megasdc.sdc.trace import Counts, Trace, compare_rank, count_differing
from megasdc.sdc.verdict import (
    ELSEWHERE,
    GOLDEN,
    INCONCLUSIVE,
    MAJORITY,
    NOT_REPRODUCED,
    OWN_CODE,
    REFEREE,
    REPLAY,
    RankVerdict,
    Unrepeated,
    find_differences,
    judge_recomputed,
    repeated_value,
    settle,
    to_repeat,
)
from megasdc.sdc.vote import Ballot, vote
from megasdc.tensors.bits import as_bits
from megasdc.tensors.permuted import Permuted, Signature, Trial, Tried, Unequal

ASKED = 8
"""Largest number of results that the referee computes in one step; each is a repeat of the micro-batch."""


@dataclass(frozen=True)
class AuditedWork:
    """The audited micro-batch of a step.

    Args:
        trace: this rank's trace of it.
        again: computes the micro-batch once more; returns this rank's trace.
        earlier: ranks that were wrong in an earlier event of the run.
    """

    step: int
    trace: Trace
    again: Callable[[], Trace]
    earlier: Collection[int] = ()


@dataclass(frozen=True)
class PermutedResult:
    """Results of the audited micro-batch with elements in other places.

    Args:
        trace: this rank's trace of them.
        again: computes them once more; returns this rank's trace.
        update: tries the micro-batch's operations again; returns whether more of them are no longer moved.
    """

    trace: Trace
    again: Callable[[], Trace]
    update: Callable[[], bool]


class AuditFindings:
    """Names the ranks behind what an audit has found, where that can be proved.

    Args:
        group: host group of all ranks.
        repeats: number of repeats of the work.
        referee: keeps results, and judges those that differ between replicas.
        emit: writes an event of kind ``sdc``, from its name, step and fields.
        asks: whether the referee is asked for opinions.
        sums: whether results may be sums over tensor ranks, or made of such sums; else each is of its rank alone.
    """

    def __init__(
        self,
        dims: ParallelDims,
        group: dist.ProcessGroup | None,
        repeats: int,
        referee: Referee,
        emit: Callable[..., None],
        *,
        asks: bool = True,
        sums: bool = False,
    ) -> None:
        self._dims, self._group = dims, group
        self._repeats, self._referee, self._asks = repeats, referee, asks
        self._emit, self._sums = emit, sums and dims.tensor > 1

    # --- replicas ---------------------------------------------------------------------------------------------------

    def of_replicas(
        self,
        work: AuditedWork,
        comparable: Collection[tuple[int, int]] | None = None,
        ask_golden: Callable[[], Mapping[int, bool] | None] = lambda: None,
    ) -> Finding:
        """Rule on results of the audited micro-batch that differ between replicas.

        Args:
            comparable: positions whose replicas can be compared; None: all.
            ask_golden: returns which ranks reproduce the golden workload, or None without one.

        Collective: all ranks of the world.
        """
        audit = gather_traces(work.trace, self._dims, self._group)
        ballot = vote(audit, self._dims, comparable)
        self._emit_finding(work.step, ballot)
        repeats = repeat_disputed(ballot, audit, work.again, self._repeats, self._dims, self._group)
        golden = ask_golden()
        opinions = self._consult_referee(work, ballot, audit) if self._asks else []
        refereed = {(rank, place): within for place, one in opinions for rank, within in one.within.items()}
        bases = {place: one.basis for place, one in opinions if one.within}
        rulings = settle(ballot, repeats, golden, work.earlier, refereed, bases)
        named = {ruling.rank: ruling.basis for ruling in rulings if ruling.rank is not None}
        self._emit_overruled(work.step, ballot, named, golden or {})
        shown = tuple(one for _, one in opinions)
        if self._sums:
            alone = {(rank, one.address) for one in shown for rank in one.alone}
            rulings = suspect_together(rulings, self._dims, alone)
        return Finding(
            "audit", _micro_batch(rulings), rulings, *count_differing(audit, self._dims, named), opinions=shown
        )

    def _consult_referee(
        self, work: AuditedWork, ballot: Ballot, audit: Mapping[int, Trace]
    ) -> list[tuple[int, Opinion]]:
        """Opinions of the referee on results that differ, with their places in traces; each costs one more repeat."""
        found = []
        for number, (address, place, values) in enumerate(find_differences(ballot)):
            opinion = Opinion(address, {}, f"it has computed {ASKED} results in this step")
            if number < ASKED:
                opinion = self._referee.judge(address, values, partial(self._repeat, work, place, values, audit))
            self._emit("referee", step=work.step, **{**asdict(opinion), "address": str(address)})
            found.append((place, opinion))
        return found

    def _repeat(
        self, work: AuditedWork, place: int, ranks: Collection[int], audit: Mapping[int, Trace]
    ) -> dict[int, int | None]:
        """Repeat the audited micro-batch; returns checksums at a place by rank, None: no evidence."""
        again = gather_traces(work.again(), self._dims, self._group)
        return {rank: repeated_value(rank, place, audit, again, self._dims) for rank in ranks}

    # --- one device ---------------------------------------------------------------------------------------------------

    def of_permuted(self, work: AuditedWork, moved: PermutedResult) -> Finding:
        """Rule on results that changed when elements were in other places.

        Collective: all ranks of the world.
        """
        dims = self._dims
        trace = moved.again() if moved.update() else moved.trace
        audit, elsewhere = (gather_traces(one, dims, self._group) for one in (work.trace, trace))
        runs = {rank: compare_run(one, elsewhere[rank], dims.at(rank)) for rank, one in audit.items()}
        verdicts = judge_cell({rank: [one.finding] for rank, one in runs.items()}, dims)
        flagged = {
            rank: difference_at(audit[rank], elsewhere[rank], one.first)
            for rank, one in verdicts.items()
            if one.status == DIVERGENT and one.first is not None
        }
        for rank, difference in flagged.items():
            who = {"ranks": list(tensor_ranks(rank, dims))} if self._sums else {"rank": rank}
            self._emit("finding", step=work.step, tier="permuted", **who, address=str(difference.address))
        pairs: dict[int, list[tuple[int, int] | None]] = {rank: [] for rank in flagged}
        own = flagged[dims.rank].address if dims.rank in flagged else None
        kept: list[Tensor | None] = []
        for _ in range(self._repeats):
            both = []
            for compute in (work.again, moved.again):
                result, trace = self._referee.capture_result(own, compute)
                kept.append(result)
                both.append(gather_traces(trace, dims, self._group))
            for rank, difference in flagged.items():
                here, there = (repeated_value(rank, difference.place, audit, one, dims) for one in both)
                pairs[rank].append(None if here is None or there is None else (here, there))
        void = gather_objects(
            any(differ_in_nan_alone(*kept[at : at + 2]) for at in range(0, len(kept), 2)), self._group
        )
        for rank, difference in flagged.items():
            if void[rank]:
                reason = "two NaN have other bits, which no operation promises to keep"
                address = str(difference.address)
                self._emit("permuted_void", step=work.step, rank=rank, address=address, reason=reason)
        rulings = [
            replace(judge_recomputed(rank, one, pairs[rank], rank in work.earlier), basis=ELSEWHERE)
            for rank, one in flagged.items()
            if not void[rank]
        ]
        if self._sums:
            rulings = list(suspect_together(rulings, dims))
        unclear = tuple(rank for rank, one in verdicts.items() if one.status == INCONCLUSIVE)
        if unclear:
            rulings.append(RankVerdict(None, INCONCLUSIVE, ELSEWHERE, verdicts[unclear[0]].first, suspects=unclear))
        counts: Counts = {}
        for rank in audit:
            for one in compare_rank(rank, audit[rank], elsewhere[rank]):
                of_submodule = counts.setdefault(one.address.phase, {}).setdefault(one.address.fqn, {})
                of_submodule[rank] = of_submodule.get(rank, 0) + 1
        return Finding("permuted", _micro_batch(rulings), tuple(rulings), sum(map(len, audit.values())), counts)

    # --- events -------------------------------------------------------------------------------------------------------

    def _emit_finding(self, step: int, ballot: Ballot) -> None:
        for flag in ballot.flagged:
            who = {"ranks": list(tensor_ranks(flag.rank, self._dims))} if self._sums else {"rank": flag.rank}
            self._emit("finding", step=step, tier="audit", **who, address=str(flag.address), basis=MAJORITY)
        if ballot.dispute is not None:
            ranks = [rank for values in ballot.dispute.values for rank in values]
            if self._sums:
                ranks = sorted({other for rank in ranks for other in tensor_ranks(rank, self._dims)})
            self._emit("finding", step=step, tier="audit", ranks=ranks, address=str(ballot.dispute.address))

    def _emit_overruled(self, step: int, ballot: Ballot, named: Mapping[int, str], golden: Mapping[int, bool]) -> None:
        """Report findings of the majority that were overruled, so that no event accuses a rank that is not named.

        ``named``: bases by rank.
        """
        for flag in ballot.flagged:
            if flag.rank in named:
                continue
            by = next((one for one in (REFEREE, OWN_CODE) if one in map(named.get, flag.against)), REPLAY)
            if golden.get(flag.rank) or not all(golden.get(rank, True) for rank in flag.against):
                by = GOLDEN
            self._emit("overruled", step=step, rank=flag.rank, address=str(flag.address), basis=by)


def difference_at(audited: Trace, moved: Trace, address: Address) -> Unrepeated:
    """Checksums of a result as it was computed in the audit, and with elements in other places."""
    place = audited.addresses.index(address)
    return Unrepeated(address, audited.checksums[place], moved.checksums[place], place)


def differ_in_nan_alone(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results have NaN at the same places, with other bits, and are equal elsewhere."""
    if one is None or other is None or one.shape != other.shape:
        return False
    alike = (as_bits(one) == as_bits(other)) | (one.isnan() & other.isnan())
    return bool(one.isnan().any()) and bool(alike.all())


def _micro_batch(rulings: Sequence[RankVerdict]) -> int:
    """Number of the audited micro-batch, as rulings have it: the first of the step, or an extra one."""
    numbers = (one.address.micro_batch for one in rulings if one.address is not None)
    return next((number for number in numbers if number is not None), 0)


logger = logging.getLogger(__name__)

T = TypeVar("T")
MANY = 0.1
"""Share of a result's elements above which a difference is not of a single unit of the device."""
SPOILED = 4
"""Elements of a call that a unit may spoil: one or two of the result, and as many others where it is moved."""
ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-5, "float16": 2.0**-8}
"""Largest difference that another order of summation explains, as a share of the largest element, by type."""


def tensor_ranks(rank: int, layout: ParallelDims) -> tuple[int, ...]:
    """Ranks of a rank's tensor group, the rank itself among them."""
    first = rank - rank % layout.tensor
    return tuple(range(first, first + layout.tensor))


def suspect_together(
    rulings: Sequence[RankVerdict], layout: ParallelDims, alone: Collection[tuple[int, Address]] = ()
) -> tuple[RankVerdict, ...]:
    """Rulings on results that may be sums over tensor ranks: no rank of such a group is named, all are suspects.

    Args:
        alone: pairs of a rank and the address of a result that it has computed from inputs known to be alike, without
            another rank: an error there is its own.
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
    """One ruling on ranks of which none can be named, in the place of several; not reproduced if all of these are."""
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


def gather_traces(trace: Trace, dims: ParallelDims, group: dist.ProcessGroup | None) -> dict[int, Trace]:
    """Every rank's trace, by global rank, on every rank; ``group``: a host group of all ranks.

    Replicas record the same addresses; only those of the first replica are sent, and those of ranks that differ from
    it.

    Collective: all ranks of the world; only after a disagreement, because the message grows with the number of ranks.
    """
    text = "\n".join(map(str, trace.addresses))
    names = gather_objects(xxhash.xxh3_64_intdigest(text.encode()), group)
    first = dims.first_replica_rank
    own = dims.rank == first or names[dims.rank] != names[first]
    sent = gather_objects((trace.addresses if own else None, trace.checksums), group)
    found = {}
    for rank, (addresses, checksums) in enumerate(sent):
        known = addresses or sent[dims.at(rank).first_replica_rank][0] or []
        found[rank] = Trace(list(known), list(checksums))
    return found


def repeat_disputed(
    ballot: Ballot,
    audit: Mapping[int, Trace],
    compute: Callable[[], Trace],
    times: int,
    dims: ParallelDims,
    group: dist.ProcessGroup | None,
) -> dict[tuple[int, int], list[int | None]]:
    """Repeat the work that replicas disagree on; returns ``repeats`` for ``megasdc.sdc.verdict.settle``.

    Args:
        ballot: the vote on ``audit``, the traces of all ranks.
        compute: does the work once more; returns this rank's trace.

    Collective: all ranks of the world.
    """
    again = [gather_traces(compute(), dims, group) for _ in range(times)]
    return {
        (rank, place): [repeated_value(rank, place, audit, one, dims) for one in again]
        for rank, place in to_repeat(ballot)
    }


class PermutableOps:
    """Computes work with the elements of all operations in other places, but for those that are not moved.

    Args:
        dims: layout and place of this rank.
        group: host group of all ranks.
        emit: writes an event, from its kind, name and fields; called on rank 0 alone.

    Attributes:
        without: operations that are not moved; None: not known yet.
    """

    def __init__(self, dims: ParallelDims, group: dist.ProcessGroup | None, emit: Callable[..., object]) -> None:
        self._dims, self._group, self._emit = dims, group, emit
        self.without: Collection[Signature] | None = None

    def compute(self, step: int, work: Callable[[], T]) -> T:
        """Compute work with elements in other places; the first time of a start its operations are tried before.

        Collective: all ranks of the world, the first time.
        """
        if self.without is None:
            found = self._try(work)
            without = places_matter(found)
            self.without = frozenset(without)
            self._report(step, found, without)
        with Permuted(self.without):
            return work()

    def update(self, step: int, work: Callable[[], T]) -> bool:
        """Try the operations of work again; returns whether more of them are no longer moved.

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
        """Compute work, trying each of its operations both ways; returns the trial of each rank."""
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
        self._emit("audit", "permuted", step=step, moved=moved, left=left, not_kept=not_kept)
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
    """Operations whose kernels do not treat all places alike, from the trials of all ranks."""
    return {
        signature: one
        for signature, one in _totals(found).items()
        if _is_of_kernel(signature, one, [of_rank for of_rank in found if signature in of_rank.moved])
    }


def order_matters(found: Sequence[Sequence[Tried]], known: Collection[Signature] = ()) -> Mapping[Signature, Unequal]:
    """Operations whose results differ on all ranks that compute the same, or on one alone as little as rounding.

    Args:
        found: trials of the ranks at each position, which compute the same.
        known: operations that are left out.
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
    """Whether a difference is a property of the kernel, or of how elements are moved here, and not of a device."""
    rounding = max(ROUNDING.get(text.partition("(")[0], 0.0) for text in signature)
    explained = len(ran) > 1 or total.largest <= rounding or _are_many(total, ran[0].moved[signature])
    return explained and all(signature in of_rank.unequal for of_rank in ran)


def _are_many(total: Unequal, calls: int) -> bool:
    """Whether more elements differ than a unit spoils; of small results these are a large share.

    There, elements that differ as little as rounding do not count: any kernel may have a few. More than half of a
    result are many, however small it is.
    """
    if (share := MANY * total.of) > (spoiled := SPOILED * calls):
        return total.elements > share
    return total.far > min(spoiled, total.of / 2)
