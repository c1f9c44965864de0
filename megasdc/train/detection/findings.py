"""Rulings on the findings of each check: all ranks gather the same evidence, repeat the work, and rule alike.

Every method here is called by all ranks at the same point.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from megasdc.addresses import FORWARD, PARAMETER, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.run import Run
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.ballot import Ballot
from megasdc.sdc.compare import compare_rank
from megasdc.sdc.evidence import Counts, count_differing
from megasdc.sdc.gather import gather_traces, repeat_disputed
from megasdc.sdc.incidents.opinion import Opinion
from megasdc.sdc.incidents.settled import Settled
from megasdc.sdc.recompute import Repeats, Unrepeated, judge_recomputed, origins, pair_at
from megasdc.sdc.replay import (
    ELSEWHERE,
    GOLDEN,
    INCONCLUSIVE,
    INTERMITTENT,
    MAJORITY,
    NOT_REPRODUCED,
    REFEREE,
    REPLAY,
    Ruling,
    differences,
    repeated_value,
    settle,
)
from megasdc.sdc.suspects import Suspects
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import DIVERGENT, find, judge
from megasdc.sdc.verdict import INCONCLUSIVE as UNCLEAR
from megasdc.sdc.vote import vote
from megasdc.tensors.bits import as_bits
from megasdc.train.detection.evidence import Moved, Rehearse
from megasdc.train.detection.parameters import ParameterReader
from megasdc.train.detection.referee import Referee
from megasdc.train.detection.rows import Rows, named

logger = logging.getLogger(__name__)

EVENT_KIND = "sdc"
RIGHT = 0
"""Stands for the checksum of a right product, which nobody computes."""
ASKED = 8
"""Most results that the referee computes in one step; each is a repeat of the micro-batch."""


class Findings:
    """Names the ranks behind a finding where that can be proved, in one method for each check.

    ``repeats``: how often work is repeated; ``suspects``: devices found wrong before; ``referee``: judges results of
    linear layers.
    """

    def __init__(
        self, run: Run, repeats: int, parameters: ParameterReader, suspects: Suspects, referee: Referee
    ) -> None:
        self._dims = run.dims
        self._group = run.host_group
        self._events = run.events
        self._repeats = repeats
        self._parameters = parameters
        self._suspects = suspects
        self._referee = referee

    def of_audit(
        self,
        engine: TrainingEngine,
        own: Trace,
        rehearse: Rehearse,
        earlier: Collection[int],
        comparable: Collection[tuple[int, int]] | None,
        ask_golden: Callable[[], Mapping[int, bool] | None],
    ) -> Settled:
        """Rule on results of the shared micro-batch that differ between replicas; call in ``after_micro_batches``.

        ``earlier``: ranks that were wrong in an earlier event of the run; ``comparable``: positions whose replicas can
        be compared, None: all; ``ask_golden`` returns which ranks reproduce the golden workload, or None without one.
        """
        audit = gather_traces(own, self._dims, self._group)
        ballot = vote(audit, self._dims, comparable)
        self._tell_finding(engine.step_number, ballot)
        repeats = repeat_disputed(
            *(ballot, audit, lambda: rehearse(engine, 0)[0], self._repeats, self._dims, self._group)
        )
        golden = ask_golden()
        opinions = self._ask_referee(engine, ballot, audit, rehearse)
        refereed = {(rank, place): within for place, one in opinions for rank, within in one.within.items()}
        rulings = settle(ballot, repeats, golden, earlier, refereed)
        named = {ruling.rank: ruling.basis for ruling in rulings if ruling.rank is not None}
        self._tell_overruled(engine.step_number, ballot, named, golden or {})
        shown = tuple(one for _, one in opinions)
        return Settled("audit", 0, rulings, *count_differing(audit, self._dims, named), opinions=shown)

    def _ask_referee(
        self, engine: TrainingEngine, ballot: Ballot, audit: Mapping[int, Trace], rehearse: Rehearse
    ) -> list[tuple[int, Opinion]]:
        """What the referee says of results that differ, with their places in traces; one more repeat for each."""
        found = []
        for number, (address, place, values) in enumerate(differences(ballot)):
            repeat = partial(self._repeat, engine, place, values, audit, rehearse)
            opinion = Opinion(address, {}, f"it has computed {ASKED} results in this step")
            if number < ASKED:
                opinion = self._referee.ask(address, values, repeat)
            self.tell("referee", step=engine.step_number, **{**asdict(opinion), "address": str(address)})
            found.append((place, opinion))
        return found

    def _repeat(
        self,
        engine: TrainingEngine,
        place: int,
        ranks: Collection[int],
        audit: Mapping[int, Trace],
        rehearse: Rehearse,
    ) -> dict[int, int | None]:
        """Repeat the audited micro-batch; what ranks got at a place this time."""
        again = gather_traces(rehearse(engine, 0)[0], self._dims, self._group)
        return {rank: repeated_value(rank, place, audit, again, self._dims) for rank in ranks}

    def of_recompute(
        self, engine: TrainingEngine, own: Repeats, rehearse: Rehearse, earlier: Collection[int]
    ) -> Settled:
        """Rule on forward results that their recomputation did not repeat; call in ``after_micro_batches``.

        ``earlier``: ranks that were wrong in an earlier event of the run.
        """
        first = own.unrepeated[0] if own.unrepeated else None
        counts = count_by_submodule(FORWARD, [one.address.fqn for one in own.unrepeated], self._dims.rank)
        found = gather_objects((first, own.compared, counts), self._group)
        flagged = origins({rank: one for rank, (one, *_) in enumerate(found) if one is not None}, self._dims)
        for rank, one in flagged.items():
            self.tell("finding", step=engine.step_number, tier="recompute", rank=rank, address=str(one.address))
        again: dict[int, list[Any]] = {rank: [] for rank in flagged}
        for micro_batch in sorted({one.address.micro_batch or 0 for one in flagged.values()}):
            for _ in range(self._repeats):
                trace = rehearse(engine, micro_batch)[1]
                mine = None
                if first is not None and first.address.micro_batch == micro_batch:
                    mine = pair_at(trace, first.address)
                for rank, pair in enumerate(gather_objects(mine, self._group)):
                    if rank in flagged and flagged[rank].address.micro_batch == micro_batch:
                        again[rank].append(pair)
        return Settled(
            "recompute",
            min(one.address.micro_batch or 0 for one in flagged.values()),
            tuple(judge_recomputed(rank, one, again[rank], rank in earlier) for rank, one in flagged.items()),
            sum(compared for _, compared, _ in found),
            merge_counts(counts for *_, counts in found),
        )

    def of_rows(self, engine: TrainingEngine, rows: Rows, earlier: Collection[int]) -> Settled:
        """Rule on products with an element that rounding does not explain; call in ``after_micro_batches``.

        ``earlier``: ranks that were wrong in an earlier event of the run.
        """
        found = gather_objects(rows.wrong, self._group)
        flagged = {rank: one for rank, one in enumerate(found) if one is not None}
        for rank, one in flagged.items():
            self.tell("finding", step=engine.step_number, tier="rows", rank=rank, address=str(one.address))
        again = [gather_objects(rows.again(), self._group) for _ in range(self._repeats)]
        rulings, opinions, counts = [], [], []
        for rank, one in flagged.items():
            first = Unrepeated(one.address, one.checksum, RIGHT)
            pairs = [(RIGHT if (now := found[rank]) is None else now.checksum, RIGHT) for found in again]
            ruling = judge_recomputed(rank, first, pairs, rank in earlier)
            rulings.append(replace(ruling, basis=REFEREE, expected=None))
            opinions.append(Opinion(one.address, {rank: False}, "", 1, named(one, rank)))
            counts.append(count_by_submodule(one.address.phase, [one.address.fqn], rank))
        shown = tuple(rulings), self._dims.world_size, merge_counts(counts), tuple(opinions)
        return Settled("rows", rows.micro_batch, *shown)

    def of_permuted(
        self, engine: TrainingEngine, audited: Trace, moved: Moved, rehearse: Rehearse, earlier: Collection[int]
    ) -> Settled:
        """Rule on results that changed when elements were in other places; call in ``after_micro_batches``.

        ``audited``: the audited micro-batch as it was computed; ``earlier``: ranks that were wrong in an earlier event
        of the run.
        """
        dims = self._dims
        audit, elsewhere = (gather_traces(one, dims, self._group) for one in (audited, moved.trace))
        verdicts = judge({rank: [find(audit[rank], elsewhere[rank], dims.at(rank))] for rank in audit}, dims)
        flagged = {
            rank: difference_at(audit[rank], elsewhere[rank], one.first)
            for rank, one in verdicts.items()
            if one.status == DIVERGENT and one.first is not None
        }
        for rank, difference in flagged.items():
            address = str(difference.address)
            self.tell("finding", step=engine.step_number, tier="permuted", rank=rank, address=address)
        pairs: dict[int, list[tuple[int, int] | None]] = {rank: [] for rank in flagged}
        own = flagged[dims.rank].address if dims.rank in flagged else None
        kept: list[Tensor | None] = []
        for _ in range(self._repeats):
            both = []
            for compute in (lambda: rehearse(engine, 0)[0], moved.again):
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
                self.tell("permuted_void", step=engine.step_number, rank=rank, address=address, reason=reason)
        rulings = [
            replace(judge_recomputed(rank, one, pairs[rank], rank in earlier), basis=ELSEWHERE)
            for rank, one in flagged.items()
            if not void[rank]
        ]
        unclear = tuple(rank for rank, one in verdicts.items() if one.status == UNCLEAR)
        if unclear:
            rulings.append(Ruling(None, INCONCLUSIVE, ELSEWHERE, verdicts[unclear[0]].first, suspects=unclear))
        counts: Counts = {}
        for rank in audit:
            for one in compare_rank(rank, audit[rank], elsewhere[rank]):
                of_submodule = counts.setdefault(one.address.phase, {}).setdefault(one.address.fqn, {})
                of_submodule[rank] = of_submodule.get(rank, 0) + 1
        return Settled("permuted", 0, tuple(rulings), sum(map(len, audit.values())), counts)

    def of_parameters(self, engine: TrainingEngine, own: Trace) -> Settled:
        """Gather the parameters again from their owners' master shards; ranks whose parameters change were wrong.

        A wrong master shard is gathered by all ranks and is not detected here.
        """
        engine.optimizer.update_lp_params()
        self._parameters.start()
        now = self._parameters.take()
        triples = zip(own.addresses, own.checksums, now.checksums, strict=True)
        changed = [(address, before, after) for address, before, after in triples if before != after]
        counts = count_by_submodule(PARAMETER, [address.fqn for address, *_ in changed], self._dims.rank)
        found = gather_objects((changed[0] if changed else None, counts, now.checksums), self._group)
        rulings = []
        for rank, (first, _, _) in enumerate(found):
            if first is not None:
                address, before, after = first
                self.tell("finding", step=engine.step_number, tier="parameters", rank=rank, address=str(address))
                verdict = INTERMITTENT if rank in self._suspects.ranks else NOT_REPRODUCED
                rulings.append(Ruling(rank, verdict, "master shard", address, expected=after, got={rank: before}))
        by_position: dict[int, set[tuple[int, ...]]] = {}
        for rank, (_, _, values) in enumerate(found):
            by_position.setdefault(self._dims.at(rank).first_replica_rank, set()).add(tuple(values))
        if any(len(values) > 1 for values in by_position.values()):
            suspects = tuple(range(self._dims.world_size))
            rulings.append(Ruling(None, INCONCLUSIVE, "master shard", own.addresses[0], suspects=suspects))
        compared = self._dims.world_size * len(own)
        merged = merge_counts(of_rank for _, of_rank, _ in found)
        return Settled("parameters", None, tuple(rulings), compared, merged)

    def of_copies(self, engine: TrainingEngine, own: Trace) -> Settled:
        """Find tensor ranks whose copies of a parameter differ from the majority's, where there are three or more.

        All replicas have the same wrong copy, so one of them made it in its update, and none can be named. All are
        gathered again, which repairs one that became wrong after the update.
        """
        engine.optimizer.update_lp_params()
        copies = self._parameters.copies(own)
        sent = gather_objects((copies.addresses, copies.checksums), self._group)
        rulings = []
        for stage in range(self._dims.pipeline):
            ranks = [rank for rank in range(self._dims.world_size) if self._dims.at(rank).pp_rank == stage]
            for place, address in enumerate(sent[ranks[0]][0]):
                values = {rank: sent[rank][1][place] for rank in ranks}
                usual, most = Counter(values.values()).most_common(1)[0]
                if most == len(ranks):
                    continue
                wrong = tuple(rank for rank in ranks if values[rank] != usual)
                suspects = wrong if 2 * most > len(ranks) else tuple(ranks)
                got = {rank: values[rank] for rank in suspects}
                rulings.append(
                    Ruling(None, INCONCLUSIVE, "copies on tensor ranks", address, suspects=suspects, got=got)
                )
                break
        return Settled("copies", None, tuple(rulings), compared=sum(len(values) for _, values in sent))

    def _tell_finding(self, step: int, ballot: Ballot) -> None:
        for flag in ballot.flagged:
            self.tell("finding", step=step, tier="audit", rank=flag.rank, address=str(flag.address), basis=MAJORITY)
        if ballot.dispute is not None:
            ranks = [rank for values in ballot.dispute.values for rank in values]
            self.tell("finding", step=step, tier="audit", ranks=ranks, address=str(ballot.dispute.address))

    def _tell_overruled(self, step: int, ballot: Ballot, named: Mapping[int, str], golden: Mapping[int, bool]) -> None:
        """Report findings of the majority that were overruled, so that no event accuses a rank that is not named.

        ``named``: bases by rank.
        """
        for flag in ballot.flagged:
            if flag.rank in named:
                continue
            by = REFEREE if REFEREE in {named.get(rank) for rank in flag.against} else REPLAY
            if golden.get(flag.rank) or not all(golden.get(rank, True) for rank in flag.against):
                by = GOLDEN
            self.tell("overruled", step=step, rank=flag.rank, address=str(flag.address), basis=by)

    def tell(self, name: str, *, step: int | None = None, **fields: Any) -> None:
        """Write an event on rank 0."""
        if self._dims.rank != 0:
            return
        try:
            self._events.emit(EVENT_KIND, name, step=step, **fields)
        except OSError as error:  # not raised: the other ranks wait in the collectives that follow
            logger.error("the event %s/%s of step %s is not written: %s: %s", EVENT_KIND, name, step, error, fields)


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


def count_by_submodule(phase: str, fqns: Iterable[str], rank: int) -> Counts:
    """Number of differing results of one rank, by phase and submodule; empty without any."""
    found = {fqn: {rank: count} for fqn, count in Counter(fqns).items()}
    return {phase: found} if found else {}


def merge_counts(counts: Iterable[Counts]) -> Counts:
    """Merge the counts of all ranks."""
    merged: Counts = {}
    for of_rank in counts:
        for phase, submodules in of_rank.items():
            for fqn, ranks in submodules.items():
                merged.setdefault(phase, {}).setdefault(fqn, {}).update(ranks)
    return merged
