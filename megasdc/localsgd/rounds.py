"""What the replicas of a Local-SGD run have agreed on, and whom the next round waits for; no sockets, no tensors.

A round ends in two parts. First each replica reports that its local steps are done, with what is known of its outer
gradient, the distance from the weights before the round; once all that take part have reported, or the deadline has
passed, the members of the round are fixed. Then the members fetch each other's weights, and say whose they have; the
round is made of those that every member has, so that all compute the same. Who is late, lost or wrong is left out, and
goes on later from what the others have agreed on. A member that is lost meanwhile is not waited for; where none is
left that could go on from the round, its members are fixed anew.

An outer gradient is wrong if it is not finite, or if its norm is far from those of the other replicas and from those of
the same replica's last rounds. With many of them it must be beyond both: all replicas' norms change with the learning
rate, and one replica's from round to round. How many steps were taken counts: a late replica is not a wrong one.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json
from megasdc.common.errors import ConfigError
from megasdc.localsgd.round_clock import Done, RoundWindow, Times
from megasdc.sdc.incident import RoundLook

FIRST_DEADLINE_S = 600.0
"""Seconds from the first report of the first round until it goes on without the others."""
LEAST_DEADLINE_S = 10.0
"""Seconds for which any later round waits at least."""
WINDOW = 20
"""Rounds of a replica whose norms are remembered."""
KNOWN = 5
"""Rounds from which on a replica's own norms count."""
SIGMAS = 6.0
"""Standard deviations from the mean of a replica's own last norms beyond which a norm is far from them."""
LEAST_SPREAD = 0.1
"""Least standard deviation of a replica's norms that is assumed, as a share of their mean."""
TIMES = 3.0
"""Factor of the median of all replicas' norms beyond which a norm is far from them, where own ones are known."""
TIMES_ALONE = 10.0
"""The same in the first rounds, in which own ones are not known; of two replicas the larger is then the wrong one."""


Doors = Sequence[tuple[str, int]]
"""Address and port of each of a replica's ranks, where others fetch its weights."""


@dataclass(frozen=True)
class Report:
    """A replica's local steps of a round.

    Args:
        round: number of the round, the first is 1.
        tokens: that it has used.
        steps: that its optimizer has taken.
        micro_batches: that it has computed.
        norm: 2-norm of its outer gradient.
        finite: whether all of its weights are.
        digest: of the weights that it has begun the round with.
        times: of its micro-batches, where a threshold is to be chosen from them; None: they are not known.
    """

    round: int
    tokens: int
    steps: int
    micro_batches: int
    norm: float
    finite: bool
    digest: str
    times: Times | None = None


@dataclass(frozen=True)
class Plan:
    """Who takes part in a round, once it is fixed; ``left_out``: why others do not, ``looks``: at these, by replica."""

    round: int
    members: Mapping[int, Report]
    left_out: Mapping[int, str]
    looks: Mapping[int, RoundLook] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """A round that has been agreed on, as it is recorded.

    ``seconds``: since the one before, by the meeting's clock; ``left_out``: why reports were not used, by replica;
    ``absent``: replicas that were waited for, or not there; ``looks``: what was looked at of those in ``left_out``;
    empty: of an earlier version.
    """

    round: int
    members: tuple[int, ...]
    tokens: Mapping[int, int]
    steps: Mapping[int, int]
    micro_batches: Mapping[int, int]
    norms: Mapping[int, float]
    left_out: Mapping[int, str]
    absent: tuple[int, ...]
    seconds: float
    looks: Mapping[int, RoundLook] = field(default_factory=dict)

    @staticmethod
    def of(raw: Mapping[str, Any]) -> Round:
        """A line of ``rounds.jsonl``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is none.
        """
        by_replica = {
            name: {int(replica): one for replica, one in raw[name].items()}
            for name in ("tokens", "steps", "micro_batches", "norms", "left_out")
        }
        places = {"members": tuple(raw["members"]), "absent": tuple(raw["absent"])}
        looks = {int(replica): RoundLook.of(one) for replica, one in raw.get("looks", {}).items()}
        return Round(**{**raw, **by_replica, **places, "looks": looks})

    def as_dict(self) -> dict[str, Any]:
        """As plain values for a line of JSON."""
        return asdict(self)


def read_rounds(path: Path | str) -> dict[int, Round]:
    """Rounds of a run, by number, of ``rounds.jsonl``; of one that was made twice the later.

    Raises:
        ConfigError: it is missing, or no such file.
    """
    place = "megasdc.local_sgd.replay_rounds"
    found: dict[int, Round] = {}
    try:
        for text in Path(path).read_text(encoding="utf-8").splitlines():
            one = Round.of(parse_json(text))
            found[one.round] = one
    except OSError as error:
        raise ConfigError(
            f"{place}: {path} cannot be read ({error.strerror}); name the rounds.jsonl of a run."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{place}: {path} is no file of rounds ({error}); name the rounds.jsonl of a run.") from error
    return found


def work_of(rounds: Mapping[int, Round], replica: int) -> dict[int, Done]:
    """Local work of a replica in rounds that it took part in, by round."""
    return {
        number: Done(one.steps[replica], one.micro_batches[replica])
        for number, one in rounds.items()
        if replica in one.members
    }


class ReplayError(RuntimeError):
    """A round cannot be replayed, since a replica that took part in it has ended."""


class NothingLeftError(RuntimeError):
    """No replica of a round has weights that can be relied on.

    Args:
        wrong: why none of a replica's can be used, by replica.
        looks: what was looked at of each.
    """

    def __init__(self, wrong: Mapping[int, str], looks: Mapping[int, RoundLook]) -> None:
        super().__init__("; ".join(f"replica {replica}: {wrong[replica]}" for replica in sorted(wrong)))
        self.wrong, self.looks = wrong, looks


def judge(reports: Mapping[int, Report], history: Mapping[int, Collection[float]]) -> dict[int, str]:
    """Why outer gradients cannot be used, by replica.

    Args:
        reports: of a round, by replica.
        history: norms of each replica's last rounds.
    """
    wrong = {replica: "its weights are not finite" for replica, one in reports.items() if not one.finite}
    digests = Counter(one.digest for one in reports.values())
    (usual, times), *others = digests.most_common(2)
    if others and times > others[0][1]:
        for replica, one in reports.items():
            if one.digest != usual:
                wrong.setdefault(replica, "it has begun the round with other weights than the others")
    for replica, one in reports.items():
        if replica not in wrong and (reason := _is_far(replica, one.norm, reports, wrong, history.get(replica, ()))):
            wrong[replica] = reason
    return wrong


def _is_far(
    replica: int, norm: float, reports: Mapping[int, Report], wrong: Collection[int], own: Collection[float]
) -> str:
    """Why a norm is far from those of the others, and where they are known from the replica's own; empty: it is not."""
    known = {other: one for other, one in reports.items() if other not in wrong}
    others = [one for other, one in known.items() if other != replica]
    if not others:
        return ""
    # Of three and more a wrong one is not in the middle; of two nobody knows which it is, but for their last rounds.
    usual = statistics.median(one.norm for one in (known.values() if len(known) > 2 else others))
    told = f"the norm of its outer gradient is {norm:.4g}, the median of all {usual:.4g}"
    longer = reports[replica].steps / max(1.0, statistics.median(one.steps for one in others))
    if len(own) < KNOWN:
        if len(known) > 2:
            is_far = _is_beyond(norm, usual, TIMES_ALONE, longer)
        else:  # a fault makes weights large, or keeps them where they are; fewer steps of a warm-up move them less
            is_far = (longer >= 1 and norm == 0 < usual) or (longer <= 1 and norm > TIMES_ALONE * usual > 0)
        return told if is_far else ""
    mean, deviation = statistics.fmean(own), statistics.pstdev(own)
    if abs(norm - mean) <= SIGMAS * max(deviation, LEAST_SPREAD * mean):
        return ""
    told += f", in its own last {len(own)} rounds {mean:.4g} with a deviation of {deviation:.2g}"
    return told if _is_beyond(norm, usual, TIMES, longer) else ""


def _is_beyond(norm: float, usual: float, times: float, longer: float) -> bool:
    """Whether a norm is so many times larger or smaller than the usual one.

    ``longer``: the replica's steps over those of the others. At a constant learning rate a distance grows at most as
    the number of steps. Who has taken fewer is not judged for being small: its steps may be those of a warm-up.
    """
    return norm > times * usual * max(1.0, longer) or (longer >= 1 and norm * times < usual)


@dataclass
class _Replica:
    """A replica as the meeting knows it.

    ``there``: whether it is connected; ``has_ended``: whether it is not going to be again; ``doors``: where others
    fetch the weights of its ranks; ``has``: round whose weights it has, and their digest, empty while it computes them.
    """

    there: bool = False
    has_ended: bool = False
    doors: Doors = ()
    has: tuple[int, str] = (0, "")
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


def look_at(replica: int, reports: Mapping[int, Report], own: Collection[float]) -> RoundLook:
    """What ``judge`` looks at of a replica; ``own``: norms of its last rounds."""
    report = reports[replica]
    usual = Counter(one.digest for one in reports.values()).most_common(1)[0][0]
    return RoundLook(
        finite=report.finite,
        as_others=report.digest == usual,
        norm=report.norm,
        others={other: one.norm for other, one in reports.items() if other != replica},
        own_rounds=len(own),
        own_mean=statistics.fmean(own) if own else None,
        own_deviation=statistics.pstdev(own) if own else None,
        steps=report.steps,
        steps_of_others={other: one.steps for other, one in reports.items() if other != replica},
    )


class Meeting:
    """Leads all replicas through their rounds; methods are called from one thread at a time.

    Args:
        replicas: number of replicas.
        deadline_s: seconds after the first report of a round until it goes on without those that have not reported;
            None: the median time of the last rounds, at least ``LEAST_DEADLINE_S``.
        record: called with each round that was agreed on.
        clock: seconds, monotonic.
        window: chooses a threshold from the times of the first rounds; None: none is to be chosen.
        replayed: rounds whose members are these again, by round; None: what happens decides.
        earlier: rounds of earlier starts, in order: the norms and times that are known of them.

    Attributes:
        round: newest round that was agreed on; 0: none.
        digest: of the weights after it; empty: not known yet.
        plan: of the round that is exchanged now; None: reports are awaited.
        made: the last rounds, by number.
    """

    def __init__(
        self,
        replicas: int,
        deadline_s: float | None,
        record: Callable[[Round], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        window: RoundWindow | None = None,
        replayed: Mapping[int, Round] | None = None,
        earlier: Sequence[Round] = (),
    ) -> None:
        self.round, self.digest = 0, ""
        self.window, self._replayed = window, replayed or {}
        self.plan: Plan | None = None
        self.made: dict[int, Round] = {}
        self._of = {replica: _Replica() for replica in range(replicas)}
        self._deadline_s, self._record, self._clock, self._earlier = deadline_s, record, clock, earlier
        self._reports: dict[int, Report] = {}
        self._reported_at: dict[int, float] = {}
        self._received: dict[int, frozenset[int]] = {}
        self._active: set[int] = set()
        """Members of the plan that have been connected since it was fixed."""
        self._begun_at = clock()
        self._durations: deque[float] = deque(maxlen=5)

    # --- who is there -------------------------------------------------------------------------------------------

    @property
    def there(self) -> list[int]:
        """Replicas that are connected."""
        return [replica for replica, one in self._of.items() if one.there]

    def begin(self, rounds: Mapping[int, tuple[int, str]]) -> None:
        """Begin with what replicas have loaded, which join now: the newest round of any of them counts.

        Args:
            rounds: round, and digest of the weights after it, by replica, of at least one.
        """
        self.round = max(number for number, _ in rounds.values())
        self.digest = Counter(digest for number, digest in rounds.values() if number == self.round).most_common(1)[0][0]
        self._begun_at = self._clock()
        for replica, has in rounds.items():
            self._of[replica].there, self._of[replica].has = True, has
        for one in self._earlier:
            if one.round <= self.round:
                self._remember(one)

    def join(self, replica: int, number: int, digest: str, doors: Doors) -> bool:
        """A replica has connected, with the weights after a round; returns whether it may go on with them.

        Otherwise it takes over those of the newest round first, as one that was left out does. Where all that had these
        have gone, the newest that a replica has are those to go on from.
        """
        self.leave(replica)
        one = self._of[replica]
        one.there, one.doors, one.has = True, doors, (number, digest)
        newest = max(self._of[other].has for other in self.there)
        if self.plan is None and newest[0] < self.round:
            self.round, self.digest = newest
        return one.has == (self.round, self.digest)

    def leave(self, replica: int) -> None:
        """A replica is not connected any more; a round of which nobody is left that could go on from it is given up."""
        self._of[replica].there = False
        self._active.discard(replica)
        self._received.pop(replica, None)
        if self.plan is not None and not self._active:
            self.plan, self._reports = None, {}
        if self.plan is None:
            self._reports.pop(replica, None)
        self.close(now=False)

    def end(self, replica: int) -> None:
        """A replica is not going to be connected again."""
        self._of[replica].has_ended = True

    def doors(self, replica: int) -> Doors:
        """Where others fetch the weights of a replica that has been connected."""
        return self._of[replica].doors

    def agree(self, replica: int, number: int, digest: str) -> None:
        """A replica has computed the weights of a round."""
        if number == self.round and not self.digest:
            self.digest = digest
        self._of[replica].has = number, digest

    # --- a round ------------------------------------------------------------------------------------------------

    def report(self, replica: int, report: Report) -> bool:
        """Take a report; returns False where its round is over, or its members are fixed: it is late."""
        if report.round != self.round + 1 or self.plan is not None:
            return False
        self._reports[replica], self._reported_at[replica] = report, self._clock()
        return True

    @property
    def deadline_s(self) -> float:
        """Seconds for which the present round waits after its first report."""
        if self._deadline_s is not None:
            return self._deadline_s
        if not self._durations:
            return FIRST_DEADLINE_S
        return max(LEAST_DEADLINE_S, statistics.median(self._durations))

    def look(self) -> None:
        """Fix the members of the round, if all that are there have reported, or the deadline has passed.

        Raises:
            NothingLeftError: none of the reports can be used.
            ReplayError: a replica that took part in a round that is replayed has ended.
        """
        if self.plan is not None or not self._reports:
            return
        if (again := self._replayed.get(self.round + 1)) is not None:
            self._replay(again)
            return
        waits = [replica for replica in self.there if replica not in self._reports]
        first_at = min(self._reported_at[replica] for replica in self._reports)
        if waits and self._clock() < first_at + self.deadline_s:
            return
        wrong = judge(self._reports, {replica: one.norms for replica, one in self._of.items()})
        members = {replica: one for replica, one in self._reports.items() if replica not in wrong}
        if len({one.digest for one in members.values()}) > 1:  # as many have begun with these as with those
            wrong |= dict.fromkeys(members, "as many began with its weights as with others")
            members = {}
        if not members:
            raise NothingLeftError(wrong, self._looks(wrong))
        self._fix(members, wrong)

    def _fix(self, members: Mapping[int, Report], wrong: Mapping[int, str]) -> None:
        self.plan = Plan(self.round + 1, dict(sorted(members.items())), wrong, self._looks(wrong))
        self._received, self._active = {}, set(members)

    def _replay(self, again: Round) -> None:
        """Fix the members of a round that is replayed, once all of them have reported."""
        if ended := [replica for replica in again.members if self._of[replica].has_ended]:
            raise ReplayError(
                f"round {again.round} is replayed, of which replica {ended[0]} was a member, and has ended"
            )
        if self._reports.keys() >= set(again.members) | (again.left_out.keys() & set(self.there)):
            wrong = {replica: reason for replica, reason in again.left_out.items() if replica in self._reports}
            self._fix({replica: self._reports[replica] for replica in again.members}, wrong)

    def _looks(self, wrong: Collection[int]) -> dict[int, RoundLook]:
        return {replica: look_at(replica, self._reports, self._of[replica].norms) for replica in wrong}

    def have(self, replica: int, received: Collection[int]) -> None:
        """A member has the weights of these replicas, its own among them, on all of its ranks."""
        if replica in self._active:
            self._received[replica] = frozenset(received)

    def close(self, *, now: bool) -> None:
        """Agree on the replicas that a round is made of, unless a member that is there has not said yet what it has.

        Args:
            now: whether those that have not said it are waited for no longer.
        """
        plan = self.plan
        if plan is None or not self._received:
            return
        if not now and any(one not in self._received for one in self._active):
            return
        common = frozenset.intersection(*self._received.values())
        members = tuple(sorted(common)) or (min(self._received),)
        absent = tuple(one for one in self._of if one not in plan.members and one not in plan.left_out)
        used = {replica: plan.members[replica] for replica in members}
        ended_at = self._clock()
        done = Round(
            plan.round,
            members,
            {replica: one.tokens for replica, one in used.items()},
            {replica: one.steps for replica, one in used.items()},
            {replica: one.micro_batches for replica, one in used.items()},
            {replica: one.norm for replica, one in used.items()},
            dict(plan.left_out),
            (*absent, *(one for one in plan.members if one not in members)),
            ended_at - self._begun_at,
            dict(plan.looks),
        )
        self._remember(done)
        if self.window is not None:
            self.window.add([None if one not in used else used[one].times for one in self._of], done.seconds)
        self.round, self.digest, self.plan, self._reports = plan.round, "", None, {}
        self._active, self._begun_at = set(), ended_at
        for replica in members:
            self._of[replica].has = plan.round, ""
        self.made = {**self.made, plan.round: done}
        self.made.pop(plan.round - WINDOW, None)
        self._record(done)

    def _remember(self, done: Round) -> None:
        for replica, norm in done.norms.items():
            if replica in self._of:
                self._of[replica].norms.append(norm)
        self._durations.append(done.seconds)
