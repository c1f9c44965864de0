"""Does a model train the same with fused modules? Losses against unfused ones, over layouts, and bits of two runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from harness import run_distributed
from tiny import GPT, LLAMA, make_engine, relative_distance, train_steps

from megasdc.model import fused, loss

pytestmark = pytest.mark.distributed

STEPS, ALL_STEPS = 40, 100
GPT2 = {**GPT, "hidden_dropout": 0.1}
FUNCTIONS = {
    "rms_norm": (LLAMA, lambda: fused.rms_norm(1e-5).forward),
    "activation": (LLAMA, lambda: _activation(LLAMA)),
    "rotate": (LLAMA, lambda: fused.rotate.forward),
    "residual_sum": (GPT2, lambda: fused.residual_sum.forward),
    "layer_norm": (GPT2, lambda: fused.layer_norm(1e-5).forward),
    "loss": (LLAMA, lambda: loss.probabilities_),
}


def _activation(model: dict[str, Any]) -> Any:
    from megasdc.model.gpt import ACTIVATIONS

    return fused.activation(ACTIVATIONS[model["activation"]], model["gated_mlp"], None, 0.0).forward


def _losses(model: dict[str, Any], steps: int, tensor: int, pipeline: int, options: dict[str, Any]) -> Any:
    """Losses, and how often fused functions were compiled."""
    engine = make_engine(model, tensor, pipeline, **options)
    losses = [result["loss"] for result in train_steps(engine, 1, 1)]
    first = _compilations()
    losses += [result["loss"] for result in train_steps(engine, 2, steps - 1)]
    assert _compilations() == first, "something was compiled after the first step"
    return losses, first


def _compilations() -> dict[str, int]:
    return {name: len(found().kinds) for name, (_, found) in FUNCTIONS.items()}


def _run(
    model: dict[str, Any], fuse: bool, steps: int, layout: tuple[int, int, int] = (1, 1, 1), **options: Any
) -> tuple[list[float], dict[str, int]]:
    tensor, pipeline, data = layout
    return run_distributed(
        _losses, tensor * pipeline * data, {**model, "fuse": fuse}, steps, tensor, pipeline, options
    )[-1]


@functools.cache
def _alone(steps: int = STEPS) -> tuple[list[float], dict[str, int]]:
    return _run(LLAMA, True, steps)


@pytest.mark.parametrize("steps", [STEPS, pytest.param(ALL_STEPS, marks=pytest.mark.full)])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_losses_are_those_of_unfused_modules(model: dict[str, Any], steps: int) -> None:
    """All steps within 1e-5 in fp32, with dropout from the same masks; every function of the model took part."""
    losses, compiled = _alone(steps) if model is LLAMA else _run(model, True, steps)
    unfused, none = _run(model, False, steps)
    assert relative_distance(losses, unfused) < 1e-5
    assert losses[-1] < losses[0] - 0.5, "it learns"
    assert set(none.values()) == {0}
    parts = {name for name, (kind, _) in FUNCTIONS.items() if kind is model} | {"loss"}
    assert {name for name, count in compiled.items() if count} >= parts


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param((2, 1, 1), {"sequence_parallel": True}, marks=pytest.mark.full),
        ((1, 2, 1), {}),
        pytest.param((1, 1, 2), {}, marks=pytest.mark.full),
    ],
    ids=["tp2_sequence", "pp2", "dp2"],
)
def test_layouts_agree_with_one_rank(layout: tuple[int, int, int], options: dict[str, Any]) -> None:
    """The vocabulary over two ranks, two stages, two replicas."""
    assert relative_distance(_run(LLAMA, True, 20, layout, **options)[0], _alone()[0][:20]) < 1e-5


def test_two_runs_have_equal_bits() -> None:
    """The same losses to the last bit from another process."""
    assert _run(LLAMA, True, 20)[0] == _alone()[0][:20]
