"""Micro-batches of a replica: loaders with a saved position, and a step's micro-batches, kept for a second pass.

While all replicas have consumed equally many samples, the set of samples of a step depends neither on the number of
replicas nor on the micro-batch size; see ``megasdc.data.position``. In a step whose first micro-batch is shared, all
replicas read the samples that would be the source replica's, and only that replica's position advances: the other
replicas use their own samples in their next micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megasdc.common.errors import CheckpointError, DataError
from megasdc.data.position import Position, merge_positions, position_for

MicroBatch = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
"""(tokens [b, s] int64, (labels [b, s] int64, loss_mask [b, s] float32))."""


class SampleStream(Protocol):
    """Interface of a loader's data, such as `megasdc.data.dataset.TokenDataset` and `BlendedTokens`."""

    path: Any
    vocab_size: int
    identity: str

    def __len__(self) -> int: ...

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``."""

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position, read from the file into fresh memory."""
        ...


class StreamShare:
    """Every n-th sample of a stream, as a stream of its own: position p is sample p * parts + part.

    So the shares of several runs are disjoint, and together they take the samples that one run of them all would.

    Args:
        stream: the whole stream.
        part: number of this share, in [0, parts).
        parts: number of shares.
    """

    def __init__(self, stream: SampleStream, part: int, parts: int) -> None:
        if not 0 <= part < parts:
            raise ValueError(f"part is {part}, must be in [0, parts {parts})")
        self._stream, self._part, self._parts = stream, part, parts
        self.path, self.vocab_size = stream.path, stream.vocab_size
        self.identity = f"{stream.identity}, share {part} of {parts}"

    def __len__(self) -> int:
        return (len(self._stream) - self._part + self._parts - 1) // self._parts

    def extend(self, num_samples: int) -> None:
        """Extend the stream so that this share has at least ``num_samples``."""
        self._stream.extend(num_samples * self._parts)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._stream[self._place(position)]

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position, read from the file into fresh memory."""
        return self._stream.read_again(self._place(position))

    def where(self, position: int) -> str:
        """Description of a sample for a message."""
        return _where(self._stream, self._place(position))

    def _place(self, position: int) -> int:
        return position * self._parts + self._part


class MicroBatchLoader:
    """Yields micro-batches of one replica and tracks its position.

    Args:
        dataset: the stream of samples.
        micro_batch_size: samples b of a micro-batch.
        dp_rank: number of this replica.
        dp_size: number of replicas.
        position: start position of this replica.
        samples_per_epoch: number of samples of an epoch of the stream, so that skipped samples are used before their
            epoch ends; None: the stream has no common epochs.
        skip: positions of the stream that are never used.
    """

    def __init__(
        self,
        dataset: SampleStream,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        position: Position = Position(),
        samples_per_epoch: int | None = None,
        skip: Sequence[range] = (),
    ) -> None:
        _check_place(micro_batch_size, dp_rank, dp_size)
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.position = position
        self.samples_per_epoch = samples_per_epoch
        self.skip = skip
        if skip:
            self.extend(len(dataset) // dp_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch.

        Raises:
            DataError: the stream has ended, or an id is outside the model's vocabulary; the position is unchanged.
        """
        positions, after = self._next_samples()
        batch = self.read(positions)
        self.position = after
        return batch

    @property
    def next_positions(self) -> list[int]:
        """Positions in the stream of the samples of the next micro-batch, [b]."""
        return self._next_samples()[0]

    def read(self, positions: Sequence[int]) -> MicroBatch:
        """Read a micro-batch at these positions of the stream; this replica's own position does not change.

        Args:
            positions: positions of the samples, [b].

        Raises:
            DataError: the stream has ended, or holds an id outside the model's vocabulary.
        """
        if max(positions) >= len(self.dataset):
            raise DataError(
                f"the training stream of {self.dataset.path} has {len(self.dataset)} samples and replica "
                f"{self.dp_rank} of {self.dp_size} asks for position {max(positions)}; build it with more samples"
            )
        return _load(self.dataset, positions)

    def read_again(self, positions: Sequence[int]) -> MicroBatch:
        """Read a micro-batch a second time, from the file into fresh memory; undamaged, it equals that of ``read``.

        Args:
            positions: positions of the samples that were read, [b].

        Raises:
            DataError: a block of the file is damaged.
        """
        return _stack([self.dataset.read_again(position) for position in positions])

    def skip_next(self, micro_batches: int, *, again: bool) -> None:
        """Skip the next micro-batches.

        Args:
            micro_batches: number of micro-batches.
            again: whether their samples are used before their epoch ends; otherwise they never are.

        Raises:
            ValueError: ``again`` is set and the stream has no common epochs.
        """
        if again and self.samples_per_epoch is None:
            raise ValueError("samples_per_epoch is None, needed to take samples again before their epoch ends")
        epoch = self.samples_per_epoch if again else None
        self.position = self.position.skip_next(
            micro_batches * self.micro_batch_size, self.dp_rank, self.dp_size, epoch, self.skip
        )

    def extend(self, samples: int) -> None:
        """Extend the stream so that every replica can take this many more samples from this position on."""
        count = samples + sum(len(one) for one in self.skip)
        self.dataset.extend(self.position.end_after(count, self.dp_size))

    @property
    def stream_end(self) -> int:
        """First position of the stream that no replica has consumed, if all have consumed as much as this one."""
        return max(self.position.order.start, self.position.end_after(0, self.dp_size))

    def state_dict(self) -> dict[str, Any]:
        """This replica's position as JSON-compatible values."""
        return {
            "dp_rank": self.dp_rank,
            "dp_size": self.dp_size,
            "stream": self.dataset.identity,
            "order": self.position.order.to_json(),
            "consumed": self.position.consumed,
            "again": list(self.position.again),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same replica with the same number of replicas.

        For another number of replicas, use `merge_positions` and `position_for`.

        Raises:
            CheckpointError: the state is of another replica or of other data.
        """
        place = (state["dp_rank"], state["dp_size"])
        if place != (self.dp_rank, self.dp_size):
            raise CheckpointError(
                f"the loader state is of replica {place[0]} of {place[1]}, this is {self.dp_rank} of {self.dp_size}"
            )
        self.move_to(merge_positions([state], partial=True))

    def move_to(self, merged: Mapping[str, Any]) -> None:
        """Continue from the positions of all replicas, a result of `merge_positions`; errors as of `position_for`."""
        together = self.position.order.together
        self.position = position_for(merged, self.dp_rank, self.dp_size, self.dataset, together)

    def _next_samples(self) -> tuple[list[int], Position]:
        return self.position.next_samples(
            self.micro_batch_size, self.dp_rank, self.dp_size, self.samples_per_epoch, self.skip
        )


class EvalLoader:
    """Samples 0 to n-1 of a stream, distributed to replicas like training samples; the same in every iteration.

    Every replica gets equally many full micro-batches. The end is padded with sample 0 under a loss mask of zeros, so
    that sums weighted by the mask do not depend on the number of replicas or the micro-batch size; a full micro-batch
    may thus have weight 0.

    Args:
        dataset: the stream of samples.
        micro_batch_size: samples b of a micro-batch.
        dp_rank: number of this replica.
        dp_size: number of replicas.
        num_samples: number of samples n; None: the whole stream.
    """

    def __init__(
        self, dataset: SampleStream, micro_batch_size: int, dp_rank: int, dp_size: int, num_samples: int | None = None
    ) -> None:
        _check_place(micro_batch_size, dp_rank, dp_size)
        self.num_samples = len(dataset) if num_samples is None else num_samples
        if not 0 < self.num_samples <= len(dataset):
            raise ValueError(f"num_samples is {self.num_samples}, the stream {dataset.path} has {len(dataset)}")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.num_micro_batches = -(-self.num_samples // (micro_batch_size * dp_size))

    def __len__(self) -> int:
        return self.num_micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        for start in range(0, self.num_micro_batches * self.micro_batch_size, self.micro_batch_size):
            positions = [(start + index) * self.dp_size + self.dp_rank for index in range(self.micro_batch_size)]
            real = [position < self.num_samples for position in positions]
            tokens, (labels, loss_mask) = _load(
                self.dataset, [position if keep else 0 for position, keep in zip(positions, real, strict=True)]
            )
            loss_mask[~torch.tensor(real)] = 0.0
            yield tokens, (labels, loss_mask)


def _check_place(micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}, must be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank is {dp_rank}, must be in [0, dp_size {dp_size})")


def _load(dataset: SampleStream, positions: Sequence[int]) -> MicroBatch:
    """Stack samples and check every id on the host, before it can reach a device's embedding lookup."""
    tokens, (labels, loss_mask) = _stack([dataset[position] for position in positions])
    for name, ids in (("token", tokens), ("label", labels)):
        low, high = ids.aminmax()
        if low < 0 or high >= dataset.vocab_size:
            wrong = ((ids < 0) | (ids >= dataset.vocab_size)).nonzero()[0]
            row, column = int(wrong[0]), int(wrong[1])
            raise DataError(
                f"{_where(dataset, positions[row])}, {name} {column}: id {int(ids[row, column])} is not "
                f"in [0, {dataset.vocab_size}); the data were prepared with another tokenizer, or are damaged"
            )
    return tokens, (labels, loss_mask)


def _stack(rows: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> MicroBatch:
    tokens, labels, loss_mask = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens, (labels, loss_mask)


def _where(dataset: SampleStream, position: int) -> str:
    """Description of a sample for a message; a blend adds the part that holds it."""
    if hasattr(dataset, "where"):
        return dataset.where(position)
    return f"{dataset.path}, sample position {position}"


@dataclass(frozen=True)
class Shared:
    """The micro-batch that all replicas share.

    Args:
        source: number of the replica whose position it advances.
        positions: positions of its samples in the stream, [b].
    """

    source: int
    positions: tuple[int, ...]


class StepBatches:
    """Yields the micro-batches of one replica, and those of the current step again after ``rewind``.

    Args:
        loader: the replica's loader.
        batches: the loader, possibly wrapped.
    """

    def __init__(self, loader: MicroBatchLoader, batches: Iterator[MicroBatch]) -> None:
        self._loader = loader
        self._batches = batches
        self._kept: list[MicroBatch] = []
        self._positions: list[list[int]] = []
        self._given: list[MicroBatch] | None = None
        """Micro-batches of the step as they were before ``renew``; None: they were not renewed."""
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
            shared: the step's first micro-batch if all replicas share it; None: it is this replica's own.
            extra: a further micro-batch that is not part of the step and advances no position; None: there is none.
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
        """Go back to a micro-batch of the current step; it and those after it are yielded next.

        Raises:
            ValueError: this rank has not read that micro-batch yet.
        """
        if not 0 <= micro_batch <= len(self._kept):
            raise ValueError(f"micro-batch {micro_batch} of the step was not read yet; {len(self._kept)} were")
        self._next = micro_batch

    def rewind_to_extra(self) -> None:
        """Yield the extra micro-batch next."""
        self._extra_is_next = True

    def renew(self) -> None:
        """Read the step's kept micro-batches again and replace them, until ``settle_renewed``.

        Raises:
            DataError, OSError: the loader cannot read them; the kept ones stay.
        """
        renewed = [self._loader.read(positions) for positions in self._positions]
        self._given = self._given or list(self._kept)
        self._kept[:] = renewed

    def settle_renewed(self, *, stays: bool) -> None:
        """End ``renew``; ``stays``: keep the micro-batches that it has read, otherwise those from before."""
        if self._given is not None and not stays:
            self._kept[:] = self._given
        self._given = None

    def positions(self, micro_batch: int) -> Sequence[int]:
        """Positions in the stream of the samples of a micro-batch of this step, [b]."""
        return self._positions[micro_batch]

    def from_file(self, micro_batch: int) -> MicroBatch:
        """A micro-batch of this step, read from the file again; see ``MicroBatchLoader.read_again``."""
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


class MemoryStream:
    """Random tokens in memory, as a loader reads them; position k is sample k modulo their number.

    Args:
        vocab: number of entries of the vocabulary.
        sequence: number of tokens s of a sample.
        distinct: number of different samples.
        length: number of samples of the stream.
    """

    def __init__(self, vocab: int, sequence: int, distinct: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, vocab, (distinct, sequence + 1), generator=generator)
        self._mask = torch.ones(sequence)
        self.path = "memory"
        self.identity = "memory"
        self.vocab_size = vocab
        self._length = length

    def __len__(self) -> int:
        return self._length

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``."""
        self._length = max(self._length, num_samples)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row = self._tokens[position % len(self._tokens)]
        return row[:-1], row[1:], self._mask

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position, as ``[position]``: there is no file."""
        return self[position]
