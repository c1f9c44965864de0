"""Rounds of Local-SGD as run folders tell them: who took part, who was left out and why, what was exchanged.

The folder of a launch of replicas holds ``rounds.jsonl`` and a run folder ``replica_K`` for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json
from megasdc.common.origin import CONFIG_FILE
from megasdc.common.words import number_of, ranges
from megasdc.config.local_sgd import INFINITE, ROUNDS_FILE
from megasdc.events import Event, event_of
from megasdc.localsgd.rounds import Round
from megasdc.ops.launch.launch_verdict import LATE, WRONG
from megasdc.ops.run_folder.record import LineReader, read_lines

_FOLDER = re.compile(r"replica_(\d+)")


@dataclass(frozen=True)
class LeftOut:
    """Rounds in a row that were made without a replica.

    Args:
        replica: its number, the first is 0.
        first: number of the first of these rounds.
        last: number of the last of them.
        kind: wrong; late: or not there.
        reason: why, in words, of the first of them.
        returned: first round after them in which it took part; None: none so far.
    """

    replica: int
    first: int
    last: int
    kind: str
    reason: str
    returned: int | None

    def __str__(self) -> str:
        rounds = f"round {self.first}" if self.first == self.last else f"rounds {self.first} to {self.last}"
        back = "it has not returned" if self.returned is None else f"it returned in round {self.returned}"
        return f"replica {self.replica}, {rounds}, {self.kind}: {self.reason}; {back}"


@dataclass(frozen=True)
class ReplicaRounds:
    """Part of one replica in the rounds of a run.

    Args:
        rounds: number of those in which it took part.
        tokens: that it used in these.
        micro_batches: that it computed in these, over its data ranks.
        fetched_bytes: of other replicas' weights that its ranks fetched; None: not recorded.
        waited_s: seconds that it waited for others until their members were fixed; None: not recorded.
    """

    replica: int
    run_dir: str
    rounds: int
    tokens: int
    micro_batches: int
    fetched_bytes: int | None
    waited_s: float | None


@dataclass(frozen=True)
class RoundsSummary:
    """Rounds of a run of Local-SGD.

    Args:
        rounds: number of the last one that was agreed on; 0: none.
        planned_rounds: None: not known.
        every: local steps of a round; None: not known.
        replicas: number of replicas.
        members: replicas of the last round.
        left_out: rounds that were made without a replica, oldest first.
        fetched_bytes: of weights that ranks fetched from other replicas, in all; None: not recorded.
        waited_s: seconds that replicas waited for others, in all; None: not recorded.
        drop_share: share of their micro-batches that members have not computed, since the round's time was up; None:
            not known, or nothing is dropped.
        threshold_s: seconds of a round after which a replica starts no micro-batch; None: there is none so far.
        of_replicas: each replica's part.
        notes: what was left out of the file of rounds, a sentence each.
    """

    rounds: int
    planned_rounds: int | None
    every: int | None
    replicas: int
    members: tuple[int, ...]
    left_out: tuple[LeftOut, ...]
    fetched_bytes: int | None
    waited_s: float | None
    drop_share: float | None
    threshold_s: float | None
    of_replicas: tuple[ReplicaRounds, ...]
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """For a terminal: label and text, a line each."""
        planned = "" if self.planned_rounds is None else f" of {self.planned_rounds}"
        every = "" if self.every is None else f", {number_of(self.every, 'local step')} each"
        lines = [f"{'rounds':<18}{self.rounds}{planned}, {self.replicas} replicas{every}"]
        shown = self.left_out[-SHOWN:]
        lines += [f"{'left out' if not place else '':<18}{one}" for place, one in enumerate(shown)]
        if len(self.left_out) > len(shown):
            lines.append(f"{'':<18}and {len(self.left_out) - len(shown)} times before: see --json")
        if not self.left_out:
            lines.append(f"{'left out':<18}nobody")
        told = [] if self.fetched_bytes is None else [f"{self.fetched_bytes / 1e6:,.1f} MB fetched from other replicas"]
        told += [] if self.waited_s is None else [f"{self.waited_s:,.1f} s waited for them, all replicas together"]
        lines += [f"{'exchanged':<18}{', '.join(told)}"] if told else []
        if self.drop_share or self.threshold_s is not None:
            after = "" if self.threshold_s is None else f", none is started after {self.threshold_s:.4g} s"
            lines.append(f"{'dropped':<18}{self.drop_share or 0:.1%} of the micro-batches of rounds{after}")
        return [*lines, *(f"{'note':<18}{one}" for one in self.notes)]


SHOWN = 8
"""Of a long list the last ones are shown."""


def is_of_replicas(folder: Path) -> bool:
    """Whether a folder is that of a launch of replicas."""
    return (folder / ROUNDS_FILE).exists()


def replica_folders(folder: Path) -> dict[int, Path]:
    """Run folders of a launch's replicas, by replica."""
    found = {int(match[1]): path for path in folder.glob("replica_*") if (match := _FOLDER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def left_out_of(rounds: Sequence[Round], replicas: int) -> list[LeftOut]:
    """Who was left out of rounds, oldest first; a replica that has been lost for good is, to the last one."""
    found: list[LeftOut] = []
    for replica in range(replicas):
        before: LeftOut | None = None
        for one in rounds:
            if replica in one.members:
                before = None
                continue
            kind = WRONG if replica in one.left_out else LATE
            if before is not None and before.kind == kind:
                found.pop()
                before = replace(before, last=one.round)
            else:
                reason = one.left_out.get(replica, "it was late, or not there")
                before = LeftOut(replica, one.round, one.round, kind, reason, None)
            found.append(before)
    back = [
        next((one.round for one in rounds if one.round > out.last and out.replica in one.members), None)
        for out in found
    ]
    told = [replace(out, returned=number) for out, number in zip(found, back, strict=True)]
    return sorted(told, key=lambda one: (one.first, one.replica))


def _events_of(folder: Path) -> list[Event]:
    """Events of Local-SGD of a replica's first rank."""
    try:
        events, _ = LineReader(folder / "events" / "rank_00000.jsonl", event_of).read()
    except OSError:
        return []
    return [one for one in events if one.kind == "local_sgd"]


def load_rounds(folder: Path, notes: list[str]) -> list[Round]:
    """Rounds that a launch of replicas has recorded so far, in order; what cannot be read is noted.

    A run that goes on from a checkpoint records rounds again: what was recorded of these and of later ones is dropped.

    Raises:
        DataError: the file cannot be read at all.
    """
    found: list[Round] = []
    for one in read_lines(folder / ROUNDS_FILE, _round_of, notes):
        while found and found[-1].round >= one.round:
            found.pop()
        found.append(one)
    return found


def _round_of(raw: dict[str, Any]) -> Round:
    try:
        return Round.of(raw)
    except AttributeError as error:  # a list in the place of an object
        raise TypeError(str(error)) from error


def summarize_rounds(folder: Path) -> RoundsSummary | None:
    """Rounds of a launch's folder, or of that which a replica's lies in; None: it holds no replicas, or is of none."""
    folder = folder if is_of_replicas(folder) else folder.resolve().parent
    if not is_of_replicas(folder):
        return None
    notes: list[str] = []
    rounds = load_rounds(folder, notes)
    return replace(rounds_summary(folder, rounds, replica_folders(folder)), notes=tuple(notes))


class RoundsFollower:
    """Reads the rounds of a launch of replicas repeatedly; again only where one was added.

    Args:
        folder: of the launch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, (-1, -1)
        self._made: RoundsSummary | None = None

    def read(self) -> RoundsSummary | None:
        """The rounds now; None: the folder holds no replicas."""
        try:
            status = (self._folder / ROUNDS_FILE).stat()
        except OSError:
            return None
        seen = status.st_size, len(replica_folders(self._folder))
        if seen != self._seen or self._made is None:
            self._seen, self._made = seen, summarize_rounds(self._folder)
        return self._made


def rounds_summary(folder: Path, rounds: Sequence[Round], folders: Mapping[int, Path]) -> RoundsSummary:
    """Summary of recorded rounds; ``folders``: of the replicas, of which some may lie elsewhere."""
    config = next(filter(None, map(_config_of, folders.values())), {})
    section, training = (config.get("megasdc", {}).get(name) or {} for name in ("local_sgd", "training"))
    every, steps = section.get("every"), training.get("steps")
    seen = {one for of_round in rounds for one in (*of_round.members, *of_round.left_out, *of_round.absent)}
    replicas = section.get("replicas") or max([*seen, *folders], default=-1) + 1
    events = {one: _events_of(folders[one]) for one in folders}
    parts = tuple(_part(one, folder / f"replica_{one}", rounds, events.get(one, [])) for one in range(replicas))
    chosen = [one.fields.get("threshold_s") for some in events.values() for one in some if one.name == "threshold"]
    given = section.get("threshold")
    inside = (config.get("megasdc", {}).get("drop_compute") or {}).get("enabled")
    drops = given not in (None, INFINITE) or section.get("replay_rounds") or inside
    done = sum(one.micro_batches for one in parts)
    batch, micro_batch = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    planned = sum(len(one.members) for one in rounds) * (every or 0) * (batch or 0) // (micro_batch or 1)
    known = [one for one in parts if one.fetched_bytes is not None]
    waits = [one.waited_s for one in parts if one.waited_s is not None]
    return RoundsSummary(
        rounds=rounds[-1].round if rounds else 0,
        planned_rounds=steps // every if steps and every else None,
        every=every,
        replicas=replicas,
        members=rounds[-1].members if rounds else (),
        left_out=tuple(left_out_of(rounds, replicas)),
        fetched_bytes=sum(one.fetched_bytes or 0 for one in known) if known else None,
        waited_s=sum(waits) if waits else None,
        drop_share=max(0.0, 1.0 - done / planned) if planned and drops else None,
        threshold_s=given if isinstance(given, int | float) else chosen[-1] if chosen else None,
        of_replicas=parts,
    )


def _part(replica: int, folder: Path, rounds: Sequence[Round], events: Sequence[Event]) -> ReplicaRounds:
    own = [one for one in rounds if replica in one.members]
    # Of a round that was made twice, since the run went on from a checkpoint, the later.
    told = list({one.fields.get("round"): one.fields for one in events if one.name == "round"}.values())
    fetched = [int(one["fetched_bytes"]) for one in told if "fetched_bytes" in one]
    waits = [float(one["waited_s"]) for one in told if "waited_s" in one]
    return ReplicaRounds(
        replica=replica,
        run_dir=str(folder),
        rounds=len(own),
        tokens=sum(one.tokens[replica] for one in own),
        micro_batches=sum(one.micro_batches[replica] for one in own),
        fetched_bytes=sum(fetched) if fetched else None,
        waited_s=sum(waits) if waits else None,
    )


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        found = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def last_round(summary: RoundsSummary) -> str:
    """The newest round as a sentence, for a live view."""
    planned = "" if summary.planned_rounds is None else f" of {summary.planned_rounds}"
    if not summary.rounds:
        return f"rounds: none yet{planned}, of {number_of(summary.replicas, 'replica')}"
    return f"rounds: {summary.rounds}{planned}, the last of replicas {ranges(summary.members)}"
