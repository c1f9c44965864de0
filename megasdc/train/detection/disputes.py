"""Settlement of findings: all ranks gather the same evidence, repeat the work, and come to the same ruling.

Every function here is called by all ranks at the same point, since findings need collectives. After an exception none
is called.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasdc.addresses import FORWARD, PARAMETER
from megasdc.config import SdcSection
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.observer import Listener
from megasdc.errors import CorruptionError
from megasdc.parallel.agreement import Agreed
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.ballot import Ballot
from megasdc.sdc.evidence import Counts, count_differing
from megasdc.sdc.recompute import Repeats, judge_recomputed, origins, pair_at
from megasdc.sdc.replay import (
    GOLDEN,
    INCONCLUSIVE,
    INTERMITTENT,
    MAJORITY,
    NOT_REPRODUCED,
    REPLAY,
    Ruling,
    repeated_value,
    settle,
    to_repeat,
)
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import AFFECTED, DIVERGENT
from megasdc.sdc.verdict import INCONCLUSIVE as UNCLEAR
from megasdc.sdc.vote import vote
from megasdc.train.detection.gather import gather_traces
from megasdc.train.detection.golden_check import GoldenAnswer, GoldenCheck
from megasdc.train.detection.incidents import Incidents, Settled, describe, say
from megasdc.train.detection.parameters import ParameterReader
from megasdc.train.detection.suspects import Suspects
from megasdc.train.run import Run

if TYPE_CHECKING:
    from megasdc.train.detection.checks import Evidence

logger = logging.getLogger(__name__)

Rehearse = Callable[[TrainingEngine, int], tuple[Trace, Trace]]
"""Recomputes a micro-batch of the step; returns the records of the audit and of the check of recomputations."""
SEVERITY = ("warn", "repair", "halt")
STATE_TIERS = ("parameters", "copies")
"""Checks of the state at the start of a step, that is, of the step before."""
EVENT_KIND = "sdc"


class Disputes:
    """Settles findings: names ranks where that can be proved, and acts by policy.

    Args:
        section: policies, repeats and golden trace.
        run: with engine and events.
        keys: of this rank: properties that must be equal between replicas for their results to be comparable.
        parameters: reads those of this rank.
        incidents: reports settled findings.
        before: listeners that inject faults, for the golden workload.
    """

    def __init__(
        self,
        section: SdcSection,
        run: Run,
        keys: Mapping[str, Any],
        parameters: ParameterReader,
        incidents: Incidents,
        before: Sequence[Listener] = (),
    ) -> None:
        self._section = section
        self._dims = run.dims
        self._group = run.host_group
        self._events = run.events
        self._keys = dict(keys)
        self._parameters = parameters
        self._incidents = incidents
        self._before = tuple(before)
        self._comparable: Collection[tuple[int, int]] | None = None
        self._golden: GoldenCheck | None = None
        self._suspects = Suspects()
        self._accepted: int | None = None
        self._committed_wrong: int | None = None
        self._wrong_since: int | None = None

    # --- before the first step ----------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Find out which positions are comparable and whether the golden trace fits."""
        self._incidents.on_start()
        self._suspects.on_start(run.engine.device, self._group)
        keys = gather_objects(self._keys, self._group)
        self._comparable = comparable_positions(keys, self._dims)
        everywhere = self._dims.pipeline * self._dims.tensor
        if len(self._comparable) < everywhere:
            names = sorted({name for key in keys for name in key if key[name] != keys[0].get(name)})
            self._tell("not_comparable", positions=everywhere - len(self._comparable), differing=names)
            logger.warning(
                "%d of %d positions have replicas that differ in %s: their results cannot be compared",
                everywhere - len(self._comparable),
                everywhere,
                ", ".join(names),
            )
        if self._section.golden is not None:
            path, keep = Path(self._section.golden), self._section.golden_interval is not None
            golden = GoldenCheck(path, self._dims, self._group, self._before, keep=keep)
            if unfit := golden.unfit():
                self._tell("golden_unfit", reason=unfit[0], ranks=len(unfit))
                logger.warning("the golden trace %s does not fit %d ranks: %s", golden.path, len(unfit), unfit[0])
            else:
                self._golden = golden

    def can_compare(self, positions: Iterable[tuple[int, int]]) -> bool:
        """Whether any of some positions has comparable replicas."""
        return self._comparable is None or any(position in self._comparable for position in positions)

    # --- one finding --------------------------------------------------------------------------------------------

    def settle(
        self, engine: TrainingEngine, evidence: Evidence, agreed: Agreed, rehearse: Rehearse, *, repaired: bool
    ) -> bool:
        """Name wrong ranks and act by policy.

        Args:
            engine: in ``after_micro_batches``.
            evidence: of this rank.
            agreed: the finding that all ranks agree on.
            rehearse: recomputes a micro-batch.
            repaired: whether the step was rerun already.

        Returns:
            Whether the step is to be rerun.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        with self._marked_if_unsettled(engine.step_number):
            again = self._settle(engine, evidence, agreed, rehearse, repaired)
        return self._commit(engine.step_number, again)

    @contextmanager
    def _marked_if_unsettled(self, step: int) -> Iterator[None]:
        """If settling raises an exception, the finding is inconclusive; if that halts, mark it for the next start."""
        try:
            yield
        except CorruptionError:
            raise
        except Exception:
            if self._section.policy.inconclusive == "halt":
                self._incidents.mark(step, any_rank=True)
            raise

    def _settle(
        self, engine: TrainingEngine, evidence: Evidence, agreed: Agreed, rehearse: Rehearse, repaired: bool
    ) -> bool:
        step, earlier = engine.step_number, self._suspects.ranks
        audit_differs = self.can_compare(agreed.differing[1])
        if agreed.differing[0]:
            again = self._act(step, self._settle_parameters(engine, evidence.parameters), repaired)
            if audit_differs and not again:  # ranks with wrong parameters computed other results
                self._tell("audit_void", step=step, reason="the parameters were not equal")
            return again
        if agreed.stages[0]:
            return self._act(step, self._settle_copies(engine, evidence.parameters), repaired)
        again = False
        if agreed.raised[0]:
            again = self._act(step, self._settle_recompute(engine, evidence.repeats, rehearse, earlier), repaired)
        if audit_differs and not again:
            again = self._act(step, self._settle_audit(engine, evidence.audited, rehearse, earlier), repaired)
        return again

    def settle_kept(self, engine: TrainingEngine, own: Trace, agreed: Agreed, *, repaired: bool) -> bool:
        """Name the ranks whose parameters are wrong before they are saved, and act by policy.

        Args:
            engine: between two steps.
            own: parameters of this rank.
            agreed: the finding that all ranks agree on.
            repaired: whether they were gathered again already.

        Returns:
            Whether they were gathered again and are to be compared again.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        with self._marked_if_unsettled(engine.step_number):
            differ = self._settle_parameters if agreed.differing[0] else self._settle_copies
            again = self._act(engine.step_number, differ(engine, own), repaired)
        return self._commit(engine.step_number, again)

    def _settle_audit(
        self, engine: TrainingEngine, own: Trace, rehearse: Rehearse, earlier: Collection[int]
    ) -> Settled:
        audit = gather_traces(own, self._dims, self._group)
        ballot = vote(audit, self._dims, self._comparable)
        self._tell_finding(engine.step_number, ballot)
        again = [gather_traces(rehearse(engine, 0)[0], self._dims, self._group) for _ in range(self._section.repeats)]
        golden = None if self._golden is None else self._ask(self._golden, engine.step_number).verified
        repeats = {
            (rank, place): [repeated_value(rank, place, audit, one, self._dims) for one in again]
            for rank, place in to_repeat(ballot)
        }
        rulings = settle(ballot, repeats, golden, earlier)
        named = {ruling.rank for ruling in rulings if ruling.rank is not None}
        self._tell_overruled(engine.step_number, ballot, named, golden or {})
        return Settled("audit", 0, rulings, *count_differing(audit, self._dims, named))

    def check_golden(self, step: int) -> float:
        """Run the golden workload on all ranks without a dispute, and act by policy.

        Args:
            step: the next step.

        Returns:
            Seconds that it took.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt, or to repair and a repeat was wrong too.

        Collective: all ranks of the world.
        """
        if self._golden is None:
            return 0.0
        answer = self._ask(self._golden, step, self._section.repeats)
        if rulings := answer.rulings(step, self._suspects.ranks):
            wrong_again = any(ruling.verdict != NOT_REPRODUCED for ruling in rulings)
            self._act(step, Settled("golden", None, rulings, answer.compared, answer.counts), wrong_again)
            self._commit(step, again=False)
        return answer.seconds

    def _ask(self, golden: GoldenCheck, step: int, repeats: int = 0) -> GoldenAnswer:
        answer = golden.ask(step, repeats)
        wrong, received, unclear = (answer.ranks(status) for status in (DIVERGENT, AFFECTED, UNCLEAR))
        self._tell(
            "golden",
            step=step,
            compared=answer.compared,
            wrong=wrong,
            affected=received,
            inconclusive=unclear,
            seconds=answer.seconds,
        )
        if self._dims.rank == 0:
            logger.info(
                "step %d: golden trace: %d results compared in %.1f s, ranks that differ: %s",
                step,
                answer.compared,
                answer.seconds,
                ", ".join(map(str, sorted({*wrong, *received, *unclear}))) or "none",
            )
        return answer

    def _settle_recompute(
        self, engine: TrainingEngine, own: Repeats, rehearse: Rehearse, earlier: Collection[int]
    ) -> Settled:
        first = own.unrepeated[0] if own.unrepeated else None
        counts = count_by_submodule(FORWARD, [one.address.fqn for one in own.unrepeated], self._dims.rank)
        found = gather_objects((first, own.compared, counts), self._group)
        flagged = origins({rank: one for rank, (one, *_) in enumerate(found) if one is not None}, self._dims)
        for rank, one in flagged.items():
            self._tell("finding", step=engine.step_number, tier="recompute", rank=rank, address=str(one.address))
        again: dict[int, list[Any]] = {rank: [] for rank in flagged}
        for micro_batch in sorted({one.address.micro_batch or 0 for one in flagged.values()}):
            for _ in range(self._section.repeats):
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

    def _settle_parameters(self, engine: TrainingEngine, own: Trace) -> Settled:
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
                self._tell("finding", step=engine.step_number, tier="parameters", rank=rank, address=str(address))
                verdict = INTERMITTENT if rank in self._suspects.ranks else NOT_REPRODUCED
                rulings.append(Ruling(rank, verdict, "master shard", address, expected=after, got={rank: before}))
        by_position: dict[int, set[tuple[int, ...]]] = {}
        for rank, (_, _, values) in enumerate(found):
            by_position.setdefault(rank - _replica(rank, self._dims) * self._dims.tensor, set()).add(tuple(values))
        if any(len(values) > 1 for values in by_position.values()):
            suspects = tuple(range(self._dims.world_size))
            rulings.append(Ruling(None, INCONCLUSIVE, "master shard", own.addresses[0], suspects=suspects))
        compared = self._dims.world_size * len(own)
        merged = merge_counts(of_rank for _, of_rank, _ in found)
        return Settled("parameters", None, tuple(rulings), compared, merged)

    def _settle_copies(self, engine: TrainingEngine, own: Trace) -> Settled:
        """Find tensor ranks whose copies of a parameter differ from the majority's, where there are three or more.

        All replicas have the same wrong copy, so one of them made it in its update, and none can be named. All are
        gathered again, which repairs one that became wrong after the update.
        """
        engine.optimizer.update_lp_params()
        copies = self._parameters.copies(own)
        sent = gather_objects((copies.addresses, copies.checksums), self._group)
        rulings = []
        for stage in range(self._dims.pipeline):
            ranks = [rank for rank in range(self._dims.world_size) if self._place(rank).pp_rank == stage]
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

    def _place(self, rank: int) -> ParallelDims:
        return ParallelDims(self._dims.tensor, self._dims.pipeline, self._dims.data, rank)

    # --- what is done -------------------------------------------------------------------------------------------

    def _act(self, step: int, found: Settled, repaired: bool) -> bool:
        policy = self._section.policy
        action = max((getattr(policy, ruling.verdict) for ruling in found.rulings), key=SEVERITY.index)
        if repaired and action == "repair":
            action = "halt"  # wrong again after the repair
        if action == "halt":  # first, so that the next start knows even if a report fails
            self._incidents.mark(step)
        for ruling in found.rulings:
            self._tell("verdict", step=step, tier=found.tier, action=action, **describe(ruling))
        self._suspects.add(ruling.rank for ruling in found.rulings if ruling.rank is not None)
        if action == "warn":
            self._accepted = step - 1 if found.tier in STATE_TIERS else step
        text = say(found.rulings)
        page = self._incidents.report(step, found, action)
        if action == "halt":
            again = " after the step was recomputed" if repaired else ""
            raise CorruptionError(
                f"step {step} is not committed: the {found.tier} check found silent data corruption{again}: {text}. "
                + (f"What to do: {page}" if page else "The incident report could not be written")
            )
        logger.warning("step %d: the %s check found silent data corruption: %s; %s", step, found.tier, text, action)
        return action == "repair"

    def _commit(self, step: int, again: bool) -> bool:
        """Record what policy ``warn`` accepts, unless it is redone: later checkpoints contain it on all replicas."""
        since, self._accepted = self._accepted, None
        if since is None or again:
            return again
        self._committed_wrong = step
        if self._wrong_since is None or since < self._wrong_since:
            self._wrong_since = since
            self._tell("not_verified_from", step=since)
            logger.warning("checkpoints from step %d on hold this corruption and will not be verified", since)
        return again

    def after_audit(self, run: Run, result: StepResult) -> None:
        """After an audited step was committed: if all replicas agreed, earlier checkpoints are verified.

        Checkpoints saved since a wrong state was committed are not.
        """
        if result.step == self._committed_wrong:
            return
        last = result.step - 1 if self._wrong_since is None else min(result.step, self._wrong_since) - 1
        if self._dims.rank == 0:
            self._events.emit("audit", "agreed", step=result.step, verified_up_to=last)
        self._incidents.verified(last, result.step)

    def _tell_finding(self, step: int, ballot: Ballot) -> None:
        for flag in ballot.flagged:
            self._tell("finding", step=step, tier="audit", rank=flag.rank, address=str(flag.address), basis=MAJORITY)
        if ballot.dispute is not None:
            ranks = [rank for values in ballot.dispute.values for rank in values]
            self._tell("finding", step=step, tier="audit", ranks=ranks, address=str(ballot.dispute.address))

    def _tell_overruled(self, step: int, ballot: Ballot, named: Collection[int], golden: Mapping[int, bool]) -> None:
        """Report findings of the majority that were overruled, so that no event accuses a rank that is not named."""
        for flag in ballot.flagged:
            if flag.rank in named:
                continue
            by = GOLDEN if golden.get(flag.rank) or not all(golden.get(rank, True) for rank in flag.against) else REPLAY
            self._tell("overruled", step=step, rank=flag.rank, address=str(flag.address), basis=by)

    def _tell(self, name: str, *, step: int | None = None, **fields: Any) -> None:
        if self._dims.rank != 0:
            return
        try:
            self._events.emit(EVENT_KIND, name, step=step, **fields)
        except OSError as error:  # not raised: the other ranks wait in the collectives that follow
            logger.error("the event %s/%s of step %s is not written: %s: %s", EVENT_KIND, name, step, error, fields)

    def state_dict(self) -> dict[str, Any]:
        """Devices found wrong so far, and the first step whose checkpoint cannot be verified."""
        return {"earlier": self._suspects.state(), "wrong_since": self._wrong_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._wrong_since = state.get("wrong_since")
        if unknown := self._suspects.load_state(state["earlier"]):
            self._tell("earlier_not_known", ranks=unknown)
            logger.warning(
                "ranks %s were found wrong before, on hosts and devices that the checkpoint does not name: forgotten",
                unknown,
            )


def comparable_positions(keys: Sequence[Mapping[str, Any]], dims: ParallelDims) -> set[tuple[int, int]]:
    """Positions (pp_rank, tp_rank) whose replicas have equal keys.

    Args:
        keys: by global rank.
        dims: layout.
    """
    positions: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for rank, key in enumerate(keys):
        place = ParallelDims(dims.tensor, dims.pipeline, dims.data, rank)
        positions.setdefault((place.pp_rank, place.tp_rank), []).append(key)
    return {position for position, found in positions.items() if all(key == found[0] for key in found)}


def _replica(rank: int, dims: ParallelDims) -> int:
    return ParallelDims(dims.tensor, dims.pipeline, dims.data, rank).dp_rank


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
