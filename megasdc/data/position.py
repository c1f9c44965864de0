"""Position of each replica in the stream, and where each resumes, also with another number of replicas.

The samples of a stream have an order; its element k * dp_size + r is sample k of replica r. At first it is the stream
itself. When the number of replicas changes, it becomes the unconsumed samples: first the positions that some replica
had not consumed while another had consumed later ones, then the rest of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasdc.errors import CheckpointError


@dataclass(frozen=True)
class Order:
    """Order in which positions of a stream are distributed to replicas: ``left_over``, then those from ``start`` on."""

    left_over: tuple[int, ...] = ()
    start: int = 0

    def __getitem__(self, index: int) -> int:
        """Position in the stream of an element of the order."""
        beyond = index - len(self.left_over)
        return self.start + beyond if beyond >= 0 else self.left_over[index]


@dataclass(frozen=True)
class Position:
    """Position of one replica.

    Args:
        consumed: samples of the order consumed, including skipped ones.
        again: skipped positions that it uses before their epoch ends, ascending.
    """

    consumed: int = 0
    order: Order = Order()
    again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.consumed < 0:
            raise ValueError(f"consumed is {self.consumed}, must not be negative")

    def take(
        self, count: int, dp_rank: int, dp_size: int, epoch: int | None = None, skip: Sequence[range] = ()
    ) -> tuple[list[int], Position]:
        """The next samples, and the position after them.

        Args:
            count: of samples.
            epoch: samples per epoch; needed if ``again`` is not empty.
            skip: positions of the stream that are never taken.

        Returns:
            Positions in the stream, [count], and the new position.
        """
        taken, consumed = [], self.consumed
        again = [position for position in self.again if not _in(skip, position)]
        for _ in range(count):
            while _in(skip, position := self.order[consumed * dp_size + dp_rank]):
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
        """The position after the next ``count`` samples; arguments of ``take``."""
        if not self.again and not skip:
            return Position(self.consumed + count, self.order)
        return self.take(count, dp_rank, dp_size, epoch, skip)[1]

    def pass_over(
        self, count: int, dp_rank: int, dp_size: int, epoch: int | None = None, skip: Sequence[range] = ()
    ) -> Position:
        """The position after skipping the next samples.

        Args:
            count: of samples.
            epoch: samples per epoch; if given, the samples are used before their epoch ends.
            skip: positions of the stream that are never taken.
        """
        positions, after = self.take(count, dp_rank, dp_size, epoch, skip)
        again = after.again if epoch is None else tuple(sorted((*after.again, *positions)))
        return Position(after.consumed, self.order, again)

    def end_after(self, count: int, dp_size: int) -> int:
        """Length of the stream with which every replica at this position can take ``count`` more samples."""
        return self.order[(self.consumed + count) * dp_size - 1] + 1 if self.consumed + count else 0


def _in(ranges: Sequence[range], position: int) -> bool:
    return any(position in one for one in ranges)


def merge_positions(states: Sequence[Mapping[str, Any]], partial: bool = False) -> dict[str, Any]:
    """Merge the states of all replicas into one, for a checkpoint.

    Args:
        states: one `MicroBatchLoader.state_dict` per replica, in any order; a replica may occur again with the same
            state.
        partial: allow replicas to be missing.

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


def position_for(merged: Mapping[str, Any], dp_rank: int, dp_size: int, stream: Any = None) -> Position:
    """Position from which a replica resumes, also with another number of replicas.

    With another number of replicas every unconsumed sample is used once, first those before another replica's position;
    skipped samples to be used again are redistributed.

    Args:
        merged: from `merge_positions`.
        dp_rank: the replica that resumes.
        dp_size: number of replicas now.
        stream: if given, must be the stream of the positions.

    Raises:
        CheckpointError: the position is of another stream, or replicas are missing.
    """
    if stream is not None and merged["stream"] != stream.identity:
        raise CheckpointError(
            f"the loader position is in stream {merged['stream']}, the data at {stream.path} are stream "
            f"{stream.identity}: other files, data.seed, data.sequence_length or data.blend; resume with the same"
        )
    order = Order(tuple(merged["order"]["left_over"]), merged["order"]["start"])
    consumed, old_size = merged["consumed"], merged["dp_size"]
    needed = [dp_rank] if dp_size == old_size else range(old_size)
    missing = [rank for rank in needed if str(rank) not in consumed]
    if missing:
        raise CheckpointError(f"no loader position of replica(s) {missing}; there are those of {sorted(consumed)}")
    if dp_size == old_size:
        return Position(consumed[str(dp_rank)], order, tuple(merged["again"][str(dp_rank)]))
    rest = _rest(order, [consumed[str(rank)] for rank in range(old_size)])
    again = sorted(position for positions in merged["again"].values() for position in positions)
    if not rest.left_over and rest.start % dp_size == 0:  # exactly the beginning of the stream is consumed
        return Position(rest.start // dp_size, Order(), tuple(again[dp_rank::dp_size]))
    return Position(0, rest, tuple(again[dp_rank::dp_size]))


def stream_end(merged: Mapping[str, Any]) -> int:
    """Position of the stream after the last one that any replica has consumed.

    Args:
        merged: from `merge_positions`.
    """
    order, size = Order(tuple(merged["order"]["left_over"]), merged["order"]["start"]), merged["dp_size"]
    last = [order[(count - 1) * size + int(rank)] for rank, count in merged["consumed"].items() if count]
    return max(order.start, max(last, default=-1) + 1)


def _rest(order: Order, consumed: Sequence[int]) -> Order:
    """The unconsumed rest of an order when replica r has consumed ``consumed[r]`` samples."""
    size = len(consumed)
    end = max((count - 1) * size + rank + 1 if count else 0 for rank, count in enumerate(consumed))
    passed = [order[index] for index in range(end) if index // size >= consumed[index % size]]
    return Order((*passed, *order.left_over[end:]), order.start + max(0, end - len(order.left_over)))
