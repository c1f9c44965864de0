"""Vote of replicas that computed the same micro-batch, on every result in execution order, to find wrong ranks.

Two replicas that were given the same micro-batch compute the same bits, position by position, until one of them is
wrong; everything that this replica computes later may follow from it. So the first result at which replicas differ is
where one was wrong, and a replica that is set aside there is not used further: origins are told apart from
consequences, also over stages and tensor ranks. The remaining replicas are compared further.

No rank is flagged without proof:

- A majority is more than half of *all* replicas that are not set aside, also of those without evidence at this result.
  As long as more than half of the replicas are healthy, every majority holds a healthy one, so that no healthy rank is
  ever flagged.
- A difference that comes after results that could not be compared may follow from them: it is disputed, not flagged.
- Of a rank that recorded other results than the others - fewer, more, in another order - only what comes before the
  first of them is evidence. It is reported as missing: neither as agreement nor as an error.

Without a golden trace all this is relative to the majority: if more than half of the replicas compute the same wrong
value, the others are flagged.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from typing import Any

from megasdc.common.addresses import FORWARD, MICRO_BATCH_PHASES, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, execution_key

Position = tuple[int, int]
"""Place of a rank in its replica: (pp_rank, tp_rank), the same in every replica."""


@dataclass(frozen=True)
class Flag:
    """A rank whose result differs from that of a strict majority.

    ``address`` is the address of its first such result, before which it recorded ``place`` results; ``expected`` and
    ``got`` are checksums, and the ranks ``against`` computed the expected one.
    """

    rank: int
    replica: int
    address: Address
    place: int
    expected: int
    got: int
    against: tuple[int, ...]

    @property
    def majority(self) -> int:
        """Number of ranks in the majority."""
        return len(self.against)


@dataclass(frozen=True)
class Dispute:
    """Differing results of which no rank can be named as the cause.

    ``values`` holds checksums by global rank, one mapping for each tensor rank that differs; ``replicas`` are those not
    set aside. ``origin``: everything computed before was compared and equal, so that the error began here.
    """

    address: Address
    place: int
    replicas: tuple[int, ...]
    values: tuple[Mapping[int, int], ...]
    origin: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose results are disputed."""
        return tuple(rank for values in self.values for rank in values)


@dataclass(frozen=True)
class Ballot:
    """Outcome of a vote.

    Args:
        flagged: ranks that are wrong relative to the majority, in execution order.
        dispute: results at which the vote stopped, None: it did not; flags before them remain valid.
        compared: number of results that were compared with those of another replica, over all ranks.
        missing: ranks whose results are missing, or are not those that the others recorded: inconclusive.
        left_out: positions that are not comparable.
    """

    flagged: tuple[Flag, ...]
    dispute: Dispute | None
    compared: int
    missing: tuple[int, ...]
    left_out: tuple[Position, ...]

    @property
    def agreed(self) -> bool:
        """Whether everything comparable was compared and equal."""
        return self.compared > 0 and not self.flagged and self.dispute is None and not self.missing


_FIELDS = operator.attrgetter("step", "micro_batch", "phase", "fqn", "slot")


def majority(values: Mapping[int, int], voters: int) -> int | None:
    """The value that more than half of a number of voters have; None: there is none."""
    value, size = Counter(values.values()).most_common(1)[0]
    return value if 2 * size > voters else None


def comparable_positions(keys: Sequence[Mapping[str, Any]], dims: ParallelDims) -> set[Position]:
    """Positions (pp_rank, tp_rank) whose replicas have equal keys; ``keys``: properties of each global rank."""
    positions: dict[Position, list[Mapping[str, Any]]] = {}
    for rank, key in enumerate(keys):
        place = dims.at(rank)
        positions.setdefault((place.pp_rank, place.tp_rank), []).append(key)
    return {position for position, found in positions.items() if all(key == found[0] for key in found)}


def differing_names(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the properties in which any of some keys differs from the first one."""
    return sorted({name for key in keys for name in {**key, **keys[0]} if key.get(name) != keys[0].get(name)})


def vote(
    traces: Mapping[int, Trace | None], layout: ParallelDims, comparable: Collection[Position] | None = None
) -> Ballot:
    """Flag the ranks that differ from the majority of replicas.

    Args:
        traces: traces by global rank, of one micro-batch that all replicas computed; None or absent: no evidence.
        comparable: positions where hardware and versions of all replicas are equal; others are not compared, and
            differences that may follow from them are disputed. None: all.

    Raises:
        ValueError: a rank is outside the layout, or a trace holds more than one micro-batch.
    """
    if outside := [rank for rank in traces if not 0 <= rank < layout.world_size]:
        raise ValueError(f"traces of ranks {sorted(outside)} do not belong to a world of {layout.world_size} ranks")
    positions = []
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            can = comparable is None or (pipeline, tensor) in comparable
            positions.append(_Position(traces, layout, pipeline, tensor, can))
    _check_one_micro_batch(positions)
    flagged, dispute = _eliminate(positions, layout.data)
    return Ballot(
        flagged=tuple(flagged),
        dispute=dispute,
        compared=sum(one.compared for one in positions),
        missing=tuple(sorted(rank for one in positions for rank in one.missing)),
        left_out=tuple(one.where for one in positions if not one.comparable),
    )


def _eliminate(positions: list[_Position], replicas: int) -> tuple[list[Flag], Dispute | None]:
    """Set replicas aside, one place after the other, until the rest agrees or no majority decides."""
    remaining = set(range(replicas))
    flagged: list[Flag] = []
    while True:
        partings = [(one, place) for one in positions if (place := one.parting(remaining)) is not None]
        if not partings:
            return flagged, None
        keys = [one.key(place) for one, place in partings]
        first = min(keys)
        here = [parting for parting, key in zip(partings, keys, strict=True) if key == first]
        clouded = {replica for one in positions for replica in one.clouded(remaining, first)}
        found = [flag for one, place in here for flag in one.flags(place, remaining, clouded)]
        if not found:
            return flagged, _dispute(here, remaining, clouded)
        flagged += sorted(found, key=lambda flag: flag.rank)
        remaining -= {flag.replica for flag in found}


def _dispute(here: list[tuple[_Position, int]], remaining: set[int], clouded: set[int]) -> Dispute:
    found = [(one.ranks, one.values(place, remaining)) for one, place in here]
    replicas = tuple(sorted({replica for _, values in found for replica in values}))
    by_rank = tuple({ranks[replica]: value for replica, value in values.items()} for ranks, values in found)
    one, place = here[0]
    return Dispute(one.addresses[place], place, replicas, by_rank, origin=clouded.isdisjoint(replicas))


def _check_one_micro_batch(positions: list[_Position]) -> None:
    """Raise ValueError for several micro-batches: stages interleave them in different orders."""
    found = {
        (address.step, address.micro_batch, address.phase in MICRO_BATCH_PHASES)
        for one in positions
        for address in one.addresses
    }
    if len(found) > 1 or any(not inside for _, _, inside in found):
        raise ValueError(f"a vote is on one micro-batch, and these traces hold {sorted(found, key=str)}")


class _Position:
    """Results of all replicas at one (pipeline, tensor) position.

    ``addresses`` are the results that a strict majority recorded, else those that all began with; ``ends[replica]`` is
    how many of them are evidence of that replica, and ``length`` how many there should be.
    """

    def __init__(
        self, traces: Mapping[int, Trace | None], layout: ParallelDims, pipeline: int, tensor: int, comparable: bool
    ) -> None:
        self.where = pipeline, tensor
        self.comparable = comparable
        first = tensor + pipeline * layout.tensor * layout.data
        self.ranks = [first + replica * layout.tensor for replica in range(layout.data)]
        self._dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, first)
        self._partings: dict[tuple[int, int], int | None] = {}
        found = [traces.get(rank) if comparable else None for rank in self.ranks]
        self._checksums = [[] if trace is None else trace.checksums for trace in found]
        kinds, lists = _kinds([None if trace is None else trace.addresses for trace in found])
        sizes = Counter(kind for kind in kinds if kind is not None)
        common = next((kind for kind, size in sizes.items() if 2 * size > layout.data or len(sizes) == 1), None)
        if common is not None:
            self.addresses, self.length = lists[common], len(lists[common])
            matching = [_matching(self.addresses, addresses) for addresses in lists]
        else:  # no majority on which results there should be
            shared = min((_matching(lists[0], addresses) for addresses in lists), default=0)
            self.addresses, self.length = lists[0][:shared] if lists else [], max(map(len, lists), default=1)
            matching = [shared] * len(lists)
        self.ends = [0 if kind is None else matching[kind] for kind in kinds]
        unmatched = [rank for rank, kind in zip(self.ranks, kinds, strict=True) if kind is None or kind != common]
        self.missing = unmatched if comparable else []

    @property
    def compared(self) -> int:
        """Number of results, over all ranks, that at least one other replica has too."""
        second = sorted(self.ends)[-2] if len(self.ends) > 1 else 0
        return sum(min(end, second) for end in self.ends)

    def values(self, place: int, remaining: set[int]) -> dict[int, int]:
        """Checksum by replica, of remaining replicas with evidence at a place."""
        return {one: self._checksums[one][place] for one in sorted(remaining) if self.ends[one] > place}

    def parting(self, remaining: set[int]) -> int | None:
        """First place where two of the remaining replicas have different values; None: nowhere."""
        longest = max(sorted(remaining), key=lambda replica: self.ends[replica])
        places = [self._parting(longest, replica) for replica in remaining if replica != longest]
        return min((place for place in places if place is not None), default=None)

    def _parting(self, longer: int, shorter: int) -> int | None:
        pair = longer, shorter
        if pair not in self._partings:
            mine, theirs, end = self._checksums[longer], self._checksums[shorter], self.ends[shorter]
            place = None if mine == theirs else _first(map(operator.ne, mine, theirs))
            self._partings[pair] = place if place is not None and place < end else None
        return self._partings[pair]

    def key(self, place: int) -> tuple[int, ...]:
        """Execution key of a place."""
        return execution_key(self.addresses[place], place, self._dims)

    def clouded(self, remaining: set[int], key: tuple[int, ...]) -> set[int]:
        """Remaining replicas with results here, earlier than a key, that no strict majority confirms."""
        descending = sorted((self.ends[replica] for replica in remaining), reverse=True)
        confirmed = descending[len(remaining) // 2]  # number of results with evidence from more than half
        found = set()
        for replica in remaining:
            end = min(self.ends[replica], confirmed)
            if end < self.length and self._hole_key(end, key) < key:
                found.add(replica)
        return found

    def _hole_key(self, end: int, key: tuple[int, ...]) -> tuple[int, ...]:
        """Execution key at which evidence ends: before the next result, whatever its phase."""
        if end:
            return execution_key(self.addresses[end - 1], end, self._dims)
        step, _, micro_batch, *_ = key
        return execution_key(Address(step, micro_batch, FORWARD, "", ""), 0, self._dims)

    def flags(self, place: int, remaining: set[int], clouded: set[int]) -> list[Flag]:
        """Replicas that differ from a strict majority of those remaining, with complete evidence before this place."""
        values = self.values(place, remaining)
        expected = majority(values, len(remaining))
        if expected is None:
            return []
        against = tuple(self.ranks[replica] for replica, value in values.items() if value == expected)
        return [
            Flag(self.ranks[replica], replica, self.addresses[place], place, expected, value, against)
            for replica, value in values.items()
            if value != expected and replica not in clouded
        ]


def _kinds(found: list[list[Address] | None]) -> tuple[list[int | None], list[list[Address]]]:
    """Number equal lists alike: the number of each (None for None), and the distinct lists by number."""
    kinds: list[int | None] = []
    distinct: list[list[Address]] = []
    fields: list[list[tuple[Any, ...]]] = []  # tuples compare several times faster than addresses
    for addresses in found:
        if addresses is None:
            kinds.append(None)
            continue
        mine = list(map(_FIELDS, addresses))
        kind = next((number for number, other in enumerate(fields) if mine == other), len(fields))
        if kind == len(fields):
            distinct.append(addresses)
            fields.append(mine)
        kinds.append(kind)
    return kinds, distinct


def _matching(expected: list[Address], got: list[Address]) -> int:
    """Length of the common prefix of two lists."""
    parting = None if expected is got else _first(map(operator.ne, expected, got))
    return min(len(expected), len(got)) if parting is None else parting


def _first(differs: Any) -> int | None:
    return next(compress(count(), differs), None)
