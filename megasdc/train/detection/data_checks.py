"""Checks of the data that ranks are given: micro-batches against the data file, and each rank's place in the data.

A reader checks a block of the file before its first use; nothing else looks at tokens between there and the model. So
ranks of the first stage keep the tokens with which the model was called, those of the last the labels and the mask of
the loss, until all micro-batches have run, and read the same samples again from the file.

A place must follow from the steps and their decisions. All ranks follow the places of all replicas from where the run
started: what a step takes is known from its size, from the micro-batches that each replica has started, and from the
replica whose micro-batch an audit shared. The loader of a rank that reads data must be where this leads, and all ranks
must have been led alike.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.common.addresses import FORWARD, Address
from megasdc.common.errors import DataError, MegasdcError, StorageError
from megasdc.data.loader import MicroBatch, StepBatches
from megasdc.data.position import Order, Position, StepWork, advance
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.events import EventLog
from megasdc.parallel.collectives import Field, gather_objects
from megasdc.sdc.used_settings import NONE

logger = logging.getLogger(__name__)

BATCH = "batch"
"""Name, in place of a submodule's, in addresses of the model's inputs."""
SLOTS = ("tokens", "labels", "loss_mask")


@dataclass(frozen=True)
class WrongTokens:
    """A tensor that the model was given and that differs from the data file.

    Args:
        got: XXH3-64 of the tensor's bytes.
        expected: XXH3-64 of the same from the file; None: the file cannot be read.
        reason: reason, as a sentence for people.
        ends_with: class of the error with which all ranks end, if the file is wrong; None: the rank is wrong.
    """

    address: Address
    got: int
    expected: int | None
    reason: str
    ends_with: type[MegasdcError] | None = None


@dataclass(frozen=True)
class Given:
    """Comparison of a rank's micro-batches with the data file, and the functions by which all ranks repeat it.

    Args:
        wrong: the first wrong tensor; None: none is wrong.
        again: reads a micro-batch of the step anew as training does, and computes it once more; returns the wrong
            tensor of that time, or None. It does not raise on one rank alone.
        finish: called with whether the step is rerun with the data read anew; else other checks of the step go
            on with the data that the model was given.
    """

    wrong: WrongTokens | None
    again: Callable[[int], WrongTokens | None]
    finish: Callable[[bool], None]


class TokenCheck(Hook):
    """Keeps the model's inputs of some micro-batches of a step, and compares them with the data file.

    Args:
        batches: this replica's micro-batches.
        events: event log, for a file that cannot be read, so that a step was not compared.
    """

    def __init__(self, batches: StepBatches, events: EventLog) -> None:
        self._batches, self._events = batches, events
        self._due: Collection[int] = ()
        self._given: dict[int, dict[str, Tensor]] = {}
        self._handle: Any = None

    def choose(self, micro_batches: Collection[int]) -> None:
        """Choose the micro-batches that a step compares."""
        self._due = frozenset(micro_batches)
        self._given.clear()

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Keep the stage's inputs and labels."""
        if micro_batch not in self._due:
            return
        kept = self._given[micro_batch] = {}
        if engine.is_last_stage():
            kept["labels"], kept["loss_mask"] = engine.labels_of(micro_batch)
        if engine.is_first_stage():

            def record_tokens(_: Any, args: Sequence[Any]) -> None:
                kept["tokens"] = args[0]

            self._handle = engine.module.register_forward_pre_hook(record_tokens)

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Stop keeping inputs."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def compare(self, engine: TrainingEngine) -> WrongTokens | None:
        """Compare the inputs kept since the last call; returns the first wrong one, or None. Waits for the device."""
        given, self._given = self._given, {}
        found = (self._compare(engine.step_number, number, kept) for number, kept in sorted(given.items()) if kept)
        return next((one for one in found if one is not None), None)

    def _compare(self, step: int, micro_batch: int, kept: dict[str, Tensor]) -> WrongTokens | None:
        positions = self._batches.positions(micro_batch)
        try:
            tokens, (labels, loss_mask) = self._read(step, micro_batch)
        except OSError as error:  # the file system's matter, such as a server that is away; not this rank's
            told: dict[str, Any] = {"micro_batch": micro_batch, "problem": f"{type(error).__name__}: {error}"}
            self._events.emit("warning", "tokens_not_compared", step=step, **told)
            logger.warning("step %d: tokens were not compared with the file, which cannot be read: %s", step, error)
            return None
        except DataError as error:
            return unreadable(step, micro_batch, error)
        for slot, right in zip(SLOTS, (tokens, labels, loss_mask), strict=True):
            if slot in kept and not torch.equal(own := kept[slot].cpu(), right):
                address = Address(step, micro_batch, FORWARD, BATCH, slot)
                return WrongTokens(address, _checksum(own), _checksum(right), _difference(slot, own, right, positions))
        return None

    def _read(self, step: int, micro_batch: int) -> MicroBatch:
        """A micro-batch from the file; again where a block has another checksum, which may come from the reading."""
        try:
            return self._batches.from_file(micro_batch)
        except DataError as error:
            found = self._batches.from_file(micro_batch)
            self._events.emit("warning", "tokens_read_again", step=step, micro_batch=micro_batch, problem=str(error))
            logger.warning("step %d: read a second time a block had its checksum: %s", step, error)
            return found


def unreadable(step: int, micro_batch: int, error: DataError | OSError) -> WrongTokens:
    """Finding for a micro-batch of the step that can no longer be read: its file is damaged or not reachable."""
    address = Address(step, micro_batch, FORWARD, BATCH, SLOTS[0])
    if isinstance(error, DataError):
        return WrongTokens(address, 0, None, str(error), DataError)
    text = f"{type(error).__name__}: {error}; see that the file system is there, and start again"
    return WrongTokens(address, 0, None, text, StorageError)


def _difference(slot: str, own: Tensor, right: Tensor, positions: Sequence[int]) -> str:
    if own.shape != right.shape:
        return f"{slot} have shape {list(own.shape)}, in the file {list(right.shape)}"
    places = (own != right).nonzero()
    row, column = places[0].tolist()
    return (
        f"{len(places)} of {right.numel()} {slot} differ from the file, the first in sample {positions[row]} of the "
        f"stream at place {column}: {own[row, column].item()}, in the file {right[row, column].item()}"
    )


def _checksum(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.contiguous().numpy().data)


SLOT = "consumed"


@dataclass(frozen=True)
class WrongPlace:
    """A place in the data that does not follow from the steps and their decisions.

    Args:
        got: digest of the loader's position.
        expected: digest of the position that follows from the steps.
        reason: reason, as a sentence for people.
    """

    address: Address
    got: int
    expected: int
    reason: str


class PlaceCheck:
    """Follows the places of all replicas, and compares this rank's own.

    Args:
        given_up: whether samples of dropped micro-batches are not taken by the next step.
        again: whether they are taken once more before their epoch ends.
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
        """Begin to follow the places of all loaders; the order of samples is the one that most ranks have.

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

    def repair(self) -> None:
        """Take the places that most ranks have followed, and move the loader there; before a step or after one.

        Collective: all ranks of the world.
        """
        own = [(one.consumed, one.again) for one in self._before]
        usual = Counter(map(tuple, gather_objects(own, self._run.host_group))).most_common(1)[0][0]
        order = self._before[0].order
        self._before = [Position(consumed, order, again) for consumed, again in usual]
        if self._reads:
            self._run.loader.position = self._before[self._dims.dp_rank]

    def accept(self) -> None:
        """Let the running step keep its samples; the next goes on at the place that follows. The same on all ranks."""
        self._is_accepted = True

    def finish(self) -> None:
        """Follow the samples that all replicas took in the step that has ended.

        Collective: all ranks of the world, where something was accepted.
        """
        work = self._work(tuple(int(count) for count in self.completed.values))
        self._before = advance(self._before, work, self._run.loader.samples_per_epoch)
        if self._is_accepted:
            self._is_accepted = False
            self.repair()

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
