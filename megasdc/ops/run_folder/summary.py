"""Short summary of a run from its folder; torch is imported only for a failed run's checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import VERIFIED_BY_GUARD_FILE, VERIFIED_FILE, step_folder
from megasdc.common.errors import ERRORS_BY_EXIT_CODE, CorruptionError, DataError, MegasdcError, NonFiniteError
from megasdc.common.origin import CONFIG_FILE
from megasdc.common.words import number_of
from megasdc.config.load import parse_config
from megasdc.config.read import shown
from megasdc.data.manifest import DataManifest
from megasdc.events import Event
from megasdc.metrics.writer import read_metrics
from megasdc.ops.health.front.clocks import describe_differing_dates
from megasdc.ops.health.hosts import last_step_seen
from megasdc.ops.health.incident_file import HangIncident
from megasdc.ops.launch.launch_verdict import LEFT_OUT, SHOWN, Met, order_by_step
from megasdc.ops.run_folder.record import LaunchEnding, RunRecord, load_run
from megasdc.ops.run_folder.replicas import RoundsSummary, is_of_replicas, replica_folders, summarize_rounds
from megasdc.ops.run_folder.status import GuardStatus, guard_of, status_of
from megasdc.ops.run_folder.study_log import STUDY_FOLDER
from megasdc.ops.supervise.goodput import Goodput, goodput_of
from megasdc.ops.supervise.met import all_met
from megasdc.sdc.incident import how_often, without_faults

_SHOWN_SKIPS = 5


@dataclass(frozen=True)
class LaunchFailure:
    """How the last launch of a run failed; the text is the cause, as the launch or the failed rank recorded it.

    ``rank``: that failed first, None: not known; ``verdict``: of the report on silent data corruption, None: another
    failure, or no report; ``incident``: that report, or the file of the hang that the launch ended with; ``suspects``:
    ranks that it names, or of which one is wrong, for NaN and Inf where they appeared first; ``verified_checkpoint``:
    the newest after which an audit agreed, None: none; ``repeats``: in how many repeats the worst suspect was wrong, as
    text, None: not repeated; ``injected``: fields by which faults were injected on purpose, according to the report;
    ``way_back``: after NaN or Inf, the checkpoint to go back to, None: there is none.
    """

    exit_code: int
    text: str
    rank: int | None
    host: str | None
    verdict: str | None
    suspects: list[str]
    incident: str | None
    verified_checkpoint: str | None
    repeats: str | None = None
    injected: list[str] = field(default_factory=list)
    way_back: str | None = None


@dataclass(frozen=True)
class Hang:
    """A standstill of the run: its kind, time (UTC, by the clock of the host that wrote it), cause and file."""

    kind: str
    time: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    who: str
    message: str
    path: str


@dataclass(frozen=True)
class Skipped:
    """Steps in a row that the optimizer did not take, in one attempt, and why: the reason and place of the first."""

    first: int
    last: int
    attempt: int
    reason: str

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps} of start {self.attempt}: {self.reason}"


@dataclass(frozen=True)
class ReplicaState:
    """One replica of Local-SGD as its run folder tells it; see ``RunSummary`` for its fields."""

    replica: int
    run_dir: str
    state: str
    steps: int
    last_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None

    def __str__(self) -> str:
        loss = "" if self.tokens_per_s is None else f", training loss {_nats(self.last_loss)}"
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.replica}: {self.state}, step {self.steps}{loss}{speed}; {self.run_dir}"


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run; losses in nats, None where none was reported or it was not finite.

    ``steps``: last one reported, 0: none; ``planned_steps``: None without a configuration; ``first_loss``,
    ``last_loss``: means of windows; ``unigram_entropy``: loss of a model that knows token frequencies alone, None for a
    blend and without data; ``tokens_per_s``: median over windows, all ranks;
    ``weaker``: exact checks that were within a tolerance, or off, since a step of the run, and why;
    ``skipped``: by start, those whose steps were done again included;
    ``stragglers``: ranks that were slower than their peers since the last start; ``hangs``: oldest first; ``archive``:
    what is in it and what failed, None: nothing was to be archived; ``goodput``: None: it was not supervised;
    ``met``: faults and standstills of all starts, hosts that were replaced and steps back, with what to do, oldest
    first; ``clocks``: of the last launch, how hosts' dates differed, a sentence each; ``state`` and ``end``: see
    ``RunStatus``; ``guard``: None: the training has none; ``protection``: word, audits and findings of all starts,
    None: not a run of megasdc's own; ``verified``: path of the newest checkpoint after which an audit has agreed;
    ``rounds``: of Local-SGD, None: the run is none of that; ``refused``: how a start ended that was refused after all
    steps were done, empty: none was.

    Of a launch of replicas the losses are means over replicas, tokens, speed and skipped steps their sums, steps the
    most that one has reached, the failure the first replica's that has one, and ``of_replicas`` has each of them.
    """

    run_dir: str
    steps: int
    planned_steps: int | None
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    unigram_entropy: float | None
    tokens: int
    tokens_per_s: float | None
    skipped_steps: int
    resumed_from: list[int]
    changed_settings: list[str]
    checkpoints: list[str]
    stragglers: list[str] = field(default_factory=list)
    weaker: list[str] = field(default_factory=list)
    failure: LaunchFailure | None = None
    hangs: tuple[Hang, ...] = ()
    archive: str | None = None
    goodput: Goodput | None = None
    clocks: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    met: tuple[Met, ...] = ()
    state: str = ""
    end: str = ""
    guard: GuardStatus | None = None
    protection: str | None = None
    verified: str | None = None
    rounds: RoundsSummary | None = None
    of_replicas: tuple[ReplicaState, ...] = ()
    refused: str = ""

    @property
    def finished(self) -> bool:
        """Whether all planned steps were reported and nothing failed afterwards; of a user's own training, its end."""
        if self.planned_steps is None:
            return self.failure is None and self.state == "done"
        done = self.failure is None and self.steps >= self.planned_steps
        return done and all(one.state == "done" for one in self.of_replicas)


def summarize_run(run_dir: Path | str) -> RunSummary:
    """Reads a run folder.

    Raises:
        DataError: the folder holds no run, or nothing was reported yet.
    """
    folder = Path(run_dir)
    if (folder / STUDY_FOLDER).is_dir():
        raise DataError(f"{folder} holds a study; give one of its folders replica_K, or use megasdc study")
    if is_of_replicas(folder):
        return _of_replicas(folder)
    run = load_run(folder)
    rows = read_metrics(folder)
    trained = [row for row in rows if "train/loss" in row]
    status = status_of(run)
    failed = status.state == "failed"
    guard = guard_of(run)
    if not (failed or (run.config and trained) or ((run.ending or guard) is not None and not run.config)):
        raise DataError(f"{folder} holds no run that has reported a step; train one with megasdc launch")
    sections = None
    if run.config:
        sections = parse_config(run.config, source=str(folder / CONFIG_FILE), stored=True).megasdc
    named = None if sections is None else sections.checkpoint.folder
    checkpoints = Path(named or folder / "checkpoints")
    saves = _saves_of_guard(run) if guard else sorted(map(str, checkpoints.glob("step_*")))
    rates = sorted(row["speed/tokens_per_s"] for row in trained)
    evals = [row["eval/loss"] for row in rows if "eval/loss" in row]
    first, last = (trained[0], trained[-1]) if trained else ({}, {})
    return RunSummary(
        run_dir=str(folder),
        steps=last["step"] if trained else max(last_step_seen(folder), 0 if run.config else run.last_step),
        planned_steps=None if sections is None else sections.training.steps,
        first_loss=first.get("train/loss"),
        last_loss=last.get("train/loss"),
        eval_loss=evals[-1] if evals else None,
        unigram_entropy=None if sections is None or sections.data.blend else _unigram_entropy(Path(sections.data.path)),
        tokens=last.get("train/tokens", 0),
        tokens_per_s=rates[len(rates) // 2] if rates else None,
        skipped_steps=last.get("train/skipped_steps", 0),
        resumed_from=sorted({one.step for one in run.of("resume", "checkpoint") if one.step is not None}),
        changed_settings=[_change_text(event) for event in run.of("resume", "changed")],
        checkpoints=saves,
        stragglers=_stragglers(run),
        weaker=list(dict.fromkeys(map(_weaker, run.of("sdc", *_WEAKER)))),
        failure=_failure(run, run.ending, checkpoints) if failed and run.ending is not None else None,
        hangs=tuple(map(_hang, run.hangs)),
        archive=_archive(run),
        goodput=goodput_of(folder, time.time()),
        clocks=tuple(describe_differing_dates(folder / "health")),
        skipped=tuple(_skipped(run)),
        met=tuple(all_met(folder)),
        state=status.state,
        end=status.text,
        guard=guard,
        protection=None if sections is None else _protection(run, sections.protect),
        verified=_newest_verified(saves),
        rounds=summarize_rounds(folder) if sections is not None and sections.local_sgd.replicas else None,
        refused=status.refused,
    )


def _of_replicas(folder: Path) -> RunSummary:
    """Summary of a launch of replicas.

    Raises:
        DataError: none of them has reported a step.
    """
    some = dict[int, RunSummary]()
    for replica, path in replica_folders(folder).items():
        with suppress(DataError):  # one that has not begun yet, or lies elsewhere
            some[replica] = summarize_run(path)
    if not some:
        raise DataError(f"{folder} holds replicas of Local-SGD, none of which has reported a step here")
    every = list(some.values())
    first, failed = every[0], next((one for one in every if one.failure is not None), None)
    told = failed or min(every, key=lambda one: (one.state == "done", one.steps))
    shares = [one.tokens_per_s for one in every if one.tokens_per_s is not None]
    return replace(
        first,
        run_dir=str(folder),
        steps=max(one.steps for one in every),
        first_loss=_mean(one.first_loss for one in every),
        last_loss=_mean(one.last_loss for one in every),
        tokens=sum(one.tokens for one in every),
        tokens_per_s=sum(shares) if shares else None,
        skipped_steps=sum(one.skipped_steps for one in every),
        resumed_from=sorted({step for one in every for step in one.resumed_from}),
        changed_settings=list(dict.fromkeys(text for one in every for text in one.changed_settings)),
        checkpoints=[path for one in every for path in one.checkpoints],
        stragglers=[f"replica {number}: {text}" for number, one in some.items() for text in one.stragglers],
        weaker=[f"replica {number}: {text}" for number, one in some.items() for text in one.weaker],
        failure=told.failure,
        hangs=tuple(hang for one in every for hang in one.hangs),
        clocks=tuple(f"replica {number}: {text}" for number, one in some.items() for text in one.clocks),
        skipped=tuple(skipped for one in every for skipped in one.skipped),
        # Who was late is in the rounds, once for all that tell it.
        met=tuple(order_by_step([met for one in every for met in one.met if met.kind != LEFT_OUT])),
        state=told.state,
        end=told.end,
        protection=None,
        rounds=summarize_rounds(folder),
        of_replicas=tuple(
            ReplicaState(
                *(number, one.run_dir, one.state, one.steps),
                *(one.last_loss, one.eval_loss, one.tokens_per_s),
            )
            for number, one in some.items()
        ),
        refused=next((one.refused for one in every if one.refused), ""),
    )


def _mean(losses: Iterable[float | None]) -> float | None:
    """None where one is not known."""
    known = list(losses)
    return None if not known or None in known else sum(filter(None, known)) / len(known)


def _protection(run: RunRecord, word: str) -> str:
    """Word, audits that agreed, and findings, of all starts."""
    agreed = len(run.of("audit", "agreed"))
    found = {(one.attempt, one.step, one.fields.get("tier")) for one in run.of("sdc", "verdict")}
    return f"{word}: {number_of(agreed, 'audit')} agreed, {number_of(len(found), 'finding')}"


def _newest_verified(saves: Sequence[str]) -> str | None:
    """The newest of checkpoints that is marked as one after which an audit has agreed; None: there is none."""
    marks = (VERIFIED_FILE, VERIFIED_BY_GUARD_FILE)
    return next((one for one in reversed(saves) if any(Path(one, mark).exists() for mark in marks)), None)


def _failure(run: RunRecord, ending: LaunchEnding, checkpoints: Path) -> LaunchFailure:
    verdict, suspects, page, repeats, injected = None, [], None, None, []
    # Times of incidents are whole seconds.
    recent = [
        pair for pair in run.incidents if run.is_of_last_start(pair[1].attempt, pair[1].launch, pair[1].found_at + 1)
    ]
    recent.sort(key=lambda pair: pair[1].place)
    ends = [pair for pair in recent if pair[1].ends_start]
    if ending.exit_code == CorruptionError.exit_code and ends:
        path, incident = ends[-1]
        verdict, page = incident.verdict, str(path)
        suspects = [f"rank {one.rank} on {one.host} ({one.device})" for one in incident.suspects]
        injected = list(incident.injected)
        worst = next((one for one in incident.flagged if one.verdict == verdict), None)
        often = "" if worst is None else how_often(worst.verdict, worst.wrong_repeats, worst.repeats)
        repeats = often or None
    if ending.exit_code == NonFiniteError.exit_code:
        found = run.since_last_start(run.of("nonfinite", "first"))
        suspects = [_place(one) for one in found if one.fields.get("rank") is not None][-1:]
    if page is None and not suspects and (hang := _hang_of_failure(run, ending)) is not None:
        page, suspects = str(hang.path), [f"{one.label} ({one.doing})" for one in hang.named] or list(hang.hosts)
    verified, way = None, None
    of_guard = next((one.verified_checkpoint for _, one in reversed(recent) if one.script is not None), None)
    of_guard = of_guard or _newest_verified(_saves_of_guard(run))
    if any(checkpoints.glob(f"step_*/{VERIFIED_FILE}")):
        from megasdc.checkpoint.verify import list_verified  # imports torch

        verified = max(list_verified(checkpoints), default=None)
    if ending.exit_code == NonFiniteError.exit_code:
        from megasdc.checkpoint.verify import find_way_back

        way = find_way_back(checkpoints)
    return LaunchFailure(
        exit_code=ending.exit_code,
        text=ending.text,
        rank=ending.rank,
        host=ending.host,
        verdict=verdict,
        suspects=suspects,
        incident=page,
        verified_checkpoint=of_guard if verified is None else str(checkpoints / step_folder(verified)),
        repeats=repeats,
        injected=injected,
        way_back=None if way is None else str(way.path),
    )


def _saves_of_guard(run: RunRecord) -> list[str]:
    """Checkpoints that a guard has seen saved, as far as they are there still; the newest is the last."""
    told = dict.fromkeys(str(one.fields["path"]) for one in reversed(run.of("guard", "saved")))
    return [path for path in reversed(told) if Path(path).is_dir()]


def _hang_of_failure(run: RunRecord, ending: LaunchEnding) -> HangIncident | None:
    """The standstill that a launch ended with: the one that its message names, else the last since its start."""
    named = [one for one in run.hangs if one.path.name in ending.text]
    recent = [one for one in run.hangs if run.is_of_last_start(one.attempt, one.launch, one.time)]
    return next(reversed(named or recent), None)


def _hang(one: HangIncident) -> Hang:
    time = one.date.isoformat(timespec="seconds")
    return Hang(one.kind, time, one.ranks, one.hosts, one.who, one.message, str(one.path))


def _place(event: Event) -> str:
    """Where NaN or Inf appeared first."""
    where = event.fields
    return (
        f"rank {where['rank']} on {where.get('host')}: {where.get('value')} in the {where.get('phase')} of "
        f"{where.get('fqn')}, step {event.step}, micro-batch {event.micro_batch}"
    )


def _change_text(event: Event) -> str:
    """A setting that a resume found changed, as text."""
    old, new = shown(event.fields["old"]), shown(event.fields["new"])
    return f"{event.fields['path']}: {old} -> {new} after step {event.step}"


def _stragglers(run: RunRecord) -> list[str]:
    """Ranks named as slow since the last start, and when they recovered, as text."""
    found: dict[tuple[Any, Any], str] = {}
    for event in run.since_last_start(run.of("health", "straggler", "recovered")):
        place = event.fields.get("replica"), event.fields.get("stage")
        if event.name == "straggler":
            again = f"{found[place]}; " if place in found else ""
            found[place] = f"{again}{event.fields.get('message')}; since step {event.step}"
        elif place in found:
            found[place] += f", until step {event.step}"
    return list(found.values())


_WEAKER = ("slices_within_rounding", "not_comparable", "golden_unfit")
"""Events of exact checks that compare less, or nothing, from then on."""


def _weaker(event: Event) -> str:
    """An exact check that compares less since a step, or a start, as text."""
    fields, since = event.fields, "" if event.step is None else f" since step {event.step}"
    if event.name == "not_comparable":
        names = ", ".join(fields.get("differing") or ())
        return f"audits leave out {fields.get('positions')} positions, whose ranks differ in {names}"
    if event.name == "golden_unfit":
        return f"no golden trace: {fields.get('reason')}"
    return f"updates are compared within rounding{since}, where {fields.get('address')} differed each time"


def _skipped(run: RunRecord) -> list[Skipped]:
    """Steps that the optimizer skipped, in stretches without a gap."""
    found: list[Skipped] = []
    for event in run.of("skip", "optimizer_step"):
        if event.rank != 0 or event.step is None:
            continue
        attempt, last = event.attempt or 1, found[-1] if found else None
        if last is not None and (last.attempt, last.last + 1) == (attempt, event.step):
            found[-1] = replace(last, last=event.step)
        else:
            reason = "; ".join(str(event.fields[name]) for name in ("reason", "place") if event.fields.get(name))
            found.append(Skipped(event.step, event.step, attempt, reason))
    return found


def _archive(run: RunRecord) -> str | None:
    """The newest checkpoint that was archived, and how many were not, as text."""
    pushed, failed = list(run.of("archive", "pushed")), list(run.of("archive", "failed"))
    if not pushed and not failed:
        return None
    newest = max(pushed, key=lambda one: one.step or 0, default=None)
    found = "nothing" if newest is None else f"up to step {newest.step} in {newest.fields.get('address')}"
    if failed:
        found += f"; {len(failed)} failed, the last of step {failed[-1].step}: {failed[-1].fields.get('problem')}"
    return found


def _unigram_entropy(data: Path) -> float | None:
    try:
        return DataManifest.load(data).unigram_entropy_nats
    except MegasdcError:
        return None


def render(summary: RunSummary) -> str:
    """The summary as text for a terminal."""
    of_user = summary.planned_steps is None and bool(summary.end)  # a training whose length is not known
    planned = "" if summary.planned_steps is None else f" of {summary.planned_steps}"
    skipped = f" ({summary.skipped_steps} skipped)" if summary.skipped_steps else ""
    lines = [f"run folder        {summary.run_dir}"]
    lines += [f"end               {summary.end}"] if of_user else []
    lines.append(f"steps             {summary.steps}{planned}{skipped}")
    if summary.rounds is not None:
        lines += summary.rounds.lines
    lines += [f"{'replicas' if not place else '':<18}{one}" for place, one in enumerate(summary.of_replicas)]
    if summary.guard is not None:
        lines.append(f"guard             {summary.guard}")
    if summary.failure is not None:
        lines += _render_failure(summary.failure, told=of_user)
    lines += [f"refused           a start after that, {summary.refused}"] if summary.refused else []
    lines += [f"skipped           {one}" for one in summary.skipped[-_SHOWN_SKIPS:]]
    if len(summary.skipped) > _SHOWN_SKIPS:
        lines.append(f"skipped           and {len(summary.skipped) - _SHOWN_SKIPS} times before: see --json")
    if summary.hangs:
        last = summary.hangs[-1]
        lines.append(f"hangs             {len(summary.hangs)}, the last ({last.kind}, {last.who}): {last.path}")
    lines += [f"{'met' if not place else '':<18}{one}" for place, one in enumerate(summary.met[-SHOWN:])]
    if len(summary.met) > SHOWN:
        lines.append(f"{'':<18}and {len(summary.met) - SHOWN} before: see --json")
    if summary.tokens_per_s is not None:
        losses = " -> ".join(map(_nats, (summary.first_loss, summary.last_loss)))
        lines.append(f"training loss     {losses} nats per token")
    if summary.eval_loss is not None:
        lines.append(f"validation loss   {summary.eval_loss:.3f} nats per token")
    reached = summary.eval_loss if summary.eval_loss is not None else summary.last_loss
    if summary.unigram_entropy is not None and reached is not None:
        better = summary.unigram_entropy - reached
        lines.append(
            f"against frequency {abs(better):.3f} nats {'better' if better >= 0 else 'worse'} than knowing token "
            f"frequencies alone ({summary.unigram_entropy:.3f})"
        )
    if summary.tokens_per_s is not None:
        lines.append(f"speed             {summary.tokens_per_s:,.0f} tokens/s, {summary.tokens:,} tokens in all")
    if summary.goodput is not None:
        lines.append(f"goodput           {summary.goodput}")
    if summary.resumed_from:
        lines.append(f"resumed from step {', '.join(map(str, summary.resumed_from))}")
    lines += [f"changed           {text}" for text in summary.changed_settings]
    lines += [f"not exact         {text}" for text in summary.weaker]
    lines += [f"straggler         {text}" for text in summary.stragglers]
    lines += [f"clocks            {text}" for text in summary.clocks]
    if summary.protection is not None:
        lines.append(f"protection        {summary.protection}")
    lines.append(f"checkpoints       {', '.join(summary.checkpoints) or 'none'}")
    if summary.verified is not None:
        lines.append(f"verified          up to {summary.verified}")
    if summary.archive is not None:
        lines.append(f"archived          {summary.archive}")
    return "\n".join(lines)


def _render_failure(failure: LaunchFailure, *, told: bool) -> list[str]:
    """Lines on a failure; ``told``: its text stands above."""
    kind = ERRORS_BY_EXIT_CODE.get(failure.exit_code)
    meaning = "" if kind is None else f": {(kind.__doc__ or '').splitlines()[0]}"
    lines = [f"ended with        exit code {failure.exit_code}{meaning}"]
    lines += [] if told else [f"because           {failure.text}"]
    if failure.verdict is not None:
        often = f" ({failure.repeats})" if failure.repeats else ""
        lines.append(f"verdict           {failure.verdict.replace('_', ' ')}{often}")
    if failure.suspects:
        lines.append(f"{'one of' if failure.verdict == 'inconclusive' else 'who':<18}{', '.join(failure.suspects)}")
    elif failure.rank is not None:
        lines.append(f"first to fail     rank {failure.rank} on {failure.host}")
    if failure.incident is not None:
        label = "evidence" if failure.verdict is None else "what to do"
        lines.append(f"{label:<18}{failure.incident}")
    if failure.injected:
        options = " ".join(map(without_faults, failure.injected))
        lines.append(
            f"on purpose        faults were injected on purpose in this run; to restart without them: {options}"
        )
    if failure.exit_code == NonFiniteError.exit_code:
        lines.append(
            f"go back to        {failure.way_back or 'nothing: no finite checkpoint was followed by a finite step'}"
        )
    lines.append(f"last verified     {failure.verified_checkpoint or 'none: no audit has agreed after a checkpoint'}")
    return lines


def _nats(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"
