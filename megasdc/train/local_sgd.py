"""The section `local_sgd` in a run: the end of each round, in which replicas agree on their weights.

A replica is a launch of its own. Each of its ranks exchanges the shard of the master weights that it owns with the
ranks at the same place of the other replicas; who takes part is agreed on in the meeting (``megasdc.localsgd``), to
which the first rank of each replica keeps a connection. Each replica keeps its own optimizer state, and takes every
n-th sample of the data. A replica that is late, or found wrong, takes over what the others have agreed on, and goes on
at their step; the moments of one that was wrong begin anew, since what was wrong is in them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.common.addresses import UPDATE, Address
from megasdc.common.errors import CheckpointError, ConfigError, CorruptionError, LaunchError
from megasdc.config.local_sgd import AGREED_WEIGHTS, AUTO, INFINITE, LOCAL_SGD, NESTEROV, LocalSgdSection
from megasdc.dropcompute.gate import ReplicaGate, new_replica_group
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.localsgd.exchange import AGREED, MASTERS, ShardDoor, bytes_of, fetch, fetch_all
from megasdc.localsgd.meeting import MeetingLine
from megasdc.localsgd.outer import Agreed, OuterRule, distance
from megasdc.localsgd.round_clock import Done, RoundClock
from megasdc.localsgd.rounds import Report, read_rounds, work_of
from megasdc.metrics.writer import MetricsWriter
from megasdc.optim.bounds import MomentumReset
from megasdc.optim.zero1 import master_partitions
from megasdc.parallel.collectives import Field, gather_objects
from megasdc.parallel.rendezvous import ROUNDS_VARIABLE, launch_secret, own_address_for_ranks
from megasdc.sdc.finding import LEAVE_OUT, Finding, Suspects
from megasdc.sdc.incident import RoundEvidence, RoundLook
from megasdc.sdc.verdict import INCONCLUSIVE, ROUNDS, RankVerdict
from megasdc.train.detection.finding_policy import Incidents
from megasdc.train.stop import TIME_LIMIT

logger = logging.getLogger(__name__)

EVENT_KIND = "local_sgd"
ATTEMPTS = 20
"""Attempts to take over the weights that others have agreed on, which change with each of their rounds."""
PAUSE_S = 0.5
LEAST_EXCHANGE_S = 10.0
SLOWEST_BYTES_PER_S = 20e6
"""An exchange ends after the deadline of a round, at least so many seconds, and the time of its bytes at this rate."""
STOPPED = "the replicas were told to stop"
NEW_MOMENTS = MomentumReset(interval=1, warmup_steps=0, warmup_start=1.0, restart_bias_correction=True)
"""Sets moments to zero, and their count of steps."""


class LocalSgd(Hook):
    """Ends rounds of local steps.

    Args:
        section: the section `local_sgd`, with more than one replica.
        timeout_s: seconds in which a shard must have come.
        writer: writer of metrics on rank 0; None on other ranks.

    Attributes:
        changed: called after the weights have changed between two steps.
        incidents: reports that this replica was left out as wrong; None: only its event says it.
        after_late_round: called at the start of a run that was stopped at the end of a round, once that is made.

    Raises:
        ConfigError: the launch has no secret.

    Collective: all ranks of the world.
    """

    saved_as = LOCAL_SGD

    def __init__(self, section: LocalSgdSection, run: Run, timeout_s: float, writer: MetricsWriter | None) -> None:
        secret = launch_secret()
        if secret is None:
            raise ConfigError(
                "megasdc.local_sgd: replicas meet with a secret; start them with megasdc launch --replicas"
            )
        self._section, self._run, self._writer, self._timeout_s = section, run, writer, timeout_s
        self._secret, self._replica = secret, section.replica
        self._rule = OuterRule(section.outer == NESTEROV, section.outer_lr, section.outer_momentum)
        self._agreed = Agreed(master_partitions(run.engine.optimizer), self._rule)
        self._round, self._digest = run.step // section.every, ""
        self._tokens = self._steps = self._micro_batches = 0
        self._waited_s = self._elapsed_s = 0.0
        self._has_ended = False
        """Whether the round's local work is done, and the others are waited for."""
        replayed = None if section.replay_rounds is None else work_of(read_rounds(section.replay_rounds), self._replica)
        given = section.threshold
        self._clock = RoundClock(math.inf if isinstance(given, str) else given, replayed)
        self._drops, self._measures = given != INFINITE or replayed is not None, given == AUTO and replayed is None
        self._over = Field(lambda: float(run.engine.decides and self._clock.is_over))
        self.fields = (self._over,) if self._drops else ()
        self._gate = self._build_gate() if self._drops else None
        self._door: ShardDoor | None = None
        self._line: MeetingLine | None = None
        self.changed: Callable[[], None] = lambda: None
        self.incidents: Incidents | None = None
        self._suspects = Suspects()
        self.after_late_round: Callable[[Run], None] = lambda run: None

    def _build_gate(self) -> ReplicaGate | None:
        """The gate that stops a local step; None: a round ends with a whole step, since more than one rank decides."""
        engine, dims = self._run.engine, self._run.dims
        if engine.gate is not None or dims.data > 1:
            return None
        group = new_replica_group(dims)
        engine.gate = ReplicaGate(dims, group, self._clock.decide, self._clock.time_left_s, 1)
        engine.divides_by_used = True
        return engine.gate

    @property
    def _masters(self) -> list[Tensor]:
        return master_partitions(self._run.engine.optimizer)

    # --- start and end ------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Meet the other replicas; one that has other weights than they takes theirs over.

        Collective: all ranks of the world.
        """
        self._suspects.on_start(run)
        meeting = os.environ.get(ROUNDS_VARIABLE, "").rpartition(":")[0]
        self._door = ShardDoor(own_address_for_ranks(*filter(None, [meeting])), self._secret, self._timeout_s)
        doors = gather_objects(self._door.place, run.host_group)
        self._digest = self._digest_of_all()
        self._offer()
        if run.dims.rank == 0:
            self._line = MeetingLine(self._replica, self._secret, lambda: self._still_waits(None))
        known = self._clock.threshold_s if self._section.threshold == AUTO and not self._measures else None
        answer = self._on_first(lambda line: line.join(self._round, self._digest, doors, known))
        if "stopping" in answer:
            run.end.reason = STOPPED
            return
        if not answer["goes_on"]:
            reason = "it has joined later, or with other weights"
            self._take_over(answer, reason, wrong=False, returns=True)
            told: dict[str, Any] = {"round": self._round, "reason": reason, "wrong": False}
            run.events.emit_on_rank_0(EVENT_KIND, "left_out", step=run.step, **told)
        run.enter("START")
        has_ended = self._has_ended or run.step % self._section.every == 0
        self._begin_round(answer)
        if self._steps and has_ended:  # it was stopped while it waited for the others
            self._end_round(run)
            self.after_late_round(run)

    def on_end(self, run: Run) -> None:
        """Wait until the other replicas are done, which may need this one's weights; they stop where it has no time.

        Collective: all ranks of the world.
        """
        if run.step >= run.steps and run.end.error is None:
            run.enter("SAVE")
            self._on_first(lambda line: line.ask("done"))
        elif run.end.reason == TIME_LIMIT:
            self._on_first(lambda line: line.ask("stop"))

    def close(self) -> None:
        """Leave the meeting."""
        for part in (self._line, self._door):
            if part is not None:
                part.close()

    def _on_first(self, ask: Callable[[MeetingLine], dict[str, Any]]) -> dict[str, Any]:
        """Ask the meeting on the first rank; returns the answer, on all.

        Raises:
            LaunchError: see ``MeetingLine.ask``, or a round cannot be replayed; on all ranks.
            CorruptionError: no replica has weights that can be relied on; on all ranks.
        """
        found: tuple[dict[str, Any], Exception | None] | None = None
        if self._line is not None:
            try:
                found = ask(self._line), None
            except Exception as error:  # the other ranks wait for it
                found = {}, error
        while (said := self._still_waits(found)) is None:
            pass
        answer, problem = said
        if problem is not None:
            raise problem
        if "failed" not in answer:
            return answer  # type: ignore[no-any-return]
        if "ended" in answer:
            raise LaunchError(f"megasdc.local_sgd.replay_rounds: {answer['failed']}")
        if answer["left_out"]:
            self._report(self._round + 1, answer["left_out"], answer["look"])
        raise CorruptionError(f"no replica can be relied on: {answer['failed']}")

    def _still_waits(self, found: Any) -> Any:
        """What the first rank has found, on all ranks; None: it waits, and is not stuck.

        Collective: all ranks of the world.
        """
        self._run.enter("SAVE")
        return gather_objects(found, self._run.host_group)[0]

    # --- a round ------------------------------------------------------------------------------------------------

    def before_start(self, engine: TrainingEngine, micro_batch: int, time_left_s: float) -> None:
        """Note when a micro-batch is started, on the rank that decides."""
        self._clock.start()

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Note when a micro-batch has been computed."""
        if engine.decides:
            self._clock.end()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count the step, and end the round with its last one, or where its time is up."""
        self._tokens += result.tokens
        self._steps += 1
        self._micro_batches += result.micro_batches
        self._clock.end_step()
        if self._gate is not None:
            self._gate.finish()
        if run.step % self._section.every == 0 or (self._drops and bool(self._over.value)):
            self._end_round(run)

    @property
    def _chosen(self) -> float | None:
        """The threshold in seconds; None: none is passed."""
        return None if math.isinf(self._clock.threshold_s) else self._clock.threshold_s

    def _begin_round(self, answer: dict[str, Any]) -> None:
        """Begin to count the time of a round; ``answer``: of the meeting, which may have chosen a threshold."""
        if self._measures and "threshold_s" in answer:
            self._clock.threshold_s, self._measures = float(answer["threshold_s"]), False
            if self._run.dims.rank == 0:
                self._run.events.emit(EVENT_KIND, "threshold", step=self._run.step, threshold_s=self._chosen)
                logger.info("Local-SGD: a replica starts no micro-batch after %g s of a round", self._clock.threshold_s)
        self._clock.begin(self._round + 1, Done(self._steps, self._micro_batches), self._elapsed_s)
        self._elapsed_s, self._has_ended = 0.0, False

    def _end_round(self, run: Run) -> None:
        run.enter("SAVE")
        began, number, self._has_ended = time.monotonic(), self._round + 1, True
        assert self._door is not None, "on_start comes first"
        masters = self._masters
        self._door.offer(MASTERS, number, masters)
        norm, finite = self._norm(masters)
        times = self._clock.times if self._measures else None
        report = Report(number, self._tokens, self._steps, self._micro_batches, norm, finite, self._digest, times)
        is_last = number * self._section.every >= run.steps
        answer = self._on_first(lambda line: line.report(report, is_last=is_last))
        self._waited_s = time.monotonic() - began
        if "stopping" in answer:
            run.end.reason, run.end.waits_for_others = STOPPED, True
            return
        if "members" in answer:
            answer = self._exchange(number, masters, answer)
        if "members" not in answer:
            self._left_out(run, number, answer)
        self._tokens = self._steps = self._micro_batches = 0
        seconds = time.monotonic() - began
        run.progress.paused_s += seconds
        if self._writer is not None:
            self._writer.write(run.step, {"local_sgd/outer_norm": norm, "local_sgd/exchange_s": seconds})
        run.enter("BETWEEN")
        self._begin_round(answer)

    def _exchange(self, number: int, masters: Sequence[Tensor], plan: dict[str, Any]) -> dict[str, Any]:
        """Fetch the members' weights, and take over what is agreed on; returns the meeting's answer."""
        assert self._door is not None, "on_start comes first"
        run, rank = self._run, self._run.dims.rank
        tokens = {int(replica): int(used) for replica, _, used in plan["members"]}
        doors = {int(replica): tuple(doors[rank]) for replica, doors, _ in plan["members"] if replica != self._replica}
        shard_bytes = _bytes(masters)
        at_most_s = max(float(plan["deadline_s"]), LEAST_EXCHANGE_S) + len(doors) * shard_bytes / SLOWEST_BYTES_PER_S
        found = fetch_all(doors, self._secret, number, masters, at_most_s)  # type: ignore[arg-type]
        of_ranks = gather_objects(({*found, self._replica}, len(found) * shard_bytes, at_most_s), run.host_group)
        has, most_s = set.intersection(*(one for one, *_ in of_ranks)), max(one[-1] for one in of_ranks)
        answer = self._on_first(lambda line: line.have(number, sorted(has), most_s))
        if "members" not in answer:
            return answer
        self._door.withdraw(AGREED)
        used = [int(one) for one in answer["members"]]
        every = {replica: masters if replica == self._replica else found[replica] for replica in used}
        self._agreed.update(every, tokens)
        self._adopt(number)
        self._on_first(lambda line: line.ask("agree", round=number, digest=self._digest))
        if run.dims.rank == 0:
            told: dict[str, Any] = {"round": number, "members": used, "digest": self._digest}
            told |= {"fetched": of_ranks[0][1], "fetched_bytes": sum(one for _, one, _ in of_ranks)}
            told["waited_s"] = self._waited_s
            run.events.emit(EVENT_KIND, "round", step=run.step, **told)
            without = answer.get("without") or {}
            if any(without.values()):
                run.events.emit(EVENT_KIND, "without", step=run.step, round=number, **without)
        return answer

    def _norm(self, masters: Sequence[Tensor]) -> tuple[float, bool]:
        """Norm of this replica's outer gradient, and whether all of its weights are finite; on all ranks."""
        squares, finite = distance(masters, self._agreed.weights)
        sums = torch.tensor([squares if finite else 0.0, float(not finite)], dtype=torch.float64)
        dist.all_reduce(sums, group=self._run.host_group)
        return float(sums[0]) ** 0.5, not bool(sums[1])

    @torch.no_grad()
    def _adopt(self, number: int) -> None:
        """Train on from the agreed weights, those after a round."""
        assert self._door is not None, "on_start comes first"
        self._door.withdraw(MASTERS)
        optimizer = self._run.engine.optimizer
        for master, agreed in zip(self._masters, self._agreed.weights, strict=True):
            master.copy_(agreed)
        optimizer.update_lp_params()
        self._move_to(number * self._section.every)
        self._round, self._digest = number, self._digest_of_all()
        self._offer()
        self.changed()

    def _offer(self) -> None:
        assert self._door is not None, "on_start comes first"
        self._door.offer(AGREED, self._round, self._agreed.tensors)

    def _digest_of_all(self) -> str:
        """Digest of the agreed weights of all ranks."""
        own = xxhash.xxh3_128()
        for one in self._agreed.tensors:
            own.update(bytes_of(one.cpu()))
        return xxhash.xxh3_128_hexdigest(" ".join(gather_objects(own.hexdigest(), self._run.host_group)).encode())

    # --- left out -----------------------------------------------------------------------------------------------

    def _left_out(self, run: Run, number: int, answer: dict[str, Any]) -> None:
        reason, wrong = str(answer["left_out"]), bool(answer.get("wrong"))
        self._take_over(answer, reason, wrong=wrong)
        if run.dims.rank == 0:
            run.events.emit(EVENT_KIND, "left_out", step=run.step, round=number, reason=reason, wrong=wrong)
            logger.warning(
                "round %d went on without this replica: %s; it goes on from round %d", number, reason, self._round
            )
        if wrong:
            self._report(number, reason, answer.get("look"))

    def _report(self, number: int, reason: str, look: dict[str, Any] | None) -> None:
        """Report that this replica was left out of a round as wrong; which of its ranks is, is not known."""
        if self.incidents is None:
            return
        step, dims = number * self._section.every, self._run.dims
        evidence = RoundEvidence(self._replica, number, reason, None if look is None else RoundLook.of(look))
        address = Address(step, None, UPDATE, "the whole model", "outer gradient")
        ranks = tuple(range(dims.world_size))
        ruling = RankVerdict(None, INCONCLUSIVE, ROUNDS, address, suspects=ranks)
        self.incidents.report(step, Finding("round", None, (ruling,), round=evidence), LEAVE_OUT, self._suspects)

    def _take_over(self, answer: dict[str, Any], reason: str, *, wrong: bool, returns: bool = False) -> None:
        """Take over the weights that others have agreed on, and go on at their step.

        Args:
            returns: whether it was lost, so that it has used samples of the steps up to there.

        Raises:
            LaunchError: no replica has any.
        """
        assert self._door is not None, "on_start comes first"
        run, before = self._run, self._run.step
        for _ in range(ATTEMPTS):
            for _, doors in answer["sources"]:
                found = self._fetch_agreed(tuple(doors[run.dims.rank]), int(answer["round"]))
                rounds = gather_objects(None if found is None else found[0], run.host_group)
                if found is None or None in rounds or len(set(rounds)) > 1:
                    continue
                self._door.withdraw(AGREED)
                for own, other in zip(self._agreed.tensors, found[1], strict=True):
                    own.copy_(other)
                if wrong:
                    NEW_MOMENTS.reset(run.engine.optimizer.optimizer)
                self._adopt(found[0])
                self._tokens = self._steps = self._micro_batches = 0
                if returns:
                    self._skip_samples(before)
                return
            time.sleep(PAUSE_S)
            answer = {**answer, **self._on_first(lambda line: line.ask("newest"))}
        raise LaunchError(f"replica {self._replica} has to take over the others' weights ({reason}), and none has them")

    def _fetch_agreed(self, place: tuple[Any, ...], least: int) -> tuple[int, list[Tensor]] | None:
        self._run.enter("SAVE")
        like = self._agreed.tensors
        at_most_s = LEAST_EXCHANGE_S + _bytes(like) / SLOWEST_BYTES_PER_S
        try:
            found = fetch((str(place[0]), int(place[1])), self._secret, AGREED, None, like, at_most_s)
        except OSError as error:
            logger.info("no agreed weights from %s: %s", place, error)
            return None
        return found if found[0] >= least else None

    def _move_to(self, step: int) -> None:
        """Go on as after the last step of a round, of which this replica may have taken fewer."""
        run, engine = self._run, self._run.engine
        if (missing := step - run.step) == 0:
            return
        scheduler = engine.lr_scheduler
        if scheduler is not None:
            scheduler.step(scheduler.last_batch_iteration + missing)
        engine.global_steps = run.progress.step = step

    def _skip_samples(self, before: int) -> None:
        """Skip the samples of the steps after ``before``: which of them were used before it was lost is not known."""
        run, engine = self._run, self._run.engine
        steps, deal = range(before + 1, run.step + 1), engine.deal
        if not steps:
            return
        counts = (engine.micro_batches if deal is None else deal.count(step, run.dims.dp_rank) for step in steps)
        run.loader.skip_next(sum(counts), again=False)
        samples = len(steps) * engine.samples_per_step
        run.progress.uncounted_samples += samples
        run.events.emit_on_rank_0(EVENT_KIND, "samples_skipped", step=run.step, first_step=steps[0], samples=samples)

    # --- saving -------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """This rank's shard of what was agreed on last, where the weights of the run do not say it."""
        if not (self._steps or self._agreed.momentum):
            return {}
        return {AGREED_WEIGHTS: [one.cpu() for one in self._agreed.tensors]}

    def state_dict(self) -> dict[str, Any]:
        """The round, and what was done since its beginning; where micro-batches are dropped, how that is decided."""
        return {
            "round": self._round,
            "tokens": self._tokens,
            "steps": self._steps,
            "micro_batches": self._micro_batches,
            **({"has_ended": self._has_ended, "elapsed_s": self._clock.elapsed_s} if self._drops else {}),
            **({"threshold_s": self._chosen} if self._section.threshold == AUTO and not self._measures else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``, and what this rank has saved by ``own_state``.

        Raises:
            CheckpointError: that has other sizes.
        """
        self._round, self._tokens = state["round"], state["tokens"]
        self._steps, self._micro_batches = state["steps"], state["micro_batches"]
        self._has_ended, self._elapsed_s = state.get("has_ended", False), state.get("elapsed_s", 0.0)
        if self._measures and "threshold_s" in state:
            chosen = state["threshold_s"]
            self._clock.threshold_s, self._measures = math.inf if chosen is None else chosen, False
        saved, own = state.get(AGREED_WEIGHTS, []), self._agreed.tensors
        if not saved:
            return
        sizes, wanted = [one.numel() for one in saved], [one.numel() for one in own]
        if sizes != wanted:
            raise CheckpointError(
                f"the checkpoint holds agreed weights of {sizes} elements, here are {wanted}; go on with the layout "
                "and the megasdc.local_sgd.outer that saved it"
            )
        for one, other in zip(own, saved, strict=True):
            one.copy_(other)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
