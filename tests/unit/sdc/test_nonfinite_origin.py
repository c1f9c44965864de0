"""Is the first NaN or Inf told from those that followed, and what came again from what did not?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, Address
from megasdc.model.submodules import Submodule
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.nonfinite import Explanation, InputKinds, NonFinite, NonFiniteOrigin, explain_origins, origin_here
from megasdc.tensors.bits import NAN

ORDER = ("a", "b", "loss")
ONE = ParallelDims(1, 1, 2)


def _at(phase: str, fqn: str, micro_batch: int = 0) -> NonFiniteOrigin:
    address = Address(3, micro_batch, phase, fqn, "output")
    return NonFiniteOrigin(NonFinite(address, 0, NAN), "host", True, True, True)


@pytest.mark.parametrize(
    ("before", "after", "rank", "fqn", "reproduced"),
    [
        ([None, _at(FORWARD, "b")], [None, _at(FORWARD, "a")], 1, "a", True),
        ([None, _at(FORWARD, "b")], [None, _at(FORWARD, "b")], 1, "b", True),
        ([None, _at(FORWARD, "a")], [_at(FORWARD, "b"), None], 1, "a", False),
        ([None, _at(BACKWARD, "loss")], [_at(BACKWARD, "a"), None], 1, "loss", False),
        ([None, _at(FORWARD, "a", 1)], [_at(BACKWARD, "b"), None], 0, "b", True),
        ([_at(FORWARD, "a"), None], None, 0, "a", None),
        ([_at(FORWARD, "a"), None], [None, None], 0, "a", False),
        ([None, None], [None, None], None, None, False),
        ([None, None], None, None, None, None),
    ],
)
def test_the_earliest_place_counts(
    before: list[NonFiniteOrigin | None],
    after: list[NonFiniteOrigin | None] | None,
    rank: int | None,
    fqn: str | None,
    reproduced: bool | None,
) -> None:
    """Of the step or of its repeat, whichever comes first; of equal ones the repeat, which has read the inputs."""
    found = explain_origins(before, after, ORDER, ONE)
    assert (found.rank, found.fields["fqn"], found.reproduced) == (rank, fqn, reproduced)
    assert found.fields["host"] == (None if rank is None else "host")
    assert {True: ", reproduced", False: "not reproduced", None: ""}[reproduced] in found.text


def test_inputs_are_of_their_direction_and_time() -> None:
    """Forward, recomputed and backward apart; unknown where a submodule was not called so often."""
    layer = nn.Linear(2, 2)
    kinds = InputKinds()
    address = {phase: Address(1, 0, phase, "layer", "output") for phase in (FORWARD, RECOMPUTE, BACKWARD)}
    with kinds.watch_inputs([Submodule("layer", "kind", layer, {})]):
        result = layer(torch.ones(1, 2))
        layer(torch.tensor([[1.0, torch.inf]]))
        result.backward(torch.tensor([[torch.nan, 1.0]]))
    assert [kinds.finite(address[phase]) for phase in (FORWARD, RECOMPUTE, BACKWARD)] == [True, False, False]
    assert kinds.finite(address[FORWARD], 2) is None
    assert kinds.finite(Address(1, 0, FORWARD, "loss", "output")) is True
    kinds.clear()
    assert kinds.finite(address[FORWARD]) is None


def test_parameters_are_looked_at() -> None:
    """Those of the submodule."""
    found = NonFinite(Address(1, 0, FORWARD, "layer", "output"), 0, NAN)
    said = [origin_here(found, None, [torch.tensor([one])], inputs_read=False) for one in (1.0, torch.nan)]
    assert [one.parameters_finite for one in said] == [True, False]


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ((), "NaN or Inf in the loss or the gradients"),
        ((1,), "NaN or Inf in the reduced gradients of rank 1"),
        ((0, 1, 3), "NaN or Inf in the reduced gradients of ranks 0-1, 3"),
    ],
)
def test_what_was_not_reproduced_is_told(ranks: tuple[int, ...], what: str) -> None:
    """With the ranks whose gradients it was in, where they are known."""
    assert Explanation(None, None, False, ranks).text.startswith(f"not reproduced: {what}; ")
