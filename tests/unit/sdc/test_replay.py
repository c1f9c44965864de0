"""What follows from repeats and a golden trace: the whole table, and nobody named without proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from megasdc.common.addresses import Address
from megasdc.config.detection import PolicySection
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import (
    GOLDEN,
    INCONCLUSIVE,
    INTERMITTENT,
    MAJORITY,
    NOT_REPRODUCED,
    PERSISTENT,
    REFEREE,
    REPLAY,
    rate_bound,
    repeated_value,
    settle,
    to_repeat,
)
from megasdc.sdc.vote import Ballot, Dispute, Flag

WHERE = Address(3, 0, "forward", "1.mlp.linear_fc2", "output")
A, B, C = 11, 22, 33
"""Values: A and B of the audit, C of neither side."""
FLAG = Flag(rank=2, replica=2, address=WHERE, place=4, expected=A, got=B, against=(0, 1))
Repeats = Mapping[int, Sequence[int | None]]


def flagged(*flags: Flag, missing: tuple[int, ...] = ()) -> Ballot:
    return Ballot(flags or (FLAG,), None, 100, missing, ())


def disputed(*values: Mapping[int, int], origin: bool = True) -> Ballot:
    replicas = tuple(range(max(map(len, values))))
    return Ballot((), Dispute(WHERE, 4, replicas, values, origin), 100, (), ())


def at(place: int, repeats: Repeats) -> dict[tuple[int, int], Sequence[int | None]]:
    return {(rank, place): values for rank, values in repeats.items()}


def said(ballot: Ballot, repeats: Repeats, golden: Mapping[int, bool] | None = None, earlier: Sequence[int] = ()):
    """Rulings in short, (rank or suspects, verdict, basis), of repeats by rank at the one place that all are about."""
    rulings = settle(ballot, at(4, repeats), golden, earlier)
    return [(one.suspects if one.rank is None else one.rank, one.verdict, one.basis) for one in rulings]


def test_verdicts_are_those_of_the_policy() -> None:
    """Every verdict has a policy of its name."""
    assert {PERSISTENT, INTERMITTENT, NOT_REPRODUCED, INCONCLUSIVE} == set(PolicySection.model_fields)


def test_an_agreement_needs_no_ruling() -> None:
    """Nothing is said of ranks that agreed."""
    assert settle(Ballot((), None, 100, (), ()), {}) == ()


@pytest.mark.parametrize(
    ("repeats", "verdict", "wrong"),
    [
        ([B, B, B], PERSISTENT, 3),
        ([A, A, A], NOT_REPRODUCED, 0),
        ([A, B, A], INTERMITTENT, 1),
        ([B, B, A], INTERMITTENT, 2),
        ([A, A, C], INTERMITTENT, 1),
        ([C, C, C], INTERMITTENT, 3),
        ([B, C, B], INTERMITTENT, 3),
        ([A, B, None], INTERMITTENT, 1),
        ([C, None, None], INTERMITTENT, 1),
        ([B, B, None], INCONCLUSIVE, 2),
        ([A, A, None], INCONCLUSIVE, 0),
        ([None, None], INCONCLUSIVE, 0),
        ([], INCONCLUSIVE, 0),
    ],
)
def test_flagged_rank(repeats: list[int | None], verdict: str, wrong: int) -> None:
    """A flagged rank is named whatever it repeats; its repeats say of which kind the fault is."""
    (ruling,) = settle(flagged(), {(2, 4): repeats})
    assert (ruling.rank, ruling.verdict, ruling.basis, ruling.wrong) == (2, verdict, MAJORITY, wrong)
    assert ruling.address == WHERE and ruling.repeats == sum(value is not None for value in repeats)
    assert ruling.rate_bound == (rate_bound(3) if verdict == NOT_REPRODUCED else None)


def test_a_rank_that_died_in_the_replay() -> None:
    """No repeats at all: still named, of no known kind."""
    assert said(flagged(), {}) == [(2, INCONCLUSIVE, MAJORITY)]


@pytest.mark.parametrize(
    ("repeats", "verdict"),
    [([A, A], INTERMITTENT), ([A, None], INTERMITTENT), ([B, B], PERSISTENT), ([None, None], INCONCLUSIVE)],
)
def test_an_earlier_event_is_a_repeat_too(repeats: list[int | None], verdict: str) -> None:
    """Wrong before and now, right in between: intermittent. An event of another rank counts nothing."""
    assert said(flagged(), {2: repeats}, earlier=[2]) == [(2, verdict, MAJORITY)]
    assert said(flagged(), {2: repeats}, earlier=[1]) == said(flagged(), {2: repeats})


@pytest.mark.parametrize("repeats", [1, 5, 59, 1000])
def test_rate_bound_is_exact(repeats: int) -> None:
    """At the bound, no error in so many repeats has probability 0.05."""
    assert (1 - rate_bound(repeats)) ** repeats == pytest.approx(0.05)
    assert rate_bound(59) < 0.05 < rate_bound(58)


def test_several_flags() -> None:
    """Each has its own place and verdict; ranks of both majorities have repeats at both places."""
    other = Flag(rank=3, replica=3, address=WHERE, place=9, expected=C, got=A, against=(0, 1))
    repeats = at(4, {0: [A, A], 1: [A, A], 2: [B, B]}) | at(9, {0: [C, C], 1: [C, C], 3: [C, C]})
    assert set(to_repeat(flagged(FLAG, other))) == set(repeats)
    rulings = settle(flagged(FLAG, other), repeats)
    assert [(one.rank, one.verdict) for one in rulings] == [(2, PERSISTENT), (3, NOT_REPRODUCED)]
    assert {one.basis for one in rulings} == {MAJORITY}
    assert to_repeat(disputed({0: A, 2: B}, {1: A, 3: B})) == ((0, 4), (1, 4), (2, 4), (3, 4))


def test_a_majority_that_does_not_stand_names_nobody() -> None:
    """If all vary there is no witness that the computation repeats: the cause may be common."""
    assert said(flagged(), {0: [C, A], 1: [A, C], 2: [A, C]}) == [((2, 0, 1), INCONCLUSIVE, REPLAY)]


def test_a_majority_that_comes_over_to_the_flagged_rank() -> None:
    """Two of three were wrong alike and give the third's value in all repeats, which it repeats: they were wrong."""
    found = said(flagged(), {0: [B, B], 1: [B, B], 2: [B, B]})
    assert found == [(0, NOT_REPRODUCED, REPLAY), (1, NOT_REPRODUCED, REPLAY)]


def test_a_varying_rank_of_a_standing_majority_is_named_too() -> None:
    """Of four, one is flagged and another gave two values; two that never varied remain."""
    flag = Flag(rank=3, replica=3, address=WHERE, place=4, expected=A, got=B, against=(0, 1, 2))
    repeats = {0: [A, A], 1: [A, A], 2: [A, C], 3: [B, B]}
    assert said(flagged(flag), repeats) == [(2, INTERMITTENT, REPLAY), ((3, 0, 1), INCONCLUSIVE, REPLAY)]
    five = Flag(rank=4, replica=4, address=WHERE, place=4, expected=A, got=B, against=(0, 1, 2, 3))
    found = said(flagged(five), repeats | {3: [A, A], 4: [B, B]})
    assert found == [(4, PERSISTENT, MAJORITY), (2, INTERMITTENT, REPLAY)]


OWN, OTHER, NEITHER, MIXED, HOLE, SILENT = "own", "other", "neither", "mixed", "hole", "silent"


def side(kind: str, own: int, other: int) -> list[int | None]:
    """Three repeats of one side of a dispute."""
    return {
        OWN: [own, own, own],
        OTHER: [other, other, other],
        NEITHER: [C, C, C],
        MIXED: [other, own, other],
        HOLE: [own, own, None],
        SILENT: [],
    }[kind]


@pytest.mark.parametrize(("left", "right"), product([OWN, OTHER, NEITHER, MIXED, HOLE, SILENT], repeat=2))
def test_two_replicas(left: str, right: str) -> None:
    """A side is named only if it varies and the other gave its own value in all repeats."""
    found = said(disputed({0: A, 1: B}), {0: side(left, A, B), 1: side(right, B, A)})
    verdicts = {OTHER: NOT_REPRODUCED, NEITHER: INTERMITTENT, MIXED: INTERMITTENT}
    if right == OWN and left in verdicts:
        assert found == [(0, verdicts[left], REPLAY)]
    elif left == OWN and right in verdicts:
        assert found == [(1, verdicts[right], REPLAY)]
    else:
        assert found == [((0, 1), INCONCLUSIVE, REPLAY)]


def test_two_replicas_with_gaps() -> None:
    """A gap in the repeats of a side that varies leaves it named; one in those of the witness does not."""
    ballot = disputed({0: A, 1: B})
    assert said(ballot, {0: [B, A, None], 1: [B, B, B]}) == [(0, INTERMITTENT, REPLAY)]
    assert said(ballot, {0: [B, B, None], 1: [B, B, B]}) == [(0, INCONCLUSIVE, REPLAY)]
    assert said(ballot, {0: [B, B, B], 1: [B, B, None]}) == [((0, 1), INCONCLUSIVE, REPLAY)]


def test_an_earlier_event_in_a_dispute() -> None:
    """It makes a named rank intermittent, and names nobody."""
    ballot = disputed({0: A, 1: B})
    assert said(ballot, {0: [B, B], 1: [B, B]}, earlier=[0]) == [(0, INTERMITTENT, REPLAY)]
    assert said(ballot, {0: [A, A], 1: [B, B]}, earlier=[0]) == [((0, 1), INCONCLUSIVE, REPLAY)]


def test_a_dispute_that_may_be_a_consequence_names_nobody() -> None:
    """If something earlier was not compared, a rank that varies may only have received other inputs."""
    ballot = disputed({0: A, 1: B}, origin=False)
    assert said(ballot, {0: [B, B], 1: [B, B]}) == [((0, 1), INCONCLUSIVE, REPLAY)]
    assert said(ballot, {}, {0: False, 1: True}) == [(0, INCONCLUSIVE, GOLDEN)]


def test_the_referee_names_where_no_vote_can() -> None:
    """It needs no repeat that varies; where it is undecided, all is as without it."""
    ballot, repeats = disputed({0: A, 1: B}), at(4, {0: [A, A], 1: [B, B]})
    (ruling,) = settle(ballot, repeats, refereed={(0, 4): True, (1, 4): False})
    assert (ruling.rank, ruling.verdict, ruling.basis, ruling.expected) == (1, PERSISTENT, REFEREE, A)
    (ruling,) = settle(ballot, repeats, refereed={(0, 5): True, (1, 5): False})
    assert (ruling.rank, ruling.verdict) == (None, INCONCLUSIVE), "that is another place"
    (ruling,) = settle(ballot, repeats, golden={0: False, 1: True}, refereed={})
    assert (ruling.rank, ruling.basis) == (0, GOLDEN)


def test_the_referee_confirms_a_majority_or_overrules_it() -> None:
    """Two against one: what is outside of the bound is wrong, whoever has it."""
    repeats = at(4, {0: [A, A], 1: [A, A], 2: [B, B]})
    (ruling,) = settle(flagged(), repeats, refereed={(0, 4): True, (1, 4): True, (2, 4): False})
    assert (ruling.rank, ruling.verdict, ruling.basis) == (2, PERSISTENT, REFEREE)
    rulings = settle(flagged(), repeats, refereed={(0, 4): False, (1, 4): False, (2, 4): True})
    assert [(one.rank, one.verdict, one.basis, one.expected) for one in rulings] == [
        (0, PERSISTENT, REFEREE, B),
        (1, PERSISTENT, REFEREE, B),
    ]


def test_each_position_of_a_dispute_has_its_own_ruling() -> None:
    """Two tensor ranks at which two replicas part are settled apart."""
    ballot = disputed({0: A, 2: B}, {1: A, 3: B})
    repeats = {0: [A, A], 2: [A, A], 1: [A, A], 3: [B, B]}
    assert said(ballot, repeats) == [(2, NOT_REPRODUCED, REPLAY), ((1, 3), INCONCLUSIVE, REPLAY)]


def test_two_against_two() -> None:
    """A rank that varies is named; the others stay disputed as long as they differ."""
    ballot = disputed({0: A, 1: A, 2: B, 3: B})
    same = {0: [A], 1: [A], 2: [B], 3: [B]}
    assert said(ballot, same) == [((0, 1, 2, 3), INCONCLUSIVE, REPLAY)]
    assert said(ballot, same | {2: [A]}) == [(2, INTERMITTENT, REPLAY), ((0, 1, 3), INCONCLUSIVE, REPLAY)]
    assert said(ballot, same | {2: [A], 3: [A]}) == [(2, NOT_REPRODUCED, REPLAY), (3, NOT_REPRODUCED, REPLAY)]


@pytest.mark.parametrize("repeats", [{0: [A, A], 1: [B, B]}, {}])
@pytest.mark.parametrize(("golden", "wrong"), [({0: False, 1: True}, 0), ({0: True, 1: False}, 1), ({1: False}, 1)])
def test_golden_settles_a_dispute(repeats: Repeats, golden: dict[int, bool], wrong: int) -> None:
    """A rank that fails the golden trace is named, whether its repeats say of which kind or not."""
    verdict = PERSISTENT if repeats else INCONCLUSIVE
    assert said(disputed({0: A, 1: B}), repeats, golden) == [(wrong, verdict, GOLDEN)]


def test_golden_with_both_wrong_or_both_right() -> None:
    """Both fail: both are named. None fails: as without."""
    ballot, repeats = disputed({0: A, 1: B}), {0: [A, A], 1: [B, A]}
    assert said(ballot, repeats, {0: False, 1: False}) == [(0, PERSISTENT, GOLDEN), (1, INTERMITTENT, GOLDEN)]
    assert said(ballot, repeats, {0: True, 1: True}) == said(ballot, repeats) == [(1, INTERMITTENT, REPLAY)]
    assert said(ballot, {0: [B, B], 1: [B, B]}, {0: False, 1: True}) == [(0, NOT_REPRODUCED, GOLDEN)]


def test_golden_with_a_rest_that_differs() -> None:
    """One fails, and the others differ still, though one of them passes: no value is known to be right."""
    ballot, repeats = disputed({0: A, 1: B, 2: C}), {0: [B, B], 1: [B, B], 2: [C, C]}
    found = said(ballot, repeats, {0: False, 1: True})
    assert found == [(0, INTERMITTENT, GOLDEN), ((1, 2), INCONCLUSIVE, REPLAY)]


@pytest.mark.parametrize(
    ("golden", "expected"),
    [
        ({2: False}, [(2, PERSISTENT, GOLDEN)]),
        ({0: True, 1: True, 2: False}, [(2, PERSISTENT, GOLDEN)]),
        ({0: True, 1: True, 2: True}, [((2, 0, 1), INCONCLUSIVE, REPLAY)]),
        ({2: True}, [((2, 0, 1), INCONCLUSIVE, REPLAY)]),
        ({0: True, 1: True}, [(2, PERSISTENT, MAJORITY)]),
        ({0: False, 1: False, 2: True}, [(0, PERSISTENT, GOLDEN), (1, PERSISTENT, GOLDEN)]),
        ({0: False, 1: False}, [(0, PERSISTENT, GOLDEN), (1, PERSISTENT, GOLDEN)]),
        ({0: False, 2: True}, [(0, PERSISTENT, GOLDEN), ((2, 1), INCONCLUSIVE, REPLAY)]),
        (dict.fromkeys(range(3), False), [(rank, PERSISTENT, GOLDEN) for rank in (2, 0, 1)]),
    ],
)
def test_golden_overrides_the_majority(golden: dict[int, bool], expected: list) -> None:
    """A majority that fails the golden trace accuses nobody, and is named itself.

    Where the one that it accuses passes, nobody is named: a fault that the golden workload does not show may be its own
    or one that the majority has in common.
    """
    assert said(flagged(), {0: [A, A], 1: [A, A], 2: [B, B]}, golden) == expected


@pytest.mark.parametrize(
    ("repeats", "verdict"), [([A, A], NOT_REPRODUCED), ([A, B], INTERMITTENT), ([A, None], INCONCLUSIVE)]
)
def test_who_contradicts_itself_is_named_though_it_passes_the_golden_trace(
    repeats: list[int | None], verdict: str
) -> None:
    """A flagged rank that gave two values for the same work was wrong once, whatever the golden workload shows."""
    everybody = dict.fromkeys(range(3), True)
    assert said(flagged(), {0: [A, A], 1: [A, A], 2: repeats}, everybody) == [(2, verdict, MAJORITY)]


def test_checksums_are_those_that_the_ruling_is_about() -> None:
    """Expected is what is right by the ruling's basis, got what each rank computed; of a dispute nothing is right."""
    same = at(4, {0: [A, A], 1: [A, A], 2: [B, B]})

    def checksums(ballot: Ballot, golden: Mapping[int, bool]) -> list[tuple[int | None, Mapping[int, int]]]:
        return [(one.expected, one.got) for one in settle(ballot, same, golden)]

    assert checksums(flagged(), {}) == [(A, {2: B})]
    assert checksums(flagged(), {0: False, 1: False, 2: True}) == [(B, {0: A}), (B, {1: A})]
    assert checksums(flagged(), {0: False, 1: False}) == [(None, {0: A}), (None, {1: A})], "2 was not verified"
    assert checksums(flagged(), {2: True}) == [(None, {0: A, 1: A, 2: B})]
    assert checksums(disputed({0: A, 2: B}), {}) == [(None, {0: A, 2: B})]


def test_a_rank_that_fails_the_golden_trace_but_was_right_here() -> None:
    """One of four that outvoted the flagged rank fails the golden trace: wrong elsewhere and right here."""
    flag = Flag(rank=4, replica=4, address=WHERE, place=4, expected=A, got=B, against=(0, 1, 2, 3))
    repeats = {rank: [A, A] for rank in range(4)} | {4: [A, A]}
    assert said(flagged(flag), repeats, {1: False}) == [(4, NOT_REPRODUCED, MAJORITY), (1, INTERMITTENT, GOLDEN)]


def test_missing_evidence_is_inconclusive() -> None:
    """It has a ruling of its own, beside those of flags; so has a vote that compared nothing."""
    found = said(flagged(missing=(1,)), {2: [B]})
    assert found == [(2, PERSISTENT, MAJORITY), ((1,), INCONCLUSIVE, REPLAY)]
    assert said(Ballot((), None, 0, (), ((0, 0),)), {}) == [((), INCONCLUSIVE, REPLAY)]


def traces(layout: ParallelDims) -> dict[int, Trace | None]:
    addresses = [Address(3, 0, phase, f"x{i}", "output") for i, phase in enumerate(["forward"] * 3 + ["backward"] * 3)]
    return {rank: Trace(list(addresses), [100 * rank + i for i in range(6)]) for rank in range(layout.world_size)}


@pytest.mark.parametrize(
    ("rank", "place", "changed", "counts"),
    [
        (1, 2, (1, 1), False),  # its own earlier result
        (1, 2, (1, 3), True),  # its own later one
        (5, 1, (1, 2), False),  # what the first stage sent
        (1, 4, (5, 4), False),  # the gradient that the last stage sent
        (1, 2, (5, 0), True),  # the next stage
        (1, 2, (0, 1), True),  # another replica
        (5, 4, (1, 3), True),  # backward on the first stage comes later
    ],
)
def test_only_repeats_with_the_same_inputs_count(rank: int, place: int, changed: tuple[int, int], counts: bool) -> None:
    """If something that a replica computed before differs from the audit, the repeat is no evidence on this rank."""
    layout = ParallelDims(1, 2, 4)
    audit, repeat = traces(layout), traces(layout)
    repeat[rank].checksums[place] = C
    repeat[changed[0]].checksums[changed[1]] += 7
    assert repeated_value(rank, place, audit, repeat, layout) == (C if counts else None)


def test_a_repeat_without_a_trace_is_no_evidence() -> None:
    """Of the rank itself, of one whose results came before, of one that ended early; a later one does not matter."""
    layout = ParallelDims(1, 2, 4)
    audit = traces(layout)
    assert repeated_value(5, 2, audit, audit, layout) == 502
    for rank, place, without, expected in ((5, 2, 5, None), (5, 2, 1, None), (1, 2, 5, 102), (1, 4, 5, None)):
        assert repeated_value(rank, place, audit, audit | {without: None}, layout) == expected
    short = Trace(audit[5].addresses[:2], audit[5].checksums[:2])
    assert repeated_value(5, 2, audit, audit | {5: short}, layout) is None
    other = Trace(audit[5].addresses[::-1], audit[5].checksums)
    assert repeated_value(5, 2, audit, audit | {5: other}, layout) is None
    pair = ParallelDims(2, 1, 2)
    assert repeated_value(0, 0, traces(pair), traces(pair) | {1: None}, pair) == 0
    assert repeated_value(0, 1, traces(pair), traces(pair) | {1: None}, pair) is None
