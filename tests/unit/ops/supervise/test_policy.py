"""What a supervisor decides: every rule of the table, and the limits before them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from megasdc.ops.supervise import policy
from megasdc.ops.supervise.diagnosis import KINDS, Diagnosis, RewindTarget
from megasdc.ops.supervise.policy import RULES, Action, Decision, FailedAttempt, RestartLimits, decide

LIMITS = RestartLimits()
FINISH, STOP, AGAIN, REPLACE = Action.FINISH, Action.STOP, Action.AGAIN, Action.REPLACE


def failure(
    kind: str,
    *hosts: str,
    step: int = 7,
    time: float = 0.0,
    used: tuple[str, ...] = ("a", "b"),
    last: int | None = None,
) -> FailedAttempt:
    """An attempt on two hosts that failed at a step that it had reached itself, unless ``last`` is another one."""
    named = hosts if KINDS[kind].names_hosts else ()
    return FailedAttempt(time, used, 1, Diagnosis(kind, named, step, f"it was {kind}"), step if last is None else last)


def decided(*failures: FailedAttempt, spares: int = 2, limits: RestartLimits = LIMITS) -> Decision:
    """What follows, with two spares."""
    return decide(failures, spares, limits)


def test_every_kind_has_a_rule_and_a_line_of_the_table() -> None:
    """The table in the documentation of the module is that of the rules."""
    assert RULES.keys() == KINDS.keys()
    assert policy.__doc__ is not None
    lines = policy.__doc__.split("====\n")[2].strip().splitlines()[:-1]
    listed = {
        name: [line[19:55].strip(), line[55:].strip()] for line in lines for name in line[:19].strip().split(", ")
    }
    words = {FINISH: "finish", STOP: "stop", AGAIN: "start again", REPLACE: "replace", Action.BACK: "go back"}
    for kind, rule in RULES.items():
        first, again = listed[kind]
        assert first.startswith(words[rule.first]), kind
        assert again == "-" or again.startswith(words[rule.again or rule.first]), kind


@pytest.mark.parametrize(
    ("kind", "first", "again"),
    [
        *(
            (kind, AGAIN, REPLACE)
            for kind in ("hang", "rank_lost", "rank_crashed", "rank_failed", "link", "corrupt_once")
        ),
        *((kind, REPLACE, REPLACE) for kind in ("corrupt_again", "corrupt_one_of", "host_lost", "unfit", "no_room")),
        ("input", STOP, STOP),
        *((kind, AGAIN, STOP) for kind in ("memory", "storage", "checkpoint", "non_finite", "corrupt")),
        *((kind, AGAIN, AGAIN) for kind in ("stuck", "launch", "preempted", "grown")),
        *((kind, FINISH, FINISH) for kind in ("done", "stopped")),
    ],
)
def test_the_first_time_and_again(kind: str, first: Action, again: Action) -> None:
    """A host that is named twice is replaced where once is no proof; another host is no repetition."""
    once = failure(kind, "b", step=7)
    assert decided(once).action is first
    twice = decided(once, failure(kind, "b", step=9 if KINDS[kind].names_hosts else 7))
    assert twice.action is again
    assert twice.replaced == (("b",) if again is REPLACE else ())
    assert decided(once, failure(kind, "a", step=9)).action is first, "another host, or progress in between"


def test_without_spares_a_wrong_host_stops_the_run_and_another_is_tried_again() -> None:
    """Nothing goes on with a host that computes wrong results; a lost one may come back."""
    assert decided(failure("corrupt_again", "b"), spares=0).action is STOP
    assert decided(failure("corrupt_one_of", "a", "b"), spares=1).action is STOP
    lost = decided(failure("host_lost", "b"), spares=0)
    assert (lost.action, lost.replaced) == (AGAIN, ())
    assert "1 other hosts would be needed, and there are 0" in lost.text


def test_without_spares_an_unfit_host_ends_the_run_and_snapshots_are_done_without() -> None:
    """One that lacks what the run needs; of the latter it is said."""
    unfit = decided(failure("unfit", "b"), spares=0)
    assert (unfit.action, unfit.lacking) == (STOP, True) and unfit.text.startswith("it was unfit; 1 other hosts")
    full = decided(failure("no_room", "b"), spares=0)
    assert (full.action, full.skips_snapshots) == (AGAIN, True) and "goes on without snapshots" in full.text
    assert not decided(failure("no_room", "b")).skips_snapshots


def test_a_folder_that_is_full_again_ends_a_run_that_keeps_nothing() -> None:
    """Whatever lies between; one that went on from a later step than the time before has kept something."""
    full = replace(failure("folder_full"), resumed=4)
    assert decided(full).action is AGAIN
    again = decided(full, failure("host_lost", "b"), full)
    assert again.action is STOP and again.text.endswith("nothing was kept since that the run could go on from")
    assert decided(full, replace(full, resumed=None)).action is STOP, "it did no step"
    assert decided(full, replace(full, resumed=5)).action is AGAIN
    assert decided(full, replace(full, resumed=5), replace(full, resumed=5)).action is STOP
    starts = replace(failure("folder_full"), resumed=None)
    kept = replace(failure("rank_lost", "b"), resumed=40_000)
    assert decided(full, kept, starts).action is AGAIN, "though it did no step itself"
    assert decided(full, kept, starts, starts).action is STOP
    assert decided(full, replace(kept, resumed=4), starts).action is STOP


@pytest.mark.parametrize(("code", "action"), [(71, STOP), (77, STOP), (78, AGAIN)])
def test_an_error_that_goes_from_host_to_host_is_no_hosts(code: int, action: Action) -> None:
    """Without progress it is what its exit code says: healthy hosts are not replaced one after the other."""
    had = [replace(failure("mended", host), exit_code=code) for host in "aab"]
    assert [decided(*had[:last]).action for last in (1, 2, 3)] == [AGAIN, REPLACE, action]
    assert decided(*had).replaced == () and "ranks of other hosts had it before" in decided(*had).text
    later = replace(failure("mended", "b", step=9), exit_code=code)
    assert decided(*had[:2], later).action is AGAIN, "the run got on"
    assert decided(*had[:2], replace(had[2], exit_code=80)).action is AGAIN, "another error"


def test_the_same_step_on_other_hosts_is_no_hardware() -> None:
    """Three in succession; on the same hosts alone it is not known, and progress between them begins anew."""
    same = [failure("rank_failed", host, used=(host, "c")) for host in "abd"]
    stopped = decided(*same)
    assert stopped.action is STOP and "trained to step 7 and ended there alike, so that it is no" in stopped.text
    assert decided(*same[:2]).action is AGAIN
    alone = [failure("rank_failed", "a", step=7) for _ in range(3)]
    assert decided(*alone).action is REPLACE
    between = [*same[:2], failure("rank_failed", "d", step=9, used=("d", "c"))]
    assert decided(*between).action is AGAIN


@pytest.mark.parametrize("kind", ["rank_lost", "ranks_lost", "host_lost", "link", "unfit", "no_room"])
def test_what_comes_from_outside_is_not_taken_for_the_software(kind: str) -> None:
    """However often it comes, at a step that was reached or while starting; a crash and an error count for that."""
    for last in (7, 0):
        outside = [failure(kind, host, used=(host, "c"), last=last) for host in "abdefghijklm"]
        assert decided(*outside).action is not STOP
        assert decided(*outside, failure("rank_failed", "n", used=("n", "c"))).action is not STOP
    crashes = [failure("rank_crashed", host, used=(host, "c")) for host in "abd"]
    assert decided(*crashes).action is STOP
    assert decided(crashes[0], *outside[:2], *crashes[1:]).action is STOP, "what is between does not change that"
    assert decided(*crashes[:2], failure("rank_failed", "d", used=("d", "c"))).action is not STOP, "not alike"


def test_attempts_that_did_not_train_to_the_step_do_not_count_for_it() -> None:
    """The run has reached step 7, but these attempts ended before a step of their own, or at an earlier one."""
    for last in (0, 5):
        same = [failure("rank_failed", host, used=(host, "c"), last=last) for host in "ab"]
        assert decided(failure("rank_failed", "d"), *same).action is AGAIN


def test_starts_that_fail_have_a_limit_of_their_own() -> None:
    """In succession; a step between begins anew, and what comes from outside is passed over."""
    limits = RestartLimits(failed_starts=3)
    start, lost = failure("launch", last=0), failure("host_lost", "b", last=0)
    assert decided(start, start, limits=limits).action is AGAIN
    stopped = decided(start, lost, start, lost, start, limits=limits)
    assert stopped.action is STOP and stopped.text.startswith("3 starts in succession ended before a step")
    assert decided(start, start, failure("launch"), start, limits=limits).action is AGAIN
    assert decided(start, start, replace(start, last=None), limits=limits).action is AGAIN, "not known"


def test_the_limits_of_the_documentation_are_those_there_are() -> None:
    """Each limit that counts failures has its line in the table."""
    assert policy.__doc__ is not None
    named = set(re.findall(r"^``(\w+)`` ", policy.__doc__, re.MULTILINE))
    assert named == {"per_hour", "without_progress", "failed_starts", "same_step"} <= vars(RestartLimits()).keys()


def test_too_many_failures_in_an_hour_stop() -> None:
    """Those before that hour do not count."""
    steps = itertools.count()
    fast = [failure("launch", step=next(steps), time=60.0 * number) for number in range(21)]
    assert decided(*fast).action is STOP and "21 failures within an hour" in decided(*fast).text
    slow = [failure("launch", step=next(steps), time=200.0 * number) for number in range(40)]
    assert decided(*slow).action is AGAIN


def test_attempts_that_get_no_further_stop_in_the_end() -> None:
    """However long the pauses are; a step less far is no progress, one further begins anew."""
    limits = RestartLimits(without_progress=5)
    steps = [7, 9, *[8, 9, 7, 9]]
    idle = [failure("launch", step=step, time=1e4 * number) for number, step in enumerate(steps)]
    assert decided(*idle, limits=limits).action is AGAIN
    stopped = decided(*idle, failure("launch", step=9, time=1e6), limits=limits)
    assert stopped.action is STOP and stopped.text == "6 attempts got no further; the last: it was launch"
    assert decided(*idle, failure("launch", step=10, time=1e6), limits=limits).action is AGAIN


def test_pauses_double_until_there_is_progress() -> None:
    """None after progress; at most the longest."""
    idle = [failure("stuck", step=7, time=1e4 * number) for number in range(12)]
    pauses = [decided(*idle[:count]).pause_s for count in range(1, 13)]
    assert pauses[:5] == [0, 5, 10, 20, 40] and pauses[-1] == LIMITS.longest_pause_s
    assert decided(*idle, failure("stuck", step=8, time=1e6)).pause_s == 0


@pytest.mark.parametrize("kind", ["checkpoint", "non_finite"])
def test_a_run_goes_back_where_it_knows_where_to(kind: str) -> None:
    """Not the first time; so often and no more, and not because of something else."""
    found = failure(kind)
    back = RewindTarget(4, (16, 32))
    again = replace(found, diagnosis=replace(found.diagnosis, back=back))
    assert decided(again).action is AGAIN
    decision = decided(found, again)
    assert (decision.action, decision.back) == (Action.BACK, back)
    assert decision.text.endswith("on from step 4 at most, without samples 16 to 31 of the stream")
    assert decide([found, again], 2, LIMITS, 2).action is Action.BACK
    often = decide([found, again], 2, LIMITS, 3)
    assert often.action is STOP and often.text.endswith("it has gone back 3 times")
    assert decided(failure("launch"), again).action is AGAIN


def test_going_back_comes_before_the_limit_of_the_same_step() -> None:
    """Where no checkpoint counts after wrong results, attempts end at their step, and blame no host."""
    corrupt, found = failure("corrupt_one_of", "a", "b"), failure("checkpoint", used=("c", "d"))
    begin = replace(found, diagnosis=replace(found.diagnosis, back=RewindTarget(0)))
    assert decided(corrupt, begin).action is AGAIN
    decision = decided(corrupt, begin, begin)
    assert (decision.action, decision.back) == (Action.BACK, RewindTarget(0))


def test_what_was_preempted_counts_for_no_limit() -> None:
    """However often, and at the same step on other hosts; a failure between is judged as without them."""
    often = [failure("preempted", used=(host, "c")) for host in "abdefgh" * 10]
    assert decided(*often).action is AGAIN
    lost = failure("rank_lost", "b", step=7)
    assert decided(*often, lost).action is AGAIN and decided(lost, *often, lost).replaced == ("b",)
