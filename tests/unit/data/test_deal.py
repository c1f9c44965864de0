"""Micro-batches dealt to replicas that cannot have equally many: each step has its samples, each sample comes once."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from megasdc.data.loader import MicroBatchLoader
from megasdc.data.position import Order, Position, UnevenSplit, merge_positions


class Numbers:
    """A stream in which every token of a sample is its position."""

    path, identity, vocab_size = "numbers", "numbers", 10**6

    def __len__(self) -> int:
        return 10**6

    def extend(self, num_samples: int) -> None:
        assert num_samples < len(self), "long enough"

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.tensor([position]), torch.tensor([position]), torch.ones(1)


def build_loaders(replicas: int, size: int, together: int) -> list[MicroBatchLoader]:
    """Loaders at the beginning of the stream."""
    begin = Position(order=Order(together=together))
    return [MicroBatchLoader(Numbers(), size, one, replicas, begin) for one in range(replicas)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("replicas", [[3], [4, 3], [4, 3, 4], [3, 5, 7, 2, 16, 5], [7, 6, 5, 7]])
def test_a_step_has_its_samples_whoever_takes_them(size: int, replicas: list[int]) -> None:
    """16 micro-batches a step; over changes of the number of replicas, 11 steps after each other one."""
    micro_batches, batch, step, loaders = 16, 16 * size, 0, build_loaders(replicas[0], size, 1)
    for number in replicas:
        together = 1 if micro_batches % number == 0 else size
        merged = json.loads(json.dumps(merge_positions([one.state_dict() for one in loaders])))
        loaders = build_loaders(number, size, together)
        for loader in loaders:
            loader.move_to(merged)
        deal = UnevenSplit(micro_batches, number, loaders[0].position.order.before // size)
        for _ in range(11):
            step += 1
            counts = [deal.count(step, one) for one in range(number)]
            assert sum(counts) == micro_batches and max(counts) - min(counts) <= 1
            found, places = [], []
            for replica, (loader, count) in enumerate(zip(loaders, counts, strict=True)):
                for micro_batch in range(count):
                    positions = loader.next_positions
                    assert next(loader)[0].flatten().tolist() == positions
                    found += positions
                    places += [deal.place(step, replica, micro_batch) * size + one for one in range(size)]
            begin = (step - 1) * batch
            assert sorted(found) == list(range(begin, step * batch))
            if together == size:
                assert [begin + one for one in places] == found
            if together == size:
                order, taken = loaders[0].position.order, [one.position.consumed // size for one in loaders]
                ends = {deal.end(step, one, taken[one]) for one in range(number)}
                assert {order[end * size - 1] + 1 for end in ends} == {step * batch}
    assert step == 11 * len(replicas)


def test_in_turn_each_replica_takes_one_more() -> None:
    """16 on 3 replicas: over three steps each takes 16."""
    deal = UnevenSplit(16, 3)
    counts = [[deal.count(step, one) for one in range(3)] for step in (1, 2, 3, 4)]
    assert counts == [[6, 5, 5], [5, 6, 5], [5, 5, 6], [6, 5, 5]]
    assert all(one != other for one, other in pairwise(counts))
