"""Does every layout train the same model? Losses of all (TP, PP, DP) against one rank, with controls that must fail."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from harness import run_distributed
from tiny import GPT, LLAMA, full_tensors, make_engine, micro_batches, relative_distance, train_steps

pytestmark = pytest.mark.distributed

STEPS = 20
LAYOUTS = [layout for layout in itertools.product((1, 2), repeat=3) if layout != (1, 1, 1)]
CASES = {
    "gpt_fp32": (GPT, {"precision": "fp32"}, 1e-5),
    "llama_bf16": (LLAMA, {"precision": "bf16"}, 1e-2),
}
PAIRS = [(1, 2, 2), (2, 1, 2), (2, 2, 1)]
SINGLE = [(2, 1, 1), (1, 2, 1)]
FULL = [*(("gpt_fp32", layout) for layout in PAIRS), *(("llama_bf16", layout) for layout in (*PAIRS, *SINGLE))]
"""Layouts that others in every test run are made of, or have as parts; part of the full campaign."""
AGREEMENTS = [
    pytest.param(
        case,
        layout,
        id=f"{case}-{'x'.join(map(str, layout))}",
        marks=[pytest.mark.full] if (case, layout) in FULL else [],
    )
    for case, layout in itertools.product(CASES, LAYOUTS)
]


def _losses(model: dict[str, Any], tensor: int, pipeline: int, options: dict[str, Any], sabotage: str | None) -> Any:
    engine = make_engine(model, tensor, pipeline, **options)
    initial = full_tensors(engine)
    if sabotage == "tp_gradient_sum":
        for name, module in engine.module.named_modules():
            if name.endswith("2.layer.mlp.linear_fc1"):
                module.allreduce_dgrad, module.disable_grad_reduce = False, True
    elif sabotage == "tied_gradient":
        engine.module.tied_comms = {}
    elif sabotage == "micro_batch":
        engine.micro_batches -= 1
    return initial, [result["loss"] for result in train_steps(engine, 1, STEPS)]


@functools.cache
def _reference(case: str) -> Any:
    model, options, _ = CASES[case]
    return run_distributed(_losses, 1, model, 1, 1, options, None)[0]


def _run(case: str, layout: tuple[int, int, int], sabotage: str | None = None) -> tuple[bool, float]:
    """Whether the initial weights are bit-identical to one rank's, and the largest relative loss difference."""
    model, options, _ = CASES[case]
    tensor, pipeline, data = layout
    initial, losses = run_distributed(_losses, tensor * pipeline * data, model, tensor, pipeline, options, sabotage)[0]
    expected_initial, expected = _reference(case)
    assert initial.keys() == expected_initial.keys()
    same = all(torch.equal(initial[name], expected_initial[name]) for name in initial)
    return same, relative_distance(losses, expected)


@pytest.mark.parametrize(("case", "layout"), AGREEMENTS)
def test_layout_agrees_with_one_rank(case: str, layout: tuple[int, int, int]) -> None:
    """20 losses agree with one rank within 1e-5 (fp32) or 1e-2 (bf16), from bit-identical initial weights."""
    same, difference = _run(case, layout)
    assert same
    assert difference <= CASES[case][2]


@pytest.mark.parametrize(
    ("sabotage", "layout"), [("tp_gradient_sum", (2, 1, 1)), ("tied_gradient", (1, 2, 1)), ("micro_batch", (1, 1, 2))]
)
def test_a_broken_layout_is_noticed(sabotage: str, layout: tuple[int, int, int]) -> None:
    """The comparison fails when a gradient sum or a micro-batch is left out."""
    _, difference = _run("gpt_fp32", layout, sabotage)
    assert difference > CASES["gpt_fp32"][2]


FEATURES = {
    "dropout": ({**GPT, "hidden_dropout": 0.1, "attention_dropout": 0.1}, {}, False),
    "dropout_recompute": (
        {**GPT, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"deepspeed": {"pipeline": {"activation_checkpoint_interval": 1}}},
        False,
    ),
    "qk_layernorm": ({**LLAMA, "megatron": {"qk_layernorm": True}}, {}, False),
    "masked_tokens": (GPT, {"masks_tokens": True}, True),
}


def _feature_losses(
    model: dict[str, Any], tensor: int, pipeline: int, options: dict[str, Any], masked: bool
) -> tuple[list[Any], float]:
    engine = make_engine(model, tensor, pipeline, **options)
    results = train_steps(engine, 1, 6, masked)
    return results, engine.evaluate(micro_batches(engine, 99, masked), engine.gradient_accumulation_steps())


@functools.cache
def _feature_reference(feature: str) -> Any:
    model, options, masked = FEATURES[feature]
    without = {key: value for key, value in options.items() if key != "deepspeed"}
    return run_distributed(_feature_losses, 1, model, 1, 1, without, masked)[0]


IN_EVERY_RUN = [("dropout_recompute", False), *((feature, True) for feature in FEATURES if feature != "dropout")]


@pytest.mark.parametrize(
    ("feature", "sequence_parallel"),
    [
        pytest.param(feature, sequence, marks=[] if (feature, sequence) in IN_EVERY_RUN else [pytest.mark.full])
        for feature, sequence in itertools.product(FEATURES, (False, True))
    ],
)
def test_features_do_not_depend_on_the_layout(feature: str, sequence_parallel: bool) -> None:
    """Dropout, recompute, masked tokens and sequence parallelism at 2x2x2 agree with one rank without them."""
    model, options, masked = FEATURES[feature]
    options = {**options, "sequence_parallel": sequence_parallel}
    results, evaluated = run_distributed(_feature_losses, 8, model, 2, 2, options, masked)[0]
    expected, expected_eval = _feature_reference(feature)
    for got, wanted in zip(results, expected, strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert got["tokens"] == wanted["tokens"]
    assert evaluated == pytest.approx(expected_eval, rel=1e-5)
