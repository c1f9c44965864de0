"""Which fields of a configuration contradict each other, or do not fit the number of ranks?

No torch here: the checks run in the launcher's front and on machines without one.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasdc.config.deepspeed_keys import SCHEDULER_PARAMS
from megasdc.config.deepspeed_part import precision_of
from megasdc.config.sections import DataSection, MegasdcSection, ModelSection
from megasdc.errors import ConfigError

if TYPE_CHECKING:
    from megasdc.config.load import RunConfig


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        paths: dotted paths of the fields it is about, the one at fault first. A contradiction is not reported while
            one of its fields is wrong by itself.
        text: the message.
    """

    paths: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Layout:
    """How many ranks do what, and how many samples they take.

    Attributes:
        world_size: all ranks, the product of the next three.
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        data: data-parallel replicas.
        train_batch_size: samples of one step over all ranks.
        micro_batch_size: samples of one micro-batch on one replica.
        accumulation_steps: micro-batches of one step on one replica.
    """

    world_size: int
    tensor: int
    pipeline: int
    data: int
    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


def head_width(model: ModelSection) -> int:
    """Width of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def query_groups(model: ModelSection) -> int:
    """Number of key/value heads."""
    return model.num_query_groups or model.num_attention_heads


def ffn_width(model: ModelSection) -> int:
    """Width of the MLP: as given, else 4 h, or with a gate 8/3 h rounded up to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    return -(-8 * model.hidden_size // (3 * 64)) * 64 if model.gated_mlp else 4 * model.hidden_size


def check_layout(config: RunConfig, world_size: int) -> Layout:
    """Check that the layout and the batch sizes fit a number of ranks.

    Args:
        config: a loaded configuration.
        world_size: all ranks of the run.

    Raises:
        ConfigError: the ranks cannot be divided so, or the three batch sizes disagree; all numbers are given.
    """
    parallel = config.megasdc.parallel
    ranks = parallel.tensor * parallel.pipeline
    if world_size < 1 or world_size % ranks:
        text = (
            f"megasdc.parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} = {ranks} does not divide the "
            f"world size {world_size}; start a multiple of {ranks} ranks, or change tensor or pipeline."
        )
        raise ConfigError(text, config.source)
    data = world_size // ranks
    train, micro, accumulation = _batch_sizes(config, data)
    return Layout(world_size, parallel.tensor, parallel.pipeline, data, train, micro, accumulation)


def resolve_batch(config: RunConfig, world_size: int) -> tuple[int, int, int, int]:
    """Return (train_batch_size, micro_batch_size, accumulation_steps, data-parallel size).

    Raises:
        ConfigError: as `check_layout`.
    """
    layout = check_layout(config, world_size)
    return layout.train_batch_size, layout.micro_batch_size, layout.accumulation_steps, layout.data


def _batch_sizes(config: RunConfig, data: int) -> tuple[int, int, int]:
    """Derive the one size that is absent, or check all three: train = micro x accumulation x data."""
    train: int | None = config.deepspeed.get("train_batch_size")
    micro: int | None = config.deepspeed.get("train_micro_batch_size_per_gpu")
    accumulation: int | None = config.deepspeed.get("gradient_accumulation_steps")
    unit = (micro or 1) * (accumulation or 1) * data
    if train is None:
        train = unit
    if micro is not None and accumulation is not None:
        if train == unit:
            return train, micro, accumulation
        remedy = f"set train_batch_size to {unit}, change the factors, or leave one of the three out"
    else:
        if train % unit == 0:
            return train, micro or train // unit, accumulation or train // unit
        remedy = f"make train_batch_size a multiple of {unit}, or change the number of ranks"
    text = (
        f"train_batch_size: got {train}, which is not train_micro_batch_size_per_gpu {micro or '(derived)'} x "
        f"gradient_accumulation_steps {accumulation or '(derived)'} x data-parallel size {data}; {remedy}."
    )
    raise ConfigError(text, config.source)


def find_problems(deepspeed: dict[str, Any], given: dict[str, Any], file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that can be seen without knowing the number of ranks.

    Args:
        deepspeed: DeepSpeed's keys with defaults filled in.
        given: DeepSpeed's keys as the user gave them.
        file: our sections.
    """
    yield from _model_problems(file.model)
    yield from _tensor_problems(file)
    yield from _pipeline_problems(file)
    yield from _data_problems(file.data)
    yield from _training_problems(file)
    yield from _precision_problems(deepspeed, given)
    yield from _optimizer_problems(deepspeed)
    yield from _scheduler_problems(deepspeed)
    local = file.checkpoint.storage == "node_local"
    if deepspeed["checkpoint"]["use_node_local_storage"] is not local:
        yield Problem(
            ("checkpoint.use_node_local_storage", "megasdc.checkpoint.storage"),
            f"checkpoint.use_node_local_storage: got {str(not local).lower()}, but megasdc.checkpoint.storage is "
            f'"{file.checkpoint.storage}"; remove the first.',
        )


def _divisible(name: str, value: int, by_name: str, by: int, remedy: str) -> Iterator[Problem]:
    if value % by:
        yield Problem((name, by_name), f"{name}: got {value}, which {by_name} {by} does not divide; {remedy}.")


_M = "megasdc.model"
_P = "megasdc.parallel"


def _model_problems(model: ModelSection) -> Iterator[Problem]:
    heads = model.num_attention_heads
    if model.kv_channels is None:
        yield from _divisible(
            f"{_M}.hidden_size",
            model.hidden_size,
            f"{_M}.num_attention_heads",
            heads,
            "change one of them, or give kv_channels",
        )
    yield from _divisible(
        f"{_M}.num_attention_heads",
        heads,
        f"{_M}.num_query_groups",
        query_groups(model),
        "every group needs equally many query heads",
    )
    if model.position_embedding == "rope" and head_width(model) % 2:
        yield Problem(
            (f"{_M}.kv_channels", f"{_M}.hidden_size", f"{_M}.num_attention_heads", f"{_M}.position_embedding"),
            f"{_M}.kv_channels: the width of a head is {head_width(model)}; rope needs an even width.",
        )
    if model.backend == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        yield Problem(
            (f"{_M}.backend",),
            f'{_M}.backend: got "transformer_engine", which is not installed; install it on a machine with a GPU '
            '(pip install --no-build-isolation "transformer_engine[pytorch]") or set "torch".',
        )
    yield from _megatron_problems(model)


_OURS_IN_MEGATRON = {
    **{name: f"{_M}.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")},
    **{name: f"{_M}.{name}" for name in ("kv_channels", "ffn_hidden_size", "normalization", "hidden_dropout")},
    **{name: f"{_M}.{name}" for name in ("attention_dropout",)},
    "layernorm_epsilon": f"{_M}.norm_epsilon",
    "init_method_std": f"{_M}.init_std",
    "gated_linear_unit": f"{_M}.gated_mlp",
    "activation_func": f"{_M}.activation",
    "add_bias_linear": f"{_M}.bias",
    "add_qkv_bias": f"{_M}.qkv_bias",
    "tensor_model_parallel_size": f"{_P}.tensor",
    "pipeline_model_parallel_size": f"{_P}.pipeline",
    "sequence_parallel": f"{_P}.sequence_parallel",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
    "params_dtype": "bf16.enabled or fp16.enabled",
    "pipeline_dtype": "bf16.enabled or fp16.enabled",
    "recompute_granularity": "pipeline.activation_checkpoint_interval",
}
"""Fields of Megatron's TransformerConfig that have a name of their own here."""


def _megatron_problems(model: ModelSection) -> Iterator[Problem]:
    for key in model.megatron:
        path = f"{_M}.megatron.{key}"
        if key in _OURS_IN_MEGATRON:
            yield Problem((path,), f"{path}: has its own field here; set {_OURS_IN_MEGATRON[key]} instead.")
        elif (names := megatron_fields()) and key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "see megatron/core/transformer/transformer_config.py."
            yield Problem((path,), f"{path}: unknown field of Megatron-core's TransformerConfig; {hint}")


@cache
def megatron_fields() -> frozenset[str]:
    """Names of TransformerConfig's fields, read from its source so that torch is not imported; empty if absent."""
    spec = importlib.util.find_spec("megatron")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        files = [
            Path(root, "core", "transformer", "transformer_config.py"),
            Path(root, "core", "model_parallel_config.py"),
        ]
        if all(file.is_file() for file in files):
            return frozenset(
                line.target.id
                for file in files
                for node in ast.parse(file.read_text(encoding="utf-8")).body
                if isinstance(node, ast.ClassDef) and node.name in ("TransformerConfig", "ModelParallelConfig")
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            )
    return frozenset()


def _tensor_problems(file: MegasdcSection) -> Iterator[Problem]:
    tensor, model = file.parallel.tensor, file.model
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": query_groups(model),
        "ffn_hidden_size": ffn_width(model),
        "vocab_multiple": model.vocab_multiple,
    }
    for name, value in sizes.items():
        yield from _divisible(f"{_M}.{name}", value, f"{_P}.tensor", tensor, "tensor ranks need equal shares")
    if file.parallel.sequence_parallel:
        if tensor == 1:
            yield Problem(
                (f"{_P}.sequence_parallel", f"{_P}.tensor"),
                f"{_P}.sequence_parallel: got true with {_P}.tensor 1; set tensor > 1 or sequence_parallel false.",
            )
        yield from _divisible(
            "megasdc.data.sequence_length",
            file.data.sequence_length,
            f"{_P}.tensor",
            tensor,
            "sequence_parallel needs equal shares",
        )
    if file.data.sequence_length > model.max_positions:
        yield Problem(
            ("megasdc.data.sequence_length", f"{_M}.max_positions"),
            f"megasdc.data.sequence_length: got {file.data.sequence_length}, more than {_M}.max_positions "
            f"{model.max_positions}; shorten the samples or raise max_positions.",
        )


def _pipeline_problems(file: MegasdcSection) -> Iterator[Problem]:
    layers, stages, partition = file.model.num_layers, file.parallel.pipeline, file.parallel.partition
    names = (f"{_P}.pipeline", f"{_M}.num_layers", f"{_P}.partition")
    if layers < stages:
        yield Problem(
            names[:2],
            f"{names[0]}: got {stages} stages for {layers} layers; every stage needs a layer: at most {layers}.",
        )
    elif partition == "uniform" and layers % stages:
        yield Problem(
            names,
            f'{names[2]}: "uniform" needs equal stages, but {names[1]} {layers} is not divisible by {names[0]} '
            f'{stages}; set "parameters" or the counts of the stages.',
        )
    if isinstance(partition, list) and (len(partition) != stages or sum(partition) != layers):
        yield Problem(
            (names[2], *names[:2]),
            f"{names[2]}: got {partition}, which is {len(partition)} stages with {sum(partition)} layers; needed: "
            f"{stages} stages ({names[0]}) with {layers} layers ({names[1]}).",
        )


def _data_problems(data: DataSection) -> Iterator[Problem]:
    if not data.path.strip():
        yield Problem(("megasdc.data.path",), 'megasdc.data.path: got ""; needed: the folder of prepared data.')
    if data.split[0] == 0:
        yield Problem(
            ("megasdc.data.split",), f"megasdc.data.split: got {data.split}; the share of training must be above 0."
        )
    for index, source in enumerate(data.sources):
        path = f"megasdc.data.sources.{index}"
        if source.kind == "stdlib" and source.path is not None:
            yield Problem((f"{path}.path",), f'{path}.path: kind "stdlib" takes no path; set kind "files" or "hub".')
        if source.kind != "stdlib" and not source.path:
            needed = "a file, folder or glob" if source.kind == "files" else "the name of a hub dataset"
            yield Problem((f"{path}.path",), f'{path}.path: missing; kind "{source.kind}" needs {needed}.')
        for name in ("name", "streaming"):
            if source.kind != "hub" and getattr(source, name):
                yield Problem((f"{path}.{name}",), f'{path}.{name}: is for kind "hub", not "{source.kind}".')
    if data.tokenizer.kind == "huggingface" and not data.tokenizer.path:
        path = "megasdc.data.tokenizer.path"
        yield Problem((path,), f'{path}: missing; kind "huggingface" needs a folder or the name of a hub tokenizer.')


def _training_problems(file: MegasdcSection) -> Iterator[Problem]:
    if not file.logging.run_dir.strip():
        yield Problem(("megasdc.logging.run_dir",), 'megasdc.logging.run_dir: got ""; needed: a folder for the run.')
    if file.training.eval_interval > 0 and file.data.split[1] == 0:
        yield Problem(
            ("megasdc.training.eval_interval", "megasdc.data.split"),
            f"megasdc.training.eval_interval: got {file.training.eval_interval}, but megasdc.data.split "
            f"{file.data.split} leaves nothing for validation; set 0 or give the second share.",
        )


def _precision_problems(deepspeed: dict[str, Any], given: dict[str, Any]) -> Iterator[Problem]:
    if "bf16" in given and "bfloat16" in given:
        yield Problem(("bfloat16", "bf16"), "bfloat16: is the old name of bf16, which is given too; remove bfloat16.")
    bf16 = deepspeed.get("bf16", {})
    if bf16.get("enabled") and deepspeed.get("fp16", {}).get("enabled"):
        yield Problem(
            ("bf16.enabled", "fp16.enabled"),
            "bf16.enabled: got true together with fp16.enabled true; switch one of them off.",
        )
        return
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield Problem(
            ("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
            "bf16.bf16_optimizer_states: got true; it needs bf16.bf16_master_weights_and_grads true.",
        )
    precision = precision_of(deepspeed)
    kind = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    if kind not in (None, "fp32", precision):
        yield Problem(
            ("data_types.grad_accum_dtype", "bf16.enabled", "fp16.enabled"),
            f'data_types.grad_accum_dtype: got "{kind}" with a model in {precision}; allowed: "fp32"'
            + ("." if precision == "fp32" else f' or "{precision}".'),
        )


def _optimizer_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    params = deepspeed["optimizer"]["params"]
    base = "optimizer.params"
    if params["torch_adam"]:
        if "bias_correction" in params:
            yield Problem(
                (f"{base}.bias_correction", f"{base}.torch_adam"),
                f"{base}.bias_correction: PyTorch's AdamW always corrects the bias; remove it or set torch_adam false.",
            )
        if params.get("fused") and params.get("foreach"):
            yield Problem(
                (f"{base}.foreach", f"{base}.fused"),
                f"{base}.foreach: got true together with fused true; PyTorch takes one of them.",
            )
    else:
        for key in ("fused", "foreach"):
            if key in params:
                yield Problem(
                    (f"{base}.{key}", f"{base}.torch_adam"),
                    f"{base}.{key}: is for PyTorch's optimizer, but torch_adam is false; remove it.",
                )


def _scheduler_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    kind, params = deepspeed["scheduler"]["type"], deepspeed["scheduler"]["params"]
    allowed = SCHEDULER_PARAMS[kind]
    for key in sorted(set(params) - allowed):
        path = f"scheduler.params.{key}"
        yield Problem(
            (path, "scheduler.type"), f"{path}: {kind} does not take it; allowed: {', '.join(sorted(allowed))}."
        )


def find_warnings(config: RunConfig) -> list[str]:
    """List what is allowed but probably not meant; each a sentence that starts with its dotted path."""
    file, warnings = config.megasdc, []
    steps = file.training.steps
    params = config.deepspeed["scheduler"]["params"]
    total, warmup = params.get("total_num_steps"), params["warmup_num_steps"]
    if total is not None and total != steps:
        effect = "the rate stays at its floor for the rest" if total < steps else "the rate never reaches its floor"
        warnings.append(f"scheduler.params.total_num_steps: {total}, but megasdc.training.steps is {steps}: {effect}.")
    if warmup >= steps > 1:
        warnings.append(f"scheduler.params.warmup_num_steps: {warmup} of {steps} steps: warm-up never ends.")
    for name, interval in (
        ("megasdc.training.eval_interval", file.training.eval_interval),
        ("megasdc.checkpoint.interval", file.checkpoint.interval),
        ("megasdc.logging.interval", file.logging.interval),
    ):
        if interval > steps:
            warnings.append(f"{name}: {interval}, but the run has {steps} steps.")
    interval, keep = file.checkpoint.interval, file.checkpoint.keep_every
    if keep and (interval == 0 or keep % interval):
        warnings.append(
            f"megasdc.checkpoint.keep_every: {keep} is no multiple of megasdc.checkpoint.interval {interval}: "
            "few or no checkpoints are kept by it."
        )
    if file.model.vocab_multiple % 8:
        warnings.append(f"megasdc.model.vocab_multiple: {file.model.vocab_multiple} is no multiple of 8: slow on GPUs.")
    return warnings
