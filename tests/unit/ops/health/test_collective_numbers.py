"""What an answer holds of collectives is read from the entries of PyTorch's flight recorder, not from its counters."""

from __future__ import annotations

from typing import Any

from megasdc.ops.health.blame import find_blame
from megasdc.ops.health.incident import rank_state
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_watch import groups_of
from megasdc.ops.health.record import Progress, WatchedIdentity


def entry(number: int, operation: int, name: str, retired: bool = True, **fields: Any) -> dict[str, Any]:
    """Entry of a collective of the world as gloo's recorder has it; ``operation`` counts transfers too."""
    size = [] if name == "barrier" else [[20]]
    plain = {
        "collective_seq_id": number,
        "is_p2p": False,
        "op_id": operation,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{name}",
        "input_sizes": size,
        "input_dtypes": ["Byte"] * len(size),
        "retired": retired,
        "state": "scheduled",
    }
    return {**plain, **fields}


def dump(transfers: int, joined_last: bool) -> dict[str, Any]:
    """Recorder of a stage of four in the save of step 40 of a drill; transfers: more in the middle stages."""
    entries = [entry(number, number + transfers, "all_reduce") for number in (141, 142)]
    if joined_last:
        entries.append(entry(143, 143 + transfers, "barrier", retired=False))
    counters = {"last_enqueued_collective": str(142 + joined_last + transfers), "last_started_collective": "-1"}
    status = {"0": {**counters, "last_completed_collective": str(142 + transfers)}}
    return {"entries": entries, "pg_status": status}


def test_transfers_between_stages_are_not_counted() -> None:
    """The rank that blocks in its write is named, and not the outer stages too, which have fewer transfers."""
    states = []
    for rank, transfers in enumerate((162, 324, 324, 162)):
        identity = WatchedIdentity("r", rank, rank, 4, rank, 0, 0, "vm", 0, 100 + rank, 0)
        groups = {"0": {**groups_of(dump(transfers, rank != 1))["0"], "ranks": [0, 1, 2, 3]}}
        answer = {"where": "save.py:174 write", "groups": groups}
        states.append(rank_state(identity, Progress(1, 1.0, 41, -1, Phase.SAVE), 8.0, "running", answer, {}))
    blame = find_blame(states)
    assert (blame.kind, blame.ranks) == ("behind", (1,))
    assert blame.waits[3].startswith("waits for rank 1") and states[0].groups["0"].waits_in == 143


def test_a_collective_has_ended_where_its_entry_is_retired() -> None:
    """Two that end one after the other may be counted in the opposite order: nothing is pending all the same."""
    entries = [entry(887, 887, "all_reduce"), entry(888, 888, "all_reduce")]
    status = {"0": {"last_enqueued_collective": "888", "last_completed_collective": "887"}}
    assert groups_of({"entries": entries, "pg_status": status}) == {
        "0": {"joined": 888, "ended": 888, "recent": {887: "all_reduce [20] Byte", 888: "all_reduce [20] Byte"}}
    }


def test_a_first_collective_that_is_pending_has_not_ended() -> None:
    """The only entry of a group; transfers, which NCCL's recorder lists, are not of them."""
    entries = [entry(1, 1, "all_reduce", retired=False), entry(1, 2, "send", is_p2p=True)]
    assert groups_of({"entries": entries}) == {"0": {"joined": 1, "ended": 0, "recent": {1: "all_reduce [20] Byte"}}}
