"""Trainings that are not megasdc's own: Hugging Face's Llama under DeepSpeed, and faults that tests plant in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megasdc

VOCAB, SEQUENCE = 64, 16
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}


@dataclass(frozen=True)
class Planted:
    """A fault of one rank.

    Args:
        phase: forward: of the submodule's output; backward: of its input's gradient; weight_grad: of its weight's.
        kind: persistent: always; intermittent: half of the times; transient: the ``nth`` time alone, from 1.
    """

    rank: int
    submodule: str
    phase: str
    kind: str = "persistent"
    nth: int = 0
    seed: int = 1

    def plant(self, model: nn.Module) -> None:
        """Attach the fault, before anything else is attached."""
        module, chance, count = model.get_submodule(self.submodule), random.Random(self.seed), [0]

        def wrong(value: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            fires = {"persistent": True, "intermittent": chance.random() < 0.5, "transient": count[0] == self.nth}
            return value * 1.5 if fires[self.kind] else value

        if self.phase == "forward":
            module.register_forward_hook(lambda _m, _a, output: wrong(output))
        elif self.phase == "backward":
            module.register_full_backward_hook(lambda _m, grads, _o: (wrong(grads[0]), *grads[1:]))
        else:
            module.weight.register_hook(wrong)


def llama_engine(deepspeed_config: Mapping[str, Any], planted: Planted | None = None, **fields: Any) -> Any:
    """An engine of a tiny Llama with the same weights on all ranks."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **fields}))
    if planted is not None and planted.rank == dist.get_rank():
        planted.plant(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        **deepspeed_config,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, steps: int, after_step: Callable[[int], None] = lambda step: None) -> list[float]:
    """A plain loop, as of DeepSpeed's documentation; the loss of each micro-batch."""
    losses = []
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(0, VOCAB, (engine.train_micro_batch_size_per_gpu(), SEQUENCE), generator=draw)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        after_step(step + 1)
    return losses


def train_guarded(
    folder: str, deepspeed_config: dict[str, Any], steps: int, planted: Planted | None = None, **settings: Any
) -> tuple[int, list[float], int]:
    """Body of a rank: train with a guard; the exit code, losses and number of audits."""
    engine = llama_engine(deepspeed_config, planted)
    guard = megasdc.attach(engine, {"logging": {"run_dir": folder}, **settings})
    try:
        losses, code = train(engine, steps), 0
    except SystemExit as error:
        losses, code = [], int(error.code or 0)
    guard.close()
    return code, losses, guard.audits
