"""Comparison of micro-batches as the model was given them with what the file holds.

A reader checks a block of the file before its first use; nothing else looks at tokens between there and the model. So
ranks of the first stage keep the tokens with which the model was called, those of the last the labels and the mask of
the loss, until all micro-batches have run, and read the same samples again from the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.common.addresses import FORWARD, Address
from megasdc.common.errors import DataError, MegasdcError, StorageError
from megasdc.data.loader import MicroBatch, StepBatches
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.events import EventLog

logger = logging.getLogger(__name__)

BATCH = "batch"
"""Stands for a submodule in addresses of what the model is given."""
SLOTS = ("tokens", "labels", "loss_mask")


@dataclass(frozen=True)
class WrongTokens:
    """A tensor that the model was given, and that is not what the file holds.

    Args:
        got: XXH3-64 of its bytes.
        expected: the same of what the file holds; None: it cannot be read.
        reason: a sentence for people.
        ends_with: error with which all ranks end, since the file is wrong and no rank; None: the rank is.
    """

    address: Address
    got: int
    expected: int | None
    reason: str
    ends_with: type[MegasdcError] | None = None


@dataclass(frozen=True)
class Given:
    """What a rank found in what its model was given, and how all ranks look again.

    Args:
        wrong: None: nothing.
        again: reads a micro-batch of the step anew as training does, computes it once more; what is wrong then. It does
            not raise on one rank alone.
        finish: gets whether the step is computed again with what was read anew; else other checks of the step go on
            with what the model was given.
    """

    wrong: WrongTokens | None
    again: Callable[[int], WrongTokens | None]
    finish: Callable[[bool], None]


class TokenCheck(Hook):
    """Keeps what the model is given of some micro-batches of a step, and compares it with the file.

    Args:
        batches: this replica's micro-batches.
        events: told of a file that cannot be read, so that a step was not compared.
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
        """Keep what the stage is called with, and the labels."""
        if micro_batch not in self._due:
            return
        kept = self._given[micro_batch] = {}
        if engine.is_last_stage():
            kept["labels"], kept["loss_mask"] = engine.labels_of(micro_batch)
        if engine.is_first_stage():

            def keep(_: Any, args: Sequence[Any]) -> None:
                kept["tokens"] = args[0]

            self._handle = engine.module.register_forward_pre_hook(keep)

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Keep no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take(self, engine: TrainingEngine) -> WrongTokens | None:
        """Compare what was kept since the last call; what is wrong first. Waits for the device."""
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
    """What is found where a micro-batch of the step can no longer be read: the file is damaged, or its system away."""
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
