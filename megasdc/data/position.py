"""Distribution of samples to replicas: their positions in the stream, the samples of a step, and positions at a resume.

The samples of a stream have an order; its element k * dp_size + r is sample k of replica r. At first the order is the
stream itself. When the number of replicas changes, it becomes the unconsumed samples: first the positions that some
replica had not consumed while another had consumed later ones, then the rest of the stream.

Where the micro-batches of a step are not divided evenly, whole micro-batches are dealt in this way (``UnevenSplit``):
micro-batch j of the stream belongs to replica j mod N, and step s takes the M from (s - 1) M on. So each step takes the
samples that it takes with any other number of replicas, and the counts of two replicas differ by at most one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megasdc.common.errors import CheckpointError


@dataclass(frozen=True)
class Order:
    """Order in which positions of a stream are distributed to replicas: ``left_over``, then those from ``start`` on.

    ``together``: number of successive elements that one replica gets: 1, or the samples of a micro-batch.
    """

    left_over: tuple[int, ...] = ()
    start: int = 0
    together: int = 1

    def __getitem__(self, index: int) -> int:
        """Position in the stream of an element of the order."""
        beyond = index - len(self.left_over)
        return self.start + beyond if beyond >= 0 else self.left_over[index]

    @property
    def before(self) -> int:
        """Number of samples that were consumed before this order began."""
        return self.start - len(self.left_over)

    def index(self, sample: int, replica: int, replicas: int) -> int:
        """Index in the order of a replica's sample; ``sample`` and ``replica`` count from 0."""
        round_, place = divmod(sample, self.together)
        return (round_ * replicas + replica) * self.together + place

    def sample(self, index: int, replicas: int) -> tuple[int, int]:
        """Replica that gets an element of the order, and the number of that sample in the replica, from 0."""
        turn, place = divmod(index, self.together)
        round_, replica = divmod(turn, replicas)
        return replica, round_ * self.together + place

    def to_json(self) -> dict[str, Any]:
        """The order as JSON-compatible values, as in a checkpoint."""
        return {"left_over": list(self.left_over), "start": self.start, "together": self.together}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Order:
        """The order in a checkpoint; earlier versions saved no ``together``, which was 1."""
        return cls(tuple(saved["left_over"]), saved["start"], saved.get("together", 1))


@dataclass(frozen=True)
class Position:
    """Position of one replica.

    Args:
        consumed: number of the replica's samples of the order that it has consumed, including skipped ones.
        order: order in which samples are distributed.
        again: skipped positions that it uses before their epoch ends, ascending.
    """

    consumed: int = 0
    order: Order = Order()
    again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.consumed < 0:
            raise ValueError(f"consumed is {self.consumed}, must not be negative")

    def next_samples(
        self, count: int, dp_rank: int, dp_size: int, epoch: int | None = None, skip: Sequence[range] = ()
    ) -> tuple[list[int], Position]:
        """The next samples, and the position after them.

        Args:
            count: number of samples.
            dp_rank: number of this replica.
            dp_size: number of replicas.
            epoch: samples per epoch; needed if ``again`` is not empty.
            skip: positions of the stream that are never used.

        Returns:
            Positions in the stream, [count], and the new position.
        """
        taken, consumed = [], self.consumed
        again = [position for position in self.again if not _in(skip, position)]
        for _ in range(count):
            while _in(skip, position := self.order[self.order.index(consumed, dp_rank, dp_size)]):
                consumed += 1
            if again and epoch is not None and position // epoch > again[0] // epoch:
                taken.append(again.pop(0))
            else:
                taken.append(position)
                consumed += 1
        return taken, Position(consumed, self.order, tuple(again))

    def after(
        self, count: int, dp_rank: int, dp_size: int, epoch: int | None = None, skip: Sequence[range] = ()
    ) -> Position:
        """The position after the next ``count`` samples; arguments of ``next_samples``."""
        if not self.again and not skip:
            return Position(self.consumed + count, self.order)
        return self.next_samples(count, dp_rank, dp_size, epoch, skip)[1]

    def skip_next(
        self, count: int, dp_rank: int, dp_size: int, epoch: int | None = None, skip: Sequence[range] = ()
    ) -> Position:
        """The position after skipping the next samples.

        Args:
            count: number of samples.
            dp_rank: number of this replica.
            dp_size: number of replicas.
            epoch: samples per epoch; if given, the samples are used before their epoch ends.
            skip: positions of the stream that are never used.
        """
        positions, after = self.next_samples(count, dp_rank, dp_size, epoch, skip)
        again = after.again if epoch is None else tuple(sorted((*after.again, *positions)))
        return Position(after.consumed, self.order, again)

    def end_after(self, count: int, dp_size: int) -> int:
        """Least length of the stream with which every replica can take ``count`` more samples from this position."""
        samples = self.consumed + count
        return self.order[self.order.index(samples - 1, dp_size - 1, dp_size)] + 1 if samples else 0


def _in(ranges: Sequence[range], position: int) -> bool:
    return any(position in one for one in ranges)


def merge_positions(states: Sequence[Mapping[str, Any]], partial: bool = False) -> dict[str, Any]:
    """Merge the states of all replicas into one, for a checkpoint.

    Args:
        states: one `MicroBatchLoader.state_dict` per replica, in any order; a replica may occur again with the same
            state.
        partial: whether replicas may be missing.

    Returns:
        ``{"dp_size", "stream", "order", "consumed": {"0": n0, ...}, "again": {"0": [...], ...}}``, JSON-compatible.

    Raises:
        CheckpointError: states contradict each other, or a replica is missing.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for state in states:
        if any(state[name] != states[0][name] for name in ("dp_size", "stream", "order")):
            raise CheckpointError(f"loader states are of different runs: {dict(states[0])} and {dict(state)}")
        known = found.setdefault(str(state["dp_rank"]), state)
        if (known["consumed"], known["again"]) != (state["consumed"], state["again"]):
            raise CheckpointError(
                f"replica {state['dp_rank']} has consumed {known['consumed']} and {state['consumed']} samples, and is "
                f"to take {len(known['again'])} and {len(state['again'])} again"
            )
    missing = [rank for rank in range(states[0]["dp_size"] if states else 1) if str(rank) not in found]
    if (missing and not partial) or not states:
        raise CheckpointError(f"no loader state of replica(s) {missing}")
    return {
        "dp_size": states[0]["dp_size"],
        "stream": states[0]["stream"],
        "order": dict(states[0]["order"]),
        "consumed": {rank: state["consumed"] for rank, state in found.items()},
        "again": {rank: list(state["again"]) for rank, state in found.items()},
    }


def position_for(
    merged: Mapping[str, Any], dp_rank: int, dp_size: int, stream: Any = None, together: int = 1
) -> Position:
    """Position from which a replica resumes, also with another number of replicas.

    With another number of replicas every unconsumed sample is used once, first those before another replica's position;
    skipped samples to be used again are redistributed.

    Args:
        merged: result of `merge_positions`.
        dp_rank: number of the replica that resumes.
        dp_size: number of replicas now.
        stream: stream whose ``identity`` must be that of the positions; None: not checked.
        together: number of successive elements that one replica gets now, see `Order`.

    Raises:
        CheckpointError: the position is of another stream, or replicas are missing.
    """
    if stream is not None and merged["stream"] != stream.identity:
        raise CheckpointError(
            f"the loader position is in stream {merged['stream']}, the data at {stream.path} are stream "
            f"{stream.identity}: other files, data.seed, data.sequence_length or data.blend; resume with the same"
        )
    order = Order.from_json(merged["order"])
    consumed, old_size = merged["consumed"], merged["dp_size"]
    goes_on = dp_size == old_size and together == order.together
    needed = [dp_rank] if goes_on else range(old_size)
    missing = [rank for rank in needed if str(rank) not in consumed]
    if missing:
        raise CheckpointError(f"no loader position of replica(s) {missing}; there are those of {sorted(consumed)}")
    if goes_on:
        return Position(consumed[str(dp_rank)], order, tuple(merged["again"][str(dp_rank)]))
    rest = _rest(order, [consumed[str(rank)] for rank in range(old_size)])
    again = sorted(position for positions in merged["again"].values() for position in positions)
    own = tuple(again[dp_rank::dp_size])
    if not rest.left_over and rest.start % (dp_size * together) == 0:  # exactly the beginning of the stream is consumed
        return Position(rest.start // dp_size, Order(together=together), own)
    return Position(0, replace(rest, together=together), own)


def stream_end(merged: Mapping[str, Any]) -> int:
    """Position of the stream after the last one that any replica has consumed.

    Args:
        merged: result of `merge_positions`.
    """
    order, size = Order.from_json(merged["order"]), merged["dp_size"]
    last = [order[order.index(count - 1, int(rank), size)] for rank, count in merged["consumed"].items() if count]
    return max(order.start, max(last, default=-1) + 1)


def num_passed(merged: Mapping[str, Any], skip: Sequence[range] = ()) -> int:
    """Number of samples that all replicas together have consumed, without those that are to be used again.

    Args:
        merged: result of `merge_positions` for all replicas.
        skip: positions of the stream that are never used, and not counted.
    """
    order, size, consumed = Order.from_json(merged["order"]), merged["dp_size"], merged["consumed"]
    left_over, end = {position: index for index, position in enumerate(order.left_over)}, stream_end(merged)

    def is_passed(position: int) -> bool:
        if position < order.start and position not in left_over:
            return True
        index = left_over.get(position, position - order.start + len(left_over))
        replica, sample = order.sample(index, size)
        return bool(sample < consumed[str(replica)])

    never = sum(is_passed(one) for ranges in skip for one in range(ranges.start, min(ranges.stop, end)))
    again = sum(not _in(skip, one) for positions in merged["again"].values() for one in positions)
    return order.before + sum(consumed.values()) - never - again


def _rest(order: Order, consumed: Sequence[int]) -> Order:
    """The unconsumed rest of an order when replica r has consumed ``consumed[r]`` samples."""
    size = len(consumed)
    end = max(order.index(count - 1, rank, size) + 1 if count else 0 for rank, count in enumerate(consumed))
    dealt = ((index, *order.sample(index, size)) for index in range(end))
    passed = [order[index] for index, replica, sample in dealt if sample >= consumed[replica]]
    return Order((*passed, *order.left_over[end:]), order.start + max(0, end - len(order.left_over)))


@dataclass(frozen=True)
class StepWork:
    """Micro-batches of a step and its rules for dropped ones, which decide which samples the step uses.

    Args:
        size: samples b of a micro-batch.
        planned: number of micro-batches of each replica.
        completed: number of micro-batches that each replica started, [replica]; the others were dropped.
        source: replica whose first micro-batch all replicas compute; None: each computes its own.
        given_up: whether samples of dropped micro-batches are skipped; otherwise they come in the next step.
        again: whether skipped samples are used before their epoch ends; otherwise they never are.
        skip: positions of the stream that are never used.
    """

    size: int
    planned: int
    completed: tuple[int, ...]
    source: int | None = None
    given_up: bool = False
    again: bool = False
    skip: tuple[range, ...] = ()

    def own(self, replica: int, micro_batches: int) -> int:
        """Number of a replica's own samples in its first micro-batches, without those of a shared one of another."""
        shared = self.source is not None and self.source != replica
        return (micro_batches - shared) * self.size


def advance(before: Sequence[Position], work: StepWork, epoch: int | None) -> list[Position]:
    """Positions of all replicas after a step; ``epoch``: samples per epoch, None: the stream has no common epochs."""
    num_replicas, after = len(before), []
    for replica, (position, completed) in enumerate(zip(before, work.completed, strict=True)):
        taken = position.after(work.own(replica, completed), replica, num_replicas, epoch, work.skip)
        if work.given_up and completed < work.planned:
            dropped = (work.planned - completed) * work.size
            taken = taken.skip_next(dropped, replica, num_replicas, epoch if work.again else None, work.skip)
        after.append(taken)
    return after


def planned_positions(before: Sequence[Position], work: StepWork, epoch: int | None) -> list[list[list[int]]]:
    """Positions in the stream of all samples that a step plans, [replica][micro-batch][b].

    Dropped micro-batches are included.
    """
    num_replicas, size, skip = len(before), work.size, work.skip
    shared = (
        [] if work.source is None else before[work.source].next_samples(size, work.source, num_replicas, epoch, skip)[0]
    )
    found = []
    for replica, position in enumerate(before):
        own = position.next_samples(work.own(replica, work.planned), replica, num_replicas, epoch, skip)[0]
        every = own if work.source in (None, replica) else [*shared, *own]
        found.append([every[first : first + size] for first in range(0, len(every), size)])
    return found


@dataclass(frozen=True)
class UnevenSplit:
    """Distribution of the micro-batches of steps to replicas, whole and in turn.

    Args:
        micro_batches: number M of micro-batches of a step, over all replicas.
        replicas: number N of replicas.
        before: number of micro-batches that were consumed before this distribution began, with another N.
    """

    micro_batches: int
    replicas: int
    before: int = 0

    def count(self, step: int, replica: int) -> int:
        """Number of micro-batches of a replica in a step; the first step is 1."""
        return len(range(self._lead(step, replica), self.micro_batches, self.replicas))

    def place(self, step: int, replica: int, micro_batch: int) -> int:
        """Number in the whole step of a replica's ``micro_batch``; both count from 0."""
        return self._lead(step, replica) + micro_batch * self.replicas

    def end(self, step: int, replica: int, taken: int) -> int:
        """Number of micro-batches that all replicas have consumed, if they are as far as this one.

        Args:
            step: the last step.
            replica: number of this replica.
            taken: number of micro-batches that this replica has consumed; fewer than were dealt to it if it computed
                another replica's, more if it skipped some.
        """
        dealt = step * self.micro_batches - self.before
        return dealt - self.replicas * (len(range(replica, dealt, self.replicas)) - taken)

    def _lead(self, step: int, replica: int) -> int:
        begin = (step - 1) * self.micro_batches - self.before
        return (replica - begin) % self.replicas
