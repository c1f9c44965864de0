"""The referee, ``python -m tools.bench referee``: whether it accuses a healthy device, and which flips of bits it sees.

Each kind of result is computed by this device's own routines in several ways: a processor's with one thread and with
two, and with oneDNN and without; a GPU's with cuBLAS and cuBLASLt, and attention by each of its kernels. Pairs of
these are given to the referee as if two ranks had computed them. None may be named. Then one bit of an element is
flipped, and the healthy one stands against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megasdc.common.errors import ConfigError
from megasdc.config.sections import DeterminismSection
from megasdc.determinism import set_deterministic
from megasdc.model.gpt import ACTIVATIONS
from megasdc.model.loss import TokenLoss
from megasdc.sdc.referee.attention import attended, elements, from_exact, head_gradients
from megasdc.sdc.referee.referee import judge_rounding
from megasdc.sdc.referee.rounding import (
    Exact,
    NormMoments,
    activated,
    activated_input,
    logit_gradients,
    norm_input,
    norm_weight,
    normalized,
    product,
    residual,
    token_losses_fp64,
)
from tools.bench.clocks import devices_here
from tools.bench.detection.options import RefereeOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress
from tools.bench.result import Report, Result, Told, listing, table
from tools.trainings.numerics import cpu_threads

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MANTISSA = {32: 23, 16: 7}
"""Bits of it, the lowest ones, by those of the whole; a loss has 32 whatever its logits have."""
EPS = 1e-5
Drawn = tuple[Callable[[], Tensor], Exact]
"""Computes the elements, as the device does; and what they should be."""


@dataclass(frozen=True)
class Answers:
    """What the referee said of one kind of result.

    Args:
        compared: healthy elements.
        apart: of these, in which two ways of computing them differ.
        accused: that were outside of their bound.
        nearest: largest share of its bound that a healthy element was off by.
        undecided: without a bound.
        seen: flips of each bit, lowest first, that were seen, and how many there were.
    """

    kind: str
    type: str
    compared: int
    apart: int
    accused: int
    nearest: float
    undecided: int
    seen: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RefereeResult(Result):
    """Answers by kind of result and type."""

    answers: Sequence[Answers] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether no healthy element was accused."""
        return not any(one.accused for one in self.answers)

    def report(self) -> Report:
        """Healthy elements, and shares of flips that were seen."""
        columns: Told = {
            "result": lambda one: one.kind,
            "type": lambda one: one.type,
            "compared": lambda one: f"{one.compared:,}",
            "apart": lambda one: f"{one.apart:,}",
            "accused": lambda one: f"{one.accused:,}",
            "nearest to its bound": lambda one: f"{one.nearest:.2f}",
            "no bound": lambda one: f"{one.undecided:,}",
        }
        yield listing("elements of a healthy device", columns, self.answers)
        seen = ("result", "type", "half from bit", "95 % from bit", "of the mantissa, %", "of exponent and sign, %")
        yield table("flips of a bit that are seen", seen, [_row(one) for one in self.answers])


def _row(one: Answers) -> tuple[str, ...]:
    shares = [seen / max(of, 1) for seen, of in one.seen]
    mantissa = MANTISSA[len(shares)]
    halves = (next((bit for bit, share in enumerate(shares) if share >= least), None) for least in (0.5, 0.95))
    parts = (sum(part) / len(part) for part in (shares[:mantissa], shares[mantissa:]))
    return (
        one.kind,
        one.type,
        *("-" if bit is None else str(bit) for bit in halves),
        *(f"{100 * share:.0f}" for share in parts),
    )


def bench_referee(options: RefereeOptions, on_progress: Progress = ignore_progress) -> RefereeResult:
    """Ask the referee of healthy results, and of flipped bits."""
    machine = describe_machine()
    if options.device == "cuda" and "cuda" not in devices_here(machine)[0]:
        raise ConfigError("--device cuda: torch sees no CUDA device; without the option the processor is measured")
    answers: list[Answers] = []
    total = len(KINDS) * len(TYPES)
    on_progress("kinds of results", 0, total)
    for one in judge_results(options):
        answers.append(one)
        on_progress("kinds of results", len(answers), total)
    return RefereeResult(machine, options, answers)


def judge_results(options: RefereeOptions) -> Iterator[Answers]:
    """Ask of one kind of result after the other, in each type, on the device that is the options'."""
    undo = set_deterministic(DeterminismSection.model_validate({"enabled": True}))  # what a run permits its libraries
    try:
        for name, make in KINDS.items():
            for kind, dtype in TYPES.items():
                with torch.device(options.device):
                    found = _judge(name, kind, partial(make, options.width, dtype), options)
                yield found
    finally:
        undo()


def _judge(name: str, kind: str, draw: Callable[[], Drawn], options: RefereeOptions) -> Answers:
    found = Answers(name, kind, 0, 0, 0, 0.0, 0, ())
    flips = torch.zeros((), dtype=torch.int64)
    torch.manual_seed(options.seed)
    while found.compared < options.elements:
        compute, exact = draw()
        results = {}
        for number, mode in enumerate(MODES[options.device].values()):
            with mode():
                results[number] = compute().detach().flatten()
        named = judge_rounding(results, exact)
        off = torch.stack([(one.double() - exact.values).abs() / exact.bounds for one in results.values()])
        bounded = exact.bounds.isfinite()
        outside = int((off[:, bounded] > 1).sum())
        found = replace(
            found,
            compared=found.compared + off.numel(),
            apart=found.apart + int(sum((one != results[0]).sum() for one in results.values())),
            accused=found.accused + max(outside, int(bool(named))),
            nearest=max(found.nearest, off[:, bounded].max().item() if bounded.any() else 0.0),
            undecided=found.undecided + int((~bounded).sum()) * len(results),
        )
        flips = flips + _flips(results[0], exact, options.flips)
    return replace(found, seen=tuple(zip(*flips.tolist(), strict=True)))


def _flips(healthy: Tensor, exact: Exact, count: int) -> Tensor:
    """How many flips of each bit of the first elements were seen, and how many there were, [2, bits]."""
    bits = torch.finfo(healthy.dtype).bits
    whole = torch.int32 if bits == 32 else torch.int16
    found = torch.zeros(2, bits, dtype=torch.int64)
    for place in torch.randperm(len(healthy))[:count].tolist():
        own = Exact(exact.values[place : place + 1], exact.bounds[place : place + 1])
        right = healthy[place : place + 1]
        for bit in range(bits):
            mask = torch.tensor(1 << bit if bit < bits - 1 else -(1 << bit), dtype=whole)
            wrong = (right.view(whole) ^ mask).view(healthy.dtype)
            found[0, bit] += bool(judge_rounding({0: right, 1: wrong}, own))
            found[1, bit] += 1
    return found


@contextmanager
def _on_processor(threads: int, library: bool) -> Iterator[None]:
    with cpu_threads(threads), torch.backends.mkldnn.flags(enabled=library):
        yield


@contextmanager
def _on_gpu(library: str, attention: SDPBackend) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        with sdpa_kernel([attention, SDPBackend.MATH]):
            yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


MODES: Mapping[str, Mapping[str, Callable[[], AbstractContextManager[None]]]] = {
    "cpu": {
        "1 thread": partial(_on_processor, 1, True),
        "2 threads": partial(_on_processor, 2, True),
        "without oneDNN": partial(_on_processor, 1, False),
    },
    "cuda": {
        "cuBLAS, flash attention": partial(_on_gpu, "cublas", SDPBackend.FLASH_ATTENTION),
        "cuBLASLt, memory-efficient attention": partial(_on_gpu, "cublaslt", SDPBackend.EFFICIENT_ATTENTION),
        "attention of several operations": partial(_on_gpu, "cublas", SDPBackend.MATH),
    },
}
"""Ways to compute, by device."""


# --- kinds of results ---------------------------------------------------------------------------------------------


def _scaled(*shape: int) -> Tensor:
    """Normal numbers, each row with a scale of its own."""
    return torch.randn(*shape) * torch.exp(torch.randn(*shape[:-1], 1))


def _linear(width: int, kind: torch.dtype) -> Drawn:
    left, weight = _scaled(32, width).to(kind), torch.randn(64, width).to(kind)
    pairs = left[:, None].expand(32, 64, width).reshape(-1, width), weight.repeat(32, 1)
    return lambda: left @ weight.T, product(*pairs, kind)


def _bias(width: int, kind: torch.dtype) -> Drawn:
    gradient = _scaled(width, 256).to(kind)
    return lambda: gradient.sum(0), product(gradient.T, torch.ones_like(gradient.T), kind)


def _residual(width: int, kind: torch.dtype) -> Drawn:
    branch, other = _scaled(2, 4 * width).to(kind)
    bias, mask = torch.randn(4 * width).to(kind), ((torch.rand(4 * width) > 0.1) / 0.9).to(kind)
    return lambda: other + (branch + bias) * mask, residual(branch, bias, mask, other, kind)


def _norm(centred: bool, width: int, kind: torch.dtype) -> Drawn:
    rows = (_scaled(16, width) + torch.randn(16, 1)).to(kind)
    weight, bias = torch.randn(2, width).to(kind)
    columns, every = torch.arange(width).repeat(16), rows.repeat_interleave(width, 0)
    moments, added = NormMoments.of(every, EPS, centred=centred), bias[columns] if centred else None
    exact = normalized(rows.flatten(), moments, weight[columns], added, kind, width)
    return partial(_normalize, centred, rows, weight, bias), exact


def _normalize(centred: bool, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    shape = (rows.shape[-1],)
    return F.layer_norm(rows, shape, weight, bias, EPS) if centred else F.rms_norm(rows, shape, weight, EPS)


def _norm_gradient(centred: bool, of_weight: bool, width: int, kind: torch.dtype) -> Drawn:
    rows = (_scaled(16, width) + torch.randn(16, 1)).to(kind)
    weight, bias = torch.randn(2, width).to(kind)
    slope = _scaled(16, width).to(kind)

    def compute() -> Tensor:
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        found = torch.autograd.grad(_normalize(centred, *leaves, bias), leaves[of_weight], slope)
        return found[0]

    if of_weight:
        return compute, norm_weight(slope.T, rows.T, NormMoments.of(rows, EPS, centred=centred), kind, width)
    columns, every = torch.arange(width).repeat(16), rows.repeat_interleave(width, 0)
    moments = NormMoments.of(every, EPS, centred=centred)
    slopes = slope.repeat_interleave(width, 0)
    return compute, norm_input(slopes, every, columns, moments, weight, kind, centred=centred)


def _activation(name: str, width: int, kind: torch.dtype) -> Drawn:
    function = ACTIVATIONS[name]
    gate, linear = _scaled(2, 4 * width).to(kind)
    bias, other = torch.randn(2, 4 * width).to(kind)
    exact = activated(function, gate, bias, (linear, other), kind)
    return lambda: function(gate + bias) * (linear + other), exact


def _activation_gradient(name: str, width: int, kind: torch.dtype) -> Drawn:
    function = ACTIVATIONS[name]
    gate, linear, slope = _scaled(3, 4 * width).to(kind)

    def compute() -> Tensor:
        leaf = gate.clone().requires_grad_()
        return torch.autograd.grad(function(leaf) * linear, leaf, slope)[0]

    return compute, activated_input(function, slope, gate, None, (linear, None), kind, steps=name == "relu")


def _loss(of_logits: bool, width: int, kind: torch.dtype) -> Drawn:
    logits, labels = _scaled(64, width).to(kind), torch.randint(0, width, (64,))
    slopes, loss = torch.rand(64) / 64, TokenLoss(width, width, 0, 1)

    def compute() -> Tensor:
        leaf = logits.clone().requires_grad_()
        found = loss.per_token(leaf[:, None], labels[None])
        return torch.autograd.grad(found, leaf, slopes[None])[0] if of_logits else found

    if not of_logits:
        return compute, token_losses_fp64(logits, labels)
    rows, columns = torch.arange(64).repeat_interleave(width), torch.arange(width).repeat(64)
    return compute, logit_gradients(logits, labels, slopes, rows, columns, kind)


def _attention(width: int, kind: torch.dtype) -> Drawn:
    query, key, value = torch.randn(3, 1, 1, 256, 64).to(kind)
    scale, zero = 64**-0.5, torch.zeros(256, 64, dtype=torch.float64)

    def row(number: int) -> Exact:
        seen = (key[0, 0, : number + 1].double(), zero[: number + 1])
        asked = query[0, 0, number].double(), zero[0]
        return attended(asked, seen, value[0, 0, : number + 1], scale, kind)

    rows = list(map(row, range(256)))
    exact = Exact(torch.cat([one.values for one in rows]), torch.cat([one.bounds for one in rows]))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale), exact


def _attention_gradient(place: int, width: int, kind: torch.dtype) -> Drawn:
    factors, slope = torch.randn(3, 1, 1, 256, 64).to(kind), torch.randn(1, 1, 256, 64).to(kind)
    query, key, value = factors
    scale = 64**-0.5

    def compute() -> Tensor:
        q, k, v = (one.clone().requires_grad_() for one in factors)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return torch.autograd.grad(output, (q, k, v), slope)[place]

    found = head_gradients(from_exact(query[0, 0]), from_exact(key[0, 0]), value[0, 0], slope[0, 0], scale, kind)[place]
    return compute, elements(found, torch.arange(256).repeat_interleave(64), torch.arange(64).repeat(256), kind)


KINDS: Mapping[str, Callable[[int, torch.dtype], Drawn]] = {
    "linear layer, and its gradients": _linear,
    "gradient of a bias": _bias,
    "residual sum": _residual,
    "LayerNorm": partial(_norm, True),
    "RMSNorm": partial(_norm, False),
    "LayerNorm, gradient of the input": partial(_norm_gradient, True, False),
    "RMSNorm, gradient of the input": partial(_norm_gradient, False, False),
    "LayerNorm, gradient of the weight": partial(_norm_gradient, True, True),
    "RMSNorm, gradient of the weight": partial(_norm_gradient, False, True),
    **{f"{name}, gated": partial(_activation, name) for name in ACTIVATIONS},
    **{f"{name}, gated, gradient of the gate": partial(_activation_gradient, name) for name in ACTIVATIONS},
    "loss": partial(_loss, False),
    "gradient of the logits": partial(_loss, True),
    "attention": _attention,
    **{
        f"attention, gradient of the {name}": partial(_attention_gradient, place)
        for place, name in enumerate(("query", "key", "value"))
    },
}
