"""Do all ranks come to the same numbers in one reduction a step?"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasdc.parallel import collectives
from megasdc.parallel.collectives import MIN, Field, StepAgreement


class Ranks:
    """Stands for the reduction: what every rank has sent becomes the largest of all once the last one waits."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, numbers: torch.Tensor, **_: Any) -> Any:
        self.sent.append(numbers)
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        largest = torch.stack(self.sent).amax(0)
        for numbers in self.sent:
            numbers.copy_(largest)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks()
    monkeypatch.setattr(collectives.dist, "all_reduce", found.all_reduce)
    return found


def agree(of_ranks: list[list[Field]]) -> None:
    """One step of ranks that have these fields."""
    agreements = [StepAgreement(None) for _ in of_ranks]
    for agreement, fields in zip(agreements, of_ranks, strict=True):
        agreement.start(fields)
    for agreement in agreements:
        agreement.finish()


def test_every_reduction_has_the_same_result_on_all_ranks(ranks: Ranks) -> None:
    """The largest signal, the least time left, and what each replica's deciding rank has completed."""
    signals, left_s, completed = [0, 15, 10], [9.5, None, -2.25], [4, None, 3]

    def fields(rank: int) -> list[Field]:
        return [
            Field(lambda: signals[rank]),
            Field(lambda: left_s[rank], MIN, default=math.inf),
            Field(lambda: completed[rank], places=2, place=rank // 2),
        ]

    of_ranks = [fields(rank) for rank in range(3)]
    agree(of_ranks)
    assert len(ranks.sent) == 3, "one reduction, whatever the number of fields"
    for one in of_ranks:
        assert [field.values for field in one] == [[15.0], [-2.25], [4.0, 3.0]]


def test_a_number_that_no_rank_has_is_the_default_again(ranks: Ranks) -> None:
    """A result is of its own step alone."""
    numbers: list[float | None] = [7.0, None]
    field = Field(lambda: numbers.pop(0), default=-1.0)
    found = [field.value]
    for _ in range(2):
        agree([[field]])
        ranks.sent.clear()
        found.append(field.value)
    assert found == [-1.0, 7.0, -1.0]


def test_without_fields_nothing_is_exchanged(ranks: Ranks) -> None:
    """A step of an engine without hooks has no reduction more."""
    agree([[], []])
    assert not ranks.sent
