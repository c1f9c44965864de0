"""Results of PyTorch's own submodules are within the referee's bounds, in all types, and wrong ones are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from megasdc.common.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.sdc.referee.foreign import is_plain, make_plain, tied_words
from megasdc.sdc.referee.recompute import LIKELY, PROVED, record_calls
from megasdc.sdc.referee.referee import is_within

SAMPLES, TOKENS, WIDTH, OUT = 3, 7, 40, 24
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, OUT),
    "without_bias": lambda: nn.Linear(WIDTH, OUT, bias=False),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "embedding": lambda: nn.Embedding(OUT, WIDTH),
    "padded": lambda: nn.Embedding(OUT, WIDTH, padding_idx=3),
    "silu": nn.SiLU,
    "silu_of_transformers": SiLUActivation,
    "gelu": nn.GELU,
    "gelu_by_tanh": lambda: nn.GELU("tanh"),
    "gelu_of_transformers": GELUActivation,
    "gelu_tanh_of_transformers": GELUTanh,
    "relu": nn.ReLU,
    "turned": lambda: Conv1D(OUT, WIDTH),
    "own_norm": lambda: LlamaRMSNorm(WIDTH),
    "column_parallel": lambda: LinearLayer(nn.Linear(WIDTH, OUT), skip_partition=True),
    "row_parallel": lambda: LinearAllreduce(nn.Linear(WIDTH, OUT, bias=False), None),
}
SUMS_OVER_RANKS = {"column_parallel": ("input",), "row_parallel": ("output",)}
"""Of layers of AutoTP."""
RESULTS = {
    **dict.fromkeys(("without_bias", "rms_norm", "own_norm", "column_parallel"), 3),
    **dict.fromkeys(("linear", "layer_norm", "turned"), 4),
}
"""Number of results; others have two."""


def _given(name: str, kind: torch.dtype) -> Tensor:
    if name in ("embedding", "padded"):
        return torch.randint(0, OUT, (SAMPLES, TOKENS))
    given = torch.randn(SAMPLES, TOKENS, WIDTH) * 3
    given[0, 0] = 1000.0  # sums that cancel
    given[0, 0, ::2] *= -1
    return given.to(kind).requires_grad_()


def _results(name: str, kind: torch.dtype, *, mixed: bool) -> Iterator[tuple[str, Tensor, Any]]:
    """What a submodule computes: name, result and exhibit."""
    module = MODULES[name]().to(kind).requires_grad_()
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter) * 30 * (parameter.dim() == 1)
    given = _given(name, kind)
    assert is_plain(module)
    with record_calls(module) as calls:
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
        yield slot, gradient, make_plain(address, calls, gradient, used_once=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_right_results_are_within_and_wrong_ones_outside(name: str, kind: torch.dtype | None) -> None:
    """Every element, forward and backward; ``None``: automatic mixed precision, where norms stay as they are."""
    torch.manual_seed(3)
    seen = 0
    for slot, result, exhibit in _results(name, kind or torch.float32, mixed=kind is None):
        if slot in SUMS_OVER_RANKS.get(name, ()) or (kind is None and name in SUMS_OVER_RANKS):
            assert exhibit is None, slot
            continue
        if name == "own_norm" and kind == torch.float16:
            assert exhibit is None, "its own operations may overflow, and its own code says whether they do"
            continue
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
    none = (name in SUMS_OVER_RANKS and kind is None) or (name == "own_norm" and kind == torch.float16)
    assert seen == (0 if none else RESULTS.get(name, 2))


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, lambda given: given * torch.sigmoid(given)),
    "gelu": (F.gelu, lambda given: given * 0.5 * (1.0 + torch.erf(given / 2**0.5))),
    "tanh": (lambda given: F.gelu(given, approximate="tanh"), NewGELUActivation()),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_activations_of_several_operations_are_within(name: str, kind: torch.dtype) -> None:
    """As kernels of others have them, each rounded to the type, forward and backward; from -9 to 9, and far off."""
    module: Any = nn.SiLU() if name == "silu" else nn.GELU("tanh" if name == "tanh" else "none")
    given = torch.cat((torch.linspace(-9, 9, 4001), torch.tensor([-60.0, 60.0]))).to(kind)[None].requires_grad_()
    slope = torch.ones_like(given)
    with record_calls(module) as calls:
        torch.autograd.grad(module(given), given, slope)
    for compute in OTHERS[name]:
        output = compute(given)
        (gradient,) = torch.autograd.grad(output, given, slope)
        for phase, slot, result in ((FORWARD, "output", output.detach()), (BACKWARD, "input", gradient)):
            exhibit = make_plain(Address(1, 0, phase, "m", slot), calls, result)
            assert exhibit is not None and exhibit.trust == PROVED
            columns = torch.arange(given.shape[1])
            assert is_within(result[0].double(), exhibit.compute(torch.zeros_like(columns), columns)).all(), slot


def test_a_norm_of_its_own_class_is_believed_where_agreeing_elements_are_within() -> None:
    """It may compute something else, which its weight and eps do not tell: here 1 + weight."""

    class Norm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, given: Tensor) -> Tensor:
            return given / (given.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt() * (1 + self.weight)

    module, given = Norm(WIDTH), torch.randn(2, WIDTH)
    with record_calls(module) as calls:
        output = module(given).detach()
    exhibit = make_plain(Address(1, 0, FORWARD, "m", "output"), calls, output)
    assert exhibit is not None and exhibit.trust == LIKELY and exhibit.trust.compared
    assert not is_within(output[0].double(), exhibit.compute(torch.zeros(WIDTH).long(), torch.arange(WIDTH))).all()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight_that_is_tied_is_the_sum_of_both(kind: torch.dtype, mixed: bool) -> None:
    """Of the embedding, without padding, and of the layer; a wrong one is outside."""
    torch.manual_seed(4)
    words, head = nn.Embedding(OUT, WIDTH, padding_idx=3).to(kind), nn.Linear(WIDTH, OUT, bias=False).to(kind)
    head.weight = words.weight
    ids = torch.randint(0, OUT, (SAMPLES, TOKENS))
    with record_calls(words) as of_words, record_calls(head) as of_head, torch.autocast("cpu", enabled=mixed):
        output = head(words(ids))
        (gradient,) = torch.autograd.grad(output, words.weight, torch.randn_like(output))
    exhibit = tied_words(of_words, of_head, gradient)
    assert exhibit is not None and not isinstance(exhibit, str)
    rows, columns = (one.flatten() for one in torch.meshgrid(torch.arange(OUT), torch.arange(WIDTH), indexing="ij"))
    exact, values = exhibit.compute(rows, columns), gradient.flatten().double()
    assert is_within(values, exact).all() and (~is_within(values + 4 * (1 + values.abs()), exact)).all()


class _Other(nn.Linear):
    """A layer that computes something else."""

    def forward(self, given: Tensor) -> Tensor:
        """Twice the product."""
        return super().forward(given) * 2


def test_what_is_not_known_is_left() -> None:
    """Other classes, weights that are made anew in each call, sums of several calls, parameters used elsewhere."""
    assert not is_plain(_Other(4, 4)) and not is_plain(nn.LayerNorm(4, elementwise_affine=False))
    assert not is_plain(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))) and not is_plain(nn.Tanh())
    module, given = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with record_calls(module) as calls:
        output = module(module(given))
        output.sum().backward()
    assert module.weight.grad is not None and given.grad is not None
    first = Address(1, 0, FORWARD, "m", "output")
    assert make_plain(first, calls, output) is not None
    for phase, slot, result in ((BACKWARD, "input", given.grad), (WEIGHT_GRAD, "weight", module.weight.grad)):
        assert make_plain(Address(1, 0, phase, "m", slot), calls, result, True) is None
    with record_calls(module) as calls:
        module(given).sum().backward()
    address = Address(1, 0, WEIGHT_GRAD, "m", "weight")
    assert make_plain(address, calls, module.weight.grad) is None
    assert make_plain(address, calls, module.weight.grad, True) is not None
    with record_calls(module) as calls:
        module(input=given)
    assert make_plain(first, calls, output) is None
