"""Who is stuck: from where all ranks stand, whom they wait for, and what their processes do; a pure function.

A rank that timed out first is a victim as often as a cause. So a wait-for graph is drawn: a rank in a transfer waits
for the neighbouring pipeline stage, a rank in a collective for those of its group that have not joined it yet, by the
sequence numbers of PyTorch's flight recorder. The cause is whom others wait for and who waits for nobody. Where ranks
wait for each other in a circle, it is the one that most wait for; of two, the one that has left out a collective, as
far as other groups show which it is (``megasdc.ops.health.blame``); else all of the circle. A rank that waits
for ranks of which nothing is known, or that is in a collective and has not answered, is not the cause. One that runs
and
does not answer, while others do, holds its interpreter: where its record has it in no collective or transfer, it is the
cause. Where the graph names nobody, nobody is named. Before the graph comes what the kernel says of connections:
between two hosts of which one acknowledges nothing that the other sends, ranks wait for each other through no fault of
theirs.

Which of two ranks has left out a collective: what ranks of sister groups have done tells; pure functions.

Where a group has two members, nothing inside it tells which of them is right. Its sisters are groups of as many ranks
of the same stage, along the same axis of the layout, that have had the same collectives until then: where tensor ranks
0 and 1 of a stage have two replicas each, the two groups of replicas. All ranks of a stage run the same program, so
what the members of all sisters have done is usual. Where there are no sisters, or they disagree, nothing is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megasdc.common.host import DISK, GONE, RUNNING, STOPPED
from megasdc.common.words import few
from megasdc.ops.health.phases import COLLECTIVE, NEIGHBOUR, Phase
from megasdc.ops.health.rank_state import GroupState, RankState

Shape = tuple[tuple[int, ...], int, int]
"""Stage of each member, number of tensor ranks, number of replicas."""


def usual_collective(states: Sequence[RankState], name: str, number: int) -> str | None:
    """The collective of a number in all sisters of a group; None: they do not tell."""
    said = {text for _, group in _sisters(states, name, number) if (text := group.recent.get(number))}
    return said.pop() if len(said) == 1 else None


def left_out(states: Sequence[RankState], first: RankState, second: RankState) -> tuple[int, str] | None:
    """Of two ranks that wait for each other in two groups, the one that has left out a collective, and which.

    Each has joined what the other has not. Ranks that wait in the same collective as one of the two, and have a sister
    of the other group, show which of both comes first.
    """
    found = {*_left_out(states, first, second), *_left_out(states, second, first)}
    return found.pop() if len(found) == 1 else None


def _left_out(states: Sequence[RankState], absent: RankState, waiting: RankState) -> Iterator[tuple[int, str]]:
    """What each rank that waits for ``absent`` in the same collective as ``waiting`` shows of the two."""
    for name, number in _waits_for(waiting, absent):
        for other, later in _waits_for(absent, waiting):
            collective = absent.groups[other].recent.get(later)
            for witness, group in _sisters(states, other, later):
                if name not in witness.groups or witness.groups[name].waits_in != number:
                    continue
                if group.joined < later:
                    yield absent.rank, f"collective {number} of group {name}"
                elif group.ended >= later and group.recent.get(later) == collective:
                    yield waiting.rank, f"collective {later} of group {other}"


def _waits_for(one: RankState, other: RankState) -> Iterator[tuple[str, int]]:
    """Groups and numbers of collectives in which a rank waits for another."""
    for name, group in one.groups.items():
        if (number := group.waits_in) is not None and other.rank in group.ranks and other.joined(name) < number:
            yield name, number


def _sisters(states: Sequence[RankState], name: str, number: int) -> Iterator[tuple[RankState, GroupState]]:
    """Members of the sisters of a group, with what they know of theirs; collectives from ``number`` on may differ."""
    by_rank = {one.rank: one for one in states}
    members = [one.groups[name] for one in states if name in one.groups]
    ranks = members[0].ranks
    before = {key: text for group in members for key, text in group.recent.items() if key < number}
    if (shape := _shape(by_rank, ranks)) is None:
        return
    for one in states:
        for group in one.groups.values():
            alike = len(group.ranks) == len(ranks) and _same(before, group.recent, number - 1)
            if alike and not set(group.ranks) & set(ranks) and _shape(by_rank, group.ranks) == shape:
                yield one, group


def _shape(by_rank: Mapping[int, RankState], ranks: Sequence[int]) -> Shape | None:
    """Where the members of a group are; None: nothing is known of some."""
    if not all(rank in by_rank for rank in ranks):
        return None
    members = [by_rank[rank] for rank in ranks]
    stages = tuple(sorted(one.pp_rank for one in members))
    return stages, len({one.tp_rank for one in members}), len({one.dp_rank for one in members})


def _same(before: Mapping[int, str], recent: Mapping[int, str], last: int) -> bool:
    """Whether two groups have had the same collectives until ``last``, as far as both still know them."""
    return last in before and last in recent and all(recent.get(key, text) == text for key, text in before.items())


GONE_KIND = "gone"
"""Kind of a blame where a rank or a host has died, which is no hang."""
UNEVEN = frozenset(
    {
        *("scatter", "gather", "reduce_scatter", "_reduce_scatter_base", "all_gather", "allgather", "_allgather_base"),
        *("all_to_all", "alltoall", "alltoall_base", "all_to_all_base", "allgather_into_tensor_coalesced"),
    }
)
"""Collectives to which ranks may give other sizes, by the names of PyTorch's flight recorders."""
MAX_SHOWN = 8
UNSEEN = -1
"""In the wait-for graph: ranks of which nothing is known."""


@dataclass(frozen=True)
class HangCause:
    """Who is stuck.

    Args:
        kind: gone, stopped, disk, behind, circle, mismatch, link, or unknown.
        ranks: the cause; empty where it is not known.
        text: one sentence.
        waits: by rank, what it waits for.
        hosts: of the connection that is the cause; empty: none is.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    waits: Mapping[int, str]
    hosts: tuple[str, ...] = ()


def find_blame(
    states: Sequence[RankState], lost_hosts: Sequence[str] = (), names: Mapping[str, str] | None = None
) -> HangCause:
    """Name the cause of a standstill, if the evidence does.

    Args:
        states: of all ranks whose hosts have answered.
        lost_hosts: hosts that no longer answer at all.
        names: of hosts by address, as far as they are known.
    """
    edges = wait_for_graph(states)
    by_rank = {one.rank: one for one in states}
    waits = {one.rank: _wait_text(one, edges[one.rank]) for one in states}

    def blame(kind: str, ranks: Sequence[int], why: str) -> HangCause:
        named = "; ".join(f"{by_rank[rank].label} ({by_rank[rank].doing})" for rank in ranks)
        return HangCause(kind, tuple(ranks), f"{named}: {why}" if named else why, waits)

    if lost_hosts:
        return blame(GONE_KIND, [], f"no sign of life from {', '.join(lost_hosts)}")
    for process, kind, why in (
        (GONE, GONE_KIND, "its process has ended"),
        (STOPPED, "stopped", "its process is stopped by a signal"),
        (DISK, "disk", "its process waits for a disk"),
    ):
        at_work = [one.rank for one in states if one.phase != Phase.DONE]
        if found := [rank for rank in at_work if by_rank[rank].process == process]:
            if process == STOPPED and len(found) == len(at_work) > 1:
                return blame(kind, [], f"all {len(found)} ranks are stopped by a signal: the job was suspended")
            if process == DISK and (shared := _hosts_text([by_rank[rank].host for rank in found])):
                said = f"{len(found)} ranks on {shared} wait for a disk: storage that hosts share does not answer"
                return blame(kind, [], said)
            return blame(kind, found, why)
    if silent := _silent_pairs(states, names or {}):
        hosts = tuple(sorted({host for pair in silent for host in pair}))
        said = "; ".join(f"{other} acknowledges nothing that {host} sends" for host, other in silent)
        return HangCause("link", (), f"{said} ({max(silent.values())} repetitions)", waits, hosts)
    if differing := _mismatch(states):
        ranks, why = differing
        return blame("mismatch", ranks, why)
    held = [one.rank for one in states if _holds_interpreter(one, states)]
    if held and any(one.answered for one in states):
        why = "it runs and does not answer, as where native code keeps the interpreter, and is in no collective"
        return blame("behind", held, why)
    awaited = {rank for targets in edges.values() for rank in targets if rank != UNSEEN}
    if sinks := sorted(rank for rank in awaited if not edges[rank]):
        return blame("behind", sinks, "others wait for it, and it waits for nobody")
    if circle := _circle(edges):
        why = "ranks wait for each other in collectives of different groups"
        if len(circle) == 2 and (odd := left_out(states, *(by_rank[rank] for rank in circle))):
            return blame("circle", [odd[0]], f"it has left out {odd[1]}, unlike its peers, and {why}")
        return blame("circle", circle, why)
    alone = [one.rank for one in states if _is_at_work(one, edges[one.rank])]
    if alone and len(alone) < len(states):
        return blame("behind", alone, "all others are in transfers or collectives")
    if len(states) == 1 and not edges[states[0].rank]:
        return blame("behind", [states[0].rank], "it waits for nobody")
    if any(UNSEEN in targets for targets in edges.values()):
        return blame("unknown", [], _unseen_text(states))
    if states and all(_waiting(one) for one in states):
        return blame("link", [], _link_text(states))
    return blame("unknown", [], "no rank moves, and what is known names none of them")


def _hosts_text(of_ranks: Sequence[str]) -> str:
    """Several hosts in words; empty: it is one."""
    hosts = sorted(set(of_ranks))
    return "" if len(hosts) < 2 else few(hosts, MAX_SHOWN)


def _silent_pairs(states: Sequence[RankState], names: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Hosts that send, those that do not acknowledge it, and the largest number of repetitions."""
    found: dict[tuple[str, str], int] = {}
    for one in sorted(states, key=lambda state: state.host):
        for address, repetitions in sorted(one.silent_peers.items()):
            pair = one.host, names.get(address, address)
            found[pair] = max(repetitions, found.get(pair, 0))
    return found


def wait_for_graph(states: Sequence[RankState]) -> dict[int, set[int]]:
    """By rank, the ranks that it waits for; ``UNSEEN`` among them where it may be some of which nothing is known.

    In a collective these are the ranks that have not joined it; where all that have answered have joined, those that
    have not answered.
    """
    by_rank = {one.rank: one for one in states}
    places = {(one.pp_rank, one.tp_rank, one.dp_rank): one.rank for one in states}
    edges: dict[int, set[int]] = {one.rank: set() for one in states}
    for one in states:
        if one.process in (STOPPED, GONE):
            continue
        if one.phase in NEIGHBOUR:
            edges[one.rank].add(places.get((one.pp_rank + NEIGHBOUR[one.phase], one.tp_rank, one.dp_rank), UNSEEN))
        elif one.phase in COLLECTIVE and not one.answered:
            edges[one.rank].add(UNSEEN)
        elif one.phase in (Phase.TRAINING, Phase.DATA) and one.may_wait and not _waiting(one):
            edges[one.rank].add(UNSEEN)  # in a transfer, of which no recorder of gloo knows the other side
        for name, group in one.groups.items():
            if group.waits_in is not None:
                members = [by_rank[rank] for rank in group.ranks if rank in by_rank]
                behind = {m.rank for m in members if m.answered and m.joined(name) < group.waits_in}
                silent = {m.rank for m in members if not m.answered}
                unseen = {UNSEEN} if len(members) < len(group.ranks) else set()
                edges[one.rank] |= behind or silent | unseen
    return edges


def _is_at_work(one: RankState, waits_for: set[int]) -> bool:
    """Whether a rank is where it waits for no other."""
    if one.phase in (Phase.TRAINING, Phase.BETWEEN):
        return one.answered and not waits_for and not _waiting(one) and not one.may_wait
    return one.phase not in COLLECTIVE and one.phase not in NEIGHBOUR and not waits_for and not _waiting(one)


def _holds_interpreter(one: RankState, states: Sequence[RankState]) -> bool:
    """Whether a rank runs, has not answered, and by its record is in no collective or transfer.

    Within a forward or backward pass tensor ranks meet in collectives that no record tells: there one is the cause only
    where it alone of them has not answered, and another waits for it.
    """
    if one.process != RUNNING or one.answered or one.phase not in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
        return False
    place = one.pp_rank, one.dp_rank
    peers = [other for other in states if (other.pp_rank, other.dp_rank) == place and other.rank != one.rank]
    waits = any(
        one.rank in group.ranks for other in peers for group in other.groups.values() if group.waits_in is not None
    )
    return not peers or (waits and all(other.answered for other in peers))


def _waiting(one: RankState) -> bool:
    """Whether a rank is in a transfer or waits in a collective."""
    return one.phase in NEIGHBOUR or any(group.waits_in is not None for group in one.groups.values())


def _mismatch(states: Sequence[RankState]) -> tuple[list[int], str] | None:
    """Ranks whose collective of some number is another one than that of most of its group; the earliest is taken."""
    names = sorted({name for one in states for name in one.groups})
    found: list[tuple[int, list[int], str]] = []
    for name in names:
        members = [one for one in states if name in one.groups]
        for number in sorted({number for one in members for number in one.groups[name].recent}):
            said = {one.rank: text for one in members if (text := one.groups[name].recent.get(number))}
            has_ended = all(one.groups[name].ended >= number for one in members)  # whatever it was, it was legal
            if not has_ended and len({_kind(text) for text in said.values()}) > 1:
                usual = _usual(states, name, number, Counter(said.values()))
                wrong = sorted(rank for rank, text in said.items() if text != usual)
                others = "; ".join(f"rank {rank}: {said[rank]}" for rank in wrong)
                common = "not the same on all ranks" if usual is None else f"{usual} on most ranks"
                found.append((number, wrong, f"collective {number} of group {name} is {common}; {others}"))
                break
    if not found:
        return None
    _, ranks, why = min(found)
    return ranks, why


def _kind(collective: str) -> str:
    """What must be the same on all ranks of a collective: of those whose sizes may rightly differ the operation alone.

    A single number may be of no dimension on some ranks, and of one on others.
    """
    operation, _, sizes = collective.partition(" ")
    return operation if operation in UNEVEN else f"{operation} {sizes.replace('[1]', '[]')}"


def _usual(states: Sequence[RankState], name: str, number: int, counts: Counter[str]) -> str | None:
    """The collective of most of a group; where as many have another one, that of its sisters; None: it is not known."""
    (most, count), (_, second), *_ = counts.most_common()
    if count > second:
        return most
    told = usual_collective(states, name, number)
    return told if told in counts else None


def _circle(edges: Mapping[int, set[int]]) -> list[int]:
    """Ranks of a circle of waits: the one that most wait for where there is one, else all that can reach themselves."""
    reach = {rank: _reachable(edges, rank) for rank in edges}
    inside = [rank for rank in edges if rank in reach[rank]]
    if not inside:
        return []
    awaited = Counter(target for rank in inside for target in edges[rank] if target in inside)
    most = max(awaited.values())
    top = sorted(rank for rank, count in awaited.items() if count == most)
    return top if len(top) == 1 else sorted(inside)


def _reachable(edges: Mapping[int, set[int]], start: int) -> set[int]:
    seen: set[int] = set()
    left = list(edges[start])
    while left:
        rank = left.pop()
        if rank not in seen:
            seen.add(rank)
            left += edges.get(rank, ())
    return seen


def _wait_text(one: RankState, targets: set[int]) -> str:
    if one.process != RUNNING:
        return f"{one.process}, after collective {one.sequence} of group {one.group}" if one.group else one.process
    if targets:
        known = [f"rank {rank}" for rank in sorted(targets - {UNSEEN})]
        unseen = ["ranks of which nothing is known"] if UNSEEN in targets else []
        return f"waits for {', '.join(known + unseen)} in {one.doing}"
    pending = [
        f"collective {group.waits_in} of group {name}"
        for name, group in one.groups.items()
        if group.waits_in is not None
    ]
    return f"waits in {', '.join(pending)}, which all have joined" if pending else f"waits for nobody: {one.doing}"


def _unseen_text(states: Sequence[RankState]) -> str:
    silent = [one.label for one in states if not one.answered and one.process == RUNNING]
    more = f"; no answer came from {', '.join(silent)}" if silent else ""
    return f"no rank moves, and whom they wait for is not known{more}"


def _link_text(states: Sequence[RankState]) -> str:
    hosts = sorted({one.host for one in states})
    if len(hosts) < 2:
        return "all ranks have joined their collectives and transfers, and none of these ends"
    return (
        "all ranks have joined their collectives and transfers, and none of these ends: a connection between the "
        f"hosts {', '.join(hosts)} carries nothing"
    )
