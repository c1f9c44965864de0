"""Incidents: what, where, when, evidence and instructions for one case of silent data corruption.

Plain data without torch and without communication, as JSON for programs; their page is ``incident_page``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megasdc.common.addresses import (
    Address,
    which_micro_batch,
)
from megasdc.common.errors import TraceError
from megasdc.common.origin import CONFIG_FILE
from megasdc.common.words import ranges
from megasdc.events import Event


@dataclass(frozen=True)
class Outside:
    """The element farthest outside of its bound.

    Args:
        element: row and column in the result.
        exact: value of the element in fp64.
        bound: largest difference that rounding explains.
        values: value of each rank, as text, since it may be NaN or Inf.
    """

    element: tuple[int, int]
    exact: float
    bound: float
    values: Mapping[int, str]


@dataclass(frozen=True)
class Opinion:
    """Opinion of the referee on one result; the same on all ranks.

    Args:
        address: address of the result.
        within: whether rounding allows the result of a rank, by rank; empty: undecided.
        reason: reason why nothing was decided; empty: something was.
        elements: number of elements that were computed.
        worst: the element farthest outside of its bound; None: none is outside.
        basis: basis of rulings that follow from the opinion.
        alone: ranks that have computed the result from inputs that all of these had alike, without another rank.
    """

    address: Address
    within: Mapping[int, bool]
    reason: str = ""
    elements: int = 0
    worst: Outside | None = None
    basis: str = "referee"
    alone: tuple[int, ...] = ()


REPEATS = 10
"""Runs of each case in the recommended verification of a host."""


INJECTED = "Faults were injected on purpose in this run"
FAULT_FIELDS = ("megasdc.faults", "megasdc.process_faults")
"""Fields of the configuration by which faults are injected."""


def without_faults(field: str) -> str:
    """The option that empties a field by which faults are injected, for a command line."""
    return f"--set {shlex.quote(f'{field}=[]')}"


@dataclass(frozen=True)
class RankPlace:
    """One rank of the run.

    Args:
        host: name of its host, as in the hostfile.
        device: name of its device.
    """

    rank: int
    host: str
    device: str
    dp_rank: int
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True)
class FlaggedRank(RankPlace):
    """A rank named as wrong.

    Args:
        verdict: verdict on this rank; inconclusive: it is certainly wrong, but its repeats do not show how often.
        first: its first wrong result.
        expected: correct checksum of that result, 16 hexadecimal digits; None: not known.
        got: its actual checksum; None: not known.
        repeats: number of times that the rank recomputed the micro-batch.
        wrong_repeats: number of these in which it was wrong.
        rate_bound: upper bound of its rate of wrong micro-batches with 95 % confidence, in (0, 1]; None where it was
            wrong again.
    """

    verdict: Literal["persistent", "intermittent", "not_reproduced", "inconclusive"]
    first: Address
    expected: str | None
    got: str | None
    repeats: int
    wrong_repeats: int
    rate_bound: float | None


@dataclass(frozen=True)
class DisputedRank(RankPlace):
    """A rank that differs from others, where it is not known which of them is wrong.

    Args:
        first: the first result that differs.
        got: checksum that this rank computed, 16 hexadecimal digits; None: there is none, or it is not known.
    """

    first: Address
    got: str | None


@dataclass(frozen=True)
class IncidentEvidence:
    """Compared and differing results.

    Args:
        compared: number of compared results, over all ranks.
        differing: number of results that differ, by phase, submodule and rank; phases and submodules in the order in
            which they were computed.
    """

    compared: int
    differing: dict[str, dict[str, dict[int, int]]]


@dataclass(frozen=True)
class RoundLook:
    """What was looked at of a replica that was left out as wrong.

    Args:
        finite: whether all of its weights were.
        as_others: whether it had begun the round with the same weights as most others.
        norm: 2-norm of its outer gradient, of what is finite in it.
        others: the same of the other replicas that have reported, by replica.
        own_rounds: number of its own last rounds whose norms are known.
        own_mean: their mean; None: there are none.
        own_deviation: their standard deviation; None: there are none.
        steps: that its optimizer has taken, by which norms are judged.
        steps_of_others: the same of the other replicas, by replica.
    """

    finite: bool
    as_others: bool
    norm: float
    others: Mapping[int, float]
    own_rounds: int
    own_mean: float | None
    own_deviation: float | None
    steps: int
    steps_of_others: Mapping[int, int]

    @staticmethod
    def of(raw: Mapping[str, Any]) -> RoundLook:
        """As it is in JSON, whose keys are text.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        by_replica = {
            name: {int(other): value for other, value in raw[name].items()} for name in ("others", "steps_of_others")
        }
        return RoundLook(**{**raw, **by_replica})


@dataclass(frozen=True)
class RoundEvidence:
    """A replica that a round of Local-SGD was made without, since it was wrong.

    Args:
        replica: its number, the first is 0.
        round: number of the round, the first is 1.
        reason: why, in words.
        look: what was looked at; None: not known.
    """

    replica: int
    round: int
    reason: str
    look: RoundLook | None = None


@dataclass(frozen=True)
class Environment:
    """Software versions, layout and precision of the run.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """

    versions: dict[str, str]
    layout: dict[str, int]
    precision: str


StepFate = Literal["not taken", "taken", "skipped"]
"""What the optimizer has made of a step: not called yet, taken, or skipped for NaN or Inf, so that nothing changed."""


@dataclass(frozen=True)
class Script:
    """A training that is not megasdc's own, to which a guard was attached.

    Args:
        command: the script and its arguments.
        agreed: last step before which an audit has found all replicas equal; None: none has.
        fate: what the optimizer had made of the step; None: of an earlier version.
    """

    command: str
    agreed: int | None
    fate: StepFate | None = None


@dataclass(frozen=True)
class Instruction:
    """One action for the engineer, with exact commands, one a line; words in capitals are to be filled in."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Incident:
    """One case of silent data corruption.

    Args:
        time: time of detection, ISO 8601, UTC.
        step: optimizer step, first is 1.
        micro_batch: micro-batch in the step, first is 0; None where it belongs to none; ``addresses.OF_AUDIT``: an
            audit's own.
        tier: the check that detected it.
        verdict: verdict of the incident, the worst of several flagged ranks'.
        basis: evidence by which the correct value is known.
        done: what was done; isolated: the others went on without the replicas of the flagged ranks; repaired: the step
            was rerun, ranks agreed, and the result was used; committed: nothing; left out: a round of Local-SGD was
            made without this replica, which has taken over what the others agreed on.
        flagged: ranks named as wrong.
        disputed: ranks that differ without being named.
        opinions: the referee's, of results that ranks disagree on.
        earlier: earlier events that may be related, oldest first.
        golden: golden trace file to verify hosts with; None: there is none.
        verified_checkpoint: folder of the newest verified checkpoint; None: there is none.
        newest_candidate: folder of the newest checkpoint that is not verified; None: there is none.
        not_read: files of the run that could not be read for this report, a sentence each.
        injected: fields of the configuration by which faults are injected on purpose; empty: none are.
        script: the guarded script; None: the run is megasdc's own.
        launch: id of the launch; None: without ``megasdc launch``, or of an earlier version.
        attempt: number of the start of the run; None: not counted, or of an earlier version.
        round: of tier round, the round that was made without this replica; None: another tier.

    Raises:
        ValueError: no rank is flagged and none disputed, one is below 0, or the time is none.
    """

    time: str
    run_dir: str
    step: int
    micro_batch: int | None
    tier: Literal[
        "audit",
        "recompute",
        "permuted",
        "rows",
        "tokens",
        "place",
        "parameters",
        "copies",
        "golden",
        "reduction",
        "state",
        "update",
        "settings",
        "norm",
        "clipping",
        "copy",
        "round",
    ]
    verdict: Literal["persistent", "intermittent", "not_reproduced", "inconclusive"]
    basis: Literal[
        "relative to the majority",
        "golden trace",
        "replay",
        "referee",
        "own code in fp64",
        "own recomputation",
        "own results elsewhere",
        "master shard",
        "copies on tensor ranks",
        "own copy",
        "file of the data",
        "step and decisions",
        "mean of the replicas' gradients",
        "own settings of the step before",
        "parts of the norm",
        "own norm",
        "own digest",
        "rounds of all replicas",
    ]
    policy: Literal["halt", "isolate", "repair", "warn", "leave out"]
    done: Literal["halted", "isolated", "repaired", "committed", "left out"]
    flagged: tuple[FlaggedRank, ...]
    disputed: tuple[DisputedRank, ...]
    ranks: tuple[RankPlace, ...]
    evidence: IncidentEvidence
    environment: Environment
    opinions: tuple[Opinion, ...] = ()
    earlier: tuple[Event, ...] = ()
    golden: str | None = None
    verified_checkpoint: str | None = None
    newest_candidate: str | None = None
    not_read: tuple[str, ...] = ()
    injected: tuple[str, ...] = ()
    script: Script | None = None
    launch: str | None = None
    attempt: int | None = None
    round: RoundEvidence | None = None
    format: Literal["megasdc.incident.v1"] = field(default="megasdc.incident.v1", kw_only=True)

    def __post_init__(self) -> None:
        if not self.suspects:
            raise ValueError(
                f"ranks are neither flagged nor disputed in the incident of step {self.step}; needed: one of them"
            )
        if min(one.rank for one in self.suspects) < 0:
            raise ValueError(f"ranks are {[one.rank for one in self.suspects]}, needed numbers from 0")
        try:
            _ = self.found_at
        except (OverflowError, ValueError) as error:
            raise ValueError(f"time is {self.time[:80]!r}, needed a date of ISO 8601") from error

    @property
    def place(self) -> tuple[int, int, float]:
        """Sort key among the incidents of a run: by start and step, and only then by time."""
        return self.attempt or 0, self.step, self.found_at

    @property
    def ends_start(self) -> bool:
        """Whether the start that has found the incident ends with it."""
        return self.done in ("halted", "isolated")

    @property
    def found_at(self) -> float:
        """``time`` in whole seconds since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()

    @property
    def suspects(self) -> tuple[FlaggedRank | DisputedRank, ...]:
        """The flagged ranks, or the disputed ones if none is flagged."""
        return self.flagged or self.disputed

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that own a wrong sum of gradients, where what has made it wrong is not known; empty: it is none."""
        if self.flagged or self.tier != "reduction":
            return ()
        return tuple(sorted({rank for one in self.opinions for rank, right in one.within.items() if not right}))

    @property
    def hosts(self) -> list[str]:
        """Hosts of the suspects, each once."""
        return list(dict.fromkeys(one.host for one in self.suspects))

    @property
    def what_to_do(self) -> list[Instruction]:
        """Instructions for the engineer, in order."""
        if self.round is not None:
            return [_of_round(self, self.round), _verify_hosts(self), _go_on(self)]
        would_decide = [] if self.flagged or self.owners else [_what_would_decide(self)]
        return [_leave_out(self), _verify_hosts(self), *would_decide, _go_on(self)]


def how_often(verdict: str, wrong: int, repeats: int) -> str:
    """Text on the number of a rank's repeats that were wrong, and why that is its verdict; empty without repeats.

    An intermittent rank that was wrong in all of them gave different values; one that was wrong in none was wrong in an
    earlier step or in the golden workload, or it contradicted itself otherwise.
    """
    if not repeats:
        return ""
    counts = f"in {wrong} of {repeats} repeats"
    if verdict == "persistent":
        return f"wrong by the same value {counts}"
    if verdict == "intermittent" and wrong == repeats:
        return f"wrong {counts}, not always by the same value"
    if verdict == "intermittent" and not wrong:
        return f"wrong {counts}, but not only here, or its values vary"
    return f"wrong {counts}"


def place_of(tier: str, address: Address) -> Address:
    """Address by which people are shown what a check found: the optimizer's state is no update."""
    return replace(address, phase="state") if tier == "state" else address


_ADAPTER = TypeAdapter(Incident)
_INSTRUCTIONS = TypeAdapter(list[Instruction])


def incident_to_json(incident: Incident) -> str:
    """The incident as JSON, with its instructions under ``what_to_do``."""
    content = _ADAPTER.dump_python(incident, mode="json")
    content["what_to_do"] = _INSTRUCTIONS.dump_python(incident.what_to_do, mode="json")
    return json.dumps(content, indent=1) + "\n"


def incident_from_json(text: str, source: str = "the text") -> Incident:
    """Parse the JSON of ``incident_to_json``; messages name its ``source``.

    Raises:
        TraceError: it is damaged, or not an incident.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "as a whole"
        raise TraceError(f"{source} is damaged or not an incident report: {where}: {first['msg']}") from error


def load_incidents(folder: Path, notes: list[str]) -> tuple[tuple[Path, Incident], ...]:
    """Incidents of corruption in a folder of reports, with the page of each; what cannot be read is noted."""
    found = []
    for path in sorted(folder.glob("incident_step_*.json")):
        try:
            found.append((path.with_suffix(".html"), incident_from_json(path.read_text(encoding="utf-8"), path.name)))
        except (OSError, ValueError, TraceError) as error:
            notes.append(f"reports/{path.name} is left out: {error}")
    return tuple(found)


def _what_would_decide(incident: Incident) -> Instruction:
    """Instruction on what would have told which rank is wrong, for the next time."""
    replicas = int(incident.environment.layout.get("data", 0))
    majority = "a third replica gives a majority; " if replicas == 2 else ""
    if incident.script is not None:
        golden = (
            "a golden trace tells who is right: with golden.record true a trusted start writes the file of sdc.golden"
        )
        return Instruction(
            f"What would decide such a case next time: {majority}audit.permuted true compares each rank with itself; "
            f"{golden}.",
            ("megasdc check-config --guard GUARD.json --show",),
        )
    config = shlex.quote(_config(incident))
    return Instruction(
        f"What would decide such a case next time: {majority}megasdc.audit.permuted true compares each rank with "
        "itself; a golden trace, recorded on trusted hosts and named in megasdc.sdc.golden, tells who is right.",
        (f"megasdc golden record --config {config} --out trusted.golden",),
    )


def _of_round(incident: Incident, found: RoundEvidence) -> Instruction:
    """Instruction on a replica that a round of Local-SGD was made without."""
    hosts = " and ".join(incident.hosts)
    text = (
        f"Replica {found.replica} trains on from what the others have agreed on. If it is left out again, exclude "
        f"{hosts} until verified"
    )
    if incident.injected:
        text = f"{INJECTED} ({', '.join(incident.injected)}). {text}"
    return Instruction(f"{text}; if others are left out too, look at the learning rate and the data.")


def _leave_out(incident: Incident) -> Instruction:
    """Instruction to exclude hosts."""
    hosts = " and ".join(incident.hosts)
    when = "start with one of these" if incident.done == "halted" else "at the next start of the run use one of these"
    if not incident.flagged:
        why = "the sum was made of what all of them gave" if incident.owners else "one of those that differ is wrong"
        text = f"No rank could be named: {why}. Exclude {hosts} until verified"
    elif incident.verdict == "not_reproduced":
        text = f"It was not reproduced. {hosts} may stay in use; if named again, exclude it"
    else:
        text = f"Exclude {hosts}"
    if incident.injected:
        text = f"{INJECTED} ({', '.join(incident.injected)}); the commands start without them. {text}"
    if incident.script is not None:
        return _leave_out_of_script(incident, incident.script, f"{text}: {when}")
    config = " ".join([f"--config {shlex.quote(_config(incident))}", *map(without_faults, incident.injected)])
    if {one.host for one in incident.ranks} <= set(incident.hosts):
        return Instruction(
            f"{text}. No host of the run would be left: list other hosts in OTHERS, and {when}.",
            (
                f"megasdc launch --hostfile OTHERS {config}",
                f"deepspeed --hostfile OTHERS --module megasdc.entry.pretrain_gpt {config}",
            ),
        )
    without = f"--exclude {shlex.quote('@'.join(incident.hosts))}"
    return Instruction(
        f"{text}: {when}. HOSTFILE is that of this run; put a spare host into it, so that the layout stays the same.",
        (
            f"megasdc launch --hostfile HOSTFILE {without} {config}",
            f"deepspeed --hostfile HOSTFILE {without} --module megasdc.entry.pretrain_gpt {config}",
        ),
    )


def _leave_out_of_script(incident: Incident, script: Script, text: str) -> Instruction:
    without = f"--exclude {shlex.quote('@'.join(incident.hosts))} "
    if {one.host for one in incident.ranks} <= set(incident.hosts):
        text, without = f"{text}. No host of the run would be left: list other hosts in HOSTFILE", ""
    return Instruction(
        f"{text}. Give deepspeed the other options, too, that this training had.",
        (f"deepspeed --hostfile HOSTFILE {without}{script.command}",),
    )


def _verify_hosts(incident: Incident) -> Instruction:
    """Instruction to verify hosts against a golden trace."""
    if incident.script is not None:
        return Instruction(
            f"Test {' and '.join(incident.hosts)} when no run uses it: log in and run this. Exit code 0: healthy, 73: "
            "wrong.",
            ("megasdc stress",),
        )
    golden = shlex.quote(incident.golden or "TRUSTED.golden")
    verify = f"megasdc golden verify {golden} --repeats {REPEATS}"
    text = (
        f"Verify {' and '.join(incident.hosts)} when no run uses it: log in and run this. Exit code 0: healthy, 73: "
        "wrong."
    )
    if incident.golden is not None:
        return Instruction(text, (verify,))
    return Instruction(
        f"{text} No golden trace is known: record one first, on a host of the same kind that you trust, and copy it.",
        (f"megasdc golden record --config {shlex.quote(_config(incident))} --out {golden}", verify),
    )


def _go_on(incident: Incident) -> Instruction:
    """Instruction on the checkpoint to resume from."""
    verified, candidate = incident.verified_checkpoint, incident.newest_candidate
    if incident.done != "halted":
        return Instruction("The run continues; no restart is needed.")
    is_lost = incident.script is not None and incident.script.fate == "skipped" and incident.tier == "reduction"
    if is_lost:
        newest = f"{candidate or verified}, the newest checkpoint" if candidate or verified else "the newest checkpoint"
        older = f"; the newest after which all replicas have agreed is {verified}" if candidate and verified else ""
        return Instruction(f"Go on from {newest}: no parameter has changed by it{older}.")
    if incident.script is not None and verified is not None:
        newer = f"; newer ones, up to {candidate}, may hold what went wrong" if candidate else ""
        folder, tag = os.path.split(verified)
        return Instruction(
            f"Go on from {verified}, the newest checkpoint after which all replicas have agreed{newer}. The script "
            "must load it, since DeepSpeed's file `latest` may name a newer one: "
            f"`engine.load_checkpoint({folder!r}, {tag!r})`"
        )
    if incident.script is not None:
        agreed = incident.script.agreed
        if agreed == 1:
            older = candidate or f"a checkpoint before step {incident.step}"
            return Instruction(
                f"All replicas have agreed before the first step alone. Begin anew, or go on from {older} and accept "
                "that it may hold what went wrong."
            )
        newest = f"at most {agreed - 1} step{'s' * (agreed > 2)}" if agreed else "no step of this start"
        return Instruction(
            f"Go on from a checkpoint with {newest}, after which all replicas have agreed; newer ones may hold what "
            "went wrong. Where there is none, begin anew."
        )
    if verified is not None:
        newer = f" Newer ones, up to {candidate}, will be moved to `unverified`." if candidate else ""
        return Instruction(
            f"The launch resumes by itself from {verified}, the newest verified checkpoint.{newer} To look at it:",
            (f"megasdc verify-checkpoint {shlex.quote(verified)}",),
        )
    if candidate is not None:
        return Instruction(
            "No checkpoint is verified, so the launch would end with exit code 72. Start anew in another run folder, "
            f"or accept that {candidate} may hold what went wrong, by one of these options.",
            (
                "--set megasdc.logging.run_dir=OTHER_FOLDER",
                "--set megasdc.checkpoint.require_verified=never",
            ),
        )
    if incident.not_read:
        return Instruction("No checkpoint is known, but not all files of the run could be read: look for some first.")
    return Instruction("There is no checkpoint: the launch starts from step 1.")


def _config(incident: Incident) -> str:
    """The run's complete configuration."""
    return str(Path(incident.run_dir) / CONFIG_FILE)


_DONE = {
    "halted": "training was halted",
    "isolated": "training continues without its replica",
    "repaired": "the work was redone and training continues",
    "committed": "training continues with it",
    "left out": "the others went on without it, and it has taken over what they agreed on",
}
WRITTEN = ("state", "update")
"""Checks of which a finding is put right by writing what is right, where other work is redone."""
_HELD = ("state", "parameters", "copies", "copy")
"""Checks of what a rank holds, and does not compute."""


def headline(incident: Incident) -> str:
    """One sentence with what happened, where and when."""
    when = f"Step {incident.step}{which_micro_batch(incident.micro_batch)}"
    if incident.round is not None:
        ranks = " and ".join(f"{one.rank} on host {one.host}" for one in incident.suspects)
        what = (
            f"round {incident.round.round} was made without replica {incident.round.replica} (rank"
            f"{'s' * (len(incident.suspects) > 1)} {ranks}): {incident.round.reason}"
        )
    elif incident.flagged:
        verb = "holds" if incident.tier in _HELD else "computed"
        places = [(one, place_of(incident.tier, one.first)) for one in incident.flagged]
        what = "; ".join(
            f"rank {one.rank} on host {one.host} {verb} a wrong {place.phase.replace('_', ' ')} of "
            f"{place.fqn} ({one.verdict.replace('_', ' ')})"
            for one, place in places
        )
    elif owners := incident.owners:
        ranks = ranges(one.rank for one in incident.disputed)
        mine = " and ".join(f"{one.rank} on host {one.host}" for one in incident.disputed if one.rank in owners)
        what = (
            f"the sum of the gradients of {incident.disputed[0].first.fqn} over ranks {ranks} is wrong; rank {mine} "
            "owns it, and it is not known whether a rank or a link made it so"
        )
    else:
        ranks = " and ".join(f"{one.rank} on host {one.host}" for one in incident.disputed)
        what = f"ranks {ranks} computed different results, and it is not known which is wrong"
    is_written = incident.done == "repaired" and incident.tier in WRITTEN
    done = "it was put right and training continues" if is_written else _DONE[incident.done]
    return f"{when}: {what}. Found {incident.time}; {done}."
