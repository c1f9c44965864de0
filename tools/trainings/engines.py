"""Trainings as others write them, with DeepSpeed alone, and faults that are planted in them.

Their structure is that of the documentation and examples: a plain loop around a model of Hugging Face, its ``Trainer``,
and a small convolutional network as a ``PipelineModule``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.tensors.nested import map_in

LLAMA, TRAINER, PIPELINE = "llama", "trainer", "pipeline"
SDPA = "scaled_dot_product_attention"
"""PyTorch's own operation of attention."""
VOCAB, SEQUENCE, SIDE = 64, 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}
MICRO_BATCHES = 2
WRONG = 64.0
"""What is added to a row, or an element, that is wrong: times the mean of all."""
PERSISTENT, INTERMITTENT, TRANSIENT = "persistent", "intermittent", "transient"


@dataclass(frozen=True)
class Planted:
    """A fault in what a submodule of one rank computes.

    Args:
        phase: forward: its output; backward: the gradient of its input; weight_grad: that of its weight.
        kind: persistent: always; transient: in the first audit alone; intermittent: there, and half of the other times.
        spoils: all of it, a drawn ``row``, or a drawn ``element``.
    """

    rank: int
    submodule: str
    phase: str
    kind: str
    seed: int = 1
    spoils: str = "all"

    def plant(self, model: nn.Module) -> None:
        """Put the fault into a submodule's computation, inside of all hooks."""
        module, chance, times = model.get_submodule(self.submodule), random.Random(self.seed), [0]
        compute = module.forward

        def wrong(value: Tensor) -> Tensor:
            times[0] += 1
            first_audit = times[0] == MICRO_BATCHES + 1  # after the micro-batches of the first step
            sometimes = self.kind == INTERMITTENT and chance.random() < 0.5
            return self.spoil(value) if first_audit or sometimes or self.kind == PERSISTENT else value

        if self.phase == "forward":
            module.forward = lambda *args, **options: _with_first(compute(*args, **options), wrong)
        elif self.phase == "backward":

            def changed(*args: Any, **options: Any) -> Any:
                given = _with_first((args, options), lambda one: self.in_gradient(one, wrong))
                return compute(*given[0], **given[1])

            module.forward = changed
        else:
            parameter = module.weight
            assert isinstance(parameter, Tensor), "a submodule with a weight"
            parameter.register_hook(wrong)

    def spoil(self, value: Tensor) -> Tensor:
        """A wrong result."""
        if self.spoils == "all":
            return value * 1.5
        flat = value.reshape(-1, value.shape[-1] if value.dim() else 1)
        row, column = random.Random(self.seed).choices(range(1 << 20), k=2)
        wrong = torch.zeros_like(flat)
        some = wrong[row % len(flat)]
        (some if self.spoils == "row" else some[column % len(some) :][:1]).fill_(1)
        more = value + WRONG * value.abs().mean()
        return torch.where(wrong.reshape(value.shape) > 0, more, value)

    def in_gradient(self, value: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The same, whose gradient is wrong."""
        return _Wrong.apply(value, change or self.spoil)  # type: ignore[no-any-return]


def _with_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """With the first tensor of floating point numbers changed; mappings other than dicts keep what they are."""
    count = iter(range(1 << 30))

    def one(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.is_floating_point() and next(count) == 0 else tensor

    return map_in(Tensor, value, one)


class _Wrong(torch.autograd.Function):
    """Identity whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


@contextmanager
def wrong_attention(planted: Planted) -> Iterator[None]:
    """Attention whose result, or gradient of the query, is wrong in one layer."""
    compute, count = F.scaled_dot_product_attention, [0]

    def wrong(query: Tensor, *args: Any, **options: Any) -> Tensor:
        count[0] += 1
        if count[0] != 1 + planted.seed % 2:
            return compute(query, *args, **options)
        if planted.phase == "backward":
            return compute(planted.in_gradient(query), *args, **options)
        return planted.spoil(compute(query, *args, **options))

    F.scaled_dot_product_attention = wrong  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = compute


def deepspeed_config(zero: int, precision: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration; ``more``: keys of it."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **(more or {}),
    }


def llama_engine(config: Mapping[str, Any], planted: Planted | None = None, **fields: Any) -> Any:
    """The engine of a tiny Llama of Hugging Face, with the same weights on all ranks; ``planted``: on this one."""
    import deepspeed

    model = _llama(planted, **fields)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(config))[0]


def _llama(planted: Planted | None, **fields: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields}))
    if planted is not None:
        planted.plant(model)
    return model


def llama_trainer(config: Mapping[str, Any], planted: Planted | None, folder: str, steps: int, **fields: Any) -> Any:
    """Hugging Face's ``Trainer`` of the same model; ``folder``: where it may write."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state()  # of another trainer in this process
    options = TrainingArguments(
        output_dir=folder,
        deepspeed=dict(config),
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        learning_rate=config["optimizer"]["params"]["lr"],
        bf16="bf16" in config,
        max_steps=steps,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(model=_llama(planted, **fields), args=options, train_dataset=_Texts())


class _Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random samples."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCAB, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def pipeline_engine(config: Mapping[str, Any], stages: int, planted: Planted | None = None, **options: Any) -> Any:
    """The engine of a small network for images, cut into stages; ``planted``: on this rank."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(1)
    layers = [
        LayerSpec(nn.Conv2d, 3, 8, 3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Conv2d, 8, 8, 3, padding=1),
        LayerSpec(nn.Dropout, 0.1),
        LayerSpec(nn.MaxPool2d, 2),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, 8 * (SIDE // 2) ** 2, 16),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 16, 10),
    ]
    model = PipelineModule(
        layers, num_stages=stages, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform", **options
    )
    if planted is not None:
        planted.plant(model)
    parameters = [one for one in model.parameters() if one.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=dict(config))[0]


def train(engine: Any, steps: int, seed: int) -> list[float]:
    """Train for some optimizer steps on random samples; the losses.

    Args:
        seed: of this replica's samples.
    """
    draw = torch.Generator().manual_seed(seed)
    if hasattr(engine, "train_batch"):
        samples = _images(engine, draw)
        return [float(engine.train_batch(data_iter=samples)) for _ in range(steps)]
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        size = engine.train_micro_batch_size_per_gpu(), SEQUENCE
        tokens = torch.randint(0, VOCAB, size, generator=draw).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _images(engine: Any, draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    kind = next(engine.module.parameters()).dtype
    while True:
        size = engine.train_micro_batch_size_per_gpu()
        images = torch.randn(size, 3, SIDE, SIDE, generator=draw).to(kind)
        yield images, torch.randint(0, 10, (size,), generator=draw)
