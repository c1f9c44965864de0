"""Who takes part in a round, and who is left out?"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megasdc.localsgd.rounds import (
    FIRST_DEADLINE_S,
    Meeting,
    NothingLeftError,
    ReplayError,
    Report,
    Round,
    judge,
)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def report(number: int = 1, norm: float = 1.0, **changes: Any) -> Report:
    """A report of a healthy replica."""
    fields: dict[str, Any] = {
        "round": number,
        "tokens": 100,
        "steps": 4,
        "micro_batches": 8,
        "norm": norm,
        "finite": True,
        "digest": "a",
    }
    return Report(**{**fields, **changes})


def met(number: int, deadline_s: float | None = None) -> tuple[Meeting, Clock, list[Round]]:
    """A meeting that so many replicas have joined."""
    clock, rounds = Clock(), list[Round]()
    meeting = Meeting(number, deadline_s, rounds.append, clock)
    meeting.begin(dict.fromkeys(range(number), (0, "a")))
    assert all(meeting.join(one, 0, "a", [("host", one)]) for one in range(number))
    return meeting, clock, rounds


def end(meeting: Meeting, *members: int, digest: str = "a") -> None:
    """All members have fetched all weights, and agree."""
    for one in members:
        meeting.have(one, members)
    meeting.close(now=False)
    for one in members:
        meeting.agree(one, meeting.round, digest)


def test_a_round_waits_for_all_and_records_what_they_did() -> None:
    """Members are fixed with the last report, and the round is made when all have all weights."""
    meeting, clock, rounds = met(2)
    assert meeting.report(0, report())
    meeting.look()
    assert meeting.plan is None
    clock.now = 5.0
    assert meeting.report(1, report(tokens=50, steps=3))
    meeting.look()
    assert meeting.plan is not None and list(meeting.plan.members) == [0, 1]
    meeting.have(0, [0, 1])
    meeting.close(now=False)
    assert meeting.round == 0, "the other has not said what it has"
    meeting.have(1, [0, 1])
    meeting.close(now=False)
    assert meeting.round == 1 and meeting.made[1].members == (0, 1) and meeting.plan is None
    (one,) = rounds
    assert (one.tokens, one.steps, one.seconds, one.absent) == ({0: 100, 1: 50}, {0: 4, 1: 3}, 5.0, ())


def test_a_late_replica_does_not_stop_the_others_and_returns() -> None:
    """The first round waits long, later ones for the median of the last rounds; who is late goes on from the newest."""
    meeting, clock, rounds = met(3)
    for number in (1, 2):
        clock.now += 20.0
        for one in range(3):
            assert meeting.report(one, report(number))
        meeting.look()
        end(meeting, 0, 1, 2)
    assert meeting.deadline_s == 20.0
    clock.now += 20.0
    for one in (0, 1):
        meeting.report(one, report(3))
    clock.now += 19.0
    meeting.look()
    assert meeting.plan is None
    clock.now += 1.0
    meeting.look()
    assert meeting.plan is not None and list(meeting.plan.members) == [0, 1]
    assert not meeting.report(2, report(3)), "its members are fixed"
    end(meeting, 0, 1, digest="b")
    assert rounds[-1].absent == (2,) and not meeting.report(2, report(3)), "it is over"
    assert meeting.report(2, report(4, digest="b")) and meeting.round == 3
    assert Meeting(2, None).deadline_s == FIRST_DEADLINE_S and met(2, 3.0)[0].deadline_s == 3.0


def test_a_lost_replica_is_not_waited_for() -> None:
    """One whose connection has ended; what it has reported is forgotten, unless the members are fixed already."""
    meeting, _, rounds = met(3)
    meeting.report(2, report())
    meeting.leave(2)
    for one in (0, 1):
        meeting.report(one, report())
    meeting.look()
    assert meeting.plan is not None and list(meeting.plan.members) == [0, 1]
    meeting.leave(1)  # in the exchange: 0 has its weights
    meeting.have(0, [0, 1])
    meeting.close(now=False)
    assert rounds[-1].members == (0, 1)
    assert not meeting.join(1, 0, "a", [("host", 1)]), "it goes on from the newest round"
    meeting.agree(0, 1, "b")
    assert meeting.join(2, 1, "b", [("host", 2)]), "it has loaded the newest"


def test_the_round_is_made_of_what_all_have() -> None:
    """One could not fetch another's weights: that other is left out on all; one that cannot fetch anything, too."""
    meeting, _, rounds = met(3)
    for one in range(3):
        meeting.report(one, report())
    meeting.look()
    meeting.have(0, [0, 1, 2])
    meeting.have(1, [0, 1])
    meeting.have(2, [0, 1, 2])
    meeting.close(now=False)
    assert rounds[-1].members == (0, 1) and rounds[-1].absent == (2,)


@pytest.mark.parametrize(
    ("reports", "history", "wrong"),
    [
        ({0: {}, 1: {"finite": False}}, {}, {1}),
        ({0: {}, 1: {"digest": "b"}, 2: {}}, {}, {1}),
        ({0: {}, 1: {"digest": "b"}}, {}, set()),
        ({0: {}, 1: {"norm": 11.0}, 2: {}}, {}, {1}),
        ({0: {}, 1: {"norm": 0.09}, 2: {}}, {}, {1}),
        ({0: {}, 1: {"norm": 1e6}, 2: {}}, {}, {1}),
        ({0: {}, 1: {"norm": 9.0}, 2: {}}, {}, set()),
        ({0: {}, 1: {"norm": 100.0}}, {}, {1}),
        ({0: {}, 1: {"norm": 9.0}}, {}, set()),
        ({0: {}, 1: {"norm": 0.0}}, {}, {1}),
        ({0: {"norm": 0.0}, 1: {"norm": 0.0}}, {}, set()),
        ({0: {}, 1: {"norm": 0.0, "steps": 2}}, {}, set()),
        ({0: {}, 1: {"norm": 0.001, "steps": 3}}, {}, set()),
        ({0: {}, 1: {"norm": 4.0}}, {1: [1.0] * 5}, {1}),
        ({0: {"norm": 4.0}, 1: {"norm": 4.0}}, {0: [1.0] * 5, 1: [1.0] * 5}, set()),
        ({0: {}, 1: {"norm": 2.0}}, {1: [1.0] * 5}, set()),
        ({0: {"norm": 0.5}, 1: {"norm": 1.65}}, {1: [1.0] * 5}, {1}),
        ({0: {"norm": 4.0}}, {0: [1.0] * 5}, set()),
        ({0: {}, 1: {"norm": 0.0, "steps": 1}, 2: {}}, {1: [1.0] * 5}, set()),
        ({0: {"norm": 0.05, "steps": 1}, 1: {"steps": 60, "norm": 3.0}, 2: {"norm": 0.05, "steps": 1}}, {}, set()),
        ({0: {"norm": 0.05, "steps": 1}, 1: {"steps": 4, "norm": 3.0}, 2: {"norm": 0.05, "steps": 1}}, {}, {1}),
    ],
    ids=[
        "nan",
        "other_weights",
        "two_differ",
        "large",
        "small",
        "huge",
        "unusual",
        "two",
        "two_near",
        "two_still",
        "two_both_still",
        "two_still_and_late",
        "two_late",
        "own",
        "all",
        "little",
        "just_beyond",
        "alone",
        "late",
        "others_late",
        "large_and_others_late",
    ],
)
def test_which_outer_gradients_are_wrong(
    reports: dict[int, dict[str, Any]], history: dict[int, list[float]], wrong: set[int]
) -> None:
    """What is not finite; what differs from the others' at the start; a norm far from the others' and from its own."""
    assert set(judge({one: report(**fields) for one, fields in reports.items()}, history)) == wrong


def test_nothing_that_can_be_relied_on() -> None:
    """All replicas are wrong, or two that begin with other weights: nobody can say which is right."""
    for changes in ([{"finite": False}] * 2, [{}, {"digest": "b"}]):
        meeting, _, _ = met(2)
        for one, fields in enumerate(changes):
            meeting.report(one, report(**fields))
        with pytest.raises(NothingLeftError, match=r"replica 0: .*; replica 1: ") as raised:
            meeting.look()
        assert raised.value.wrong.keys() == raised.value.looks.keys() == {0, 1}


def test_norms_of_healthy_replicas_are_never_far() -> None:
    """10,000 rounds of four replicas, whose norms vary by a tenth and fall with a learning rate to a hundredth; each is
    late in some rounds, and has then taken one to nine of ten steps.
    """
    chance, history = random.Random(3), {one: list[float]() for one in range(4)}
    for place in range(10_000):
        rate = 0.01 + 0.99 * (1 - place / 10_000)
        steps = {one: chance.choice([10] * 30 + list(range(1, 10))) for one in range(4)}
        norms = {one: rate * chance.lognormvariate(0.0, 0.1) * steps[one] for one in range(4)}
        assert judge({one: report(norm=norms[one], steps=steps[one]) for one in range(4)}, history) == {}
        for one, norm in norms.items():
            history[one] = [*history[one], norm][-20:]


def test_a_round_keeps_what_was_looked_at() -> None:
    """Norms of the others and of its own last rounds, of those left out as wrong; read again as they were recorded."""
    meeting, _, rounds = met(3)
    for number in range(1, 7):
        for one in range(3):
            meeting.report(one, report(number, norm=50.0 if (one, number) == (1, 6) else 1.0 + one, digest="a"))
        meeting.look()
        end(meeting, *([0, 2] if number == 6 else [0, 1, 2]))
    look = rounds[-1].looks[1]
    assert (look.finite, look.as_others, look.norm, look.others) == (True, True, 50.0, {0: 1.0, 2: 3.0})
    assert (look.own_rounds, look.own_mean, look.own_deviation) == (5, 2.0, 0.0)
    assert (look.steps, look.steps_of_others) == (4, {0: 4, 2: 4})
    lines = [json.loads(json.dumps(one.as_dict())) for one in rounds]
    del lines[4]["looks"]  # of an earlier version
    assert [Round.of(line) for line in lines] == rounds


@pytest.mark.parametrize("returns", [False, True])
def test_a_round_of_which_nobody_is_left_begins_anew(returns: bool) -> None:
    """Its only member is lost in the exchange, and may have returned: the others' reports count then."""
    meeting, clock, rounds = met(2, 10.0)
    meeting.report(0, report())
    clock.now += 10.0
    meeting.look()
    assert meeting.plan is not None and list(meeting.plan.members) == [0]
    meeting.have(0, [0])
    assert not meeting.report(1, report())
    if returns:
        assert meeting.join(0, 0, "a", [("host", 0)])
    else:
        meeting.leave(0)
    assert meeting.plan is None and meeting.report(1, report())
    if returns:
        assert meeting.report(0, report())
    meeting.look()
    end(meeting, *([0, 1] if returns else [1]))
    assert [one.members for one in rounds] == [(0, 1) if returns else (1,)]


def test_a_member_that_was_lost_in_the_exchange_is_not_waited_for_when_it_returns() -> None:
    """Nobody waits for what its life before would have said."""
    meeting, _, rounds = met(3)
    for one in range(3):
        meeting.report(one, report())
    meeting.look()
    meeting.have(0, [0, 2])
    meeting.have(2, [0, 2])
    assert not rounds
    assert not meeting.join(1, 0, "a", [("host", 1)])
    assert rounds[-1].members == (0, 2) and rounds[-1].absent == (1,)


def test_the_deadline_begins_with_the_first_report_that_counts() -> None:
    """One that has reported first and is lost does not shorten the others' time."""
    meeting, clock, _ = met(3, 10.0)
    meeting.report(0, report())
    clock.now = 9.0
    meeting.leave(0)
    meeting.report(1, report())
    clock.now = 18.0
    meeting.look()
    assert meeting.plan is None
    clock.now = 19.0
    meeting.look()
    assert meeting.plan is not None and list(meeting.plan.members) == [1]


def test_the_others_go_on_from_what_is_left_where_all_members_of_a_round_are_lost() -> None:
    """The only member of the newest round dies with its weights: the newest that is left counts."""
    meeting, clock, rounds = met(2, 10.0)
    meeting.report(0, report())
    clock.now += 10.0
    meeting.look()
    end(meeting, 0, digest="b")
    assert rounds[-1].members == (0,)
    meeting.leave(0)
    assert meeting.join(0, 0, "a", [("host", 0)]) and (meeting.round, meeting.digest) == (0, "a")
    for one in (0, 1):
        assert meeting.report(one, report())
    meeting.look()
    end(meeting, 0, 1)
    assert [one.round for one in rounds] == [1, 1] and rounds[-1].members == (0, 1)


def test_norms_and_times_of_earlier_starts_are_known() -> None:
    """Up to the round from which the run goes on: a norm is far from its own at once, and the deadline is as before."""
    first, clock, rounds = met(2)
    for number in range(1, 8):
        clock.now += 30.0
        for one in range(2):
            first.report(one, report(number, norm=1.0 if number < 7 else 50.0))
        first.look()
        end(first, 0, 1)
    meeting = Meeting(2, None, clock=clock, earlier=rounds)
    meeting.begin({0: (6, "a"), 1: (6, "a")})
    assert meeting.deadline_s == 30.0
    meeting.report(0, report(7))
    meeting.report(1, report(7, norm=4.0))
    meeting.look()
    assert meeting.plan is not None and list(meeting.plan.left_out) == [1]


def test_a_replayed_round_whose_member_has_ended_is_told() -> None:
    """The others do not wait for it for ever."""
    meeting = Meeting(2, 1.0, replayed={1: Round(1, (0, 1), {}, {}, {}, {}, {}, (), 1.0)})
    meeting.begin(dict.fromkeys(range(2), (0, "a")))
    meeting.report(0, report())
    meeting.look()
    meeting.end(1)
    with pytest.raises(ReplayError, match="round 1 is replayed, of which replica 1"):
        meeting.look()


def test_a_replayed_round_waits_for_those_that_it_left_out() -> None:
    """They are told that they were wrong, as before; the deadline plays no part."""
    again = Round(1, (0, 2), {}, {}, {}, {}, {1: "its weights are not finite"}, (), 1.0)
    clock = Clock()
    meeting = Meeting(3, 1.0, clock=clock, replayed={1: again})
    meeting.begin(dict.fromkeys(range(3), (0, "a")))
    for one in range(3):
        meeting.join(one, 0, "a", [])
    for one in (0, 2, 1):
        clock.now += 5.0
        assert meeting.plan is None and meeting.report(one, report())
        meeting.look()
    assert meeting.plan is not None
    assert list(meeting.plan.members) == [0, 2] and meeting.plan.left_out == again.left_out
