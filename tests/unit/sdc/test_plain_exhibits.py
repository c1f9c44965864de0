"""Results of PyTorch's own submodules are within the referee's bounds, in all types, and wrong ones are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasdc.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.sdc.exhibits.calls import kept_calls
from megasdc.sdc.exhibits.plain import is_plain, make_plain
from megasdc.sdc.fp64.referee import is_within

SAMPLES, TOKENS, WIDTH, OUT = 3, 7, 40, 24
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, OUT),
    "without_bias": lambda: nn.Linear(WIDTH, OUT, bias=False),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "embedding": lambda: nn.Embedding(OUT, WIDTH),
}


def _given(name: str, kind: torch.dtype) -> Tensor:
    if name == "embedding":
        return torch.randint(0, OUT, (SAMPLES, TOKENS))
    given = torch.randn(SAMPLES, TOKENS, WIDTH) * 3
    given[0, 0] = 1000.0  # sums that cancel
    given[0, 0, ::2] *= -1
    return given.to(kind).requires_grad_()


def _results(name: str, kind: torch.dtype, *, mixed: bool) -> Iterator[tuple[str, Tensor, Any]]:
    """What a submodule computes: name, result and exhibit."""
    module = MODULES[name]().to(kind)
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter) * 30 * (parameter.dim() == 1)
    given = _given(name, kind)
    assert is_plain(module)
    with kept_calls(module) as calls:
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            output = module(given)
        slopes = torch.randn(output.shape).to(output.dtype)
        wanted = {f"m.{key}": one for key, one in module.named_parameters()}
        if given.is_floating_point():
            wanted["input"] = given
        found = dict(zip(wanted, torch.autograd.grad(output, list(wanted.values()), slopes), strict=True))
    yield "output", output, make_plain(Address(1, 0, FORWARD, "m", "output"), calls, output)
    for key, gradient in found.items():
        slot = key.removeprefix("m.")
        address = Address(1, 0, BACKWARD if slot == "input" else WEIGHT_GRAD, "m", slot)
        yield slot, gradient, make_plain(address, calls, gradient, used_once=wanted)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_right_results_are_within_and_wrong_ones_outside(name: str, kind: torch.dtype | None) -> None:
    """Every element, forward and backward; ``None``: automatic mixed precision, where norms stay as they are."""
    torch.manual_seed(3)
    seen = 0
    for slot, result, exhibit in _results(name, kind or torch.float32, mixed=kind is None):
        assert exhibit is not None, slot
        rows, columns = (
            one.flatten() for one in torch.meshgrid(*map(torch.arange, exhibit.result.shape), indexing="ij")
        )
        exact = exhibit.compute(rows, columns)
        values = exhibit.result[rows, columns]
        assert values.dtype == result.dtype
        assert is_within(values.double(), exact).all(), slot
        wrong = values.double() + 4 * (1 + values.double().abs())
        assert (~is_within(wrong, exact)).double().mean() > 0.9, slot
        seen += 1
    assert seen == {"linear": 4, "without_bias": 3, "layer_norm": 4, "rms_norm": 3, "embedding": 2}[name]


class _Other(nn.Linear):
    """A layer that computes something else."""

    def forward(self, given: Tensor) -> Tensor:
        """Twice the product."""
        return super().forward(given) * 2


def test_what_is_not_known_is_left() -> None:
    """Other classes, weights that are made anew in each call, sums of several calls, parameters used elsewhere."""
    assert not is_plain(_Other(4, 4)) and not is_plain(nn.LayerNorm(4, elementwise_affine=False))
    assert not is_plain(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))) and not is_plain(nn.ReLU())
    module, given = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with kept_calls(module) as calls:
        output = module(module(given))
        output.sum().backward()
    assert module.weight.grad is not None and given.grad is not None
    first = Address(1, 0, FORWARD, "m", "output")
    assert make_plain(first, calls, output) is not None
    for phase, slot, result in ((BACKWARD, "input", given.grad), (WEIGHT_GRAD, "weight", module.weight.grad)):
        assert make_plain(Address(1, 0, phase, "m", slot), calls, result, {"m.weight"}) is None
    with kept_calls(module) as calls:
        module(given).sum().backward()
    address = Address(1, 0, WEIGHT_GRAD, "m", "weight")
    assert make_plain(address, calls, module.weight.grad) is None
    assert make_plain(address, calls, module.weight.grad, {"m.weight"}) is not None
    with kept_calls(module) as calls:
        module(input=given)
    assert make_plain(first, calls, output) is None
