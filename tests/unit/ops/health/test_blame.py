"""Who is stuck is named from positions, process states and collectives; where they name nobody, nobody is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megasdc.common.host import DISK, GONE, STOPPED
from megasdc.ops.health.blame import find_blame
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_state import GroupState, RankState

WORLD = "world"


def state(
    rank: int,
    phase: Phase,
    *,
    pp: int = 0,
    dp: int | None = None,
    groups: Mapping[str, GroupState] | None = None,
    process: str = "running",
) -> RankState:
    """A rank of one tensor rank, by default a replica each, on a host each."""
    place = (pp, 0, rank if dp is None else dp)
    return RankState(rank, f"n{rank}", *place, 40, 0, phase, 90.0, process, groups or {}, "")


def group(
    joined: int, ended: int, op: str = "all_reduce [8] Float", ranks: tuple[int, ...] = tuple(range(8))
) -> GroupState:
    """A group whose collectives are all alike."""
    return GroupState(ranks, joined, ended, {number: op for number in range(max(1, joined - 3), joined + 1)})


def waiting(rank: int, **fields: object) -> RankState:
    """A rank that waits in the 7th collective of the world."""
    return replace(state(rank, Phase.REDUCTION, groups={WORLD: group(7, 6)}), **fields)  # type: ignore[arg-type]


def test_the_rank_that_has_not_joined_a_collective_is_named() -> None:
    """Three wait in the sum of gradients; the one in its forward pass has not joined it."""
    late = state(2, Phase.FORWARD, groups={WORLD: group(6, 6)})
    blame = find_blame([waiting(0), waiting(1), late, waiting(3)])
    assert (blame.kind, blame.ranks) == ("behind", (2,))
    assert "rank 2 on n2 (forward of step 40" in blame.text
    assert blame.waits[0].startswith("waits for rank 2") and blame.waits[2].startswith("waits for nobody")


def test_an_endless_loop_in_a_collective_phase_is_named_by_its_missing_entry() -> None:
    """All are in the same phase, but one has not joined: its hook before the reduction does not return."""
    late = state(1, Phase.REDUCTION, groups={WORLD: group(6, 6)})
    assert find_blame([waiting(0), late, waiting(2)]).ranks == (1,)


def test_in_a_pipeline_the_end_of_the_chain_of_waits_is_named() -> None:
    """Stages 0 and 1 wait for stage 2, which computes; so does another replica, in a collective."""
    chain = [
        state(0, Phase.RECEIVE_GRADIENT, pp=0, dp=0, groups={"dp0": group(6, 6, ranks=(0, 3))}),
        state(1, Phase.RECEIVE_GRADIENT, pp=1, dp=0, groups={"dp1": group(6, 6, ranks=(1, 4))}),
        state(2, Phase.BACKWARD, pp=2, dp=0, groups={"dp2": group(6, 6, ranks=(2, 5))}),
        state(3, Phase.REDUCTION, pp=0, dp=1, groups={"dp0": group(7, 6, ranks=(0, 3))}),
        state(4, Phase.REDUCTION, pp=1, dp=1, groups={"dp1": group(7, 6, ranks=(1, 4))}),
        state(5, Phase.REDUCTION, pp=2, dp=1, groups={"dp2": group(7, 6, ranks=(2, 5))}),
    ]
    blame = find_blame(chain)
    assert (blame.kind, blame.ranks) == ("behind", (2,))
    assert blame.waits[3] == "waits for rank 0 in reduction of step 40, micro-batch 0"


@pytest.mark.parametrize(("process", "kind"), [(STOPPED, "stopped"), (DISK, "disk"), (GONE, "gone")])
def test_what_the_system_says_of_a_process_comes_first(process: str, kind: str) -> None:
    """A rank that was stopped inside the collective stands where all others stand."""
    blame = find_blame([waiting(0), waiting(1, process=process, groups={}), waiting(2)])
    assert (blame.kind, blame.ranks) == (kind, (1,))


def test_a_job_that_was_suspended_has_no_cause() -> None:
    """All ranks are stopped, on whatever hosts, but for those that are done; of one that runs the others are it."""
    stopped = [waiting(rank, process=STOPPED, groups={}) for rank in range(3)]
    blame = find_blame([*stopped, state(3, Phase.DONE)])
    assert (blame.kind, blame.ranks, blame.hosts) == ("stopped", (), ()) and "the job was suspended" in blame.text
    assert find_blame([*stopped, waiting(3)]).ranks == (0, 1, 2)
    assert find_blame(stopped[:1]).ranks == (0,)


def test_storage_that_hosts_share_is_no_rank_and_no_host() -> None:
    """Ranks of several hosts wait for a disk at once, all of them or those that read data; of one host they are it."""
    held = [waiting(rank, process=DISK, groups={}) for rank in range(3)]
    for ranks in ([replace(one, host=f"n{one.rank}") for one in held], [replace(held[0], host="n9"), *held[1:]]):
        blame = find_blame([*ranks, waiting(3)])
        assert (blame.kind, blame.ranks, blame.hosts) == ("disk", (), ()) and "storage that hosts share" in blame.text
    assert find_blame([*(replace(one, host="n1") for one in held), waiting(3)]).ranks == (0, 1, 2)


def test_a_lost_host_is_named_and_no_rank() -> None:
    """Without its agent nothing is known of its ranks."""
    blame = find_blame([waiting(0), waiting(1)], ["n2"])
    assert (blame.kind, blame.ranks) == ("gone", ()) and "n2" in blame.text


def test_a_rank_that_skipped_a_collective_is_named_by_the_others_order() -> None:
    """Its collectives of the group are shifted by one, so one of them is another operation than everyone else's."""
    order = {5: "all_reduce [8] Float", 6: "all_gather [2] Float", 7: "all_reduce [8] Float"}
    skipped = {5: "all_reduce [8] Float", 6: "all_reduce [8] Float"}
    ranks = [state(rank, Phase.OPTIMIZER, groups={WORLD: GroupState((0, 1, 2, 3), 6, 5, order)}) for rank in (0, 1, 3)]
    ranks.insert(2, state(2, Phase.OPTIMIZER, groups={WORLD: GroupState((0, 1, 2, 3), 6, 5, skipped)}))
    blame = find_blame(ranks)
    assert (blame.kind, blame.ranks) == ("mismatch", (2,))
    assert (
        "collective 6 of group world is all_gather [2] Float on most ranks; rank 2: all_reduce [8] Float" in blame.text
    )


def test_a_rank_that_skipped_one_group_and_waits_in_another_is_named() -> None:
    """A circle: all others wait for it in one group, it waits for them in the next; most wait for it."""
    ranks = [state(rank, Phase.REDUCTION, groups={"a": group(7, 6), "b": group(3, 3)}) for rank in (0, 1, 2)]
    ranks.append(state(3, Phase.OPTIMIZER, groups={"a": group(6, 6), "b": group(4, 3)}))
    blame = find_blame(ranks)
    assert (blame.kind, blame.ranks) == ("circle", (3,))


def test_a_rank_that_never_joined_a_collective_of_a_group_is_named() -> None:
    """The others wait for it in the group's first collective, of which its own recorder knows nothing."""
    ranks = [state(rank, Phase.REDUCTION, groups={"new": group(1, 0), WORLD: group(6, 6)}) for rank in (0, 1, 2)]
    ranks.append(state(3, Phase.REDUCTION, groups={WORLD: group(7, 6)}))
    blame = find_blame(ranks)
    assert (blame.kind, blame.ranks) == ("circle", (3,))


def test_two_ranks_in_opposite_order_are_both_named() -> None:
    """Each waits for the other in another group: nothing tells whose order is right."""
    ranks = [
        state(0, Phase.REDUCTION, groups={"a": group(7, 6), "b": group(3, 3)}),
        state(1, Phase.REDUCTION, groups={"a": group(6, 6), "b": group(4, 3)}),
    ]
    assert find_blame(ranks).ranks == (0, 1)


def test_where_all_have_joined_a_connection_is_suspected_and_no_rank_named() -> None:
    """The same collective on all ranks of two hosts, which does not end."""
    both = {WORLD: group(7, 6, ranks=(0, 1))}
    blame = find_blame([waiting(0, groups=both), waiting(1, groups=both)])
    assert (blame.kind, blame.ranks) == ("link", ()) and "n0, n1" in blame.text


def test_who_waits_for_a_host_of_which_nothing_is_known_is_not_named() -> None:
    """A stage that waits for the next one on another host, and ranks of a collective that has members there."""
    last, first = state(1, Phase.RECEIVE_GRADIENT, pp=1, dp=0), state(0, Phase.RECEIVE_GRADIENT, pp=0, dp=0)
    for states in ([first, last], [waiting(0), waiting(1)]):
        blame = find_blame(states)
        assert (blame.kind, blame.ranks) == ("unknown", ()) and "is not known" in blame.text
        assert any("ranks of which nothing is known" in text for text in blame.waits.values())


def test_a_rank_in_a_collective_that_does_not_answer_is_not_taken_for_the_cause() -> None:
    """The one that computes is named; where there is none, nobody, and who did not answer is told."""
    both = ("dp", group(7, 6, ranks=(1, 2)))
    first = replace(state(0, Phase.RECEIVE_GRADIENT, pp=0, dp=0), where="a.py:1 f")
    silent = state(1, Phase.REDUCTION, pp=1, dp=0)
    late = state(2, Phase.FORWARD, pp=1, dp=1, groups={"dp": group(6, 6, ranks=(1, 2))})
    assert find_blame([first, silent, late]).ranks == (2,)
    blame = find_blame([first, silent, replace(late, phase=Phase.REDUCTION, groups=dict([both]))])
    assert (blame.kind, blame.ranks) == ("unknown", ()) and "no answer came from rank 1 on n1" in blame.text


def test_a_single_rank_is_named() -> None:
    """Nobody waits for it, and it for nobody."""
    assert find_blame([state(0, Phase.OPTIMIZER, groups={WORLD: group(6, 6, ranks=(0,))})]).ranks == (0,)


def test_without_evidence_nobody_is_named() -> None:
    """All between steps, and no answer from any: no name."""
    blame = find_blame([state(0, Phase.BETWEEN), state(1, Phase.BETWEEN)])
    assert (blame.kind, blame.ranks) == ("unknown", ())


def test_without_a_flight_recorder_the_only_rank_that_computes_is_named() -> None:
    """No sequence numbers: all others are in transfers or collectives."""
    blame = find_blame([state(0, Phase.REDUCTION), state(1, Phase.DATA), state(2, Phase.REDUCTION)])
    assert (blame.kind, blame.ranks) == ("behind", (1,))


def test_a_connection_that_carries_nothing_is_named_before_whom_ranks_wait_for() -> None:
    """Two stages wait for each other, and what one host sends is not acknowledged: the pair, and no rank."""
    first = replace(state(0, Phase.RECEIVE_GRADIENT, pp=0, dp=0), silent_peers={"10.0.0.2": 6})
    last = state(1, Phase.RECEIVE_ACTIVATION, pp=1, dp=0)
    assert find_blame([replace(first, silent_peers={}), last]).kind == "circle"
    blame = find_blame([first, last], names={"10.0.0.2": "n1"})
    assert (blame.kind, blame.ranks, blame.hosts) == ("link", (), ("n0", "n1"))
    assert blame.text == "n1 acknowledges nothing that n0 sends (6 repetitions)"
    unknown = find_blame([first, last])
    assert unknown.hosts == ("10.0.0.2", "n0"), "a host that has reported no address"


def training(rank: int, joined: int, ended: int, *, may_wait: bool = False) -> RankState:
    """A rank of a program of which nothing is known but its collectives and the innermost line of its main thread."""
    found = state(rank, Phase.TRAINING, groups={WORLD: group(joined, ended)})
    return replace(found, step=0, micro_batch=-1, where="train.py:9 <module>", may_wait=may_wait)


def test_of_unknown_programs_who_has_not_joined_is_named_and_who_may_be_in_a_transfer_is_not() -> None:
    """A rank in its own code is the cause; one in a transfer, whose other side is unknown, is not, nor is a victim."""
    blame = find_blame([training(0, 7, 6), training(1, 6, 6), training(2, 7, 6)])
    assert blame.ranks == (1,) and "rank 1 on n1 (training at train.py:9 <module>)" in blame.text
    receives, works = training(1, 6, 6, may_wait=True), replace(training(3, 5, 5), groups={})
    assert find_blame([training(0, 7, 6), receives]).ranks == (), "who has not sent to rank 1 is not known"
    assert find_blame([training(0, 7, 6), receives, works]).ranks == (3,)
    assert find_blame([receives, training(2, 6, 6, may_wait=True)]).ranks == ()


def test_collectives_that_have_ended_are_no_mismatch() -> None:
    """Whatever sizes ranks gave to one that has ended on all, it was right; who has not joined is named."""
    odd = [replace(group(7, 6), recent={6: "all_reduce [] Float", 7: "all_reduce [8] Float"}), group(7, 6)]
    late = state(2, Phase.FORWARD, groups={WORLD: group(6, 6)})
    waits = [state(rank, Phase.REDUCTION, groups={WORLD: one}) for rank, one in enumerate(odd)]
    assert find_blame([*waits, late]).ranks == (2,)


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (("all_reduce [] Float", "all_reduce [1] Float", "all_reduce [1] Float"), "link"),
        (("scatter [3, 3] Float", "scatter  ", "scatter  "), "link"),
        (("all_to_all [2][1] Float", "all_to_all [1][2] Float", "all_to_all [1][1] Float"), "link"),
        (("all_reduce [2] Float", "all_reduce [1] Float", "all_reduce [1] Float"), "mismatch"),
        (("scatter [3] Float", "gather [3] Float", "gather [3] Float"), "mismatch"),
    ],
)
def test_sizes_that_may_rightly_differ_accuse_nobody(texts: tuple[str, ...], kind: str) -> None:
    """A number is as long without a dimension as with it; what is scattered, gathered or exchanged may be uneven."""
    waits = [
        state(rank, Phase.REDUCTION, groups={WORLD: replace(group(7, 6, ranks=(0, 1, 2)), recent={7: text})})
        for rank, text in enumerate(texts)
    ]
    blame = find_blame(waits)
    assert (blame.kind, blame.ranks) == (kind, (0,) if kind == "mismatch" else ())


def test_who_is_between_steps_and_waits_for_nobody_is_named() -> None:
    """Others are in transfers; it has answered, is in no collective, and in no call that may wait."""
    here = replace(state(0, Phase.BETWEEN, pp=0, dp=0), where="train.py:9 <module>")
    receives = state(1, Phase.RECEIVE_GRADIENT, pp=1, dp=0)
    assert find_blame([here, receives]).ranks == (0,)
    assert find_blame([replace(here, may_wait=True), receives]).ranks == ()


def test_a_rank_that_keeps_its_interpreter_is_named_and_who_waits_in_its_data_phase_is_not() -> None:
    """It is in its forward pass and does not answer; another has got to a broadcast of the next batch, a third waits.

    No recorder knows the broadcast, so that the second one waits for nobody by the graph.
    """
    keeps = state(0, Phase.FORWARD)
    fetches = replace(state(1, Phase.DATA, groups={WORLD: group(6, 6)}), where="loader.py:9 fetch", may_wait=True)
    blame = find_blame([keeps, fetches, waiting(2)])
    assert (blame.kind, blame.ranks) == ("behind", (0,)) and "native code keeps the interpreter" in blame.text
    assert find_blame([replace(fetches, rank=0), fetches, waiting(2)]).ranks == (), "nobody is accused instead"


def test_a_rank_in_a_collective_of_its_data_phase_waits() -> None:
    """For a rank of which nothing is known; the other is in a transfer."""
    fetches = state(1, Phase.DATA, groups={"tp": group(7, 6, ranks=(1, 9))})
    receives = state(2, Phase.RECEIVE_GRADIENT, pp=1, groups={"tp": group(6, 6, ranks=(2, 8))})
    assert find_blame([fetches, receives]).ranks == ()


def test_a_tensor_rank_in_its_forward_pass_may_wait_in_a_collective_that_no_record_tells() -> None:
    """It does not answer; only where its peer waits for it is it the cause, and not of two that do not answer."""

    def tensor(rank: int, **fields: object) -> RankState:
        return replace(state(rank, Phase.FORWARD, dp=0), tp_rank=rank, **fields)  # type: ignore[arg-type]

    late = replace(state(3, Phase.FORWARD, groups={WORLD: group(6, 6)}), dp_rank=1, where="mlp.py:3 forward")
    works = {"groups": {"tp": group(6, 6, ranks=(0, 1, 2))}, "where": "mlp.py:3 forward"}
    waits = {"groups": {"tp": group(7, 6, ranks=(0, 1, 2))}}
    assert 0 not in find_blame([tensor(0), tensor(1, **works), tensor(2, **works), late]).ranks
    blame = find_blame([tensor(0), tensor(1, **waits), tensor(2, **waits), waiting(4)])
    assert blame.ranks == (0,) and "native code keeps the interpreter" in blame.text
    both = find_blame([tensor(0), tensor(1), tensor(2, **waits), waiting(4)])
    assert "native code" not in both.text


def test_where_no_rank_answers_none_is_taken_to_keep_its_interpreter() -> None:
    """Their agent or their host is what is late."""
    assert find_blame([state(0, Phase.FORWARD), state(1, Phase.FORWARD)]).ranks == ()
