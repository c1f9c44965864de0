"""Are weights brought together as float64 and torch's optimizer say, whatever their order?"""

from __future__ import annotations

import pytest
import torch

from megasdc.localsgd import outer
from megasdc.localsgd.outer import Agreed, OuterRule, distance


def _weights(seed: int, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("piece", [1 << 20, 7])
def test_the_mean_is_that_of_float64(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Weighted by tokens, rounded once, and the same whatever the order in which weights came and the pieces."""
    monkeypatch.setattr(outer, "PIECE", piece)
    tokens = {0: 4096, 2: 1000, 5: 3}
    masters = {replica: _weights(replica, 100, 33) for replica in tokens}
    agreed = Agreed(_weights(9, 100, 33), OuterRule())
    agreed.update(dict(reversed(masters.items())), tokens)
    for index, found in enumerate(agreed.weights):
        wanted = sum(masters[one][index].double() * tokens[one] for one in tokens) / 5099
        assert torch.equal(found, wanted.float())
    with pytest.raises(ValueError, match="0 tokens"):
        agreed.update({0: masters[0]}, {0: 0})


def test_nesterov_is_that_of_torch() -> None:
    """Several rounds of DiLoCo's outer optimizer against ``torch.optim.SGD`` in float64, within fp32's rounding."""
    before = _weights(0, 50)
    agreed = Agreed(before, OuterRule(nesterov=True, lr=0.7, momentum=0.9))
    parameter = torch.nn.Parameter(before[0].double())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(1, 6):
        masters = {one: [agreed.weights[0] + 0.1 * _weights(10 * round_ + one, 50)[0]] for one in range(2)}
        mean = (masters[0][0].double() + masters[1][0].double()) / 2
        parameter.grad = parameter.detach() - mean
        optimizer.step()
        agreed.update(masters, {0: 7, 1: 7})
        torch.testing.assert_close(agreed.weights[0].double(), parameter.detach(), rtol=1e-6, atol=1e-6)
    assert [one.shape for one in agreed.tensors] == [(50,), (50,)]


def test_the_distance_is_a_norm_and_finds_what_is_not_finite() -> None:
    """Over all partitions; NaN and Inf in one element are told."""
    one, other = _weights(1, 20, 5), _weights(2, 20, 5)
    squares, finite = distance(one, other)
    wanted = sum(float(((a.double() - b.double()) ** 2).sum()) for a, b in zip(one, other, strict=True))
    assert finite and squares == pytest.approx(wanted, rel=1e-12)
    for value in (float("nan"), float("inf"), -float("inf")):
        one[1][3] = value
        assert not distance(one, other)[1]
