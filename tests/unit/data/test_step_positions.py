"""Samples of a step, against the loaders that take them."""

from __future__ import annotations

import random

import pytest
import torch

from megasdc.data.loader import MicroBatchLoader, Shared, StepBatches
from megasdc.data.position import StepWork, advance, planned_positions

REPLICAS, EPOCH = 3, 25


class Numbers:
    """A stream in which every token of a sample is its position."""

    path, identity, vocab_size = "numbers", "numbers", 10**6

    def __len__(self) -> int:
        return 10**6

    def extend(self, num_samples: int) -> None:
        assert num_samples < 2 * len(self), "long enough"

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.tensor([position]), torch.tensor([position]), torch.ones(1)


@pytest.mark.parametrize(("given_up", "again"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("skip", [(), (range(7, 20), range(101, 102))])
def test_positions_are_those_that_loaders_take(given_up: bool, again: bool, skip: tuple[range, ...]) -> None:
    """Over 60 steps with audits, drops and other sizes each replica's loader hands out what is said, and no other."""
    chosen = random.Random(7)
    epoch = EPOCH if again else None
    stream, replicas = Numbers(), range(REPLICAS)
    loaders = [MicroBatchLoader(stream, 1, one, REPLICAS, samples_per_epoch=epoch, skip=skip) for one in replicas]
    batches = [StepBatches(loader, loader) for loader in loaders]
    before = [loader.position for loader in loaders]
    for step in range(60):
        planned, size = chosen.randint(2, 4), 1 if step < 30 else 2
        completed = tuple(chosen.randint(1, planned) for _ in range(REPLICAS))
        source = chosen.choice([None, None, 0, 1, 2])
        work = StepWork(size, planned, completed, source, given_up, again, skip)
        for loader in loaders:
            loader.micro_batch_size = size
        shared = None if source is None else Shared(source, tuple(loaders[source].next_positions))
        expected = planned_positions(before, work, epoch)
        for replica, (loader, kept) in enumerate(zip(loaders, batches, strict=True)):
            kept.begin(shared)
            taken = [next(kept)[0].flatten().tolist() for _ in range(completed[replica])]
            assert taken == expected[replica][: completed[replica]]
            assert [len(batch) for batch in expected[replica]] == [size] * planned
            if given_up and completed[replica] < planned:
                loader.skip_next(planned - completed[replica], again=again)
        before = advance(before, work, epoch)
        assert before == [loader.position for loader in loaders]
