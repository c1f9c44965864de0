"""Rulings on an audit: on results that differ between replicas, and on those that changed with elements elsewhere.

Every method here is called by all ranks at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.audits.referee import Referee
from megasdc.sdc.audits.together import suspect_together, tensor_ranks
from megasdc.sdc.finding import Finding
from megasdc.sdc.gather import gather_traces, repeat_disputed
from megasdc.sdc.golden_compare import DIVERGENT, find, judge_cell
from megasdc.sdc.incident import Opinion
from megasdc.sdc.trace import Counts, Trace, compare_rank, count_differing
from megasdc.sdc.verdict import (
    ELSEWHERE,
    GOLDEN,
    INCONCLUSIVE,
    MAJORITY,
    OWN_CODE,
    REFEREE,
    REPLAY,
    RankVerdict,
    Unrepeated,
    find_differences,
    judge_recomputed,
    repeated_value,
    settle,
)
from megasdc.sdc.vote import Ballot, vote
from megasdc.tensors.bits import as_bits

ASKED = 8
"""Most results that the referee computes in one step; each is a repeat of the micro-batch."""


@dataclass(frozen=True)
class AuditedWork:
    """The audited micro-batch of a step.

    Args:
        trace: of this rank.
        again: computes it once more; returns this rank's trace.
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
        again: computes it so once more.
        learn: tries its operations again; whether more of them are not moved from now on.
    """

    trace: Trace
    again: Callable[[], Trace]
    learn: Callable[[], bool]


class AuditFindings:
    """Names the ranks behind what an audit has found, where that can be proved.

    Args:
        group: of all ranks, on the host.
        repeats: how often work is repeated.
        referee: keeps results, and judges those that differ between replicas.
        tell: writes an event ``sdc`` of a name, with its step and fields.
        asks: whether the referee is asked for opinions.
        sums: whether results may be sums over tensor ranks, or made of such; else each is of its rank alone.
    """

    def __init__(
        self,
        dims: ParallelDims,
        group: dist.ProcessGroup | None,
        repeats: int,
        referee: Referee,
        tell: Callable[..., None],
        *,
        asks: bool = True,
        sums: bool = False,
    ) -> None:
        self._dims, self._group = dims, group
        self._repeats, self._referee, self._asks = repeats, referee, asks
        self._tell, self._sums = tell, sums and dims.tensor > 1

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
        self._tell_finding(work.step, ballot)
        repeats = repeat_disputed(ballot, audit, work.again, self._repeats, self._dims, self._group)
        golden = ask_golden()
        opinions = self._ask_referee(work, ballot, audit) if self._asks else []
        refereed = {(rank, place): within for place, one in opinions for rank, within in one.within.items()}
        bases = {place: one.basis for place, one in opinions if one.within}
        rulings = settle(ballot, repeats, golden, work.earlier, refereed, bases)
        named = {ruling.rank: ruling.basis for ruling in rulings if ruling.rank is not None}
        self._tell_overruled(work.step, ballot, named, golden or {})
        shown = tuple(one for _, one in opinions)
        if self._sums:
            alone = {(rank, one.address) for one in shown for rank in one.alone}
            rulings = suspect_together(rulings, self._dims, alone)
        return Finding(
            "audit", _micro_batch(rulings), rulings, *count_differing(audit, self._dims, named), opinions=shown
        )

    def _ask_referee(self, work: AuditedWork, ballot: Ballot, audit: Mapping[int, Trace]) -> list[tuple[int, Opinion]]:
        """What the referee says of results that differ, with their places in traces; one more repeat for each."""
        found = []
        for number, (address, place, values) in enumerate(find_differences(ballot)):
            opinion = Opinion(address, {}, f"it has computed {ASKED} results in this step")
            if number < ASKED:
                opinion = self._referee.ask(address, values, partial(self._repeat, work, place, values, audit))
            self._tell("referee", step=work.step, **{**asdict(opinion), "address": str(address)})
            found.append((place, opinion))
        return found

    def _repeat(
        self, work: AuditedWork, place: int, ranks: Collection[int], audit: Mapping[int, Trace]
    ) -> dict[int, int | None]:
        """Repeat the audited micro-batch; what ranks got at a place this time."""
        again = gather_traces(work.again(), self._dims, self._group)
        return {rank: repeated_value(rank, place, audit, again, self._dims) for rank in ranks}

    # --- one device ---------------------------------------------------------------------------------------------------

    def of_permuted(self, work: AuditedWork, moved: PermutedResult) -> Finding:
        """Rule on results that changed when elements were in other places.

        Collective: all ranks of the world.
        """
        dims = self._dims
        trace = moved.again() if moved.learn() else moved.trace
        audit, elsewhere = (gather_traces(one, dims, self._group) for one in (work.trace, trace))
        verdicts = judge_cell({rank: [find(audit[rank], elsewhere[rank], dims.at(rank))] for rank in audit}, dims)
        flagged = {
            rank: difference_at(audit[rank], elsewhere[rank], one.first)
            for rank, one in verdicts.items()
            if one.status == DIVERGENT and one.first is not None
        }
        for rank, difference in flagged.items():
            who = {"ranks": list(tensor_ranks(rank, dims))} if self._sums else {"rank": rank}
            self._tell("finding", step=work.step, tier="permuted", **who, address=str(difference.address))
        pairs: dict[int, list[tuple[int, int] | None]] = {rank: [] for rank in flagged}
        own = flagged[dims.rank].address if dims.rank in flagged else None
        kept: list[Tensor | None] = []
        for _ in range(self._repeats):
            both = []
            for compute in (work.again, moved.again):
                result, trace = self._referee.keep(own, compute)
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
                self._tell("permuted_void", step=work.step, rank=rank, address=address, reason=reason)
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

    def _tell_finding(self, step: int, ballot: Ballot) -> None:
        for flag in ballot.flagged:
            who = {"ranks": list(tensor_ranks(flag.rank, self._dims))} if self._sums else {"rank": flag.rank}
            self._tell("finding", step=step, tier="audit", **who, address=str(flag.address), basis=MAJORITY)
        if ballot.dispute is not None:
            ranks = [rank for values in ballot.dispute.values for rank in values]
            if self._sums:
                ranks = sorted({other for rank in ranks for other in tensor_ranks(rank, self._dims)})
            self._tell("finding", step=step, tier="audit", ranks=ranks, address=str(ballot.dispute.address))

    def _tell_overruled(self, step: int, ballot: Ballot, named: Mapping[int, str], golden: Mapping[int, bool]) -> None:
        """Report findings of the majority that were overruled, so that no event accuses a rank that is not named.

        ``named``: bases by rank.
        """
        for flag in ballot.flagged:
            if flag.rank in named:
                continue
            by = next((one for one in (REFEREE, OWN_CODE) if one in map(named.get, flag.against)), REPLAY)
            if golden.get(flag.rank) or not all(golden.get(rank, True) for rank in flag.against):
                by = GOLDEN
            self._tell("overruled", step=step, rank=flag.rank, address=str(flag.address), basis=by)


def difference_at(audited: Trace, moved: Trace, address: Address) -> Unrepeated:
    """A result as it was computed, and with elements in other places."""
    place = audited.addresses.index(address)
    return Unrepeated(address, audited.checksums[place], moved.checksums[place], place)


def differ_in_nan_alone(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results have NaN at the same places, with other bits, and are equal elsewhere."""
    if one is None or other is None or one.shape != other.shape:
        return False
    alike = (as_bits(one) == as_bits(other)) | (one.isnan() & other.isnan())
    return bool(one.isnan().any()) and bool(alike.all())


def _micro_batch(rulings: Sequence[RankVerdict]) -> int:
    """The audited micro-batch: the first of the step, or an extra one."""
    numbers = (one.address.micro_batch for one in rulings if one.address is not None)
    return next((number for number in numbers if number is not None), 0)
