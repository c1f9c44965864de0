"""Comparison of a model's logits with those of ``transformers`` for a folder of Hugging Face, a layer at a time.

Both sides compute in fp32 from what is on disk: ours from the weights, ``transformers`` with its own class from its own
reading of ``config.json`` and from the folder's tensors. So a setting that one of the two reads otherwise shows.

A model can amplify rounding so much that two right computations differ by more than is allowed. So before a model is
refused, ``transformers`` computes it once more with another kernel and with each output moved by one unit in its last
place: what that changes is no difference of models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.checkpoint.views.hf_shards import HEAD, HfShards
from megasdc.checkpoint.views.logical import WeightSource, load_weights
from megasdc.durable import TEMPORARY_PREFIX
from megasdc.errors import ConfigError, MegasdcError
from megasdc.memory_limits import free_memory
from megasdc.model.hf import hf_class, num_pipeline_layers, rules
from megasdc.parallel import groups
from megasdc.progress import parts_bar
from megasdc.tensors.finite import are_finite

MAX_DIFFERENCE = 1e-4
"""Of two logits, relative to the largest one; that of equal models in fp32 is some 1e-6."""
MAX_NOISE_FACTOR = 10
"""A layer's difference is that of another model above this multiple of what rounding changes there."""
NUM_TOKENS = 64
SEED = 1
_GB = 1e9
_BLOCK = re.compile(r"(.*\.\d+)\..*")
_ROUNDING = torch.finfo(torch.float32).eps
_WITHOUT_EFFECT = (
    "attn_implementation", "_attn_implementation", "return_dict", "use_return_dict", "output_attentions",
    "output_hidden_states", "torchscript", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""Keys of a ``config.json`` that change no logits, but may keep a model from being built or computed here."""


class _NotVerifiedError(Exception):
    """Logits cannot be compared, for the reason given."""


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
        The largest difference; or why logits were not compared: there is not enough memory, they are not finite,
        ``transformers`` cannot compute the model, or rounding changes them as much as they differ.

    Raises:
        ConfigError: logits differ by more than ``MAX_DIFFERENCE`` and by more than rounding explains.

    Collective: none; in a process group of several ranks nothing is compared.
    """
    count = min(NUM_TOKENS, weights.model.max_positions)
    try:
        return LogitsComparison(count, _compare(weights, shards, count, rounded_to, progress))
    except (_NotVerifiedError, MemoryError) as error:
        return LogitsComparison(count, reason=str(error) or "there is not enough memory")


def _compare(
    weights: WeightSource, shards: HfShards, count: int, rounded_to: torch.dtype | None, progress: bool
) -> float:
    """The largest difference; _NotVerifiedError, or ConfigError, as ``compare_logits``."""
    if dist.is_initialized() and dist.get_world_size() != 1:
        raise _NotVerifiedError(f"this process is one of {dist.get_world_size()} ranks, needed is one alone")
    needed = _needed_bytes(weights, count)
    if needed > free_memory():
        raise _NotVerifiedError(f"needs {needed / _GB:.1f} GB of memory, free are {free_memory() / _GB:.1f}")
    tokens = torch.randint(0, weights.vocab_size, (1, count), generator=torch.Generator().manual_seed(SEED))
    with parts_bar("comparing logits", 2 * num_pipeline_layers(weights.model), quiet=not progress) as advance:
        ours = _our_outputs(weights, tokens, rounded_to, advance)
        theirs = _their_outputs(weights, shards, tokens, advance)
    assert len(ours) == len(theirs), f"{len(ours)} outputs of megasdc, {len(theirs)} of transformers"
    if wrong := next((name for name, output in theirs.items() if not are_finite([output])), None):
        raise _NotVerifiedError(f"the output of {wrong} is not finite")
    differences = {name: _difference(output, mine) for (name, output), mine in zip(theirs.items(), ours, strict=True)}
    logits = HEAD.removesuffix(".weight")
    found = differences[logits]
    if found <= MAX_DIFFERENCE:
        return found
    moved = _their_outputs(weights, shards, tokens, lambda: None, moved=True)
    noise = {name: _difference(output, moved[name]) for name, output in theirs.items()}
    allowed = {name: max(MAX_DIFFERENCE, MAX_NOISE_FACTOR * _or_infinite(value)) for name, value in noise.items()}
    if first := next((name for name, value in differences.items() if not value <= allowed[name]), None):
        raise ConfigError(
            f"logits of {_final(weights.path)} differ from those that transformers computes from "
            f"{_final(shards.folder)}: by {found:.2g} of the largest, allowed are {MAX_DIFFERENCE:g}; first {first} by "
            f"{differences[first]:.2g}, where rounding explains {noise[first]:.1g}. "
            "They compute other models from its config.json or its tensors; nothing was written"
        )
    raise _NotVerifiedError(
        f"this model amplifies rounding by {noise[logits] / _ROUNDING:.2g}: they differ from those of transformers by "
        f"{found:.1e} of the largest logit, and those of transformers by {noise[logits]:.1e} where each layer's output "
        "is moved by one unit in its last place"
    )


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _final(path: Path) -> Path:
    """A folder as the user knows it, also while it is written under its temporary name."""
    return path.with_name(path.name.removeprefix(TEMPORARY_PREFIX))


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference relative to the largest element; 0 of equal tensors, also if all are 0."""
    return float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _needed_bytes(weights: WeightSource, tokens: int) -> int:
    """Estimate of the memory: the largest layer as saved, converted and as a module; logits and all layers' outputs."""
    layers = (weights.layer(index, "meta").values() for index in range(num_pipeline_layers(weights.model)))
    largest = max(sum(one.numel() * (2 * one.itemsize + 4) for one in layer) for layer in layers)
    model = weights.model
    return largest + 4 * tokens * (5 * weights.vocab_size + 3 * (model.num_layers + 2) * model.hidden_size)


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
    weights: WeightSource, shards: HfShards, tokens: Tensor, advance: Callable[[], None], *, moved: bool = False
) -> dict[str, Tensor]:
    """The same as ``transformers`` computes it, by the names of its modules.

    Args:
        moved: with another kernel of attention, and each module's output moved by one unit in its last place.
    """
    try:
        with _streamed(weights, shards, advance, moved) as (model, found), torch.no_grad():
            model(input_ids=tokens, use_cache=False)
    except MegasdcError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise _NotVerifiedError(f"transformers cannot compute it: {type(error).__name__}: {error}") from error
    return found


def _empty_model(weights: WeightSource, shards: HfShards, attention: str) -> nn.Module:
    """The model of ``transformers`` for a folder, in evaluation mode, with its buffers but without its parameters."""
    import transformers

    kind = hf_class(weights.model)
    config = getattr(transformers, {"GPT2LMHeadModel": "GPT2Config", "LlamaForCausalLM": "LlamaConfig"}[kind])
    fields, _ = config.get_config_dict(str(shards.folder))
    kept = {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT}
    settings = config.from_dict(kept, attn_implementation=attention)
    with torch.device("meta"):
        model = getattr(transformers, kind)(settings)
    filled: dict[type[nn.Module], nn.Module] = {}  # of a class all layers have the same buffers
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is None:
            continue
        real = filled.get(type(module)) or filled.setdefault(type(module), type(module)(settings))
        if next(module.parameters(), None) is None:  # rotary angles; those have further tensors that are no buffers
            model.set_submodule(name, real)
        else:  # GPT-2's causal mask, in attention of transformers 4
            for key, buffer in real.named_buffers(recurse=False):
                setattr(module, key, buffer)
    return model.eval()


@contextmanager
def _streamed(
    weights: WeightSource, shards: HfShards, advance: Callable[[], None], moved: bool
) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """A model of ``transformers`` whose modules hold their parameters while they compute, and the outputs by name."""
    model = _empty_model(weights, shards, "sdpa" if moved else "eager")
    generator = torch.Generator().manual_seed(SEED)
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
            found = output[0] if isinstance(output, tuple) else output
            if moved:
                found *= 1 + _ROUNDING * (2 * torch.randint(0, 2, found.shape, generator=generator) - 1)
            if names[0] not in embeddings:
                outputs[part] = found[0].detach().clone()
            module.to_empty(device="meta")

        module.register_forward_pre_hook(load)
        module.register_forward_hook(keep)

    for part, names in parts.items():
        attach(part, names)
    yield model, outputs
