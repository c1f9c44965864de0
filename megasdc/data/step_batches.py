"""Micro-batches of a step, kept so that they can be read again: from memory, or from the file.

In a step whose first micro-batch is shared, all replicas read the samples that would be the source replica's, and only
that replica's position advances: the other replicas use their own samples in their next micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megasdc.data.loader import MicroBatch, MicroBatchLoader


@dataclass(frozen=True)
class Shared:
    """The micro-batch that all replicas share.

    Args:
        source: replica whose samples they are.
        positions: positions of its samples in the stream, [b].
    """

    source: int
    positions: tuple[int, ...]


class StepBatches:
    """Yields the micro-batches of one replica, and those of the current step again after ``rewind``.

    Args:
        batches: the loader, possibly wrapped.
    """

    def __init__(self, loader: MicroBatchLoader, batches: Iterator[MicroBatch]) -> None:
        self._loader = loader
        self._batches = batches
        self._kept: list[MicroBatch] = []
        self._positions: list[list[int]] = []
        self._given: list[MicroBatch] | None = None
        """What was kept before ``renew``."""
        self._next = 0
        self._shared: Shared | None = None
        self._extra_positions: Sequence[int] | None = None
        self._extra: MicroBatch | None = None
        self._extra_is_next = False

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def begin(self, shared: Shared | None, extra: Shared | None = None) -> None:
        """Begin a step.

        Args:
            shared: its first micro-batch if all replicas share it.
            extra: a micro-batch that is not one of the step's, and moves no position; None: there is none.
        """
        self._kept.clear()
        self._positions.clear()
        self._given = None
        self._next = 0
        self._shared = shared
        self._extra_is_next = False
        self._extra = None
        self._extra_positions = None if extra is None else extra.positions

    def rewind(self, micro_batch: int = 0) -> None:
        """Continue with this micro-batch of the current step, then those after it.

        Raises:
            ValueError: this rank has not read that far.
        """
        if not 0 <= micro_batch <= len(self._kept):
            raise ValueError(f"micro-batch {micro_batch} of the step was not read yet; {len(self._kept)} were")
        self._next = micro_batch

    def rewind_to_extra(self) -> None:
        """Yield the extra micro-batch next."""
        self._extra_is_next = True

    def renew(self) -> None:
        """Replace what is kept of the step by what the loader reads there now, until ``settle_renewed``.

        Raises:
            DataError, OSError: as the loader; what was kept stays.
        """
        renewed = [self._loader.read(positions) for positions in self._positions]
        self._given = self._given or list(self._kept)
        self._kept[:] = renewed

    def settle_renewed(self, *, stays: bool) -> None:
        """Keep what ``renew`` has read; else what the step was computed with is kept again."""
        if self._given is not None and not stays:
            self._kept[:] = self._given
        self._given = None

    def positions(self, micro_batch: int) -> Sequence[int]:
        """Positions in the stream of the samples of a micro-batch of the step that was read, [b]."""
        return self._positions[micro_batch]

    def from_file(self, micro_batch: int) -> MicroBatch:
        """A micro-batch of the step that was read, from the file; see ``MicroBatchLoader.read_again``."""
        return self._loader.read_again(self._positions[micro_batch])

    def __next__(self) -> MicroBatch:
        """The next micro-batch; errors as in ``MicroBatchLoader``."""
        if self._extra_is_next:
            assert self._extra_positions is not None, "the step has an extra micro-batch"
            self._extra_is_next = False
            self._extra = self._extra or self._loader.read(self._extra_positions)
            return self._extra
        if self._next == len(self._kept):
            self._kept.append(self._read())
        self._next += 1
        return self._kept[self._next - 1]

    def _read(self) -> MicroBatch:
        shared = self._shared
        if self._kept or shared is None or shared.source == self._loader.dp_rank:
            self._positions.append(self._loader.next_positions)
            return next(self._batches)
        self._positions.append(list(shared.positions))
        return self._loader.read(shared.positions)
