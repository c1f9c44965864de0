"""Checks of a step before it is committed: audits, recomputations and parameters, with the same findings on every rank.

Evidence is collected while micro-batches run and compared once, after the last of them and before any gradient is mixed
over replicas. A finding is not an error: all ranks learn it at the same point and settle it together.

An audit inside one device computes the audited micro-batch once more, each operation with its elements in other places.
Each stage replays it alone, where it would wait for others (``megasdc.engine.schedules``), but for an extra one. The
first audit of a start computes it after all micro-batches, and also tries every operation both ways
(``megasdc.sdc.audits``).

``build_detection`` builds the checks of a run from the sections `audit` and `sdc`. The referee of a run knows the
submodules of Megatron-core's, and those that are no modules lie between two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, MICRO_BATCH_PHASES, OF_AUDIT, RECOMPUTE, Address
from megasdc.common.errors import DataError
from megasdc.config.detection import EXTRA, AlwaysOnSection, AuditSection, SdcSection
from megasdc.config.drop_compute import DISCARD, RESAMPLE, DropComputeSection
from megasdc.config.hooks import AFTER_NORM, LOCAL
from megasdc.config.load import RunConfig
from megasdc.config.sections import TraceSection
from megasdc.data.loader import Shared, StepBatches
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.observer import Listener, ObserverSwitch, Watch
from megasdc.engine.schedules import StageReplay
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.kinds import LOSS as LOSS_KIND
from megasdc.model.submodules import Submodule, list_submodules
from megasdc.optim.bounds import momentum_reset_of
from megasdc.parallel.collectives import Agreed, Field, compare_replicas
from megasdc.sdc.audits import PermutableOps, PermutedResult
from megasdc.sdc.budget import CheckBudget, CheckPlan
from megasdc.sdc.cost import Cadence
from megasdc.sdc.finding import Finding
from megasdc.sdc.nonfinite import FiniteRecorder
from megasdc.sdc.referee.recompute import BETWEEN, Call, Exhibit, make_exhibit
from megasdc.sdc.referee.referee import Referee, Subject
from megasdc.sdc.rows import Rows, WrongRow
from megasdc.sdc.slice_checks import Checkable, SliceChecks
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.sdc.used_settings import NONE, SETTINGS
from megasdc.sdc.verdict import compare_recomputed
from megasdc.tensors.checksum import ChecksumAlgorithm, default_algorithm
from megasdc.tensors.permuted import Permuted
from megasdc.train.detection.budget import coverage_table
from megasdc.train.detection.chain import Chain
from megasdc.train.detection.data_checks import Given, PlaceCheck, TokenCheck, WrongTokens, unreadable
from megasdc.train.detection.finding_policy import FindingPolicy, Incidents
from megasdc.train.detection.findings import (
    AUDITED,
    COPIES,
    LOSS,
    MOVED,
    NO_RECORDS,
    NOT_FINITE,
    OF_PLACE,
    OF_STATE,
    OF_STEP,
    PARAMETERS,
    ChainFindings,
    Evidence,
    ParameterReader,
    Recompute,
    compared,
    has_finding,
)
from megasdc.train.detection.golden_key import golden_key
from megasdc.train.detection.nonfinite import NonFiniteSearch
from megasdc.train.detection.rows import RowChecks
from megasdc.train.signals import StopSignals


class PermutedReplay:
    """Repeats micro-batches with the elements of all operations in other places.

    Args:
        run: the run whose ranks take part, and whose event log tells which operations were tried.
        tracer: records results of a stage's replays.
        clock: measures the time of those replays.
    """

    def __init__(self, run: Run, tracer: Tracer, clock: AbstractContextManager[None]) -> None:
        self._places = PermutableOps(run.dims, run.host_group, run.events.emit)
        self._tracer, self._clock = tracer, clock

    def begin(self, engine: TrainingEngine) -> None:
        """Begin an audited step: its stages replay the micro-batch, if it is known which operations can be moved.

        Results of the replay come to ``listen``.
        """
        if self._places.without is not None:
            engine.replay = StageReplay(0, self._moving)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        with self._clock, Permuted(self._places.without or ()):
            yield

    def listen(self, address: Address, result: Tensor) -> None:
        """Listener that records results of replays."""
        with self._clock:
            self._tracer(address, result)

    def pop_trace(self, engine: TrainingEngine, recompute_micro_batch: Recompute) -> Trace:
        """Trace of the audited micro-batch with elements in other places; without a fault it is equal to the audit's.

        The micro-batch was replayed in the step, or is computed now.

        Collective: all ranks of the world.
        """
        if engine.replay is None:
            return self.replay(engine, recompute_micro_batch)
        engine.replay = None
        return self._tracer.pop_trace()

    def replay(self, engine: TrainingEngine, recompute_micro_batch: Recompute) -> Trace:
        """Compute the audited micro-batch once more with elements in other places, after all others.

        Collective: all ranks of the world.
        """
        return self._places.compute(engine.step_number, lambda: recompute_micro_batch(engine, None)[0])

    def update(self, engine: TrainingEngine, recompute_micro_batch: Recompute) -> bool:
        """Try the micro-batch's operations again, after all others; returns whether more of them are no longer moved.

        Collective: all ranks of the world.
        """
        return self._places.update(engine.step_number, lambda: recompute_micro_batch(engine, None)[0])


logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_FINITE_LOSS = "its loss or gradient norm is not finite"
"""Why an audit of a step that was taken verifies nothing."""
FINITE_PHASES = (FORWARD, BACKWARD)
"""Phases whose results are checked for NaN and Inf in every step.

Weight gradients, as many bytes again, are part of the gradient norm, which is always checked.
"""


@dataclass(frozen=True)
class CheckSettings:
    """Settings of a run's checks.

    Args:
        recomputes: whether activations are recomputed.
        save_interval: number of steps between checkpoints; 0: none are saved.
        checkable: parts of the optimizer's step that can be checked where gradients are bounded.
    """

    audit: AuditSection
    sdc: SdcSection
    algorithm: ChecksumAlgorithm
    recomputes: bool
    save_interval: int
    checkable: Checkable
    drops: DropComputeSection

    @property
    def checks_recompute(self) -> bool:
        """Whether forward results are compared with their recomputation in every step."""
        always_on = self.sdc.always_on
        return always_on.enabled and self.recomputes and always_on.recompute is not False

    @property
    def checks_finite(self) -> bool:
        """Whether results are checked for NaN and Inf in every step."""
        return self.sdc.always_on.enabled and self.sdc.always_on.finite


class StepChecker(Hook):
    """Checks each step as configured, and has findings settled before the step is committed.

    Args:
        settings: settings of the checks.
        batches: this replica's micro-batches.
        policy: settles findings.
        signals: signals of this process; SIGUSR2 requests an audit.
        budget: decides which steps are looked at, and measures the time of that; its plan is reported at the start.
        referee: receives the results of audited micro-batches that it asks for.

    Attributes:
        slices: the hook that checks slices of the optimizer; None: not enabled.
        chain: the hook that checks norm, clipping, state between steps and the copy of the masters; None: not enabled.
        rows: the hook that checks rows of products; None: not enabled.
        tokens: the hook that compares micro-batches with the data file; None: not enabled.
        place: compares this rank's place in the data with the one that follows from the steps; None: not enabled.
        permuted: computes audited micro-batches with elements in other places; None: not enabled.
        table: returns the table of what is covered, as lines, from a cadence and the limits of checks by name.
    """

    saved_as = "Detection"

    def __init__(
        self,
        settings: CheckSettings,
        run: Run,
        batches: StepBatches,
        policy: FindingPolicy,
        parameters: ParameterReader,
        signals: StopSignals,
        budget: CheckBudget,
        referee: Referee,
    ) -> None:
        sdc = settings.sdc
        self._audit = settings.audit
        self._always_on = sdc.always_on
        self._golden_at_start = sdc.golden_at_start
        self._golden_interval = sdc.golden_interval
        self._golden_step: int | None = None  # the last step before which the golden workload was run
        self._batches = batches
        self._policy = policy
        self.budget = budget
        size = sdc.always_on.slice_elements
        self.slices: SliceChecks | None = None
        if sdc.always_on.enabled and size is not None:
            self.slices = SliceChecks(
                size, policy.settle_slice, self._report_weaker, budget, policy.settings, settings.checkable
            )
        self.chain: Chain | None = None
        if sdc.always_on.enabled and sdc.always_on.chain:
            self.chain = Chain(run, settings.algorithm, policy.settle_slice, budget)
        self.rows: RowChecks | None = None
        if sdc.always_on.enabled and sdc.always_on.rows:
            self.rows = RowChecks(list_submodules(run.engine.module), run, budget.looks)
        always_on = sdc.always_on
        self.tokens = TokenCheck(batches, run.events) if always_on.enabled and always_on.tokens else None
        drops = settings.drops
        self.place: PlaceCheck | None = None
        if always_on.enabled:
            given_up, again = drops.samples == DISCARD, drops.compensation == RESAMPLE
            self.place = PlaceCheck(run, given_up=drops.enabled and given_up, again=drops.enabled and again)
        self._save_interval = settings.save_interval
        self.referee = referee
        self._run, self._host_group = run, run.host_group
        self._within: dict[str, str] = {}
        self.table: Callable[[Cadence, Mapping[str, str]], list[str]] = lambda cadence, within: []
        self._requested = False
        self._auditing = self._is_void = False
        self._extra: Shared | None = None
        """The extra micro-batch that is audited in this step; None: no audit, or of one of the step's micro-batches."""
        self._first_step: int | None = None
        self._end: int | None = None
        """The number after the last step's, where what the run ends with is audited; None: it is not, or not yet."""
        self.observe: Callable[[Run], None] = lambda run: None
        """Attaches listeners for the results that are needed with the parameters of now."""
        self._covered: Collection[int] = ()
        self._compares = True
        """Whether ranks compare in this step what each step has; the same on all of them."""
        self._parameters = parameters
        self._audited, self._checked, checked = _recorders(run, settings)
        self.permuted: PermutedReplay | None = None
        if self._audit.enabled and self._audit.permutes(run.dims.data):
            self.permuted = PermutedReplay(run, _audit_tracer(settings, self._audited.fqns or ()), budget.replays)
        self._finite = FiniteRecorder()
        self._finite_fqns = frozenset(checked if settings.checks_finite else ())
        self.search: NonFiniteSearch | None = None
        self._request = Field(lambda: float(signals.pop_audit_request()))
        asked = (self._request,) if self._audit.enabled else ()
        followed = () if self.place is None else (self.place.completed,)
        self.fields = (*asked, *followed, *self.budget.fields)

    # --- what is listened to ------------------------------------------------------------------------------------

    def is_audit(self, step: int) -> bool:
        """Whether a step is audited; the same on all ranks."""
        return self._is_asked(step) or step in (self._first_step, self._end)

    def _is_asked(self, step: int) -> bool:
        return self._requested or self._audit.is_due(step, self._save_interval, self.budget.audit_factor)

    def _is_extra(self, step: int) -> bool:
        """Whether an audit of a step takes an extra micro-batch instead of one of the step's.

        It always does where only the start asks for the audit, so that a resumed run has the bits of one that went on,
        and at the end of a run.
        """
        return self._audit.micro_batch == EXTRA or step == self._end or not self._is_asked(step)

    def audited_submodules(self, step: int) -> Collection[str]:
        """Submodules that the audit observes in a step, in a micro-batch of the step."""
        return self._audited.fqns or () if self.is_audit(step) and not self._is_extra(step) else ()

    def submodules_of_extra(self, step: int) -> Collection[str]:
        """Submodules that the audit observes in a step, in an extra micro-batch."""
        return self._audited.fqns or () if self.is_audit(step) and self._is_extra(step) else ()

    def checked_submodules(self, step: int) -> Collection[str]:
        """Submodules that the check of recomputations observes in a step."""
        return self._checked.fqns or () if self.budget.looked_at(step) else ()

    def row_submodules(self, step: int) -> Collection[str]:
        """Submodules that the check of rows observes in a step."""
        return self.rows.fqns if self.rows is not None and self.budget.looked_at(step) else ()

    def finite_submodules(self, step: int) -> Collection[str]:
        """Submodules that the check for NaN and Inf observes in a step."""
        return self._finite_fqns if self.budget.looked_at(step) else ()

    def record_audited(self, address: Address, result: Tensor) -> None:
        """Listener that records results of the audited micro-batch."""
        if self._auditing:
            with self.budget.audits:
                self._audited(address, result)

    def record_checked(self, address: Address, result: Tensor) -> None:
        """Listener that records forward results and their recomputations."""
        if address.micro_batch in self._covered:
            with self.budget.looks:
                self._checked(address, result)

    def record_finite(self, address: Address, result: Tensor) -> None:
        """Listener that records whether results are finite."""
        covered = address.micro_batch in self._covered and address.phase in FINITE_PHASES
        if covered and address.fqn in self._finite_fqns:
            with self.budget.looks:
                self._finite(address, result)

    # --- a step -------------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Find out which positions are comparable, and report what is covered; the first step is audited."""
        if self._audit.enabled and (run.dims.data > 1 or self.permuted is not None):
            self._first_step = run.engine.step_number
        left = self._policy.on_start(run)
        if self._always_on.enabled:
            self._policy.settings.start()
        if self.place is not None:
            self.place.start()
        if left:
            self._report_weaker(left)
        if self._golden_at_start:
            self._check_golden(run)

    def _check_golden(self, run: Run) -> None:
        self._golden_step = run.engine.step_number
        run.progress.paused_s += self._policy.check_golden(self._golden_step)

    def before_step(self, run: Run) -> None:
        """Decide what is checked in this step."""
        step = run.engine.step_number
        if self._golden_interval and step % self._golden_interval == 0 and step != self._golden_step:
            self._check_golden(run)
        self._auditing = self.is_audit(step)
        if self.search is not None:
            self.search.place = None
        has_looked, self._covered = bool(self._covered), self.budget.looked_at(step)
        # What a step that looked has found in the chain is compared in the next.
        self._compares = has_looked or bool(self._covered) or self._auditing or self.budget.cadence.compares(step)
        self.budget.begin(step, audits=self._auditing, compares=self._compares)
        if self.rows is not None:
            turn = self.budget.cadence.turn(step)
            self.rows.choose(turn, self.budget.micro_batches, looks=bool(self._covered))
        if self.tokens is not None:
            self.tokens.choose(self._covered)
        shared = self._begin_batches(run, step)
        if shared is not None and self.permuted is not None:
            self.permuted.begin(run.engine)
        if self._auditing or (self._compares and self._always_on.enabled and self._always_on.parameters):
            with self.budget.fixed:
                self._parameters.start()

    def _begin_batches(self, run: Run, step: int) -> Shared | None:
        """Begin to read a step's micro-batches; returns the one that all replicas share, None: each reads its own."""
        with self.budget.waits:
            audited = self._share(run, step) if self._auditing else None
        shared, self._extra = (None, audited) if self._is_extra(step) else (audited, None)
        run.engine.shared_source = None if shared is None else shared.source
        if self.place is not None:
            self.place.begin(run.engine.shared_source)
        self._batches.begin(shared, self._extra)
        return shared

    def _share(self, run: Run, step: int) -> Shared:
        """The replica whose samples all replicas use in an audit, and the positions of these samples.

        At the end of a run they are those of the last step, since the stream may end with them.
        """
        dims = run.dims
        source = self._audit.source(step, dims.data, self.budget.audit_factor)
        positions = torch.full((run.loader.micro_batch_size,), -1, dtype=torch.int64)
        if dims.is_first_stage and dims.dp_rank == source:  # reads every micro-batch; stages in the middle read none
            at_end = step == self._end
            positions = torch.tensor(self._batches.positions(0) if at_end else run.loader.next_positions)
        dist.all_reduce(positions, op=dist.ReduceOp.MAX, group=self._host_group)
        return Shared(source, tuple(positions.tolist()))

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Compare the evidence of all ranks; returns when the step may be committed.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.
        """
        if not (self._auditing or (self._always_on.enabled and self._compares)):
            return
        budget, repaired = self.budget, False
        while True:
            with budget.looks:
                checked = compare_recomputed(self._checked.pop_trace())
                seen = self._finite.pop_first(engine.dims)
            with budget.fixed:
                parameters = self._parameters.pop_checksums()
            with budget.audits:
                if self._extra is not None:
                    self._compute_extra(engine, self._extra)
                audited, moved = self._audited.pop_trace(), self._move(engine)
            links, of_copy = self._links()
            settings = self._policy.settings.pop_digest() if self._always_on.enabled else NONE
            with budget.fixed:
                copies, loss_finite = self._parameters.copies(parameters), loss_is_finite(engine)
            evidence = Evidence(
                parameters=parameters,
                copies=copies,
                audited=audited,
                repeats=checked,
                moved=moved,
                rows=self._found_in_rows(engine),
                given=self._found_in_tokens(engine),
                settings=settings,
                links=links,
                copy=of_copy,
                wrong_place=None if self.place is None else self.place.in_step(engine.completed),
                places=NONE if self.place is None else self.place.digest,
                unrecorded=self._auditing and not len(audited),
                not_finite=seen is not None,
                loss_not_finite=not loss_finite,
            )
            agreed = self._agree(evidence)
            self._is_void = bool(agreed[NO_RECORDS])
            if self.search is not None and (agreed[NOT_FINITE] or agreed[LOSS]):
                budget.ignore_step()
                overflow = engine.fp16_enabled() and not agreed[LOSS]  # scaled gradients overflow in normal operation
                self.search.explain(engine, seen, repeat=not overflow)
            of_place = has_finding(agreed, OF_PLACE)
            of_step = has_finding(agreed, OF_STEP) or self._policy.can_compare(agreed[AUDITED])
            if not (of_place or has_finding(agreed, OF_STATE) or of_step):
                return
            budget.ignore_step()
            again = self._policy.settle(engine, evidence, agreed, self.recompute_micro_batch, repaired=repaired)
            if of_place and self.place is not None and not again:
                self.place.accept()
            if not again:
                return
            if agreed[PARAMETERS] or agreed[COPIES]:
                self._parameters.start()
            if self.chain is not None:
                self.chain.compare_copy()
            if of_place and self.place is not None:
                self.place.repair()
                self._begin_batches(self._run, engine.step_number)
            elif engine.is_first_stage() or engine.is_last_stage():
                self._batches.rewind()
            engine.recompute_step()
            repaired = True

    def _links(self) -> tuple[ChainFindings, Callable[[Collection[int]], Finding] | None]:
        """Findings in the last step's chain, and the function that rules on parameters that are not their masters'."""
        chain = self.chain
        if chain is None:
            return ChainFindings(), None
        with self.budget.looks:
            links = chain.pop_findings()
        return links, lambda earlier: chain.of_copy(links, earlier)

    def _agree(self, evidence: Evidence) -> Agreed:
        """Compare evidence over all ranks, and settle what was found in the step before: settings, then the chain.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        with self.budget.fixed:
            values = compared(evidence)
        with self.budget.waits:
            agreed = compare_replicas(values, self._run.dims, self._host_group)
        if agreed[SETTINGS]:
            self.budget.ignore_step()
            step, used = self._run.engine.step_number, self._policy.settings
            self._policy.settle_slice(step, lambda earlier: used.rule(step - 1))
        if self.chain is not None:
            self.chain.settle(evidence.links, agreed)
        return agreed

    def _move(self, engine: TrainingEngine) -> PermutedResult | None:
        """Compute the audited micro-batch with elements in other places, where that is asked for."""
        permuted = self.permuted
        if permuted is None or not self._auditing:
            return None

        def moved(compute: Callable[[TrainingEngine, Recompute], T]) -> T:
            with nullcontext() if self.rows is None else self.rows.resting():
                return compute(engine, self.recompute_micro_batch)

        return PermutedResult(moved(permuted.pop_trace), lambda: moved(permuted.replay), lambda: moved(permuted.update))

    def _found_in_rows(self, engine: TrainingEngine) -> Rows | None:
        rows = self.rows
        if rows is None or rows.micro_batch is None:
            return None
        micro_batch = rows.micro_batch

        def again() -> WrongRow | None:
            self.recompute_micro_batch(engine, micro_batch)
            return rows.pop_wrong()

        return Rows(rows.pop_wrong(), micro_batch, again)

    def _found_in_tokens(self, engine: TrainingEngine) -> Given | None:
        tokens = self.tokens
        if tokens is None:
            return None

        def again(micro_batch: int) -> WrongTokens | None:
            failed: DataError | OSError | None = None
            try:
                if engine.is_first_stage() or engine.is_last_stage():
                    self._batches.renew()
            except (DataError, OSError) as error:  # others compute it too, and wait for this rank
                failed = error
            self.recompute_micro_batch(engine, micro_batch)
            found = tokens.compare(engine)
            return found if failed is None else unreadable(engine.step_number, micro_batch, failed)

        with self.budget.looks:
            return Given(tokens.compare(engine), again, lambda stays: self._batches.settle_renewed(stays=stays))

    def _compute_extra(self, engine: TrainingEngine, extra: Shared) -> None:
        if engine.is_first_stage() or engine.is_last_stage():
            self._batches.rewind_to_extra()
        engine.compute_extra(extra.source)

    def recompute_micro_batch(self, engine: TrainingEngine, micro_batch: int | None) -> tuple[Trace, Trace]:
        """Recompute a micro-batch; returns the records of the audit and of the check of recomputations.

        They are empty on a replica that did not start it in this step.

        Args:
            micro_batch: its number in the step; None: the audited one.
        """
        if micro_batch is None and self._extra is not None:
            self._compute_extra(engine, self._extra)
            return self._audited.pop_trace(), Trace()
        micro_batch = micro_batch or 0
        if micro_batch < engine.completed:
            if engine.is_first_stage() or engine.is_last_stage():
                self._batches.rewind(micro_batch)
            engine.recompute_micro_batch(micro_batch)
        self._finite.pop_first(engine.dims)
        return self._audited.pop_trace(), self._checked.pop_trace()

    def _report_weaker(self, texts: Mapping[str, str]) -> None:
        """Print the table of what is covered again, and write its event: checks compare less than it said."""
        self._within |= texts
        run = self._run
        if run.dims.rank == 0:
            table = self.table(self.budget.cadence, self._within)
            logger.warning("coverage of silent data corruption from now on:\n%s", "\n".join(table))
            run.events.emit("sdc", "coverage", step=run.engine.step_number, table=table, within=self._within)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Search for the cause of a skipped step, if it is not known yet; parameters are unchanged."""
        if self.search is not None and engine.is_skipped and self.search.place is None:
            self.budget.ignore_step()
            self.search.explain(engine, None, repeat=not engine.fp16_enabled())

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count the samples lost to an audit, and find out whether the next step is to be audited."""
        run.progress.skip_place = None if self.search is None else self.search.place
        if self._auditing:
            if self._extra is None:
                run.progress.samples -= (run.dims.data - 1) * run.engine.micro_batch_size
            doubt = None if result.is_finite else result.skipped or NOT_FINITE_LOSS
            self._policy.after_audit(run, result.step, doubt, extra=self._extra is not None, recorded=not self._is_void)
        if self.place is not None:
            self.place.finish()
        self._requested = bool(self._request.value)
        if self._requested:
            run.events.emit("audit", "requested", step=run.step + 1)
        self.budget.end(run, run.step)

    def after_save(self) -> None:
        """Mark a checkpoint that has become whole, where an audit has agreed on it already."""
        self._policy.after_save()

    def before_save(self, run: Run) -> None:
        """Compare state and places about to be saved, and the step's settings: the next step would do so too late.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt; nothing is saved then.

        Collective: all ranks of the world.
        """
        if not self._always_on.enabled:
            return
        repaired = False
        while True:
            if self._always_on.parameters:
                self._parameters.start()
            if self.chain is not None:
                self.chain.before_save()
            links, of_copy = self._links()
            settings, parameters = self._policy.settings.pop_digest(), self._parameters.pop_checksums()
            evidence = Evidence(
                parameters=parameters,
                copies=self._parameters.copies(parameters),
                settings=settings,
                links=links,
                copy=of_copy,
                wrong_place=None if self.place is None else self.place.between_steps(),
                places=NONE if self.place is None else self.place.digest,
            )
            agreed = self._agree(evidence)
            of_place = has_finding(agreed, OF_PLACE)
            if not (of_place or has_finding(agreed, OF_STATE)):
                return
            again = self._policy.settle_kept(run.engine, evidence, agreed, repaired=repaired)
            if of_place and self.place is not None:  # also where it is accepted: no resume would take the save
                self.place.repair()
            if not again:
                return
            repaired = True

    def on_end(self, run: Run) -> None:
        """Audit what the run ends with, where the step after each checkpoint is audited: none follows the last one.

        The first micro-batch of the last step is computed once more by all replicas. Where the run has failed, or is
        only stopped, the next start does it.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt; the last checkpoint stays a candidate.

        Collective: all ranks of the world.
        """
        engine, verifies = run.engine, self._audit.verify_checkpoints
        has_trained = self._first_step is not None and run.step >= self._first_step
        if not (verifies and has_trained) or run.step < run.steps or run.end.error is not None:
            return
        run.enter("BETWEEN")
        self._end, self._auditing, self._covered = engine.step_number, True, ()
        self._extra = self._share(run, self._end)
        self._batches.begin(None, self._extra)
        self.observe(run)
        repaired = False
        while True:
            self._parameters.start()
            parameters = self._parameters.pop_checksums()
            self._compute_extra(engine, self._extra)
            audited, moved = self._audited.pop_trace(), self._move(engine)
            evidence = Evidence(
                parameters=parameters,
                copies=self._parameters.copies(parameters),
                audited=audited,
                moved=moved,
                unrecorded=not len(audited),
            )
            agreed = self._agree(evidence)
            of_audit = bool(agreed[MOVED]) or self._policy.can_compare(agreed[AUDITED])
            if not (of_audit or has_finding(agreed, OF_STATE)):
                break
            if not self._policy.settle(engine, evidence, agreed, self.recompute_micro_batch, repaired=repaired):
                break
            repaired = True
        doubt = None if run.progress.finite_step == run.step else NOT_FINITE_LOSS
        self._policy.after_audit(run, self._end, doubt, extra=True, recorded=not agreed[NO_RECORDS])

    def close(self) -> None:
        """Stop listening to the optimizer."""
        self._policy.settings.close()

    def state_dict(self) -> dict[str, Any]:
        """Devices found wrong so far, and the first step whose checkpoint cannot be verified."""
        return self._policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._policy.load_state_dict(state)


def _recorders(run: Run, settings: CheckSettings) -> tuple[Tracer, Tracer, list[str]]:
    """Tracers of audits and of the check of recomputations, and fqns of the submodules checked in every step."""
    every, audit, algorithm = list_submodules(run.engine.module), settings.audit, settings.algorithm
    checked = [one.fqn for one in choose_submodules(every, settings.sdc.always_on.granularity, None)]
    audited = [one.fqn for one in choose_submodules(every, audit.granularity, None)] if audit.enabled else []
    twice = TraceSection(phases=[FORWARD, RECOMPUTE])
    return (
        _audit_tracer(settings, audited),
        Tracer(algorithm, twice, checked if settings.checks_recompute else []),
        checked,
    )


def _audit_tracer(settings: CheckSettings, fqns: Collection[str]) -> Tracer:
    """Tracer of the results of the audited micro-batch."""
    section = TraceSection(phases=list(MICRO_BATCH_PHASES))
    return Tracer(settings.algorithm, section, fqns, micro_batches=(0, OF_AUDIT))


def loss_is_finite(engine: TrainingEngine) -> bool:
    """Whether this rank's sum of the step's losses is finite; true where it has none. Waits for the device."""
    return not isinstance(engine.total_loss, Tensor) or bool(torch.isfinite(engine.total_loss).all())


def build_referee(run: Run) -> Referee:
    """The referee of a run's stage."""
    submodules = {one.fqn: one for one in list_submodules(run.engine.module)}
    loss = run.engine.module.loss_fn

    def subject_of(fqn: str) -> Subject | None:
        submodule = submodules.get(fqn)
        if submodule is None:
            return None
        kind = submodule.kind

        def make(address: Address, kept: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | None:
            calls, after = kept
            return make_exhibit(address, kind, calls, result, after)

        return Subject(_modules_of(submodule, list(submodules.values()), loss), [make])

    return Referee(subject_of, run.dims.rank, run.host_group)


def _modules_of(submodule: Submodule, all_of_them: Sequence[Submodule], loss: Any) -> tuple[Any, Any]:
    """Modules whose calls begin and end a submodule; for one that is no module, the modules before and after it."""
    if submodule.kind == LOSS_KIND:
        return loss, None
    if submodule.kind not in BETWEEN:
        return submodule.module, None
    block = {one.kind: one.module for one in all_of_them if one.layer == submodule.layer}
    before, after = BETWEEN[submodule.kind]
    return block.get(before), block.get(after)


def build_detection(
    config: RunConfig,
    run: Run,
    batches: StepBatches,
    signals: StopSignals,
    injector: Listener | None,
    plan: CheckPlan,
    writer: MetricsWriter | None = None,
) -> StepChecker:
    """Build the checks of each step of a run.

    Args:
        batches: this replica's micro-batches.
        injector: injects faults into the golden workload; None: no faults are injected.
        plan: plan of the checks, from which the table of what is covered is made.
        writer: writer of metrics on rank 0, for the time of the checks; None: it is not written.
    """
    sections, dims = config.megasdc, run.dims
    algorithm = default_algorithm(run.engine.device)
    parameters = ParameterReader(run.engine, algorithm)
    keys = golden_key(config, dims.at(0), algorithm.name)
    referee = build_referee(run)
    policy = FindingPolicy(
        sections.sdc,
        run,
        keys,
        parameters,
        Incidents(config, run),
        referee,
        () if injector is None else (injector,),
    )
    policy.settings.reset = momentum_reset_of(sections.optimizer_hooks)
    settings = CheckSettings(
        sections.audit,
        sections.sdc,
        algorithm,
        recomputes=bool(config.recompute_interval),
        save_interval=sections.checkpoint.interval,
        checkable=Checkable(
            sums=not any(spec.where == LOCAL for spec in sections.optimizer_hooks),
            clips=not any(spec.where == AFTER_NORM for spec in sections.optimizer_hooks),
        ),
        drops=sections.drop_compute,
    )
    budget = CheckBudget(plan, run.engine, writer)
    policy.watch = budget.watch
    detection = StepChecker(settings, run, batches, policy, parameters, signals, budget, referee)
    detection.table = partial(coverage_table, config, run.engine, plan)
    return detection


def watches_of(detection: StepChecker) -> list[Watch]:
    """The watches of the checks."""
    moved, audited = detection.permuted, (detection.record_audited, detection.referee.listen)
    return [
        *(Watch(listener, detection.audited_submodules) for listener in audited),
        *(Watch(partial(_of_audit, one), detection.submodules_of_extra, replays=True) for one in audited),
        Watch(detection.record_checked, detection.checked_submodules, gradients=False),
        Watch(detection.record_finite, detection.finite_submodules),
        *([] if detection.rows is None else [Watch(detection.rows.listen, detection.row_submodules)]),
        *([] if moved is None else [Watch(moved.listen, detection.audited_submodules, replays=True)]),
    ]


def _of_audit(listener: Listener, address: Address, result: Tensor) -> None:
    """Call a listener with a result of the audit's extra micro-batch, which the engine numbers as the first."""
    listener(replace(address, micro_batch=OF_AUDIT), result)


def build_search(
    section: AlwaysOnSection, detection: StepChecker, run: Run, observation: ObserverSwitch
) -> NonFiniteSearch | None:
    """Build the search for the first NaN or Inf; None where it is not enabled.

    Args:
        section: checks of every step.
        observation: source of the results of the run's submodules.
    """
    if not (section.enabled and section.finite):
        return None
    return NonFiniteSearch(run, observation, detection.recompute_micro_batch)
