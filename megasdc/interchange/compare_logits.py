"""Comparison of a model's logits with those of ``transformers`` for a folder of Hugging Face, a layer at a time.

Both sides compute in fp32 from what is on disk: ours from the weights, ``transformers`` with its own class from its own
reading of ``config.json`` and from the folder's tensors. So a setting that one of the two reads otherwise shows.

Each of our layers gets the hidden states that ``transformers`` has there, so that a wrong layer is named, and errors
of earlier layers are neither amplified nor hidden. Beside them it gets our own, which end in our logits.

A model can amplify rounding so much that two right computations differ by more than is allowed. So before a model is
refused, ``transformers`` computes it once more with another kernel and with each input and output moved by one unit in
its last place: what that changes is no difference of models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.checkpoint.hf_shards import HEAD, HfShards
from megasdc.checkpoint.weights import WeightSource, load_weights
from megasdc.common.durable import TEMPORARY_PREFIX
from megasdc.common.errors import ConfigError, MegasdcError
from megasdc.common.host import free_memory
from megasdc.common.program import parts_bar
from megasdc.model.hf.classes import hf_class
from megasdc.model.hf.tensors import num_pipeline_layers, rules
from megasdc.parallel import groups
from megasdc.tensors.bits import are_finite

MAX_DIFFERENCE = 1e-4
"""Largest allowed difference of two logits, relative to the largest one, and of a layer; of equal models some 1e-6."""
MAX_NOISE_FACTOR = 10
"""A layer's difference is that of another model above this multiple of what rounding changes there."""
NUM_TOKENS = 64
SEED = 1
_GB = 1e9
_BLOCK = re.compile(r"(.*\.\d+)\..*")
_LAYER = re.compile(r".*\.(\d+)")
_EMBEDDINGS = "embeddings"
"""Name of the first layer's input."""
_NUM_NAMED = 3
"""Maximum number of wrong layers that an error names."""
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
        layer: the layer that differs most for the same input, by its name in ``transformers``; None: not compared.
        layer_difference: by how much, relative to what it adds to its input.
    """

    tokens: int
    difference: float | None = None
    reason: str | None = None
    layer: str | None = None
    layer_difference: float | None = None

    def render(self) -> str:
        """The result as text."""
        if self.difference is None or self.layer is None:
            return f"logits: not verified, {self.reason}"
        most = f"for the same input {_title(self.layer)} differs most, by {self.layer_difference:.1e}"
        allowed = f"(allowed {MAX_DIFFERENCE:g}; {self.tokens} random tokens, fp32)"
        if self.difference <= MAX_DIFFERENCE:
            return (
                f"logits: those of transformers, largest difference {self.difference:.1e} of the largest logit; {most} "
                f"{allowed}"
            )
        return (
            f"logits: each layer computes that of transformers, {most} {allowed}; together they amplify rounding to a "
            f"difference of {self.difference:.1e} of the largest logit"
        )


def compare_logits(
    weights: WeightSource, shards: HfShards, *, rounded_to: torch.dtype | None = None, progress: bool = False
) -> LogitsComparison:
    """Compare the logits of weights with those that ``transformers`` computes from a folder, on random tokens.

    Args:
        weights: weights with which megasdc computes logits.
        shards: tensors of the folder, checked against the model.
        rounded_to: type to which the folder's tensors were rounded, to which ours are too; None: they were not.
        progress: whether a bar is drawn on standard error where it is a terminal.

    Returns:
        The largest differences; or the reason why logits were not compared: there is not enough memory, they are not
        finite, ``transformers`` cannot compute the model, or rounding changes a layer as much as it differs.

    Raises:
        ConfigError: a layer or logits differ by more than ``MAX_DIFFERENCE`` and by more than rounding explains.

    Collective: none; in a process group of several ranks nothing is compared.
    """
    count = min(NUM_TOKENS, weights.model.max_positions)
    try:
        return _compare(weights, shards, count, rounded_to, progress)
    except (_NotVerifiedError, MemoryError) as error:
        return LogitsComparison(count, reason=str(error) or "there is not enough memory")


@dataclass(frozen=True)
class _Differences:
    """Relative differences of each layer for the same input, by its name in ``transformers``, and of the logits."""

    layers: dict[str, float]
    logits: float

    def within(self, allowed: _Differences) -> bool:
        """Whether all are; NaN is not."""
        return self.logits <= allowed.logits and not self.above(allowed)

    def above(self, allowed: _Differences) -> list[str]:
        """The layers that differ by more."""
        return [name for name, value in self.layers.items() if not value <= allowed.layers[name]]


def _compare(
    weights: WeightSource, shards: HfShards, count: int, rounded_to: torch.dtype | None, progress: bool
) -> LogitsComparison:
    """The largest differences; _NotVerifiedError, or ConfigError, as ``compare_logits``."""
    if dist.is_initialized() and dist.get_world_size() != 1:
        raise _NotVerifiedError(f"this process is one of {dist.get_world_size()} ranks, needed is one alone")
    needed = _needed_bytes(weights, count)
    if needed > free_memory():
        raise _NotVerifiedError(f"needs {needed / _GB:.1f} GB of memory, free are {free_memory() / _GB:.1f}")
    tokens = torch.randint(0, weights.vocab_size, (1, count), generator=torch.Generator().manual_seed(SEED))
    with parts_bar("comparing logits", 2 * num_pipeline_layers(weights.model), quiet=not progress) as advance:
        theirs = _their_outputs(weights, shards, tokens, advance)
        if wrong := next((name for name, output in theirs.items() if not are_finite([output])), None):
            raise _NotVerifiedError(f"the output of {wrong} is not finite")
        found = _our_differences(weights, tokens, rounded_to, theirs, advance)
    limit = _Differences(dict.fromkeys(found.layers, MAX_DIFFERENCE), MAX_DIFFERENCE)
    if not found.within(limit):
        noise = _noise(weights, shards, tokens, theirs)
        allowed = _Differences({name: _allowed(value) for name, value in noise.layers.items()}, _allowed(noise.logits))
        if not found.within(allowed):
            raise _another_model(weights, shards, found, noise, allowed)
        if unsure := found.above(limit):
            name = max(unsure, key=lambda one: found.layers[one])
            raise _NotVerifiedError(
                f"{_title(name)} amplifies rounding by {noise.layers[name] / _ROUNDING:.2g}: for the same input it "
                f"differs from that of transformers by {found.layers[name]:.1e}, and that of transformers by "
                f"{noise.layers[name]:.1e} where its input is moved by one unit in its last place; "
                f"{len(found.layers) - len(unsure)} of {len(found.layers)} layers are those of transformers"
            )
    most = max(found.layers, key=lambda one: found.layers[one])
    return LogitsComparison(count, found.logits, layer=most, layer_difference=found.layers[most])


def _allowed(noise: float) -> float:
    return math.inf if math.isnan(noise) else max(MAX_DIFFERENCE, MAX_NOISE_FACTOR * noise)


def _another_model(
    weights: WeightSource, shards: HfShards, found: _Differences, noise: _Differences, allowed: _Differences
) -> ConfigError:
    """The error that names the layers that differ; if only all together do, the one that differs most."""
    wrong = found.above(allowed) or [max(found.layers, key=lambda one: found.layers[one])]
    named = "; ".join(
        f"{_title(name)}: relative difference {found.layers[name]:.2g}, where rounding explains "
        f"{noise.layers[name]:.1g}"
        for name in wrong[:_NUM_NAMED]
    )
    more = f"; and {len(wrong) - _NUM_NAMED} more" if len(wrong) > _NUM_NAMED else ""
    return ConfigError(
        f"logits of {_final(weights.path)} differ from those that transformers computes from {_final(shards.folder)}: "
        f"by {found.logits:.2g} of the largest, where rounding explains {noise.logits:.1g}. For the same input, where "
        f"{MAX_DIFFERENCE:g} is allowed, {named}{more}. They compute other models from its config.json or its tensors; "
        "nothing was written"
    )


def _title(name: str) -> str:
    """A layer as a reader knows it, with its name in ``transformers``."""
    found = _LAYER.fullmatch(name)
    return f"layer {found[1]} ({name})" if found else name


def _final(path: Path) -> Path:
    """A folder as the user knows it, also while it is written under its temporary name."""
    return path.with_name(path.name.removeprefix(TEMPORARY_PREFIX))


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference relative to the largest element; 0 of equal tensors, also if all are 0."""
    return float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _layer_difference(name: str, theirs: Tensor, ours: Tensor, given: Tensor | None) -> float:
    """Largest difference of a layer's outputs [s, h] for the same input, relative to what the layer computes there.

    What a transformer layer computes is what it adds to its input ``given`` [s, h], which may be small beside it: the
    rounding of that sum is no difference. Each token is measured by its own largest element, or that of most tokens,
    since those of one token may be a thousand times as large.
    """
    added, rounding = theirs, theirs.abs()
    if given is not None and _LAYER.fullmatch(name):
        added, rounding = theirs - given, rounding + given.abs()
    sizes = added.abs().amax(-1)
    sizes = sizes.clamp(min=max(float(sizes.median()), torch.finfo(torch.float32).tiny))
    beyond = ((theirs - ours).abs() - 4 * _ROUNDING * rounding).clamp(min=0).amax(-1)
    return float((beyond / sizes).max())


def _needed_bytes(weights: WeightSource, tokens: int) -> int:
    """Estimate of the memory: the largest layer as saved, converted and as a module; logits and all layers' outputs."""
    layers = (weights.layer(index, "meta").values() for index in range(num_pipeline_layers(weights.model)))
    largest = max(sum(one.numel() * (2 * one.itemsize + 4) for one in layer) for layer in layers)
    model = weights.model
    return largest + 4 * tokens * (8 * weights.vocab_size + 3 * (model.num_layers + 2) * model.hidden_size)


def _our_differences(
    weights: WeightSource,
    tokens: Tensor,
    rounded_to: torch.dtype | None,
    theirs: dict[str, Tensor],
    advance: Callable[[], None],
) -> _Differences:
    """Compare each of our layers, for the input that ``transformers`` has there, and the logits of all of ours."""
    from megasdc.model.pipeline import streamed_outputs
    from megasdc.model.sharding import LEADING_LAYERS

    model = weights.model.model_copy(update={"backend": "torch", "fuse": False})

    def load(parameters: list[tuple[str, nn.Parameter]]) -> None:
        load_weights(weights, parameters, model, vocab_size=weights.vocab_size)
        for _, parameter in parameters if rounded_to is not None else ():
            parameter.data = parameter.data.to(rounded_to).float()
        advance()

    found: dict[str, float] = {}
    given: Tensor | None = None
    with groups.single_process():
        outputs = streamed_outputs(model, tokens, vocab_size=weights.vocab_size, dtype=torch.float32, load=load)
        for _ in range(LEADING_LAYERS):
            output = next(outputs)
        for name, wanted in theirs.items():
            if given is not None:  # [s, 2, h]: our own hidden states, and theirs
                output = outputs.send(torch.cat((output[:, :1], given[:, None]), 1))
            found[name] = _layer_difference(name, wanted, output[:, -1, : wanted.shape[-1]].detach(), given)
            given = wanted
        assert next(outputs, None) is None, "as many layers of megasdc as of transformers"
    return _Differences(found, _difference(wanted, output[:, 0, : weights.vocab_size].detach()))


class _Recorder:
    """Outputs of the layers of ``transformers``, by the names of its modules; each is the input of the next.

    They are what enters the first layer, the outputs [s, h] of all transformer layers and of the last norm, and logits
    [s, v].
    """

    attention = "eager"

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def enter(self, name: str, given: Tensor) -> Tensor:
        """Input that a layer gets in place of the given one, here the same, [b, s, h]."""
        if not self.outputs:
            self.outputs[_EMBEDDINGS] = given[0].clone()
        return given

    def leave(self, name: str, output: Tensor) -> Tensor:
        """Output that replaces a layer's, here the same after recording it, [b, s, h] or [b, s, v]."""
        self.outputs[name] = output[0].clone()
        return output


class _Mover:
    """Probe of the effect of rounding: another kernel of attention, inputs and outputs moved by one unit in last place.

    Args:
        theirs: the outputs where nothing is moved. Each layer gets two inputs: the output of the moved layers before
            it, and its input where nothing was moved.
    """

    attention = "sdpa"

    def __init__(self, theirs: dict[str, Tensor]) -> None:
        self.theirs, self.found = theirs, dict.fromkeys(theirs, 0.0)
        self.given = dict(zip(list(theirs)[1:], theirs.values(), strict=False))
        self.logits = math.nan
        self.generator = torch.Generator().manual_seed(SEED)

    def enter(self, name: str, given: Tensor) -> Tensor:
        """Input that a layer gets in place of the given one, [2, s, h]."""
        return self._move(torch.stack((given[0], self.given[name])))

    def leave(self, name: str, output: Tensor) -> Tensor:
        """Compare and move its output, [2, s, h] or [2, s, v]."""
        moved = self._move(output)
        self.found[name] = _layer_difference(name, self.theirs[name], moved[1], self.given[name])
        self.logits = _difference(self.theirs[name], moved[0])  # that of the last layer stays
        return moved

    def _move(self, values: Tensor) -> Tensor:
        return values * (1 + _ROUNDING * (2 * torch.randint(0, 2, values.shape, generator=self.generator) - 1))


def _their_outputs(
    weights: WeightSource, shards: HfShards, tokens: Tensor, advance: Callable[[], None]
) -> dict[str, Tensor]:
    """The outputs of all layers, as ``_Recorder`` has them."""
    recorder = _Recorder()
    _compute(weights, shards, tokens, recorder, advance)
    return recorder.outputs


def _noise(weights: WeightSource, shards: HfShards, tokens: Tensor, theirs: dict[str, Tensor]) -> _Differences:
    """Differences that rounding makes in each layer for the same input, and in the logits."""
    mover = _Mover(theirs)
    _compute(weights, shards, tokens.repeat(2, 1), mover, lambda: None)
    return _Differences(mover.found, mover.logits)


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


def _compute(
    weights: WeightSource, shards: HfShards, tokens: Tensor, probe: _Recorder | _Mover, advance: Callable[[], None]
) -> None:
    """Let ``transformers`` compute the logits of tokens [b, s]; each module holds its parameters while it computes.

    _NotVerifiedError if it cannot.
    """
    try:
        model = _empty_model(weights, shards, probe.attention)
        parts: dict[str, list[str]] = {}
        for name, _ in model.named_parameters(remove_duplicate=False):
            block = _BLOCK.fullmatch(name)
            parts.setdefault(block[1] if block else name.rpartition(".")[0], []).append(name)
        embeddings = {name for index in (0, 1) for rule in rules(weights.model, index) for name in rule.theirs}
        tied = {HEAD: rules(weights.model, 0)[0].theirs[0]} if weights.model.tie_embeddings else {}
        for part, names in parts.items():
            _attach(model, part, {name: tied.get(name, name) for name in names}, shards, advance)
            if names[0] not in embeddings:
                _observe(model.get_submodule(part), part, probe)
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
    except MegasdcError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise _NotVerifiedError(f"transformers cannot compute it: {type(error).__name__}: {error}") from error


def _attach(
    model: nn.Module, part: str, sources: dict[str, str], shards: HfShards, advance: Callable[[], None]
) -> None:
    """Load the parameters of a module before it computes, from the tensors of ``sources``, and free them afterwards."""
    module = model.get_submodule(part)

    def load(*hooked: Any) -> None:
        for name, source in sources.items():
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(shards.read([source])[source].float(), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, value)
        advance()

    def free(*hooked: Any) -> None:
        module.to_empty(device="meta")

    module.register_forward_pre_hook(load)
    module.register_forward_hook(free)


def _observe(module: nn.Module, name: str, probe: _Recorder | _Mover) -> None:
    """Let a probe see, and change, what a layer of ``transformers`` gets and gives."""

    def enter(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return probe.enter(name, given[0]), *given[1:]

    def leave(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return probe.leave(name, output[0]), *output[1:]
        return probe.leave(name, output)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
