"""Settlement of findings: rulings of all ranks, the policy that follows from them, and reports of what was found.

Every function of ``FindingPolicy`` is called by all ranks at the same point, since findings need collectives; it also
says what may be verified afterwards. After an exception none is called. ``Incidents`` writes reports in the run folder,
and marks on checkpoints for the next start. The mark for the next start is written first and needs only its own file;
errors in a report are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.host_memory import find_slots, memory_folder, read_line
from megasdc.checkpoint.manifest import installed_versions, read_complete
from megasdc.checkpoint.ranks import CheckpointGroup, FolderRanks, find_place
from megasdc.checkpoint.verify import list_verified, mark_corruption, mark_verified
from megasdc.common.errors import CorruptionError, DataError, StorageError
from megasdc.config.detection import EXTRA, TRAINING, SdcSection
from megasdc.config.load import RunConfig
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run
from megasdc.engine.observer import Listener
from megasdc.parallel.collectives import Agreed
from megasdc.sdc.coverage import AUDIT, GOLDEN, NOTHING
from megasdc.sdc.finding import Finding, Suspects
from megasdc.sdc.host import Host, find_comparable
from megasdc.sdc.incident import FAULT_FIELDS, Environment
from megasdc.sdc.policy import choose_action, report_finding, what_to_do
from megasdc.sdc.referee.referee import Referee
from megasdc.sdc.rows import rule_on_rows
from megasdc.sdc.used_settings import SETTINGS, UsedSettings
from megasdc.sdc.verdict import NOT_REPRODUCED
from megasdc.train.checkpointer import checkpoint_folder, mark_memory
from megasdc.train.detection.findings import (
    AUDITED,
    COPIES,
    COPY,
    EVENT_KIND,
    MOVED,
    OF_PLACE,
    OF_STATE,
    PARAMETERS,
    REPEATS,
    ROWS,
    TOKENS,
    Evidence,
    Findings,
    ParameterReader,
    Recompute,
    has_finding,
)
from megasdc.train.detection.golden import GoldenCheck
from megasdc.train.isolation import IsolationError

logger = logging.getLogger(__name__)

STATE_TIERS = ("parameters", "copies", "copy", SETTINGS)
"""Names of checks of the state at the start of a step, that is, of the step before."""
SLICE_TIERS = ("reduction", "state", "update", "norm", "clipping")
"""Names of checks that end when the optimizer has stepped."""


class FindingPolicy:
    """Settles findings: names ranks where that can be proved, and acts by policy.

    ``keys`` are properties of this rank that must be equal between replicas for their results to be comparable;
    ``before`` are listeners that inject faults into the golden workload.
    """

    def __init__(
        self,
        section: SdcSection,
        run: Run,
        keys: Mapping[str, Any],
        parameters: ParameterReader,
        incidents: Incidents,
        referee: Referee,
        before: Sequence[Listener] = (),
    ) -> None:
        self._section = section
        self.settings = UsedSettings(run)
        self._host: Host = run
        self._dims = run.dims
        self._group = run.host_group
        self._emit = partial(run.events.emit_on_rank_0, EVENT_KIND)
        self._keys = dict(keys)
        self._incidents = incidents
        self._before = tuple(before)
        self._comparable: Collection[tuple[int, int]] | None = None
        self._golden: GoldenCheck | None = None
        self._suspects = Suspects()
        self._findings = Findings(run, section.repeats, parameters, self._suspects, referee)
        self._accepted: int | None = None
        self._committed_wrong: int | None = None
        self._wrong_since: int | None = None
        self.watch: Callable[[], None] = lambda: None
        """Called when training goes on after a finding."""

    # --- before the first step ----------------------------------------------------------------------------------

    def on_start(self, run: Run) -> Mapping[str, str]:
        """Find out which positions are comparable and whether the golden trace fits.

        Returns:
            By name of the check, a text of what it still compares where it cannot compare all that was asked for.

        Collective: all ranks of the world.
        """
        left: dict[str, str] = {}
        self._incidents.on_start()
        self._suspects.on_start(run)
        self._comparable = find_comparable(run, self._keys)
        everywhere = self._dims.pipeline * self._dims.tensor
        if (number := len(self._comparable)) < everywhere:
            left[AUDIT] = f"at {number} of {everywhere} positions" if number else NOTHING
        if self._section.golden is not None:
            path, keep = Path(self._section.golden), self._section.golden_interval is not None
            golden = GoldenCheck(path, run, self._before, keep=keep)
            if unfit := golden.unfit():
                left[GOLDEN] = NOTHING
                self._emit("golden_unfit", reason=unfit[0], ranks=len(unfit))
                if self._dims.rank == 0:
                    logger.warning("the golden trace %s does not fit %d ranks: %s", golden.path, len(unfit), unfit[0])
            else:
                self._golden = golden
        return left

    def can_compare(self, positions: Iterable[tuple[int, int]]) -> bool:
        """Whether any of some positions has comparable replicas."""
        return self._comparable is None or any(position in self._comparable for position in positions)

    # --- one finding --------------------------------------------------------------------------------------------

    def settle(
        self,
        engine: TrainingEngine,
        evidence: Evidence,
        agreed: Agreed,
        recompute_micro_batch: Recompute,
        *,
        repaired: bool,
    ) -> bool:
        """Name wrong ranks and act by policy; call in ``after_micro_batches``. Returns whether the step is to be rerun.

        ``agreed``: the finding that all ranks agree on; ``repaired``: whether the step was rerun already.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        with self._marked_if_unsettled(engine.step_number):
            again = self._settle(engine, evidence, agreed, recompute_micro_batch, repaired)
        return self._commit(engine.step_number, again)

    @contextmanager
    def _marked_if_unsettled(self, step: int) -> Iterator[None]:
        """If settling raises an exception, the finding is inconclusive; if that halts, mark it for the next start."""
        try:
            yield
        except (CorruptionError, DataError, StorageError):  # the latter: a file is wrong, and no rank
            raise
        except Exception:
            if self._section.policy.inconclusive == "halt":
                self._incidents.mark(step, any_rank=True)
            raise

    def _settle(
        self,
        engine: TrainingEngine,
        evidence: Evidence,
        agreed: Agreed,
        recompute_micro_batch: Recompute,
        repaired: bool,
    ) -> bool:
        step, earlier = engine.step_number, self._suspects.ranks
        audit_differs = self.can_compare(agreed[AUDITED])
        if has_finding(agreed, OF_PLACE):  # first: the whole step reads other samples
            found = self._findings.of_place(step, evidence.wrong_place, evidence.places)
            if self._act(step, found, repaired):
                return True
        if has_finding(agreed, OF_STATE):
            again = self._settle_parameters(engine, evidence, agreed, repaired)
            if agreed[PARAMETERS] and audit_differs and not again:
                # Ranks with wrong parameters computed other results.
                self._emit("audit_void", step=step, reason="the parameters were not equal")
            return again
        again = False
        if agreed[TOKENS] and evidence.given is not None:  # other results of that rank follow from it
            found = self._findings.of_tokens(engine, evidence.given, earlier)
            again = self._act(step, found, repaired)
            evidence.given.finish(again)
            if audit_differs and not again and found.micro_batch == 0 and engine.shared_source is not None:
                self._emit("audit_void", step=step, reason="the micro-batch was not read alike")
                audit_differs = False
        if agreed[REPEATS] and not again:
            found = self._findings.of_recompute(engine, evidence.repeats, recompute_micro_batch, earlier)
            again = self._act(step, found, repaired)
        if agreed[ROWS] and not again and evidence.rows is not None:
            again = self._act(
                step, rule_on_rows(self._host, step, evidence.rows, self._section.repeats, earlier), repaired
            )
        if agreed[MOVED] and not again and evidence.moved is not None:
            found = self._findings.of_permuted(engine, evidence.audited, evidence.moved, recompute_micro_batch, earlier)
            again = self._act(step, found, repaired)
        if audit_differs and not again:
            found = self._findings.of_audit(
                engine,
                evidence.audited,
                recompute_micro_batch,
                earlier,
                self._comparable,
                lambda: self._golden_verified(step),
            )
            again = self._act(step, found, repaired)
        return again

    def settle_kept(self, engine: TrainingEngine, evidence: Evidence, agreed: Agreed, *, repaired: bool) -> bool:
        """Name the ranks whose parameters, or place in the data, are wrong before they are saved, and act by policy.

        Returns whether they were repaired and must be compared again; ``repaired``: they were repaired once already.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        with self._marked_if_unsettled(engine.step_number):
            again, step = False, engine.step_number
            if has_finding(agreed, OF_PLACE):
                found = self._findings.of_place(step, evidence.wrong_place, evidence.places)
                again = self._act(step, found, repaired)
            again = self._settle_parameters(engine, evidence, agreed, repaired) or again
        return self._commit(engine.step_number, again)

    def _settle_parameters(self, engine: TrainingEngine, evidence: Evidence, agreed: Agreed, repaired: bool) -> bool:
        """Rule on parameters that differ between ranks, then on those that differ from their owner's masters.

        Returns whether the step is rerun. A rank whose own part changed after it was gathered has both
        findings, and is ruled on once.
        """
        again, step, named = False, engine.step_number, set[int | None]()
        if agreed[PARAMETERS] or agreed[COPIES]:
            differ = self._findings.of_parameters if agreed[PARAMETERS] else self._findings.of_copies
            found = differ(engine, evidence.parameters)
            named = {one.rank for one in found.rulings}
            again = self._act(step, found, repaired)
        if agreed[COPY] and evidence.copy is not None:
            found = evidence.copy(self._suspects.ranks)
            rest = tuple(one for one in found.rulings if one.rank not in named)
            if rest:
                again = self._act(step, replace(found, rulings=rest), repaired) or again
        return again

    def settle_slice(self, step: int, find: Callable[[Collection[int]], Finding]) -> bool:
        """Act by policy on a finding in a slice of a shard; returns whether it was repaired.

        ``find`` returns the finding, from the ranks that were wrong in an earlier event of the run.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt, or to repair an error that was reproduced.

        Collective: all ranks of the world.
        """
        with self._marked_if_unsettled(step):
            found = find(self._suspects.ranks)
            again = self._act(step, found, repaired=False, in_step=False)
        return self._commit(step, again)

    def check_golden(self, step: int) -> float:
        """Run the golden workload on all ranks without a dispute, and act by policy; returns the seconds that it took.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt, or to repair and a repeat was wrong too.

        Collective: all ranks of the world.
        """
        if self._golden is None:
            return 0.0
        answer = self._golden.run(step, self._section.repeats)
        if found := answer.finding(step, self._suspects.ranks):
            self._act(step, found, repaired=False, in_step=False)
            self._commit(step, again=False)
        return answer.seconds

    def _golden_verified(self, step: int) -> Mapping[int, bool] | None:
        return None if self._golden is None else self._golden.run(step).verified

    # --- what is done -------------------------------------------------------------------------------------------

    def _act(self, step: int, found: Finding, repaired: bool, *, in_step: bool = True) -> bool:
        """Act on a finding by policy; returns whether it is repaired, by the caller or by computing the step again.

        ``in_step``: computing the step again may repair it; else only an error that was not reproduced can be repaired.
        """
        if not found.rulings:
            return False
        action = choose_action(self._section.policy, found)
        lasts = any(ruling.verdict != NOT_REPRODUCED for ruling in found.rulings)
        half = found.unrepaired if action == "repair" else ""
        if action == "repair" and (half or repaired or (lasts and not in_step)):
            action = "halt"
        wrong = {ruling.rank for ruling in found.rulings if ruling.rank is not None}
        replicas = {self._dims.at(rank).dp_rank for rank in wrong}
        if action == "isolate" and self._dims.data - len(replicas) < self._section.isolation.min_replicas:
            action = "halt"
        ends_here = action in ("halt", "isolate")
        if ends_here:  # first, so that the next start knows even if a report fails
            self._incidents.mark(step)
        if action == "warn":
            self._accepted = step - 1 if found.tier in STATE_TIERS else step
        text = found.text
        page = self._incidents.report(step, found, action, self._suspects)
        if ends_here:
            again = " after the step was recomputed" if repaired else ""
            text += f"; the step cannot be repaired, since {half}" if half else ""
            ends = "is the last, and is not saved" if found.tier in SLICE_TIERS else "is not committed"
            goes_back = "" if action == "isolate" else f"{self._incidents.way_back}. "
            message = f"step {step} {ends}: the {found.tier} check found silent data corruption{again}: {text}. " + (
                goes_back + what_to_do(page)
            )
            if action == "halt":
                raise CorruptionError(message)
            if self._dims.rank == 0:
                logger.error("%s", message)
            raise IsolationError(message, step, wrong)
        if self._dims.rank == 0:
            logger.warning("step %d: the %s check found silent data corruption: %s; %s", step, found.tier, text, action)
        self.watch()
        return action == "repair"

    def _commit(self, step: int, again: bool) -> bool:
        """Record an error that policy ``warn`` accepts, unless the step is redone: later checkpoints contain the error.

        Returns ``again``.
        """
        since, self._accepted = self._accepted, None
        if since is None or again:
            return again
        self._committed_wrong = step
        if self._wrong_since is None or since < self._wrong_since:
            self._wrong_since = since
            self._emit("not_verified_from", step=since)
            if self._dims.rank == 0:
                logger.warning("checkpoints from step %d on hold this corruption and will not be verified", since)
        return again

    def after_audit(self, run: Run, step: int, doubt: str | None, *, extra: bool, recorded: bool) -> None:
        """Mark earlier checkpoints as verified, if all replicas agreed in an audited step that was committed.

        Checkpoints saved since a wrong state was committed are not marked, and none is where a position's replicas
        could not be compared: missing evidence is no agreement. Nor is one marked by a step whose loss or gradient norm
        was not finite, or that was skipped: replicas that agree on NaN have computed nothing that can be relied on.

        Args:
            step: the step that was audited; after the last one, the number that the next would have.
            doubt: why nothing can be relied on that was computed in it; None: it was taken, and is finite.
            extra: whether the step was audited by an extra micro-batch.
            recorded: whether all ranks have recorded results of the audit.
        """
        everywhere = self._dims.pipeline * self._dims.tensor
        unseen = self._comparable is not None and len(self._comparable) < everywhere
        if unseen or step == self._committed_wrong:
            return
        if not recorded:
            self._emit("audit_void", step=step, reason="a rank has recorded no result of it")
            if self._dims.rank == 0:
                logger.warning("step %d: the audit is void, since a rank has recorded no result of it", step)
            return
        if doubt is not None:
            if self._dims.rank == 0:
                run.events.emit("audit", "not_finite", step=step, reason=doubt)
            return
        last = step - 1 if self._wrong_since is None else min(step, self._wrong_since) - 1
        if self._dims.rank == 0:
            which = EXTRA if extra else TRAINING
            run.events.emit("audit", "agreed", step=step, verified_up_to=last, micro_batch_of=which)
        self._incidents.verified(last, step)

    def after_save(self) -> None:
        """Mark a checkpoint that has become whole, where an audit has agreed on it already."""
        self._incidents.mark_saved()

    def state_dict(self) -> dict[str, Any]:
        """Devices found wrong so far, and the first step whose checkpoint cannot be verified."""
        return {"earlier": self._suspects.state(), "wrong_since": self._wrong_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._wrong_since = state.get("wrong_since")
        if unknown := self._suspects.load_state(state["earlier"]):
            self._emit("earlier_not_known", ranks=unknown)
            if self._dims.rank == 0:
                logger.warning(
                    "ranks %s were found wrong before, on hosts and devices that the checkpoint does not name: "
                    "forgotten",
                    unknown,
                )


class Incidents:
    """Reports findings and marks checkpoints."""

    def __init__(self, config: RunConfig, run: Run) -> None:
        self._config = config
        self._run = run
        self._checkpoints = checkpoint_folder(config)
        self._place: FolderRanks | None = None
        self._unmarked: dict[int, str] = {}  # steps whose checkpoints stay candidates, and why, as it was told
        self._agreed: tuple[int, int] | None = None  # newest step that an audit has agreed on, and that audit's

    def on_start(self) -> None:
        """Find the place of this rank in the checkpoints' folder.

        Collective: all ranks of the world.
        """
        storage = self._config.megasdc.checkpoint.storage
        self._place = find_place(CheckpointGroup(storage, self._run.host_group))

    def mark(self, step: int, see: str | None = None, *, any_rank: bool = False) -> None:
        """Restrict the next start to verified checkpoints; a mark that cannot be written is logged.

        It calls no collective, so it may be called after an exception.

        Args:
            step: step in which corruption was found.
            see: path of the page where people read more; None: the run folder.
            any_rank: write the mark from every rank, since the rank that usually writes it may have gone.
        """
        if self._place is None:
            return
        place = replace(self._place, ranks=[self._place.rank]) if any_rank else self._place
        try:
            mark_corruption(self._checkpoints, step, see or self._run.folder, place)
        except StorageError as error:
            logger.error("%s", error)

    @property
    def way_back(self) -> str:
        """Sentence, without its full stop, on the save from which a halted run goes on; from what this host holds."""
        if self._config.megasdc.checkpoint.require_verified == "never":
            return "The next start goes on from the newest save, since megasdc.checkpoint.require_verified is never"
        try:
            saves = read_complete(self._checkpoints).keys() - self._run.skipped_checkpoint_steps
            verified = saves & set(list_verified(self._checkpoints))
            in_memory = self._verified_in_memory()
        except OSError as error:
            return f"Where the next start goes back to is not known, since the checkpoints cannot be listed: {error}"
        if newest := max(verified | in_memory, default=0):
            where = "in memory" if newest in in_memory else f"in {self._checkpoints / step_folder(newest)}"
            return f"The next start goes back to the newest verified save, of step {newest}, {where}"
        if saves:
            return "No save is verified: the next start ends with exit code 72, and says which candidates there are"
        return "Nothing is saved that is verified: the next start begins at step 1"

    def _verified_in_memory(self) -> set[int]:
        """Steps in this host's memory after which an audit has agreed."""
        if not self._config.megasdc.checkpoint.memory.interval:
            return set()
        run = self._run.events.origin.run
        folder = memory_folder(run)
        line, held = read_line(folder), find_slots(folder, run)[0]
        return {one.record.step for one in held if line.verifies(one.record)}

    def report(self, step: int, found: Finding, action: str, suspects: Suspects) -> str | None:
        """Report a finding, as ``report_finding`` does; before a halt, name the page in the mark for the next start."""
        alert_command = self._config.megasdc.health.alert_command
        page = report_finding(self._run, suspects, step, found, action, self._describe, alert_command)
        if action in ("halt", "isolate") and page is not None:
            self.mark(step, page)
        return page

    def verified(self, last: int, audit_step: int) -> None:
        """Mark checkpoints up to the step ``last`` as verified, after an audit agreed."""
        assert self._place is not None, "on_start comes first"
        self._agreed = (last, audit_step)
        self.mark_saved()
        if (
            self._config.megasdc.checkpoint.memory.interval
            and self._place.rank == self._place.nodes[self._place.node][0]
        ):
            mark_memory(memory_folder(self._run.events.origin.run), last)

    def mark_saved(self) -> None:
        """Mark saves that the last audit agreed on; also after each save, since one beside training may end later."""
        assert self._place is not None, "on_start comes first"
        if self._agreed is not None:
            skipped_checkpoint_steps, events = self._run.skipped_checkpoint_steps, self._run.events
            mark_verified(
                *(self._checkpoints, *self._agreed, self._place),
                skipped_checkpoint_steps=skipped_checkpoint_steps,
                events=events,
                told=self._unmarked,
            )

    def _describe(self, gaps: list[str]) -> dict[str, Any]:
        """Fields of an incident; see ``policy.Describe``."""
        sections, verified, newest = self._config.megasdc, 0, 0
        try:
            verified = max(list_verified(self._checkpoints), default=0)
            newest = max(list_steps(self._checkpoints), default=0)
        except OSError as error:
            gaps.insert(0, f"checkpoints cannot be listed: {error}")
        return {
            "environment": Environment(installed_versions(), self._run.dims.layout, self._config.precision),
            "golden": sections.sdc.golden,
            "verified_checkpoint": str(self._checkpoints / step_folder(verified)) if verified else None,
            "newest_candidate": str(self._checkpoints / step_folder(newest)) if newest > verified else None,
            "injected": tuple(name for name in FAULT_FIELDS if getattr(sections, name.rpartition(".")[2])),
        }
