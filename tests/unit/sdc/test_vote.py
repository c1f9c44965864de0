"""Does the vote name every rank that began to be wrong, and never one that did not?"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from megasdc.common.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, execution_key
from megasdc.sdc.vote import vote

LAYOUTS = [ParallelDims(*sizes) for sizes in [(1, 1, 3), (2, 1, 3), (1, 2, 3), (2, 2, 4)]]
PHASES = ["forward"] * 4 + ["recompute"] * 2 + ["backward", "weight_grad"] * 3


def place_of(rank: int, layout: ParallelDims) -> ParallelDims:
    return ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)


def healthy(layout: ParallelDims) -> dict[int, Trace | None]:
    """Traces of all ranks: replicas equal, every position and place another value."""
    traces: dict[int, Trace | None] = {}
    for rank in range(layout.world_size):
        dims = place_of(rank, layout)
        addresses = [Address(7, 0, phase, f"{dims.pp_rank}.x{i}", "output") for i, phase in enumerate(PHASES)]
        values = [hash((dims.pp_rank, dims.tp_rank, i)) % 2**64 for i in range(len(PHASES))]
        traces[rank] = Trace(addresses, values)
    return traces


def key_of(rank: int, place: int, layout: ParallelDims) -> tuple[int, ...]:
    dims = place_of(rank, layout)
    return execution_key(Address(7, 0, PHASES[place], "", ""), place, dims)


def damage(
    traces: dict[int, Trace | None],
    layout: ParallelDims,
    origins: Iterable[tuple[int, int]],
    draws: random.Random,
    spread: float = 1.0,
    equal: bool = False,
) -> None:
    """Let ranks be wrong at places, and what their replicas compute later too, each result with probability ``spread``.

    With ``equal`` all that are wrong at one place of a position have the same wrong value.
    """
    for rank, place in origins:
        key = key_of(rank, place, layout)
        for other in range(layout.world_size):
            trace = traces[other]
            if trace is None or place_of(other, layout).dp_rank != place_of(rank, layout).dp_rank:
                continue
            for i in range(len(trace)):
                follows = key_of(other, i, layout) > key and draws.random() < spread
                if follows or (other, i) == (rank, place):
                    trace.checksums[i] = trace.checksums[i] + 1 if equal else draws.getrandbits(64)


def named(ballot) -> list[tuple[int, int]]:
    return [(flag.rank, flag.place) for flag in ballot.flagged]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_clean_replicas_agree(layout: ParallelDims) -> None:
    """Equal traces agree, and every result of every rank was compared."""
    ballot = vote(healthy(layout), layout)
    assert ballot.agreed and ballot.compared == layout.world_size * len(PHASES)
    assert (ballot.flagged, ballot.dispute, ballot.missing, ballot.left_out) == ((), None, (), ())


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_single_rank_at_every_place(layout: ParallelDims, spread: float) -> None:
    """One wrong rank is named at its first wrong result, whatever the rest of its replica then computes."""
    draws = random.Random(1)
    for rank in range(layout.world_size):
        for place in range(len(PHASES)):
            traces, clean = healthy(layout), healthy(layout)
            damage(traces, layout, [(rank, place)], draws, spread)
            ballot = vote(traces, layout)
            assert named(ballot) == [(rank, place)] and ballot.dispute is None and not ballot.agreed
            flag = ballot.flagged[0]
            assert (flag.expected, flag.got) == (clean[rank].checksums[place], traces[rank].checksums[place])
            assert flag.address == clean[rank].addresses[place]
            assert flag.majority == layout.data - 1 and rank not in flag.against
            assert flag.replica == place_of(rank, layout).dp_rank


def test_two_wrong_of_five_are_both_named() -> None:
    """As long as the right ones are a strict majority, each wrong one is named at its own place, in execution order."""
    layout = ParallelDims(1, 2, 5)
    for seed in range(200):
        draws = random.Random(seed)
        origins = [(rank + 5 * draws.randrange(2), draws.randrange(len(PHASES))) for rank in draws.sample(range(5), 2)]
        traces = healthy(layout)
        damage(traces, layout, origins, draws, equal=bool(seed % 2))
        ballot = vote(traces, layout)
        assert sorted(named(ballot)) == sorted(origins) and ballot.dispute is None
        keys = [key_of(*one, layout) for one in named(ballot)]
        assert keys == sorted(keys)


def test_two_tensor_ranks_in_one_slot_are_both_named() -> None:
    """Results of several tensor ranks at one place do not follow from each other, in one replica or in two."""
    layout = ParallelDims(2, 1, 3)
    for second in (3, 5):  # replica 1 like rank 2, or replica 2
        traces = healthy(layout)
        damage(traces, layout, [(2, 5), (second, 5)], random.Random(1), spread=0)
        assert named(vote(traces, layout)) == [(2, 5), (second, 5)]


def test_what_follows_in_another_tensor_rank_is_not_named() -> None:
    """A tensor rank whose first difference is one place later than its neighbour's received it."""
    layout = ParallelDims(2, 1, 3)
    traces = healthy(layout)
    traces[2].checksums[5] += 1
    traces[3].checksums[6] += 1
    assert named(vote(traces, layout)) == [(2, 5)]


def test_two_wrong_of_three() -> None:
    """The first is named; then two are left that differ, and neither is."""
    layout = ParallelDims(1, 1, 3)
    traces = healthy(layout)
    damage(traces, layout, [(2, 3), (0, 8)], random.Random(1))
    ballot = vote(traces, layout)
    assert named(ballot) == [(2, 3)]
    assert ballot.dispute is not None and ballot.dispute.place == 8 and ballot.dispute.origin
    assert ballot.dispute.replicas == (0, 1)
    assert ballot.dispute.values == ({0: traces[0].checksums[8], 1: traces[1].checksums[8]},)
    assert ballot.dispute.address == traces[1].addresses[8]


@pytest.mark.parametrize(("sizes", "wrong"), [((1, 1, 2), [1]), ((1, 1, 4), [0, 3]), ((1, 1, 3), [0, 1])])
def test_no_strict_majority_is_disputed(sizes: tuple[int, int, int], wrong: list[int]) -> None:
    """Two that differ, two against two, and three that all differ: nobody is named."""
    layout = ParallelDims(*sizes)
    traces = healthy(layout)
    for number, rank in enumerate(wrong):
        traces[rank].checksums[4] += 1 if layout.data == 4 else number + 1
    ballot = vote(traces, layout)
    assert ballot.flagged == () and not ballot.agreed
    assert ballot.dispute is not None and ballot.dispute.ranks == tuple(range(layout.data))
    assert ballot.dispute.address.fqn == "0.x4"


def test_dispute_of_several_tensor_ranks() -> None:
    """Where two replicas part at two tensor ranks of one place, each position keeps its own values."""
    layout = ParallelDims(2, 1, 2)
    traces = healthy(layout)
    traces[0].checksums[4] += 1
    traces[3].checksums[4] += 1
    dispute = vote(traces, layout).dispute
    assert [sorted(values) for values in dispute.values] == [[0, 2], [1, 3]]
    assert dispute.values[1][3] == traces[3].checksums[4]


def test_equal_wrong_majority_accuses_relative_to_the_majority() -> None:
    """Two of three that are wrong in the same way outvote the third: the documented limit without a golden trace."""
    layout = ParallelDims(1, 1, 3)
    traces = healthy(layout)
    damage(traces, layout, [(0, 4), (1, 4)], random.Random(1), equal=True)
    ballot = vote(traces, layout)
    assert named(ballot) == [(2, 4)] and ballot.flagged[0].against == (0, 1)


@pytest.mark.parametrize("absent", [True, False])
def test_missing_evidence_is_no_agreement(absent: bool) -> None:
    """A rank without a trace is reported; the others may be equal, but that is not agreement."""
    layout = ParallelDims(1, 1, 3)
    traces = healthy(layout)
    traces[1] = None
    if absent:
        del traces[1]
    ballot = vote(traces, layout)
    assert not ballot.agreed and ballot.missing == (1,)
    assert ballot.flagged == () and ballot.dispute is None and ballot.compared == 2 * len(PHASES)


def test_silent_replicas_count_against_a_majority() -> None:
    """Two equal ones of five are no majority, although nobody but one spoke against them."""
    layout = ParallelDims(1, 1, 5)
    traces = healthy(layout)
    damage(traces, layout, [(0, 4), (1, 4)], random.Random(1), equal=True)
    traces[2] = traces[3] = None
    ballot = vote(traces, layout)
    assert ballot.flagged == () and ballot.dispute is not None and ballot.missing == (2, 3)


def test_consequence_of_missing_evidence_is_not_named() -> None:
    """If a rank of the first stage gave no trace, its replica's difference on the second stage may be its doing."""
    layout = ParallelDims(1, 2, 3)
    traces = healthy(layout)
    damage(traces, layout, [(1, 2)], random.Random(1))
    traces[1] = None
    ballot = vote(traces, layout)
    assert ballot.flagged == () and ballot.missing == (1,)
    assert ballot.dispute is not None and not ballot.dispute.origin and 4 in ballot.dispute.ranks
    traces = healthy(layout)
    damage(traces, layout, [(0, 2)], random.Random(1))
    traces[1] = None
    ballot = vote(traces, layout)  # of three, two spoke, and differ
    assert ballot.flagged == () and ballot.dispute.ranks == (0, 2) and ballot.dispute.origin


def test_missing_evidence_downstream_does_not_hide_an_origin() -> None:
    """A rank of the second stage that gave no trace takes nothing from what the first stage showed before it."""
    layout = ParallelDims(1, 2, 3)
    traces = healthy(layout)
    damage(traces, layout, [(1, 2)], random.Random(1))
    traces[4] = None
    assert named(vote(traces, layout)) == [(1, 2)]


def test_a_silent_neighbour_at_the_same_place_hides_nothing() -> None:
    """What a tensor rank computes first cannot follow from a neighbour, even if that one gave no trace."""
    layout = ParallelDims(2, 1, 3)
    for place, expected in ((0, [(2, 0)]), (1, [])):
        traces = healthy(layout)
        traces[3] = None
        traces[2].checksums[place] += 1
        assert named(vote(traces, layout)) == expected


def cut(trace: Trace, start: int, stop: int) -> Trace:
    """A trace without some of its results."""
    return Trace(trace.addresses[:start] + trace.addresses[stop:], trace.checksums[:start] + trace.checksums[stop:])


@pytest.mark.parametrize(("start", "stop"), [(3, 4), (6, len(PHASES)), (0, 1), (0, len(PHASES))])
def test_fewer_results_are_missing_evidence(start: int, stop: int) -> None:
    """A rank that lacks results neither agrees nor is accused of it, but of a wrong value before them."""
    layout = ParallelDims(1, 1, 3)
    traces = healthy(layout)
    traces[1] = cut(traces[1], start, stop)
    ballot = vote(traces, layout)
    assert ballot.missing == (1,) and not ballot.agreed and ballot.flagged == () and ballot.dispute is None
    if start > 2:
        traces[1].checksums[2] += 1
        assert named(vote(traces, layout)) == [(1, 2)]


def test_more_results_are_no_agreement() -> None:
    """A rank that recorded more than the others neither agrees nor is accused of it."""
    layout = ParallelDims(1, 1, 3)
    traces = healthy(layout)
    traces[2].extend(Trace([Address(7, 0, "backward", "extra", "input")], [5]))
    ballot = vote(traces, layout)
    assert ballot.missing == (2,) and not ballot.agreed and ballot.flagged == ()


def test_two_that_recorded_other_results() -> None:
    """Without a majority nobody knows which results there should be: both are reported, up to there compared."""
    layout = ParallelDims(1, 1, 2)
    traces = healthy(layout)
    traces[1] = cut(traces[1], 5, 6)
    ballot = vote(traces, layout)
    assert ballot.missing == (0, 1) and ballot.compared == 10 and not ballot.agreed
    traces[0].checksums[4] += 1
    assert vote(traces, layout).dispute.place == 4


def test_incomparable_positions_are_left_out() -> None:
    """A second stage on unlike hardware differs without anybody being wrong; what it then sends back is disputed."""
    layout = ParallelDims(1, 2, 3)
    everything_but = [(0, 0)]
    traces = healthy(layout)
    for rank in (3, 4, 5):
        traces[rank].checksums = [rank] * len(PHASES)
    ballot = vote(traces, layout, everything_but)
    assert ballot.left_out == ((1, 0),) and ballot.missing == () and ballot.agreed
    assert ballot.compared == 3 * len(PHASES)
    damage(traces, layout, [(2, 3)], random.Random(1))
    assert named(vote(traces, layout, everything_but)) == [(2, 3)]
    traces = healthy(layout)
    traces[1].checksums[8] += 1  # backward: after the other stage's
    ballot = vote(traces, layout, everything_but)
    assert ballot.flagged == () and ballot.dispute is not None and not ballot.dispute.origin
    assert not vote(traces, layout, []).agreed


def test_one_replica_has_nobody_to_agree_with() -> None:
    """A vote of one is no agreement."""
    ballot = vote(healthy(ParallelDims(2, 1, 1)), ParallelDims(2, 1, 1))
    assert ballot.compared == 0 and not ballot.agreed


def test_wrong_arguments() -> None:
    """Ranks of another world, and traces of more than one micro-batch, are refused."""
    layout = ParallelDims(1, 1, 3)
    with pytest.raises(ValueError, match=r"\[3\] do not belong to a world of 3"):
        vote({3: None}, layout)
    traces = healthy(layout)
    for trace in traces.values():
        trace.extend(Trace([Address(7, 1, "forward", "0.x0", "output")], [5]))
    with pytest.raises(ValueError, match="one micro-batch"):
        vote(traces, layout)


def random_case(seed: int):
    """Draw a layout, wrong ranks in less than half of the replicas, lost evidence, and unlike hardware."""
    draws = random.Random(seed)
    layout = ParallelDims(draws.randint(1, 2), draws.randint(1, 3), draws.randint(2, 6))
    traces = healthy(layout)
    lost = draws.random() < 0.7
    comparable = None
    positions = [(p, t) for p in range(layout.pipeline) for t in range(layout.tensor)]
    if lost and draws.random() < 0.3:
        comparable = [one for one in positions if draws.random() < 0.7]
        unlike = [(rank, 0) for rank in traces if position_of(rank, layout) not in comparable]
        damage(traces, layout, unlike, draws, spread=draws.random())
    wrong = draws.sample(range(layout.data), draws.randint(0, (layout.data - 1) // 2))
    of_wrong = [rank for rank in traces if place_of(rank, layout).dp_rank in wrong]
    origins = [(rank, draws.randrange(len(PHASES))) for rank in of_wrong if draws.random() < 0.7]
    damage(traces, layout, origins, draws, spread=draws.choice([0, 0.5, 1]), equal=draws.random() < 0.5)
    if lost:
        for rank in list(traces):
            if draws.random() < 0.2:
                start = draws.randrange(len(PHASES))
                traces[rank] = draws.choice([None, cut(traces[rank], start, draws.choice([start + 1, len(PHASES)]))])
    return layout, traces, comparable, origins, lost


def position_of(rank: int, layout: ParallelDims) -> tuple[int, int]:
    dims = place_of(rank, layout)
    return dims.pp_rank, dims.tp_rank


def first_origins(origins, layout: ParallelDims) -> list[tuple[int, int]]:
    """Of each replica, the origins that no other of its own comes before, in execution order."""
    found = []
    for replica in range(layout.data):
        of_replica = [one for one in origins if place_of(one[0], layout).dp_rank == replica]
        keys = {one: key_of(*one, layout) for one in of_replica}
        found += [one for one, key in keys.items() if key == min(keys.values())]
    return sorted(found, key=lambda one: (key_of(*one, layout), one[0]))


@pytest.mark.parametrize("block", range(20))
def test_never_a_healthy_rank_while_healthy_replicas_are_a_strict_majority(block: int) -> None:
    """Whoever is named began to be wrong at that place; with all evidence, all who did are named and nothing else."""
    for seed in range(100 * block, 100 * block + 100):
        layout, traces, comparable, origins, lost = random_case(seed)
        ballot = vote(traces, layout, comparable)
        expected = first_origins(origins, layout)
        assert set(named(ballot)) <= set(expected), seed
        if not lost:
            assert named(ballot) == expected, seed
            assert ballot.dispute is None and ballot.agreed == (not expected), seed
