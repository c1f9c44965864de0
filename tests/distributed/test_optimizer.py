"""Does one ZeRO-1 step equal plain torch.optim.AdamW? Both DeepSpeed optimizers, with TP and PP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from tiny import GPT, LLAMA, GradientTap, full_tensors, make_engine, micro_batches

from megasdc.optim.zero1 import owned_fragments

pytestmark = pytest.mark.distributed

LR, BETAS, EPS, DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place of fp32."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.float().view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    """Full fp32 master weights by name, put together from the shards."""
    values = {}
    optimizer = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        full = torch.zeros(parameter.numel())
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            fragment, address = mapping.hp_fragment, mapping.lp_fragment_address
            full[address.start : address.start + address.numel] = fragment.flatten()
        dist.all_reduce(full, group=engine.mpu.get_data_parallel_group())
        values[name] = full.view_as(parameter)
    assert optimizer is not None
    return full_tensors(engine, values)


def _steps(model: dict[str, Any], tensor: int, pipeline: int, precision: str, grad_accum: str, count: int) -> Any:
    engine = make_engine(
        model,
        tensor,
        pipeline,
        precision=precision,
        grad_accum=grad_accum,
        lr=LR,
        deepspeed={
            "optimizer": {
                "params": {
                    "lr": LR,
                    "betas": list(BETAS),
                    "eps": EPS,
                    "weight_decay": DECAY,
                    "torch_adam": True,
                    "fused": True,
                },
                "type": "AdamW",
            }
        },
    )
    tap = GradientTap()
    engine.hooks.append(tap)
    masters, norms = [_masters(engine)], []
    for step in range(1, count + 1):
        norms.append(engine.train_step(micro_batches(engine, step)).grad_norm)
        masters.append(_masters(engine))
    return {"masters": masters, "gradients": tap.steps, "norms": norms, "optimizer": type(engine.optimizer).__name__}


def _oracle(
    initial: dict[str, torch.Tensor], gradients: list[dict[str, torch.Tensor]], norms: list[float], kind: str
) -> Any:
    """Weights after each step of torch.optim.AdamW on the gathered gradients, clipped by the float64 norm."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    history = []
    for step_gradients, reported in zip(gradients, norms, strict=True):
        norm = sum(float((g.double() ** 2).sum()) for g in step_gradients.values()) ** 0.5
        assert reported == pytest.approx(norm, rel=1e-5)
        # Both clip by max_norm / (norm + 1e-6); they divide in another order, hence the kind.
        if kind == "BF16_Optimizer":
            factor = torch.clamp(CLIP / (torch.tensor(reported) + 1e-6), max=1.0)
        else:
            factor = 1.0 / torch.clamp((torch.tensor(reported) + 1e-6) / CLIP, min=1.0)
        for name, parameter in parameters.items():
            parameter.grad = step_gradients[name] * factor
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in parameters.items()})
    return history


KINDS = [
    ("fp32", "fp32", "DeepSpeedZeroOptimizer"),
    ("bf16", "fp32", "BF16_Optimizer"),
    ("bf16", "bf16", "DeepSpeedZeroOptimizer"),
]
LAYOUTS = [((1, 1, 2), GPT), ((2, 2, 2), GPT), ((2, 1, 1), LLAMA)]
CASES = [
    pytest.param(*layout, *kind, marks=[pytest.mark.full] if layout[0] == (2, 2, 2) and kind[0] == "bf16" else [])
    for kind in KINDS
    for layout in LAYOUTS
]
"""Kinds of optimizers in layouts; eight ranks with each kind are part of the full campaign."""


@pytest.mark.parametrize(("layout", "model", "precision", "grad_accum", "kind"), CASES)
def test_steps_equal_torch_adamw(
    precision: str, grad_accum: str, kind: str, layout: tuple[int, int, int], model: dict[str, Any]
) -> None:
    """After one step within 2 fp32 ULP of torch.optim.AdamW, after ten within 1e-6 relative."""
    tensor, pipeline, data = layout
    got = run_distributed(_steps, tensor * pipeline * data, model, tensor, pipeline, precision, grad_accum, 10)[0]
    assert got["optimizer"] == kind
    expected = _oracle(got["masters"][0], got["gradients"], got["norms"], kind)
    first, last = got["masters"][1], got["masters"][10]
    largest = {name: _ulps(first[name], expected[0][name]) for name in first}
    assert max(largest.values()) <= 2, largest
    for name, value in last.items():
        torch.testing.assert_close(value, expected[9][name], rtol=1e-6, atol=1e-8)


def _named_states(precision: str, grad_accum: str) -> Any:
    engine = make_engine(GPT, 1, 1, precision=precision, grad_accum=grad_accum)
    engine.train_step(micro_batches(engine, 1))
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    local = [
        (names[id(fragment.parameter)], key, values.clone())
        for fragment in owned_fragments(engine.optimizer)
        for key, values in [("master", fragment.master), *fragment.states(engine.optimizer).items()]
    ]
    parameters = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return engine.dims.dp_rank, local, parameters


@pytest.mark.parametrize(("precision", "grad_accum"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_optimizer_states_are_those_of_the_named_parameter(precision: str, grad_accum: str) -> None:
    """Of all ranks together, each parameter's master rounds to the parameter, and its moments are of one gradient."""
    found = sorted(run_distributed(_named_states, 2, precision, grad_accum), key=lambda rank: rank[0])
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for _, local, _ in found:
        assert local
        for name, key, values in local:
            whole[name, key] = torch.cat([whole[name, key], values]) if (name, key) in whole else values
    for name, parameter in found[0][2].items():
        assert torch.equal(whole[name, "master"].to(parameter.dtype), parameter.flatten())
        mean, square = whole[name, "exp_avg"].double(), whole[name, "exp_avg_sq"].double()
        torch.testing.assert_close(square, mean**2 * (1 - 0.95) / (1 - 0.9) ** 2, rtol=1e-5, atol=1e-30)
    assert len(whole) == 3 * len(found[0][2])
