"""Comparison of each rank's place in the data with what follows from the steps and their decisions.

All ranks follow the places of all replicas from where the run started: what a step takes is known from its size, from
the micro-batches that each replica has started, and from the replica whose micro-batch an audit shared. The loader of a
rank that reads data must be where this leads, and all ranks must have been led alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import xxhash

from megasdc.common.addresses import FORWARD, Address
from megasdc.data.position import Order, Position, StepWork, advance
from megasdc.engine.hooks import Run
from megasdc.parallel.collectives import Field, gather_objects
from megasdc.train.detection.tokens import BATCH

SLOT = "consumed"
NONE = 0
"""Digest where places are not followed."""


@dataclass(frozen=True)
class WrongPlace:
    """A place in the data that does not follow.

    Args:
        got: digest of the loader's position.
        expected: digest of that which follows.
        reason: a sentence for people.
    """

    address: Address
    got: int
    expected: int
    reason: str


class PlaceCheck:
    """Follows the places of all replicas, and compares this rank's own.

    Args:
        given_up: samples of dropped micro-batches do not come in the next step.
        again: but once more before their epoch ends.
    """

    def __init__(self, run: Run, *, given_up: bool, again: bool) -> None:
        self._run, self._dims = run, run.dims
        self._given_up, self._again = given_up, again
        self._before: list[Position] = []
        self._orders = NONE
        self._source: int | None = None
        self._planned = run.engine.micro_batches
        self._is_accepted = False
        engine, dims = run.engine, run.dims
        self.completed = Field(
            lambda: engine.completed if engine.decides else None, places=dims.data, place=dims.dp_rank
        )

    @property
    def digest(self) -> int:
        """Digest of the places of all replicas before the running step, unsigned, 64 bits; equal on all ranks."""
        numbers = [self._orders, *((one.consumed, one.again) for one in self._before)]
        return xxhash.xxh3_64_intdigest(repr(numbers).encode())

    def start(self) -> None:
        """Take the places at which loaders are; the order of samples is the one that most ranks have.

        Collective: all ranks of the world.
        """
        dims, position = self._dims, self._run.loader.position
        reads = dims.is_first_stage and dims.tp_rank == 0
        own = (dims.dp_rank, position.consumed, position.again, position.order) if reads else None
        found = [one for one in gather_objects(own, self._run.host_group) if one is not None]
        order: Order = Counter(one[3] for one in found).most_common(1)[0][0]
        order = position.order if position.order == order else order  # one object, so that comparing it costs nothing
        places = {replica: Position(consumed, order, again) for replica, consumed, again, _ in found}
        self._before = [places[replica] for replica in range(dims.data)]
        self._orders = xxhash.xxh3_64_intdigest(repr(order).encode())

    def begin(self, source: int | None) -> None:
        """Begin a step; ``source``: replica whose first micro-batch all compute, None: each computes its own."""
        self._source = source
        self._planned = self._run.engine.micro_batches  # at its end DropCompute may have planned those of the next

    def in_step(self, completed: int) -> WrongPlace | None:
        """Compare this rank's place after it has read the micro-batches of the running step."""
        work, replica, dims = self._work((completed,) * self._dims.data), self._dims.dp_rank, self._dims
        taken, epoch = work.own(replica, completed), self._run.loader.samples_per_epoch
        after = self._before[replica].after(taken, replica, dims.data, epoch, work.skip)
        return self._compare(after)

    def between_steps(self) -> WrongPlace | None:
        """Compare this rank's place after a step."""
        return self._compare(self._before[self._dims.dp_rank])

    def put_right(self) -> None:
        """Follow what most ranks have followed, and move the loader there: before the running step, or after the last.

        Collective: all ranks of the world.
        """
        own = [(one.consumed, one.again) for one in self._before]
        usual = Counter(map(tuple, gather_objects(own, self._run.host_group))).most_common(1)[0][0]
        order = self._before[0].order
        self._before = [Position(consumed, order, again) for consumed, again in usual]
        if self._reads:
            self._run.loader.position = self._before[self._dims.dp_rank]

    def accept(self) -> None:
        """Let the running step keep what it has read; the next goes on from where it has to. The same on all ranks."""
        self._is_accepted = True

    def finish(self) -> None:
        """Follow what all replicas took in the step that has ended.

        Collective: all ranks of the world, where something was accepted.
        """
        work = self._work(tuple(int(count) for count in self.completed.values))
        self._before = advance(self._before, work, self._run.loader.samples_per_epoch)
        if self._is_accepted:
            self._is_accepted = False
            self.put_right()

    @property
    def _reads(self) -> bool:
        return self._dims.is_first_stage or self._dims.pp_rank == self._dims.pipeline - 1

    def _work(self, completed: tuple[int, ...]) -> StepWork:
        loader = self._run.loader
        return StepWork(
            size=loader.micro_batch_size,
            planned=self._planned,
            completed=completed,
            source=self._source,
            given_up=self._given_up,
            again=self._again,
            skip=tuple(loader.skip),
        )

    def _compare(self, right: Position) -> WrongPlace | None:
        own = self._run.loader.position
        if not self._reads or own == right:
            return None
        reason = (
            f"replica {self._dims.dp_rank} has consumed {own.consumed} samples and is to take {len(own.again)} again; "
            f"{right.consumed} and {len(right.again)} follow from its steps and decisions"
        )
        address = Address(self._run.engine.step_number, None, FORWARD, BATCH, SLOT)
        return WrongPlace(address, _digest(own), _digest(right), reason)


def _digest(position: Position) -> int:
    return xxhash.xxh3_64_intdigest(repr(position).encode())
