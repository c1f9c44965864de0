"""Which samples does a replica get next, and where does it go on after a restart? Micro-batches with a saved position.

Sample k of replica r is stream position ``k * dp_size + r``. As long as all replicas have taken equally many, the set
of samples of a step depends on neither the number of replicas nor the size of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from megasdc.errors import CheckpointError, DataError

MicroBatch = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
"""(tokens [b, s] int64, (labels [b, s] int64, loss_mask [b, s] float32))."""


class SampleStream(Protocol):
    """What a loader reads from; `megasdc.data.dataset.TokenDataset` and `BlendedTokens` are two."""

    path: Any
    vocab_size: int
    identity: str

    def __len__(self) -> int: ...

    def prolong(self, num_samples: int) -> None:
        """Make the stream at least so long."""

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class MicroBatchLoader:
    """Yields micro-batches of one replica and counts what it gave out.

    Args:
        dataset: the stream.
        micro_batch_size: samples b of a micro-batch.
        dp_rank: this replica.
        dp_size: number of replicas.
        consumed: samples that this replica has taken before.
    """

    def __init__(
        self, dataset: SampleStream, micro_batch_size: int, dp_rank: int, dp_size: int, consumed: int = 0
    ) -> None:
        _check_place(micro_batch_size, dp_rank, dp_size)
        if consumed < 0:
            raise ValueError(f"consumed is {consumed}, must not be negative")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.consumed = consumed

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch.

        Raises:
            DataError: the stream has ended, or holds an id that the model does not know; `consumed` stays as it was.
        """
        batch = self.read(self.dp_rank, self.consumed)
        self.consumed += self.micro_batch_size
        return batch

    def read(self, dp_rank: int, consumed: int) -> MicroBatch:
        """The micro-batch that a replica takes after so many samples; no position moves.

        Args:
            dp_rank: any replica.
            consumed: samples that it has taken before.

        Raises:
            DataError: the stream has ended, or holds an id that the model does not know.
        """
        positions = [(consumed + index) * self.dp_size + dp_rank for index in range(self.micro_batch_size)]
        if positions[-1] >= len(self.dataset):
            raise DataError(
                f"the training stream of {self.dataset.path} has {len(self.dataset)} samples and replica "
                f"{dp_rank} of {self.dp_size} asks for position {positions[-1]} after {consumed} samples; "
                f"build it with more samples"
            )
        return _load(self.dataset, positions)

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's position, in plain numbers and text."""
        return {
            "dp_rank": self.dp_rank,
            "dp_size": self.dp_size,
            "consumed": self.consumed,
            "stream": self.dataset.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state of the same replica of the same number was taken.

        For another number of replicas, use `merge_positions` and `position_for`.

        Raises:
            CheckpointError: the state is of another replica or of other data.
        """
        place = (state["dp_rank"], state["dp_size"])
        if place != (self.dp_rank, self.dp_size):
            raise CheckpointError(
                f"the loader state is of replica {place[0]} of {place[1]}, this is {self.dp_rank} of {self.dp_size}"
            )
        self.consumed = position_for(merge_positions([state], partial=True), self.dp_rank, self.dp_size, self.dataset)


class EvalLoader:
    """Samples 0 to n-1 of a stream, dealt to replicas like training samples; the same in every iteration.

    Every replica gets equally many whole micro-batches. What is missing at the end is filled with sample 0 under a
    loss mask of zeros, so that sums weighted by the mask do not depend on replicas and micro-batch size; a whole
    micro-batch may thus have weight 0.

    Args:
        dataset: the stream.
        micro_batch_size: samples b of a micro-batch.
        dp_rank: this replica.
        dp_size: number of replicas.
        num_samples: n; null: the whole stream.
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


def merge_positions(states: Sequence[Mapping[str, Any]], partial: bool = False) -> dict[str, Any]:
    """Put the states of all replicas into one, for a checkpoint.

    Args:
        states: one `state_dict` a replica, in any order; the same replica may occur again with the same state.
        partial: allow replicas to be missing.

    Returns:
        ``{"dp_size", "consumed": {"0": n0, ...}, "stream"}``, which JSON can hold.

    Raises:
        CheckpointError: states contradict each other, or a replica is missing.
    """
    consumed: dict[str, int] = {}
    for state in states:
        if (state["dp_size"], state["stream"]) != (states[0]["dp_size"], states[0]["stream"]):
            raise CheckpointError(f"loader states are of different runs: {dict(states[0])} and {dict(state)}")
        known = consumed.setdefault(str(state["dp_rank"]), state["consumed"])
        if known != state["consumed"]:
            raise CheckpointError(f"replica {state['dp_rank']} has consumed {known} and {state['consumed']} samples")
    missing = [rank for rank in range(states[0]["dp_size"] if states else 1) if str(rank) not in consumed]
    if (missing and not partial) or not states:
        raise CheckpointError(f"no loader state of replica(s) {missing}")
    return {"dp_size": states[0]["dp_size"], "consumed": consumed, "stream": states[0]["stream"]}


def position_for(merged: Mapping[str, Any], dp_rank: int, dp_size: int, dataset: SampleStream | None = None) -> int:
    """Return the samples that a replica has consumed, also for another number of replicas.

    With another number of replicas the samples taken so far must be a whole beginning of the stream: all replicas
    must have taken equally many.

    Args:
        merged: from `merge_positions`.
        dp_rank: the replica that goes on.
        dp_size: number of replicas now.
        dataset: if given, must be the stream that the positions are in.

    Returns:
        `consumed` for `MicroBatchLoader`.

    Raises:
        CheckpointError: there is no such position.
    """
    if dataset is not None and merged["stream"] != dataset.identity:
        raise CheckpointError(
            f"the loader position is in stream {merged['stream']}, the data at {dataset.path} are stream "
            f"{dataset.identity}: other files, data.seed, data.sequence_length or data.blend; resume with the same"
        )
    consumed = merged["consumed"]
    old_size = merged["dp_size"]
    if dp_size == old_size:
        if str(dp_rank) not in consumed:
            raise CheckpointError(f"no loader position of replica {dp_rank}; there are those of {sorted(consumed)}")
        return consumed[str(dp_rank)]
    counts = set(consumed.values())
    if len(counts) > 1 or len(consumed) < old_size:
        raise CheckpointError(
            f"the number of replicas changed from {old_size} to {dp_size}, but replicas have consumed different "
            f"numbers of samples: {dict(consumed)}; resume with {old_size} replicas"
        )
    total = counts.pop() * old_size
    if total % dp_size:
        raise CheckpointError(
            f"the {total} samples consumed by {old_size} replicas cannot be divided among {dp_size}; resume with "
            f"a number of replicas that divides them"
        )
    return total // dp_size


def _check_place(micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}, must be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank is {dp_rank}, must be in [0, dp_size {dp_size})")


def _load(dataset: SampleStream, positions: Sequence[int]) -> MicroBatch:
    """Stack samples and check every id on the host, before it can reach a device's embedding lookup."""
    rows = [dataset[position] for position in positions]
    tokens, labels, loss_mask = (torch.stack(column) for column in zip(*rows, strict=True))
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


def _where(dataset: SampleStream, position: int) -> str:
    """Name a sample for a message; a blend says which of its parts the sample is in."""
    if hasattr(dataset, "where"):
        return dataset.where(position)
    return f"{dataset.path}, sample position {position}"
