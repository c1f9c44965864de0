"""Comparison of a model's logits with those of ``transformers`` for a folder of Hugging Face, a layer at a time.

Both sides compute in fp32 from what is on disk: ours from the weights, ``transformers`` with its own class from its own
reading of ``config.json`` and from the folder's tensors. So a setting that one of the two reads otherwise shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.checkpoint.views.hf_shards import HEAD, HfShards
from megasdc.checkpoint.views.logical import WeightSource, load_weights
from megasdc.errors import ConfigError, MegasdcError
from megasdc.memory_limits import free_memory
from megasdc.model.hf import hf_class, num_pipeline_layers, rules
from megasdc.parallel import groups
from megasdc.progress import parts_bar
from megasdc.tensors.finite import are_finite

MAX_DIFFERENCE = 1e-4
"""Of two logits, relative to the largest one; that of equal models in fp32 is some 1e-6."""
NUM_TOKENS = 64
SEED = 1
_GB = 1e9
_BLOCK = re.compile(r"(.*\.\d+)\..*")


@dataclass(frozen=True)
class LogitsComparison:
    """Result of a comparison of logits.

    Args:
        tokens: length of the random input.
        difference: largest difference of two logits, divided by the largest logit; None: not compared.
        reason: why they were not compared; None: they were.
    """

    tokens: int
    difference: float | None = None
    reason: str | None = None

    def render(self) -> str:
        """The result as text."""
        if self.difference is None:
            return f"logits: not verified, {self.reason}"
        return (
            f"logits: those of transformers, largest difference {self.difference:.1e} of the largest logit "
            f"(allowed {MAX_DIFFERENCE:g}; {self.tokens} random tokens, fp32)"
        )


def compare_logits(
    weights: WeightSource, shards: HfShards, *, rounded_to: torch.dtype | None = None, progress: bool = False
) -> LogitsComparison:
    """Compare the logits of weights with those that ``transformers`` computes from a folder, on random tokens.

    Args:
        weights: whose logits megasdc computes.
        shards: tensors of the folder, checked against the model.
        rounded_to: type to which the folder's tensors were rounded, to which ours are too; None: they were not.
        progress: draw a bar on standard error where it is a terminal.

    Returns:
        The largest difference; or that there is not enough memory, or logits are not finite.

    Raises:
        ConfigError: logits differ by more than ``MAX_DIFFERENCE``, or ``transformers`` cannot compute the model.

    Collective: none; needs a process that is alone, or has no process group.
    """
    count = min(NUM_TOKENS, weights.model.max_positions)
    needed = _needed_bytes(weights, count)
    if needed > free_memory():
        return LogitsComparison(
            count, reason=f"needs {needed / _GB:.1f} GB of memory, free are {free_memory() / _GB:.1f}"
        )
    tokens = torch.randint(0, weights.vocab_size, (1, count), generator=torch.Generator().manual_seed(SEED))
    with parts_bar("comparing logits", 2 * num_pipeline_layers(weights.model), quiet=not progress) as advance:
        ours = _our_outputs(weights, tokens, rounded_to, advance)
        theirs = _their_outputs(weights, shards, tokens, advance)
    assert len(ours) == len(theirs), f"{len(ours)} outputs of megasdc, {len(theirs)} of transformers"
    if wrong := next((name for name, output in theirs.items() if not are_finite([output])), None):
        return LogitsComparison(count, reason=f"the output of {wrong} is not finite")
    differences = {name: _difference(output, mine) for (name, output), mine in zip(theirs.items(), ours, strict=True)}
    found = differences[HEAD.removesuffix(".weight")]
    if not found <= MAX_DIFFERENCE:
        first = next(name for name, value in differences.items() if not value <= MAX_DIFFERENCE)
        raise ConfigError(
            f"logits of {weights.path} differ from those that transformers computes from {shards.folder}: by "
            f"{found:.2g} of the largest, allowed are {MAX_DIFFERENCE:g}; first {first} by {differences[first]:.2g}. "
            "They compute other models from its config.json or its tensors; nothing was written"
        )
    return LogitsComparison(count, found)


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference relative to the largest element; 0 of equal tensors, also if all are 0."""
    return float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _needed_bytes(weights: WeightSource, tokens: int) -> int:
    """Estimate of the memory: the largest layer as saved, converted and as a module; logits and all layers' outputs."""
    layers = (weights.layer(index, "meta").values() for index in range(num_pipeline_layers(weights.model)))
    largest = max(sum(one.numel() * (2 * one.itemsize + 4) for one in layer) for layer in layers)
    model = weights.model
    return largest + 4 * tokens * (4 * weights.vocab_size + 2 * (model.num_layers + 2) * model.hidden_size)


def _our_outputs(
    weights: WeightSource, tokens: Tensor, rounded_to: torch.dtype | None, advance: Callable[[], None]
) -> list[Tensor]:
    """Outputs [s, h] of all transformer layers and of the last norm, and logits [s, v]."""
    from megasdc.model.sharding import LEADING_LAYERS
    from megasdc.model.whole import streamed_outputs

    model = weights.model.model_copy(update={"backend": "torch", "fuse": False})

    def load(parameters: list[tuple[str, nn.Parameter]]) -> None:
        load_weights(weights, parameters, model, vocab_size=weights.vocab_size)
        for _, parameter in parameters if rounded_to is not None else ():
            parameter.data = parameter.data.to(rounded_to).float()
        advance()

    with groups.single_process():
        outputs = streamed_outputs(model, tokens, vocab_size=weights.vocab_size, dtype=torch.float32, load=load)
        found = [output[:, 0].detach() for output in outputs][LEADING_LAYERS:]
    return [*found[:-1], found[-1][:, : weights.vocab_size]]


def _their_outputs(
    weights: WeightSource, shards: HfShards, tokens: Tensor, advance: Callable[[], None]
) -> dict[str, Tensor]:
    """The same as ``transformers`` computes it, by the names of its modules."""
    try:
        with _streamed(weights, shards, advance) as (model, found), torch.no_grad():
            model(input_ids=tokens, use_cache=False)
    except MegasdcError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(
            f"transformers cannot compute the model of {shards.folder}: {type(error).__name__}: {error}"
        ) from error
    return found


@contextmanager
def _streamed(
    weights: WeightSource, shards: HfShards, advance: Callable[[], None]
) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """A model of ``transformers`` whose modules hold their parameters while they compute, and the outputs by name."""
    import transformers

    kind = hf_class(weights.model)
    config = getattr(transformers, {"GPT2LMHeadModel": "GPT2Config", "LlamaForCausalLM": "LlamaConfig"}[kind])
    settings = config.from_pretrained(str(shards.folder))
    with torch.device("meta"):
        model = getattr(transformers, kind)(settings).eval()
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:  # of rotary angles, computed from the configuration
            model.set_submodule(name, type(module)(settings))
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        block = _BLOCK.fullmatch(name)
        parts.setdefault(block[1] if block else name.rpartition(".")[0], []).append(name)
    embeddings = {name for index in (0, 1) for rule in rules(weights.model, index) for name in rule.theirs}
    tied = {HEAD: rules(weights.model, 0)[0].theirs[0]} if weights.model.tie_embeddings else {}
    outputs: dict[str, Tensor] = {}

    def attach(part: str, names: list[str]) -> None:
        module = model.get_submodule(part)

        def load(*hooked: Any) -> None:
            for name in names:
                source = tied.get(name, name)
                owner, _, leaf = name.rpartition(".")
                value = nn.Parameter(shards.read([source])[source].float(), requires_grad=False)
                setattr(model.get_submodule(owner), leaf, value)
            advance()

        def keep(_: Any, __: Any, output: Any) -> None:
            if names[0] not in embeddings:
                outputs[part] = (output[0] if isinstance(output, tuple) else output)[0].detach().clone()
            module.to_empty(device="meta")

        module.register_forward_pre_hook(load)
        module.register_forward_hook(keep)

    for part, names in parts.items():
        attach(part, names)
    yield model, outputs
