"""Disputes in which something raises, or takes too long, end with a reason on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasdc.attached.batch_replayer import Batch, SentTensor
from megasdc.common.addresses import FORWARD, Address
from megasdc.sdc.incident import Opinion
from megasdc.sdc.referee import rounding
from megasdc.sdc.referee.recompute import Exhibit
from megasdc.sdc.referee.referee import Referee, Subject, judge_exhibits, shown_by
from megasdc.sdc.referee.rounding import Exact
from tools.trainings.pair import Side, judge_pair

ADDRESS = Address(1, 0, FORWARD, "m", "output")


class _Sparse(nn.Module):
    """Sums over neighbours, which a sparse buffer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("near", torch.eye(6).to_sparse())

    def forward(self, given: Tensor) -> Tensor:
        """Of all."""
        return torch.sparse.mm(self.near, self.layer(given))


class _Join(nn.Module):
    """Of what came before, which may be nothing, and what is given."""

    def forward(self, past: Tensor, given: Tensor) -> Tensor:
        """Beside one another."""
        return torch.cat([past, given], -1).tanh()


class _Model(nn.Module):
    """A layer, one of the above, and a loss."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.kind, self.head = nn.Linear(8, 8), kind(), nn.Linear(8, 1)

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        """A loss."""
        found = self.first(given)
        joined = isinstance(self.kind, _Join)
        found = self.kind(found.new_empty(len(found), 0), found) if joined else self.kind(found)
        return {"loss": self.head(found).square().mean()}


@pytest.mark.parametrize(
    ("kind", "watched", "reason"), [(_Sparse, "kind.layer", "cannot be judged"), (_Join, "kind", "it has no elements")]
)
def test_a_model_that_cannot_be_judged_goes_on(kind: Callable[[], nn.Module], watched: str, reason: str) -> None:
    """A sparse buffer has no bytes that are compared; an empty input no rows."""
    sides, given = [], torch.randn(6, 8)
    for rank in range(2):
        torch.manual_seed(3)
        model = _Model(kind)
        if rank:
            model.get_submodule(watched).register_forward_hook(lambda _, __, output: output + 1e-6)
        sides.append(Side(rank, model, Batch((), {"given": SentTensor(given, False, True)}, None, {})))
    judged = judge_pair((sides[0], sides[1]))
    assert judged is not None and judged.named == [] and reason in judged.opinion.reason


def _hear(mine: dict[int, Iterator[Any]]) -> tuple[Opinion, int]:
    """What all ranks, and one that has nothing to show, say, and how often they have answered."""
    asked = [judge_exhibits(ADDRESS, [*mine], one) for one in (*mine.values(), iter(()))]
    sent: list[Any] = [next(one) for one in asked]
    count = 1
    while True:
        answers, ends = [], []
        for one in asked:
            try:
                answers.append(one.send(sent))
            except StopIteration as end:
                ends.append(end.value)
        if ends:
            assert not answers and all(one == ends[0] for one in ends), "all ranks answer as often"
            return ends[0], count
        sent, count = answers, count + 1


def _exhibit(**parts: Any) -> Exhibit:
    result = torch.arange(6.0).reshape(2, 3)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        values = result.double()[rows, columns]
        return Exact(values, torch.full_like(values, 1e-3))

    return Exhibit(**{"result": result, "factors": (torch.ones(2),), "compute": compute, **parts})


def _raises(*_: Any) -> Any:
    raise ArithmeticError("of the user")


BROKEN: dict[str, Callable[[], Exhibit | str]] = {
    "make": _raises,
    "factors": lambda: _exhibit(factors=(torch.eye(2).to_sparse(),)),
    "result": lambda: _exhibit(result=torch.empty(2, 3, device="meta")),
    "rows": lambda: _exhibit(result=torch.ones(4, 3)),
    "columns": lambda: _exhibit(result=torch.ones(2, 4)),
    "compute": lambda: _exhibit(result=torch.ones(2, 3), compute=_raises),
}


@pytest.mark.parametrize("where", BROKEN)
def test_what_raises_on_one_rank_leaves_no_other_waiting(where: str) -> None:
    """In what is shown first; what is shown next is judged."""
    wrong = torch.arange(6.0).reshape(2, 3) + (torch.arange(3) == 1)
    shown: dict[int, list[Callable[[], Exhibit | str]]] = {
        0: [_exhibit, _exhibit],
        1: [BROKEN[where], lambda: _exhibit(result=wrong)],
    }

    def mine(rank: int) -> Iterator[Exhibit | str]:
        subject = Subject([], [lambda *_, make=make: make() for make in shown[rank]])
        return shown_by(subject, ADDRESS, [], torch.ones(1), repeated=True)

    opinion, _ = _hear({rank: mine(rank) for rank in shown})
    assert opinion.within == {0: True, 1: False}
    del shown[0][1], shown[1][1]
    opinion, _ = _hear({rank: mine(rank) for rank in shown})
    reason = "differs already" if where in ("rows", "columns") else "rank 1: it cannot be judged: "
    assert not opinion.within and reason in opinion.reason


class _Refuses(nn.Module):
    """Its methods cannot be replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("subject_of", [_raises, lambda _: Subject([nn.Tanh(), _Refuses()], [])])
def test_a_rank_whose_calls_cannot_be_kept_repeats_what_the_others_do(subject_of: Callable[[str], Subject]) -> None:
    """All ranks wait for each other while they repeat a micro-batch."""
    repeats: list[int] = []

    def repeat() -> dict[int, int]:
        repeats.append(1)
        return {0: 1}

    (shown,) = Referee(subject_of, 0, None).exhibits(ADDRESS, {0: 1, 1: 2}, repeat)
    assert "cannot be judged" in str(shown) and repeats == [1]


def test_a_dispute_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two operations, in all of a dispute; what follows has its own time."""
    compute = partial(torch.ones, 3, dtype=torch.float64)
    budget = rounding.NoiseBudget()
    with budget.spent():
        rounding.estimate(compute, torch.float32)
    monkeypatch.setattr(rounding, "BUDGET_S", 0.0)
    spent = rounding.NoiseBudget()
    with spent.spent(), pytest.raises(rounding.Unfit, match="takes more than"):
        rounding.estimate(compute, torch.float32)
    with budget.spent():
        rounding.estimate(compute, torch.float32)
    rounding.estimate(compute, torch.float32)


@pytest.mark.parametrize("kind", ["mm", "addmm", "bmm"])
def test_a_product_that_would_take_long_is_not_begun(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operands may be small."""
    left, right = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64)
    products: dict[str, Callable[[], Tensor]] = {
        "mm": lambda: left @ right,
        "addmm": lambda: torch.addmm(torch.ones(5, dtype=torch.float64), left, right),
        "bmm": lambda: torch.bmm(left[None], right[None]),
    }
    monkeypatch.setattr(rounding, "MOST_PRODUCTS", 2 * 3 * 5)
    rounding.estimate(products[kind], torch.float32)
    monkeypatch.setattr(rounding, "MOST_PRODUCTS", 2 * 3 * 5 - 1)
    with pytest.raises(rounding.Unfit, match="too many elements"):
        rounding.estimate(products[kind], torch.float32)
