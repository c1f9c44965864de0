"""What follows from a diagnosis: a table of rules, and limits that end what does not help; pure functions.

=================  ==================================  =====================================================
diagnosis          the first time                      again: on one of the same hosts, or without progress
=================  ==================================  =====================================================
done, stopped      finish                              -
grown, preempted   start again                         start again
folder_full        start again, once it has room       stop, where it went on from no later step
input              stop: a person must change it       -
unfit              replace the hosts; else stop        replace the hosts; else stop
no_room            replace the hosts; else start again replace the hosts; else start again
non_finite         start again                         go back, and skip data if that is wanted; else stop
memory, storage    start again                         stop
checkpoint         start again                         go back to an earlier one, or to the beginning; else stop
corrupt            start again                         stop
corrupt_again      replace the hosts                   replace the hosts
corrupt_once       start again                         replace the hosts
corrupt_one_of     replace all of them                 replace all of them
host_lost          replace the hosts                   replace the hosts
mended             start again                         replace the hosts
hang, rank_lost    start again                         replace the hosts
memory_of_host     start again                         replace the hosts
rank_crashed       start again                         replace the hosts
rank_failed        start again                         replace the hosts
link               start again                         replace both hosts
stuck, launch      start again                         start again
ranks_lost         start again                         start again
lost               start again                         start again
=================  ==================================  =====================================================

An attempt that was preempted, that ended to go on with more hosts, or while the run folder had no room, is no failure,
and counts for no limit. Before the
rules of the others come limits, each of which stops the run:

===================  ================================================================================================
limit                failures that it counts
===================  ================================================================================================
``per_hour``         all within an hour
``without_progress`` all in succession, none of which got further than the first of them
``failed_starts``    in succession, that did no step, unless from outside
``same_step``        in succession of one kind at one step, on more than one set of hosts: attempts that trained and
                     reached it themselves, and whose failure blames hosts and did not come from outside; then it is
                     no hardware
===================  ================================================================================================

From outside are host_lost, rank_lost, ranks_lost, memory_of_host, link, unfit and no_room: hosts, processes and
connections that are gone, and what a host lacks, say nothing of what is trained; a process that crashes by a signal of
its own, such as SIGSEGV, does. A host is replaced by a spare, or the run goes on without it where it can. Where neither
is possible for one that may recover, the attempt is repeated in place after a pause that doubles; after no_room from
then on without snapshots in memory where they have no room. What was ``mended`` on one host and then, with the same
exit code and without progress, on another one, is no host's: it is what follows again from its exit code.

A host that was replaced is tested beside the run, and comes back as a spare if it passes, the last one to be taken;
``RestartLimits.returns`` times, and never if it computed wrong results again when it repeated them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megasdc.ops.supervise.diagnosis import BY_CODE, KINDS, LOST, Diagnosis, RewindTarget

HOUR_S = 3600.0
_NO_HOSTS = "ranks of other hosts had it before, so that it is no host's"


class Action(Enum):
    """What a supervisor does after an attempt; the values are those of the journal."""

    FINISH = "finish"
    """The run has ended as it should."""
    STOP = "stop"
    """A person is needed."""
    AGAIN = "start again"
    """On the same hosts."""
    REPLACE = "replace hosts"
    """Start again on others instead of some."""
    BACK = "go back"
    """Start again from an earlier checkpoint."""


@dataclass(frozen=True)
class Rule:
    """What follows from a diagnosis.

    Args:
        first: the first time.
        again: where one of its hosts had it before, or the run, if it names none, since it last got on; None: the same.
            Of one that is no failure: where the run had it before, and has gone on from no later step since.
        certain: a host that it names is wrong for certain, so that the run cannot go on with it.
        returns: a host that it names may come back after a test: that weighs more than the evidence.
        fails: the attempt has failed, which counts for limits.
        outside: it came from outside, and says nothing of what is trained.
    """

    first: Action
    again: Action | None = None
    certain: bool = False
    returns: bool = True
    fails: bool = True
    outside: bool = False


RULES = {
    "done": Rule(Action.FINISH),
    "stopped": Rule(Action.FINISH),
    "grown": Rule(Action.AGAIN, fails=False),
    "preempted": Rule(Action.AGAIN, fails=False),
    "folder_full": Rule(Action.AGAIN, Action.STOP, fails=False),
    "input": Rule(Action.STOP),
    "checkpoint": Rule(Action.AGAIN, Action.BACK),
    "non_finite": Rule(Action.AGAIN, Action.BACK),
    "unfit": Rule(Action.REPLACE, certain=True, outside=True),
    "no_room": Rule(Action.REPLACE, outside=True),
    "mended": Rule(Action.AGAIN, Action.REPLACE),
    "memory": Rule(Action.AGAIN, Action.STOP),
    "memory_of_host": Rule(Action.AGAIN, Action.REPLACE, outside=True),
    "storage": Rule(Action.AGAIN, Action.STOP),
    "corrupt": Rule(Action.AGAIN, Action.STOP),
    "corrupt_again": Rule(Action.REPLACE, certain=True, returns=False),
    "corrupt_once": Rule(Action.AGAIN, Action.REPLACE),
    "corrupt_one_of": Rule(Action.REPLACE, certain=True),
    "host_lost": Rule(Action.REPLACE, outside=True),
    "hang": Rule(Action.AGAIN, Action.REPLACE),
    "rank_lost": Rule(Action.AGAIN, Action.REPLACE, outside=True),
    "ranks_lost": Rule(Action.AGAIN, outside=True),
    "rank_crashed": Rule(Action.AGAIN, Action.REPLACE),
    "rank_failed": Rule(Action.AGAIN, Action.REPLACE),
    "link": Rule(Action.AGAIN, Action.REPLACE, outside=True),
    "stuck": Rule(Action.AGAIN),
    "launch": Rule(Action.AGAIN),
    LOST: Rule(Action.AGAIN),
}
"""By kind of ``megasdc.ops.supervise.diagnosis``."""


@dataclass(frozen=True)
class RestartLimits:
    """What ends a run that does not get on.

    Args:
        per_hour: failures within an hour.
        without_progress: failures in succession, none of which got further than the first of them.
        failed_starts: failures in succession that did no step.
        same_step: failures in succession of one kind at one step that was reached, on more than one set of hosts.
        pause_s: seconds before an attempt is repeated where the one before got no further; doubled each time.
        longest_pause_s: most of it.
        returns: times that a host comes back after its test; 0: no host is tested.
        retest_s: seconds until a host that could not be tested to the end is tested again.
        rewinds: times that a run goes back to an earlier checkpoint.
        spare_test_s: seconds between tests of a host that waits, the first at once; 0: it is not tested.
    """

    per_hour: int = 20
    without_progress: int = 50
    failed_starts: int = 10
    same_step: int = 3
    pause_s: float = 5.0
    longest_pause_s: float = 300.0
    returns: int = 1
    retest_s: float = 300.0
    rewinds: int = 3
    spare_test_s: float = 0.0


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed.

    Args:
        time: of its end, seconds since the epoch.
        used: hosts of the attempt.
        exit_code: of the launch; None: its front was killed.
        last: last step that it did itself; 0: none, None: not known.
        resumed: step that it went on from; 0: it began, None: it did no step.
    """

    time: float
    used: tuple[str, ...]
    exit_code: int | None
    diagnosis: Diagnosis
    last: int | None = None
    resumed: int | None = None


@dataclass(frozen=True)
class Decision:
    """What is done.

    Args:
        replaced: hosts that are not used from now on.
        lacking: there are too few others; one that passes its test would help.
        back: where the run goes back to; None: it goes on from the newest checkpoint.
        skips_snapshots: from now on the run goes on without snapshots in memory where they have no room.
        pause_s: seconds before the next attempt.
        text: why, in a sentence.
    """

    action: Action
    text: str
    replaced: tuple[str, ...] = ()
    pause_s: float = 0.0
    lacking: bool = False
    back: RewindTarget | None = None
    skips_snapshots: bool = False


def decide(failures: Sequence[FailedAttempt], num_spares: int, limits: RestartLimits, went_back: int = 0) -> Decision:
    """Decide what follows from the last attempt.

    Args:
        failures: attempts of the run, oldest first; the last one is what is decided on, also where it is no failure.
        num_spares: hosts that could be used instead of others, or that the run can do without.
        went_back: how often the run has gone back.
    """
    found = failures[-1].diagnosis
    rule = RULES[found.kind]
    if rule.first in (Action.FINISH, Action.STOP):
        return Decision(rule.first, found.text)
    if not rule.fails:
        before = [place for place, one in enumerate(failures[:-1]) if one.diagnosis.kind == found.kind]
        if rule.again is Action.STOP and before and not _has_gone_on(failures[before[-1] :]):
            text = f"{found.text}; it is not the first time, and nothing was kept since that the run could go on from"
            return Decision(Action.STOP, text)
        return Decision(rule.first, found.text, pause_s=_pause_s(failures, limits))
    failures = [one for one in failures if RULES[one.diagnosis.kind].fails]
    if (limit := _limit_of(failures, limits)) is not None:
        return Decision(Action.STOP, limit)
    if found.kind == "mended" and _is_of_other_hosts_too(failures):
        code, text = failures[-1].exit_code, f"{found.text}; {_NO_HOSTS}"
        rule = RULES["launch" if code is None else BY_CODE.get(code, "launch")]
        is_over = Action.STOP in (rule.first, rule.again)
        return Decision(Action.STOP if is_over else rule.first, text, pause_s=_pause_s(failures, limits))
    recent = failures[:-1] if found.hosts else _since_progress(failures)
    had = [one for one in recent if one.diagnosis.kind == found.kind and _shares_host(one.diagnosis, found)]
    action = rule.again if had and rule.again is not None else rule.first
    pause_s = _pause_s(failures, limits)
    if action is Action.BACK and found.back is not None and went_back < limits.rewinds:
        return Decision(action, f"again: {found.text}; {found.back}", pause_s=pause_s, back=found.back)
    if action in (Action.STOP, Action.BACK):
        often = f"; it has gone back {went_back} times" if went_back else ""
        return Decision(Action.STOP, f"{found.text}; it is not the first time{often}")
    if action is not Action.REPLACE:
        return Decision(action, found.text, pause_s=pause_s)
    if len(found.hosts) <= num_spares:
        again = "again: " if had else ""
        return Decision(action, f"{again}{found.text}", found.hosts)
    lacking = f"{len(found.hosts)} other hosts would be needed, and there are {num_spares}"
    if rule.certain:
        return Decision(Action.STOP, f"{found.text}; {lacking}", lacking=True)
    if found.kind == "no_room":
        text = f"{found.text}; {lacking}: it goes on without snapshots in memory where they have no room"
        return Decision(Action.AGAIN, text, pause_s=pause_s, skips_snapshots=True)
    return Decision(Action.AGAIN, f"{found.text}; {lacking}", pause_s=pause_s)


def may_return(kind: str | None, given_back: int, limits: RestartLimits) -> bool:
    """Whether a host that was replaced for a kind of diagnosis, and was given back so often, is worth a test.

    Args:
        kind: None: it failed as a spare, or in other runs.
    """
    return (kind is None or RULES[kind].returns) and given_back < limits.returns


def _limit_of(failures: Sequence[FailedAttempt], limits: RestartLimits) -> str | None:
    """The limit that is reached; None: none is."""
    last = failures[-1]
    recent = [one for one in failures if last.time - one.time < HOUR_S]
    if len(recent) > limits.per_hour:
        return f"{len(recent)} failures within an hour; the last: {last.diagnosis.text}"
    if len(_since_progress(failures)) >= limits.without_progress:
        return f"{limits.without_progress + 1} attempts got no further; the last: {last.diagnosis.text}"
    inside = [one for one in failures if not RULES[one.diagnosis.kind].outside]
    starts = len(list(itertools.takewhile(lambda one: one.last == 0, reversed(inside))))
    if starts >= limits.failed_starts:
        return f"{starts} starts in succession ended before a step; the last: {last.diagnosis.text}"
    same = [one for one in inside if one.last][-limits.same_step :]
    alike = len({(one.diagnosis.kind, one.exit_code, one.last) for one in same}) == 1
    alike = alike and len({frozenset(one.used) for one in same}) > 1
    alike = alike and all(KINDS[one.diagnosis.kind].names_hosts for one in same)  # the others blame no hardware
    if len(same) == limits.same_step and alike and last is same[-1]:
        return (
            f"{len(same)} attempts on different hosts trained to step {last.last} and ended there alike, so that it is "
            f"no hardware; the last: {last.diagnosis.text}"
        )
    return None


def _has_gone_on(failures: Sequence[FailedAttempt]) -> bool:
    """Whether any attempt has gone on from a later step than the first one; those that did no step do not count."""
    return max(one.resumed or 0 for one in failures) > (failures[0].resumed or 0)


def _shares_host(one: Diagnosis, other: Diagnosis) -> bool:
    """Whether two diagnoses name a common host, or both name none."""
    return bool(set(one.hosts) & set(other.hosts)) or not (one.hosts or other.hosts)


def _is_of_other_hosts_too(failures: Sequence[FailedAttempt]) -> bool:
    """Whether other hosts had the diagnosis and the exit code of the last attempt, since the run last got on."""
    last = failures[-1]
    alike = [one for one in _since_progress(failures) if one.diagnosis.kind == last.diagnosis.kind]
    return any(one.exit_code == last.exit_code and not _shares_host(one.diagnosis, last.diagnosis) for one in alike)


def _since_progress(failures: Sequence[FailedAttempt]) -> Sequence[FailedAttempt]:
    """Failures before the last one, from the first that had reached the furthest step of all."""
    steps = [one.diagnosis.step for one in failures]
    return failures[steps.index(max(steps)) : -1]


def _pause_s(failures: Sequence[FailedAttempt], limits: RestartLimits) -> float:
    """None after progress; else doubled with each attempt in succession that got no further."""
    idle = len(_since_progress(failures))
    return min(limits.longest_pause_s, limits.pause_s * 2.0 ** (idle - 1)) if idle else 0.0
