"""Does a guard name where NaN or Inf began, and say what it does not know?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from torch import nn

import megasdc
from megasdc.attached.nonfinite import GIVEN, HIDDEN, NO_LABEL
from megasdc.events import read_events
from tools.trainings.engines import deepspeed_config, llama_engine, llama_trainer, pipeline_engine, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
STEP, MICRO_BATCH = 2, 1
CALL = 4
"""Of a submodule: two micro-batches a step."""


class _Spoiled(torch.autograd.Function):
    """Identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.nan


def _plant(model: nn.Module, submodule: str, phase: str, once: bool) -> None:
    """NaN of one call, and unless once of each call with the same input, which dropout has a part in."""
    module, inputs = model.get_submodule(submodule), list[torch.Tensor]()
    compute: Callable[..., torch.Tensor] = module.forward

    def forward(value: torch.Tensor) -> torch.Tensor:
        inputs.append(value.detach().clone())
        number, wanted = len(inputs), inputs[min(len(inputs), CALL) - 1]
        wrong = number == CALL or (number > CALL and not once and torch.equal(value, wanted))
        result = compute(_Spoiled.apply(value) if wrong and phase == "backward" else value)
        return result * torch.nan if wrong and phase == "forward" else result

    module.forward = forward  # type: ignore[method-assign]


def _settings(folder: str, **fields: Any) -> dict[str, Any]:
    return {"logging": {"run_dir": folder}, "audit": {"enabled": False}, "nonfinite": fields}


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _trained(
    folder: str, zero: int, stages: int, rank: int, submodule: str, phase: str, once: bool, more: dict[str, Any]
) -> None:
    """Body of a rank: train with NaN of one rank, in one micro-batch of the second step."""
    config = deepspeed_config(zero, "fp32", more)
    engine = llama_engine(config, attention_dropout=0.1) if stages == 1 else pipeline_engine(config, stages)
    if dist.get_rank() == rank:
        _plant(engine.module, submodule, phase, once)
    guard = megasdc.attach(engine, _settings(folder))
    train(engine, 3, guard.dims.dp_rank)
    guard.close()


@pytest.mark.parametrize(
    ("zero", "stages", "rank", "submodule", "phase", "more"),
    [
        (0, 1, 0, "model.layers.0.self_attn.v_proj", "backward", {}),
        (1, 1, 1, "model.layers.1.mlp.up_proj", "forward", {}),
        (2, 1, 1, "lm_head", "backward", {}),
        (1, 1, 0, "model.layers.1.mlp.up_proj", "backward", BF16),
        (1, 2, 3, "6", "forward", {}),
        (1, 2, 1, "2", "backward", {}),
    ],
    ids=["zero0", "zero1", "zero2", "bf16", "pipeline forward", "pipeline backward"],
)
def test_where_it_began_is_named(
    tmp_path: Path, zero: int, stages: int, rank: int, submodule: str, phase: str, more: dict[str, Any]
) -> None:
    """Rank, micro-batch, submodule, direction; that its inputs and parameters were finite, and that it came again."""
    run_distributed(_trained, 2 * stages, str(tmp_path), zero, stages, rank, submodule, phase, False, more)
    event, *later = read_events(tmp_path, kind="nonfinite")
    assert bool(later) == (zero == 0), "without ZeRO DeepSpeed takes the step, and weights are NaN from then on"
    assert (event.name, event.step) == ("first", STEP)
    told = {name: event.fields[name] for name in ("rank", "phase", "fqn", "slot", "value")}
    slot = "output" if phase == "forward" else "input"
    assert event.micro_batch == MICRO_BATCH
    assert told == dict(rank=rank, phase=phase, fqn=submodule, slot=slot, value="NaN")
    known = "inputs_finite", "inputs_read", "parameters_finite", "reproduced"
    assert [event.fields[name] for name in known] == [True] * 4 and event.fields["not_recomputed"] == []


def test_what_does_not_come_again_says_so(tmp_path: Path) -> None:
    """A loss that was NaN once is of its rank and micro-batch; a gradient that was has no place."""
    for phase, told in (("forward", (1, MICRO_BATCH, "model", "NaN")), ("backward", (None, None, None, None))):
        folder = tmp_path / phase
        run_distributed(_trained, 2, str(folder), 1, 1, 1, "model.layers.1.mlp.up_proj", phase, True, {})
        (event,) = read_events(folder, kind="nonfinite")
        rank, fqn, value = (event.fields[name] for name in ("rank", "fqn", "value"))
        assert (rank, event.micro_batch, fqn, value) == told
        assert event.fields["reproduced"] is False and event.step == STEP


class _Small(nn.Module):
    """A model without a loss, with a weight that can be spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def _of_the_loop(folder: str) -> None:
    """Body of a rank: NaN of the loop's loss, Inf of a weight, inputs changed in place, too large, too often."""
    import deepspeed

    torch.manual_seed(1)
    model = _Small()
    config = deepspeed_config(1, "fp32")
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step(changes: bool = False, spoils: bool = False) -> None:
        for _ in range(2):
            x = torch.ones(2, 8)
            result = engine(x)
            engine.backward((result * torch.nan).sum() if spoils and dist.get_rank() == 1 else result.sum())
            if changes:
                x.zero_()
            engine.step()

    def hooks() -> list[int]:
        parts = model, model.first, model.last
        return [len(found) for one in parts for found in (one._forward_hooks, one._forward_pre_hooks)]

    before = hooks()
    guard = megasdc.attach(engine, _settings(f"{folder}/one", searches=3))
    step()
    step(spoils=True)
    if dist.get_rank() == 0:
        model.last.weight.data[0, 0] = torch.inf
    step()
    step(changes=True)
    step()
    guard.close()
    guard = megasdc.attach(engine, _settings(f"{folder}/none", keep_mib=0))
    step()
    guard.close()
    guard = megasdc.attach(engine, _settings(f"{folder}/off", enabled=False))
    step()
    guard.close()
    assert hooks() == before and "_take_model_step" not in vars(engine)


def test_what_is_not_of_a_submodule_is_told(tmp_path: Path) -> None:
    """A gradient of the loop, a parameter, micro-batches that cannot be computed again, searches that are used up."""
    run_distributed(_of_the_loop, 2, str(tmp_path))
    events = read_events(tmp_path / "one", kind="nonfinite")
    given, weight, changed = ({"step": one.step, "micro_batch": one.micro_batch, **one.fields} for one in events)
    names = ("step", "rank", "micro_batch", "phase", "fqn", "value", "inputs_finite", "parameters_finite", "reproduced")
    assert [given[name] for name in names] == [2, 1, 0, "backward", "model", "NaN", False, True, None]
    assert given["meaning"] == GIVEN and weight["meaning"] is None
    assert [weight[name] for name in names] == [3, 0, 0, "forward", "last", "Inf", True, False, True]
    assert [changed[name] for name in names] == [4] + 8 * [None]
    assert changed["not_recomputed"][0].endswith("changed what the model was given in place")
    (none,) = read_events(tmp_path / "none", kind="nonfinite")
    assert none.fields["reproduced"] is None and "nonfinite.keep_mib" in none.fields["not_recomputed"][0]
    assert not list(read_events(tmp_path / "off", kind="nonfinite"))


class _Unlabelled(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of which no token counts."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((16,), index)
        return {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}


def _without_labels(folder: str) -> list[str]:
    """Body of a rank: a Trainer whose labels are all ignored; what is told of it."""
    told = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megasdc.attached.nonfinite").addHandler(handler)
    trainer = llama_trainer(deepspeed_config(1, "fp32"), None, folder, 3)
    trainer.train_dataset = _Unlabelled()
    megasdc.attach(trainer, _settings(folder))
    trainer.train()
    return told


def test_a_loss_of_no_label_is_told_once(tmp_path: Path) -> None:
    """That it is the loss, why it is NaN and why the trainer's log shows none; then how often it came again."""
    (told,) = run_distributed(_without_labels, 1, str(tmp_path))
    first, again = told
    assert first.startswith("step 1: NaN first at") and first.endswith(NO_LABEL + HIDDEN)
    assert again == f"NaN or Inf again in 2 more steps, the last is step 3: {NO_LABEL}{HIDDEN}"
    events = read_events(tmp_path, kind="nonfinite")
    assert [(one.step, one.fields["meaning"]) for one in events] == [(n, NO_LABEL + HIDDEN) for n in (1, 2, 3)]
