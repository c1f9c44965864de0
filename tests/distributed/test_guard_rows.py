"""Do sums of rows find wrong products in steps of an attached training, and leave healthy ones as they are?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from torch import Tensor, nn

import megasdc
from megasdc.events import read_events
from megasdc.sdc.incident import load_incidents
from tools.trainings.engines import PERSISTENT, Planted, deepspeed_config, llama_engine, pipeline_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

LAYOUTS: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "zero0": (0, "fp32", {}, 1),
    "zero2": (2, "fp32", {}, 1),
    "bf16": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, 1),
    "mixed": (1, "fp32", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 1),
    "checkpointed": (1, "fp32", {}, 1),
    "pipeline": (1, "fp32", {}, 2),
}
"""ZeRO stage, precision, more of DeepSpeed's keys, and pipeline stages."""
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


def _settings(folder: str) -> dict[str, Any]:
    sdc = {"always_on": {"enabled": True, "parameters": False, "rows": True}, "budget": 1.0}
    return {"logging": {"run_dir": folder}, "audit": {"enabled": False}, "sdc": sdc}


def _trained(folder: str, layout: str, steps: int, guarded: bool, only: str = "") -> tuple[int, list[float], str]:
    """Body of a rank: train; exit code, losses, and digest of the weights; ``only``: the fault of rank 1."""
    zero, precision, more, stages = LAYOUTS[layout]
    config = deepspeed_config(zero, precision, more)
    engine = llama_engine(config) if stages == 1 else pipeline_engine(config, stages)
    if layout == "checkpointed":
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if only and dist.get_rank() == 1:
        FAULTS[only](engine.module)
    before = [name for name, _ in engine.module.named_parameters()]
    guard = megasdc.attach(engine, _settings(folder)) if guarded else None
    losses: list[float] = []
    try:
        losses = train(engine, steps, engine.data_parallel_group.rank())
        code = 0
    except SystemExit as error:
        code = int(str(error.code))
    if guard is not None:
        guard.close()
    assert before == [name for name, _ in engine.module.named_parameters()]
    assert only or not any("forward" in vars(one) for one in engine.module.modules() if isinstance(one, nn.Linear))
    return code, losses, str([float(one.double().sum()) for one in engine.module.parameters()])


class _WrongWeight(torch.autograd.Function):
    """A linear layer with a wrong row in its weight's gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(given, weight)
        return given @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        given, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ given.flatten(0, -2)
        of_weight[3, 5] += of_weight.abs().max()
        return gradient @ weight, of_weight


def _wrong_weight(model: nn.Module) -> None:
    layer = model.get_submodule(UP)
    layer.forward = lambda given: _WrongWeight.apply(given, layer.weight)  # type: ignore[method-assign]


FAULTS: dict[str, Any] = {
    "forward": lambda model: Planted(1, DOWN, "forward", PERSISTENT, spoils="element").plant(model),
    "backward": lambda model: Planted(1, UP, "backward", PERSISTENT, spoils="row").plant(model),
    "weight_grad": _wrong_weight,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_training_is_the_one_without_a_guard(tmp_path: Path, layout: str) -> None:
    """Same bits, and no row is suspicious, whatever product is due; the layers have their own methods afterwards."""
    ranks, steps = 2 * LAYOUTS[layout][3], 24
    found = [run_distributed(_trained, ranks, str(tmp_path / str(on)), layout, steps, on) for on in (False, True)]
    assert found[0] == found[1] and {code for code, *_ in found[1]} == {0}
    assert not (tmp_path / "True" / "reports").exists() and not list(read_events(tmp_path / "True", kind="sdc"))


@pytest.mark.parametrize("phase", FAULTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_product_is_found_in_its_turn(tmp_path: Path, ranks: int, phase: str) -> None:
    """Rank, submodule and verdict are right, of two replicas too, and the step is not taken."""
    found = run_distributed(_trained, ranks, str(tmp_path), "zero2", 100, True, phase)
    assert {code for code, *_ in found} == {73}
    ((_, incident),) = load_incidents(tmp_path / "reports", [])
    (flagged,) = incident.flagged
    fqn = DOWN if phase == "forward" else UP
    assert (flagged.rank, flagged.first.fqn, flagged.first.phase) == (1, fqn, phase)
    assert (incident.tier, incident.verdict, incident.done) == ("rows", "persistent", "halted")


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_row_is_suspicious_in_many_clean_steps(tmp_path: Path, layout: str) -> None:
    """Whatever product is due."""
    ranks = 3 * LAYOUTS[layout][3]
    found = run_distributed(_trained, ranks, str(tmp_path), layout, 200, True, timeout_s=600.0)
    assert {code for code, *_ in found} == {0} and not (tmp_path / "reports").exists()
    assert not list(read_events(tmp_path, kind="sdc", name="row_not_checked"))
