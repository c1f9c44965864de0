"""Evidence of one rank in a step, and rulings on the findings of each check, which follow from it.

All ranks gather the same evidence, repeat the work, and rule alike: every method of ``Findings`` is called by all ranks
at the same point.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from megasdc.common.addresses import FORWARD, PARAMETER, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import StateBlock, is_copied
from megasdc.parallel.collectives import ANY, REPLICAS, STAGE, WORLD, Agreed, Compared, gather_objects
from megasdc.sdc.audits import AuditedWork, AuditFindings, PermutedResult
from megasdc.sdc.finding import Finding, Suspects
from megasdc.sdc.referee.referee import Referee
from megasdc.sdc.rows import RIGHT, Rows
from megasdc.sdc.trace import Trace, count_by_submodule, merge_counts, trace_digest
from megasdc.sdc.used_settings import NONE, SETTINGS
from megasdc.sdc.verdict import (
    FILE,
    FOLLOWS,
    INCONCLUSIVE,
    INTERMITTENT,
    MAJORITY,
    NOT_REPRODUCED,
    RankVerdict,
    Repeats,
    Unrepeated,
    judge_recomputed,
    origins,
    pair_at,
)
from megasdc.sdc.vote import majority
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back
from megasdc.train.detection.blocks import BlockMismatch
from megasdc.train.detection.data_checks import BATCH, SLOT, Given, WrongPlace, WrongTokens

Recompute = Callable[[TrainingEngine, int | None], tuple[Trace, Trace]]
"""Recomputes a micro-batch of the step, None: the audited one; returns the records of the audit and of the check of
recomputations."""


@dataclass(frozen=True)
class ChainFindings:
    """Findings of a rank in the chain since the last agreement.

    Args:
        step: last step that the optimizer has made; 0: none since the last agreement.
        norm: norm of the gradient, as the rank used it.
        factors: factors by which the rank clipped each group.
        parts: the rank's parts of the squared norm.
        sum: squared norm that all ranks' blocks add up to; None: they were not added in that step.
        own: sum of squares of this rank's blocks.
        block: block of the rank before that this one added up to another sum; None: all sums are equal.
        norm_is_wrong: whether ``norm`` differs from the root of ``sum`` by more than rounding.
        factor_is_wrong: whether a factor does not follow from ``norm``.
        state: block and state that changed between two steps; None: none did.
        copy: block of parameters that is not the cast of its masters; None: all are.
        norm_bits: bits of ``norm``, which must be equal on all ranks; 0: they need not.
        factor_bits: bits of ``factors``, likewise.
        part_bits: bits of ``parts``, which replicas must have equal; 0: they need not.
    """

    step: int = 0
    norm: float = 0.0
    factors: tuple[float, ...] = ()
    parts: tuple[float, ...] = ()
    sum: float | None = None
    own: float = 0.0
    block: BlockMismatch | None = None
    norm_is_wrong: bool = False
    factor_is_wrong: bool = False
    state: tuple[StateBlock, str] | None = None
    copy: StateBlock | None = None
    norm_bits: int = 0
    factor_bits: int = 0
    part_bits: int = 0


@dataclass(frozen=True)
class Evidence:
    """Evidence of one rank in a step.

    Args:
        parameters: checksums of the rank's parameters before the step; empty where they were not read.
        copies: those of them of which every tensor rank has a whole copy.
        audited: checksums of the audited micro-batch's results; empty outside audits.
        repeats: comparison of forward results with their recomputation.
        moved: results of the audited micro-batch with elements in other places; None: it was not computed so.
        rows: check of rows of a product; None: no product was checked.
        given: comparison of the model's micro-batches with the data file; None: not compared.
        settings: digest of the settings that the last step used.
        links: findings in the chain of the last step.
        copy: gathers parameters that are not the cast of their masters again, and rules on them, from the ranks found
            wrong before; None: not compared.
        wrong_place: this rank's place in the data, where it is not the one that follows from the steps; None: it is.
        places: digest of all replicas' places in the data, as this rank has followed them.
        unrecorded: whether the step is audited, and this rank has recorded no result.
        not_finite: whether a result was NaN or Inf.
        loss_not_finite: whether this rank's loss was.
    """

    parameters: Trace = field(default_factory=Trace)
    copies: Trace = field(default_factory=Trace)
    audited: Trace = field(default_factory=Trace)
    repeats: Repeats = field(default_factory=lambda: Repeats(0, 0, ()))
    moved: PermutedResult | None = None
    rows: Rows | None = None
    given: Given | None = None
    settings: int = NONE
    links: ChainFindings = ChainFindings()
    copy: Callable[[Collection[int]], Finding] | None = None
    wrong_place: WrongPlace | None = None
    places: int = NONE
    unrecorded: bool = False
    not_finite: bool = False
    loss_not_finite: bool = False

    @property
    def place_matters(self) -> bool:
        """Whether a result of this rank changed when elements were in other places."""
        return self.moved is not None and trace_digest(self.moved.trace) != trace_digest(self.audited)


PARAMETERS, COPIES, COPY, PLACE, PLACES = "parameters", "copies", "copy", "place", "places"
TOKENS, REPEATS, ROWS, MOVED, AUDITED = "tokens", "repeats", "rows", "elsewhere", "audited"
NORM, NORMS, PART, CLIPPING, FACTORS, STATE = "norm", "norms", "part of the norm", "clipping", "clip factors", "state"
NO_RECORDS, NOT_FINITE, LOSS = "no records", "not finite", "loss"
OF_PLACE, OF_STATE, OF_STEP, OF_CHAIN = "place", "state", "step", "chain"
"""What a field is about: samples and state at the start of the step, its micro-batches, the chain of the last step."""


@dataclass(frozen=True)
class StepField:
    """Field of the one reduction in which all ranks compare their evidence of a step.

    Args:
        among: ranks that must have the same value, or ``ANY`` for a flag; see ``Compared``.
        of: value or flag of this rank's evidence.
        about: what it is about, by which it is settled; None: the caller settles it by name.
    """

    name: str
    among: str
    of: Callable[[Evidence], int]
    about: str | None = None


FIELDS = (
    StepField(PLACE, ANY, lambda one: one.wrong_place is not None, OF_PLACE),
    StepField(PLACES, WORLD, lambda one: one.places, OF_PLACE),
    StepField(PARAMETERS, REPLICAS, lambda one: trace_digest(one.parameters), OF_STATE),
    StepField(COPIES, STAGE, lambda one: trace_digest(one.copies), OF_STATE),
    StepField(COPY, ANY, lambda one: one.links.copy is not None, OF_STATE),
    StepField(TOKENS, ANY, lambda one: one.given is not None and one.given.wrong is not None, OF_STEP),
    StepField(REPEATS, ANY, lambda one: bool(one.repeats.unrepeated), OF_STEP),
    StepField(ROWS, ANY, lambda one: one.rows is not None and one.rows.wrong is not None, OF_STEP),
    StepField(MOVED, ANY, lambda one: one.place_matters, OF_STEP),
    StepField(AUDITED, REPLICAS, lambda one: trace_digest(one.audited)),
    StepField(SETTINGS, REPLICAS, lambda one: one.settings),
    StepField(NORM, ANY, lambda one: one.links.norm_is_wrong or one.links.block is not None, OF_CHAIN),
    StepField(NORMS, WORLD, lambda one: one.links.norm_bits, OF_CHAIN),
    StepField(PART, REPLICAS, lambda one: one.links.part_bits, OF_CHAIN),
    StepField(CLIPPING, ANY, lambda one: one.links.factor_is_wrong, OF_CHAIN),
    StepField(FACTORS, WORLD, lambda one: one.links.factor_bits, OF_CHAIN),
    StepField(STATE, ANY, lambda one: one.links.state is not None, OF_CHAIN),
    StepField(NO_RECORDS, ANY, lambda one: one.unrecorded),
    StepField(NOT_FINITE, ANY, lambda one: one.not_finite),
    StepField(LOSS, ANY, lambda one: one.loss_not_finite),
)


def compared(evidence: Evidence) -> dict[str, Compared]:
    """This rank's value of each field, by name."""
    return {one.name: Compared(one.of(evidence), one.among) for one in FIELDS}


def has_finding(agreed: Agreed, about: str) -> bool:
    """Whether a field about something was found."""
    return any(agreed[one.name] for one in FIELDS if one.about == about)


class ParameterReader:
    """Computes checksums of the parameters of a stage, in the same order on all replicas."""

    def __init__(self, engine: TrainingEngine, algorithm: ChecksumAlgorithm) -> None:
        self._engine = engine
        self._algorithm = algorithm
        self._parameters = [
            (one.fqn, slot, value) for one in list_submodules(engine.module) for slot, value in one.parameters.items()
        ]
        self._copied = [is_copied(value) for _, _, value in self._parameters]
        self._values: list[int | Tensor] = []

    def start(self) -> None:
        """Start the checksums; on a GPU without a sync."""
        self._values = [self._algorithm.start(value.data) for _, _, value in self._parameters]

    def pop_checksums(self) -> Trace:
        """Checksums since the last ``start``; empty without one. Waits for the device."""
        values, self._values = read_back(self._values), []
        if not values:
            return Trace()
        step = self._engine.step_number
        return Trace([Address(step, None, PARAMETER, fqn, slot) for fqn, slot, _ in self._parameters], values)

    def copies(self, trace: Trace) -> Trace:
        """The part of ``pop_checksums``'s trace for parameters of which every tensor rank has a whole copy."""
        places = [place for place, copied in enumerate(self._copied[: len(trace)]) if copied]
        return Trace([trace.addresses[place] for place in places], [trace.checksums[place] for place in places])


logger = logging.getLogger(__name__)

EVENT_KIND = "sdc"


class Findings:
    """Names the ranks behind a finding where that can be proved, in one method for each check.

    ``repeats``: number of repeats of the work; ``suspects``: devices found wrong before; ``referee``: judges results
    that differ.
    """

    def __init__(
        self, run: Run, repeats: int, parameters: ParameterReader, suspects: Suspects, referee: Referee
    ) -> None:
        self._dims = run.dims
        self._group = run.host_group
        self._emit = partial(run.events.emit_on_rank_0, EVENT_KIND)
        self._repeats = repeats
        self._parameters = parameters
        self._suspects = suspects
        self._audits = AuditFindings(run.dims, run.host_group, repeats, referee, self._emit)

    def of_audit(
        self,
        engine: TrainingEngine,
        own: Trace,
        recompute_micro_batch: Recompute,
        earlier: Collection[int],
        comparable: Collection[tuple[int, int]] | None,
        ask_golden: Callable[[], Mapping[int, bool] | None],
    ) -> Finding:
        """Rule on results of the shared micro-batch that differ between replicas; see ``AuditFindings``."""
        work = AuditedWork(engine.step_number, own, lambda: recompute_micro_batch(engine, None)[0], earlier)
        return self._audits.of_replicas(work, comparable, ask_golden)

    def of_permuted(
        self,
        engine: TrainingEngine,
        audited: Trace,
        moved: PermutedResult,
        recompute_micro_batch: Recompute,
        earlier: Collection[int],
    ) -> Finding:
        """Rule on results that changed when elements were in other places; see ``AuditFindings``."""
        work = AuditedWork(engine.step_number, audited, lambda: recompute_micro_batch(engine, None)[0], earlier)
        return self._audits.of_permuted(work, moved)

    def of_recompute(
        self, engine: TrainingEngine, own: Repeats, recompute_micro_batch: Recompute, earlier: Collection[int]
    ) -> Finding:
        """Rule on forward results that their recomputation did not repeat; call in ``after_micro_batches``.

        ``earlier``: ranks that were wrong in an earlier event of the run.
        """
        first = own.unrepeated[0] if own.unrepeated else None
        counts = count_by_submodule(FORWARD, [one.address.fqn for one in own.unrepeated], self._dims.rank)
        found = gather_objects((first, own.compared, counts), self._group)
        flagged = origins({rank: one for rank, (one, *_) in enumerate(found) if one is not None}, self._dims)
        for rank, one in flagged.items():
            self._emit("finding", step=engine.step_number, tier="recompute", rank=rank, address=str(one.address))
        again: dict[int, list[Any]] = {rank: [] for rank in flagged}
        for micro_batch in sorted({one.address.micro_batch or 0 for one in flagged.values()}):
            for _ in range(self._repeats):
                trace = recompute_micro_batch(engine, micro_batch)[1]
                mine = None
                if first is not None and first.address.micro_batch == micro_batch:
                    mine = pair_at(trace, first.address)
                for rank, pair in enumerate(gather_objects(mine, self._group)):
                    if rank in flagged and flagged[rank].address.micro_batch == micro_batch:
                        again[rank].append(pair)
        return Finding(
            "recompute",
            min(one.address.micro_batch or 0 for one in flagged.values()),
            tuple(judge_recomputed(rank, one, again[rank], rank in earlier) for rank, one in flagged.items()),
            sum(compared for _, compared, _ in found),
            merge_counts(counts for *_, counts in found),
        )

    def of_tokens(self, engine: TrainingEngine, given: Given, earlier: Collection[int]) -> Finding:
        """Rule on micro-batches of the model that differ from the data file; each is read from the file again.

        ``earlier``: ranks that were wrong in an earlier event of the run. Call in ``after_micro_batches``.

        Raises:
            DataError, StorageError: a rank cannot read the file any more; on all ranks.
        """
        found = self._from_files(given.wrong)
        flagged = {rank: one for rank, one in enumerate(found) if one is not None}
        for rank, one in flagged.items():
            said = {"rank": rank, "address": str(one.address), "reason": one.reason}
            self._emit("finding", step=engine.step_number, tier="tokens", **said)
            if self._dims.rank == 0:
                logger.warning("rank %d, %s: %s", rank, one.address, one.reason)
        again: dict[int, list[tuple[int, int]]] = {rank: [] for rank in flagged}
        for micro_batch in sorted({one.address.micro_batch or 0 for one in flagged.values()}):
            for _ in range(self._repeats):
                for rank, now in enumerate(self._from_files(given.again(micro_batch))):
                    if rank in flagged and flagged[rank].address.micro_batch == micro_batch:
                        right = flagged[rank].expected or RIGHT
                        again[rank].append((right, right) if now is None else (now.got, now.expected or RIGHT))
        rulings, counts = [], []
        for rank, one in flagged.items():
            first = Unrepeated(one.address, one.got, one.expected or RIGHT)
            ruling = judge_recomputed(rank, first, again[rank], rank in earlier)
            rulings.append(replace(ruling, basis=FILE, expected=one.expected))
            counts.append(count_by_submodule(FORWARD, [one.address.fqn], rank))
        first_of_all = min(one.address.micro_batch or 0 for one in flagged.values())
        return Finding("tokens", first_of_all, tuple(rulings), self._dims.world_size, merge_counts(counts))

    def _from_files(self, own: WrongTokens | None) -> list[WrongTokens | None]:
        """Wrong tokens of every rank, None: right; where a data file is wrong, its error is raised on all ranks."""
        every = gather_objects((socket.gethostname(), own), self._group)
        for rank, (host, one) in enumerate(every):
            if one is not None and one.ends_with is not None:
                raise one.ends_with(f"{one.address}: on rank {rank} on {host} {one.reason}")
        return [one for _, one in every]

    def of_place(self, step: int, wrong: WrongPlace | None, places: int) -> Finding:
        """Rule on ranks whose place in the data does not follow from the steps; else on ranks that disagree with most.

        Args:
            wrong: this rank's wrong place; None: its place follows from the steps.
            places: digest of all replicas' places, as this rank has followed them.
        """
        found = gather_objects((wrong, places), self._group)
        rulings: list[RankVerdict] = []
        for rank, (one, _) in enumerate(found):
            if one is not None:
                said = {"rank": rank, "address": str(one.address), "reason": one.reason}
                self._emit("finding", step=step, tier=PLACE, **said)
                if self._dims.rank == 0:
                    logger.warning("rank %d, %s: %s", rank, one.address, one.reason)
                verdict = INTERMITTENT if rank in self._suspects.ranks else NOT_REPRODUCED
                rulings.append(
                    RankVerdict(rank, verdict, FOLLOWS, one.address, expected=one.expected, got={rank: one.got})
                )
        if not rulings:
            digests = {rank: one for rank, (_, one) in enumerate(found)}
            usual, most = Counter(digests.values()).most_common(1)[0]
            address = Address(step, None, FORWARD, BATCH, SLOT)
            others = [rank for rank, one in digests.items() if one != usual]
            self._emit("finding", step=step, tier=PLACE, ranks=others, address=str(address))
            if 2 * most > len(digests):
                for rank in others:
                    got = {rank: digests[rank]}
                    rulings.append(RankVerdict(rank, INCONCLUSIVE, MAJORITY, address, expected=usual, got=got))
            else:
                rulings = [RankVerdict(None, INCONCLUSIVE, MAJORITY, address, suspects=tuple(digests), got=digests)]
        return Finding(PLACE, None, tuple(rulings), self._dims.world_size)

    def of_parameters(self, engine: TrainingEngine, own: Trace) -> Finding:
        """Gather the parameters again from their owners' master shards; ranks whose parameters change were wrong.

        Where all replicas had the same wrong parameter, its owner has given it to them, and none is named here. A wrong
        master shard is gathered by all ranks and is not detected here.
        """
        engine.optimizer.update_lp_params()
        self._parameters.start()
        now = self._parameters.pop_checksums()
        every = gather_objects((own.checksums, now.checksums), self._group)
        replicas = next(ranks for ranks in self._dims.positions if self._dims.rank in ranks)
        alike = [len(set(values)) == 1 for values in zip(*(every[rank][0] for rank in replicas), strict=True)]
        """For each parameter, whether all replicas had the same value, which then is its owner's."""
        rows = zip(own.addresses, own.checksums, now.checksums, alike, strict=True)
        changed = [row[:3] for row in rows if row[1] != row[2] and not (row[3] and self._dims.data > 1)]
        counts = count_by_submodule(PARAMETER, [address.fqn for address, *_ in changed], self._dims.rank)
        found = gather_objects((changed[0] if changed else None, counts), self._group)
        rulings = []
        for rank, (first, _) in enumerate(found):
            if first is not None:
                address, before, after = first
                self._emit("finding", step=engine.step_number, tier="parameters", rank=rank, address=str(address))
                verdict = INTERMITTENT if rank in self._suspects.ranks else NOT_REPRODUCED
                rulings.append(RankVerdict(rank, verdict, "master shard", address, expected=after, got={rank: before}))
        if any(every[rank][1] != every[ranks[0]][1] for ranks in self._dims.positions for rank in ranks):
            suspects = tuple(range(self._dims.world_size))
            rulings.append(RankVerdict(None, INCONCLUSIVE, "master shard", own.addresses[0], suspects=suspects))
        compared = self._dims.world_size * len(own)
        merged = merge_counts(of_rank for _, of_rank in found)
        return Finding("parameters", None, tuple(rulings), compared, merged)

    def of_copies(self, engine: TrainingEngine, own: Trace) -> Finding:
        """Find tensor ranks whose copies of a parameter differ from the majority's, where there are three or more.

        All replicas have the same wrong copy, so one of them made it in its update, and none can be named. All copies
        are gathered again, which repairs a copy that became wrong after the update.
        """
        engine.optimizer.update_lp_params()
        copies = self._parameters.copies(own)
        sent = gather_objects((copies.addresses, copies.checksums), self._group)
        rulings = []
        for stage in range(self._dims.pipeline):
            ranks = [rank for rank in range(self._dims.world_size) if self._dims.at(rank).pp_rank == stage]
            for place, address in enumerate(sent[ranks[0]][0]):
                values = {rank: sent[rank][1][place] for rank in ranks}
                usual = majority(values, len(ranks))
                suspects = tuple(rank for rank in ranks if usual is None or values[rank] != usual)
                if not suspects:
                    continue
                got = {rank: values[rank] for rank in suspects}
                rulings.append(
                    RankVerdict(None, INCONCLUSIVE, "copies on tensor ranks", address, suspects=suspects, got=got)
                )
                break
        return Finding("copies", None, tuple(rulings), compared=sum(len(values) for _, values in sent))
