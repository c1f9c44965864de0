"""Do fused functions give the values and gradients of their formulas in fp64, in every type, with one compilation each?

The formulas are PyTorch's own operators in fp64.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megasdc.common.errors import LaunchError, StorageError
from megasdc.model import fused
from megasdc.model import loss as fused_loss
from megasdc.model.fused import CACHE_VARIABLE
from megasdc.model.gpt import residual_sum, rotate
from megasdc.model.loss import TokenLoss, VocabParallelCrossEntropy

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
H, EPS = 64, 1e-5

tanh_gelu = functools.partial(F.gelu, approximate="tanh")


def _swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    gate, linear = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * linear


def _clamped(x: Tensor, bias: Tensor) -> Tensor:
    gate, linear = (x + bias).chunk(2, -1)
    return F.silu(gate.clamp(max=0.7)) * (linear.clamp(-0.7, 0.7) + 1)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, WIDE, MASK = _normal(6, 2, H), _normal(6, 2, 2 * H), (_normal(2, 6, H) > 0).transpose(0, 1) / 0.5
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "rms_norm": (fused.rms_norm(EPS), lambda x, w: F.rms_norm(x, (H,), w, EPS), (X, _normal(H))),
    "layer_norm": (
        fused.layer_norm(EPS),
        lambda x, w, b: F.layer_norm(x, (H,), w, b, EPS),
        (X + 3, _normal(H), _normal(H)),
    ),
    "swiglu": (fused.activation(F.silu, True), _swiglu, (WIDE, None)),
    "clamped": (fused.activation(F.silu, True, 0.7, 1.0), _clamped, (WIDE, _normal(2 * H))),
    "gelu": (fused.activation(tanh_gelu), lambda x, b: tanh_gelu(x + b), (WIDE, _normal(2 * H))),
    "rotate": (
        fused.rotate,
        rotate,
        (_normal(5, 2, 4, 16).transpose(0, 1), _normal(2, 5, 2, 16), _normal(2, 1, 1, 16), _normal(2, 1, 1, 16)),
    ),
    "residual_sum": (fused.residual_sum, residual_sum, (X, _normal(H), MASK, _normal(2, 6, H).transpose(0, 1))),
}


def _results(function: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    """Values and gradients for random gradients of the values; the arguments are those of the narrow type."""
    leaves = [None if a is None else a.to(dtype).requires_grad_() for a in args]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    weights = [_normal(*output.shape, 1)[..., 0].to(dtype) for output in outputs]
    gradients = torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], weights)
    return [*outputs, *gradients]


def _close(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    assert len(found) == len(expected)
    for ours, right in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        error = ((ours.double() - right).abs().max() / right.abs().max()).item()
        assert error < TOLERANCE[dtype], f"relative error {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_functions_agree_with_fp64(name: str) -> None:
    """Values and gradients in fp32, for strided arguments too."""
    ours, formula, args = CASES[name]
    _close(_results(ours, args, torch.float32), _results(formula, args, torch.float64), torch.float32)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_narrow_types_are_rounded_once(name: str) -> None:
    """In bf16 only arguments and results are rounded, not what lies between."""
    ours, formula, args = CASES[name]
    narrow = tuple(a if a is None else a.bfloat16().float() for a in args)
    _close(_results(ours, narrow, torch.bfloat16), _results(formula, narrow, torch.float64), torch.bfloat16)


def _loss(logits: Tensor, labels: Tensor, mask: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the logits, and the buffer that was handed to the loss."""
    leaf = logits.clone().requires_grad_()
    handed = leaf * 1
    total = loss(handed, (labels, mask))
    return total.detach(), torch.autograd.grad(total * 1024, leaf)[0] / 1024, handed


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "offset"), [(4, 0), (4, 1000), (100, 1000)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cross_entropy_agrees_with_fp64(
    dtype: torch.dtype, scale: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding columns, masked tokens, a last chunk that is shorter; the gradient lies where the logits were.

    Large logits cost no precision: neither a common offset nor differences of hundreds.
    """
    s, b, v, real = 7, 2, 96, 90
    monkeypatch.setitem(fused_loss.CHUNK_BYTES, "cpu", 4 * v * dtype.itemsize)
    logits = (_normal(s, b, v) * scale + offset).to(dtype)
    labels = torch.arange(s * b).reshape(b, s) * 6 % real
    mask = torch.ones(b, s)
    mask[1, 3:] = 0
    value, gradient, buffer = _loss(logits, labels, mask, TokenLoss(real, v, 0, 1, fuse=True))
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide[..., :real].flatten(0, 1), labels.T.flatten(), reduction="none").view(s, b).T
    expected = (losses * mask).sum() / mask.numel()
    (right,) = torch.autograd.grad(expected, wide)
    assert abs(value.item() - expected.item()) < 1e-5 * max(1.0, expected.item() / 10)
    _close([gradient], [right], dtype)
    assert torch.equal(gradient[..., real:], torch.zeros(s, b, v - real, dtype=dtype))
    assert not torch.equal(buffer, logits), "the gradient has taken the logits' place"


def test_observed_logits_are_not_overwritten() -> None:
    """Whoever looks at the logits finds them; the gradient has the same bits."""
    logits, labels, mask = _normal(7, 2, 96) * 4, torch.arange(14).reshape(2, 7), torch.ones(2, 7)
    loss = TokenLoss(96, 96, 0, 1, fuse=True)
    alone = _loss(logits, labels, mask, loss)
    loss.observe = lambda name, value: None
    seen = _loss(logits, labels, mask, loss)
    assert torch.equal(seen[2], logits)
    assert torch.equal(seen[0], alone[0]) and torch.equal(seen[1], alone[1])


def test_a_second_backward_is_refused() -> None:
    """It would scale the gradient twice."""
    logits = (_normal(7, 2, 96) * 4).requires_grad_()
    total = TokenLoss(96, 96, 0, 1, fuse=True)(logits * 1, (torch.arange(14).reshape(2, 7), torch.ones(2, 7)))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("offset", [0, 1000])
def test_divided_columns_show_what_unfused_shows(tmp_path: Path, offset: int) -> None:
    """Maximum, predicted logit and sum of a rank, with labels elsewhere and padding; loss and gradient too."""
    logits, labels = _normal(5, 2, 48) * 3 + offset, torch.tensor([[0, 90], [50, 47], [12, 3], [40, 41], [70, 59]])
    seen: dict[str, dict[str, Tensor]] = {"fused": {}, "unfused": {}}
    masked = logits.clone()
    masked[..., 44:] = torch.finfo(torch.float32).min
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        leaves = [logits.clone().requires_grad_(), masked.requires_grad_()]
        plain = VocabParallelCrossEntropy.apply(
            leaves[1] * 1, labels, 16, dist.group.WORLD, lambda n, x: seen["unfused"].update({n: x.clone().flatten()})
        ).flatten()
        ours = fused_loss.parallel_token_losses(
            (leaves[0] * 1).flatten(0, 1),
            labels.flatten(),
            44,
            True,
            16,
            dist.group.WORLD,
            lambda n, x: seen["fused"].update({n: x.clone()}),
        )
        for total in (ours, plain):
            total.sum().backward()
    finally:
        dist.destroy_process_group()
    assert list(seen["fused"]) == ["maximum", "predicted", "sum"]
    for name, value in seen["unfused"].items():
        torch.testing.assert_close(seen["fused"][name], value)
    here = (labels >= 16) & (labels < 60)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(leaves[0].grad[here], leaves[1].grad[here])
    torch.testing.assert_close(leaves[0].grad[~here], leaves[1].grad[~here])


def test_one_compilation_a_kind_of_arguments() -> None:
    """Other values, evaluation and inference compile nothing; another length does, once."""
    norm = fused.Fused(fused.rms_norm(EPS).function)
    for _ in range(2):
        _results(norm, (X, _normal(H)), torch.float32)
    with torch.inference_mode():
        assert norm(X + 1, _normal(H)).is_inference()
    kinds = [norm.forward, norm.backward((True, True))]
    assert [len(one.kinds) for one in kinds] == [1, 1]
    for _ in range(2):
        norm(X[:4], _normal(H))
    assert [len(one.kinds) for one in kinds] == [2, 1]


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 78 with what is missing and what to do."""
    fused.find_compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        with pytest.raises(LaunchError, match=r"model\.fuse: got true.*no-such-compiler.*set megasdc") as error:
            fused.require_compiler("cpu")
        with pytest.raises(LaunchError, match="no-such-compiler"):
            fused.Fused(lambda x: x + 1)(X)
    finally:
        fused.find_compiler.cache_clear()
    assert error.value.exit_code == 78


def test_triton_is_looked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without it the early check ends with exit code 78; its version is its own, whatever the name of its wheel."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fused, "find_compiler", lambda device: f"a compiler for {device}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    for call in (lambda: fused.require_compiler("cuda"), fused.code_generator):
        with pytest.raises(
            LaunchError, match=r"model\.fuse: got true.*Triton cannot be imported.*set megasdc"
        ) as error:
            call()
        assert error.value.exit_code == 78
    fused.require_compiler("cpu")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.9.1+image"))
    fused.require_compiler("cuda")
    assert fused.code_generator() == "triton 3.9.1+image"


@pytest.mark.parametrize("kind", ["missing", "too old"])
def test_what_triton_refuses_while_compiling_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor raises its own errors where Triton is not usable or the GPU is too old: exit code 78 with both names."""
    from torch._inductor import exc

    old = SimpleNamespace(name="an old GPU", major=6, minor=1)
    raised = exc.TritonMissing(None) if kind == "missing" else exc.GPUTooOldForTriton(old, None)

    def compile_graph(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("torch._inductor.compile", compile_graph)
    with pytest.raises(LaunchError, match=rf"halved was not compiled.*{'triton' if kind == 'missing' else 'old GPU'}"):
        fused.Fused(halved)(_normal(3, 6))


def test_a_compiler_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that tells its version and compiles nothing: exit code 78 with the function and what the compiler said."""
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho no space left >&2; exit 1\n')
    broken.chmod(0o755)
    fused.find_compiler.cache_clear()
    monkeypatch.setenv("CXX", str(broken))
    refused = pytest.raises(LaunchError, match=r"(?s)halved was not compiled.*no space left")
    try:
        with (
            importlib.import_module("torch._inductor.config").patch({"cpp.cxx": (None, str(broken))}),
            refused as error,
        ):
            fused.Fused(halved)(_normal(3, 5))
    finally:
        fused.find_compiler.cache_clear()
    assert error.value.exit_code == 78


def halved(x: Tensor) -> Tensor:
    """A function that no other test compiles."""
    return (x * 0.5).sin() + 0.25


def test_a_cache_folder_must_be_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 77 with the folder and what to set."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "inductor"))
    with pytest.raises(StorageError, match=r"file/inductor: .*set TORCHINDUCTOR_CACHE_DIR"):
        fused.require_compiler("cpu")
