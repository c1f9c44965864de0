"""Contradictions between fields of a configuration that do not depend on the number of ranks."""

from __future__ import annotations

import importlib.util
import math
import os.path
from collections.abc import Iterator
from typing import Any

from megasdc.config.deepspeed_keys import SCHEDULER_PARAMS
from megasdc.config.deepspeed_part import precision_of
from megasdc.config.megatron_fields import megatron_problems
from megasdc.config.problems.delay import delay_problems
from megasdc.config.problems.detection import detection_problems
from megasdc.config.problems.drop_compute import drop_problems
from megasdc.config.problems.faults import fault_problems
from megasdc.config.problems.optimizer_hooks import hook_problems
from megasdc.config.problems.problem import Problem
from megasdc.config.problems.study import study_problems
from megasdc.config.sections.megasdc import DataSection, MegasdcSection, ModelSection, TrainingSection


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


def find_problems(deepspeed: dict[str, Any], given: dict[str, Any], file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks.

    Args:
        deepspeed: DeepSpeed's keys with defaults filled in.
        given: DeepSpeed's keys as the user gave them.
        file: our sections.
    """
    yield from _model_problems(file.model)
    yield from _tensor_problems(file)
    yield from _length_problems(file)
    yield from _pipeline_problems(file)
    yield from _data_problems(file.data)
    yield from _blend_problems(file.data)
    yield from _training_problems(file)
    yield from _garbage_problems(file.training)
    yield from _determinism_problems(file)
    yield from _trace_problems(file)
    yield from detection_problems(file, deepspeed)
    yield from hook_problems(file, deepspeed)
    yield from drop_problems(file)
    yield from _precision_problems(deepspeed, given)
    yield from _monitor_problems(deepspeed)
    yield from _optimizer_problems(deepspeed)
    yield from _scheduler_problems(deepspeed)
    yield from fault_problems(file, deepspeed)
    yield from delay_problems(file.delay)
    yield from study_problems(file)
    if file.checkpoint.require_verified == "always" and not file.audit.enabled:
        yield Problem(
            ("megasdc.checkpoint.require_verified", "megasdc.audit.enabled"),
            'megasdc.checkpoint.require_verified: got "always", but without audits no checkpoint is ever verified and '
            'the run could never be resumed; set megasdc.audit.enabled true, or "auto".',
        )
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


DETERMINISTIC_MEGATRON_FIELDS = {"deterministic_mode": True, "tp_comm_overlap": False}
"""Values that deterministic mode needs of fields that `model.megatron` may set.

Source: Megatron-core, docs/user-guide/deterministic-training.md: overlapped tensor-parallel sums are not deterministic.
"""

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
    if model.backend == "transformer_engine" and model.attention_dropout > 0:
        yield Problem(
            (f"{_M}.attention_dropout", f"{_M}.backend"),
            f'{_M}.attention_dropout: got {model.attention_dropout} with {_M}.backend "transformer_engine", whose '
            'dropout masks depend on the layout; set attention_dropout 0 or backend "torch".',
        )
    if model.backend == "transformer_engine" and model.fuse:
        yield Problem(
            (f"{_M}.fuse", f"{_M}.backend"),
            f'{_M}.fuse: got true with {_M}.backend "transformer_engine", whose modules are fused already; set fuse '
            'false or backend "torch".',
        )
    for name, wrong in megatron_problems(model).items():
        path = f"{_M}.megatron.{name}"
        yield Problem((path,), f"{path}: got {model.megatron[name]!r}; {wrong}.".replace("?.", "?"))


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
    if model.backend == "transformer_engine" and tensor > 1 and model.megatron.get("qk_layernorm"):
        yield Problem(
            (f"{_M}.megatron.qk_layernorm", f"{_M}.backend", f"{_P}.tensor"),
            f'{_M}.megatron.qk_layernorm: got true with {_M}.backend "transformer_engine" and {_P}.tensor {tensor}, '
            'where the gradients of these norms are not summed over tensor ranks; set tensor 1, backend "torch", or '
            "qk_layernorm false.",
        )
    if file.parallel.sequence_parallel and tensor == 1:
        yield Problem(
            (f"{_P}.sequence_parallel", f"{_P}.tensor"),
            f"{_P}.sequence_parallel: got true with {_P}.tensor 1; set tensor > 1 or sequence_parallel false.",
        )


def _length_problems(file: MegasdcSection) -> Iterator[Problem]:
    lengths = {"megasdc.data.sequence_length": file.data.sequence_length}
    for index, length in enumerate(file.golden.sequence_lengths or ()):
        lengths[f"megasdc.golden.sequence_lengths.{index}"] = length
    for path, length in lengths.items():
        if file.parallel.sequence_parallel:
            yield from _divisible(
                path, length, f"{_P}.tensor", file.parallel.tensor, "sequence_parallel needs equal shares"
            )
        if length > file.model.max_positions:
            yield Problem(
                (path, f"{_M}.max_positions"),
                f"{path}: got {length}, more than {_M}.max_positions {file.model.max_positions}; shorten the samples "
                "or raise max_positions.",
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
        if source.pattern is not None and source.kind != "stdlib":
            yield Problem((f"{path}.pattern",), f'{path}.pattern: is for kind "stdlib", not "{source.kind}".')
        elif source.pattern is not None and not _inside(source.pattern):
            yield Problem(
                (f"{path}.pattern",),
                f'{path}.pattern: got "{source.pattern}"; needed: a glob of files inside the library, such as "*.py", '
                'where ".." is not used and "**" stands for whole folders.',
            )
        for name in ("name", "streaming"):
            if source.kind != "hub" and getattr(source, name):
                yield Problem((f"{path}.{name}",), f'{path}.{name}: is for kind "hub", not "{source.kind}".')
    if data.tokenizer.kind == "huggingface" and not data.tokenizer.path:
        path = "megasdc.data.tokenizer.path"
        yield Problem((path,), f'{path}: missing; kind "huggingface" needs a folder or the name of a hub tokenizer.')


def _inside(pattern: str) -> bool:
    """Whether a glob can match only below the folder in which it is used."""
    parts = pattern.split("/")
    odd = any(part == ".." or ("**" in part and part != "**") for part in parts)
    return bool(pattern.strip()) and not os.path.isabs(pattern) and not odd


def _blend_problems(data: DataSection) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, part in enumerate(data.blend):
        path = f"megasdc.data.blend.{index}.path"
        if not part.path.strip():
            yield Problem((path,), f'{path}: got ""; needed: a folder of prepared data.')
            continue
        before = first.setdefault(os.path.normpath(part.path), index)
        if before != index:
            yield Problem(
                (path, f"megasdc.data.blend.{before}.path"),
                f'{path}: got "{part.path}", which megasdc.data.blend.{before}.path names already; '
                "give each folder once, with the sum of the weights.",
            )
    if data.blend and data.path.strip() and os.path.normpath(data.path) not in first:
        yield Problem(
            ("megasdc.data.path", "megasdc.data.blend"),
            f'megasdc.data.path: got "{data.path}", which is not in megasdc.data.blend '
            f"({', '.join(part.path for part in data.blend)}); name one of its folders or add it to the blend.",
        )
    if not math.isfinite(sum(part.weight for part in data.blend)):
        yield Problem(("megasdc.data.blend",), "megasdc.data.blend: the sum of the weights is infinite; scale them.")


def _training_problems(file: MegasdcSection) -> Iterator[Problem]:
    if not file.logging.run_dir.strip():
        yield Problem(("megasdc.logging.run_dir",), 'megasdc.logging.run_dir: got ""; needed: a folder for the run.')
    if file.training.eval_interval > 0 and file.data.split[1] == 0:
        yield Problem(
            ("megasdc.training.eval_interval", "megasdc.data.split"),
            f"megasdc.training.eval_interval: got {file.training.eval_interval}, but megasdc.data.split "
            f"{file.data.split} leaves nothing for validation; set 0 or give the second share.",
        )


def _garbage_problems(training: TrainingSection) -> Iterator[Problem]:
    name, kind = "garbage_collection_interval", training.garbage_collection
    if kind == "python" and getattr(training, name) != TrainingSection.model_fields[name].default:
        path = f"megasdc.training.{name}"
        yield Problem(
            (path, "megasdc.training.garbage_collection"),
            f'{path}: got {getattr(training, name)} with megasdc.training.garbage_collection "python", which does not '
            'read it; set "managed", or remove it.',
        )


def _determinism_problems(file: MegasdcSection) -> Iterator[Problem]:
    path = "megasdc.determinism.enabled"
    if not file.determinism.enabled:
        if file.determinism.fill_uninitialized_memory:
            name = "megasdc.determinism.fill_uninitialized_memory"
            yield Problem((name, path), f"{name}: got true with {path} false, where it has no effect; set {path} true.")
        return
    if file.parallel.threads == 0:
        yield Problem(
            (f"{_P}.threads", path),
            f"{_P}.threads: got 0, which leaves the number of threads to each machine, with {path} true; sums depend "
            "on that number: give one.",
        )
    for field, wanted in DETERMINISTIC_MEGATRON_FIELDS.items():
        if file.model.megatron.get(field, wanted) != wanted:
            name = f"{_M}.megatron.{field}"
            yield Problem(
                (name, path),
                f"{name}: got {str(not wanted).lower()} with {path} true, which needs {str(wanted).lower()}; "
                "remove it.",
            )


def _trace_problems(file: MegasdcSection) -> Iterator[Problem]:
    last = file.model.num_layers + 3  # before the transformer layers: words, positions; after: norm, output
    beyond = [layer for layer in file.trace.layers or () if layer > last]
    if beyond:
        yield Problem(
            ("megasdc.trace.layers", f"{_M}.num_layers"),
            f"megasdc.trace.layers: got {beyond[0]}, but with {_M}.num_layers {file.model.num_layers} the last place "
            f"in the pipeline is {last}, the output; the transformer layers are 2 to {last - 2}.",
        )
    if file.trace.enabled and file.model.backend != "torch":
        yield Problem(
            ("megasdc.trace.enabled", f"{_M}.backend"),
            f'megasdc.trace.enabled: got true with {_M}.backend "{file.model.backend}", whose submodules cannot be '
            'observed; set it to "torch", or trace.enabled false.',
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
    allowed = ("fp32", "bf16") if precision == "bf16" else (precision,)
    if kind is not None and kind not in allowed:
        yield Problem(
            ("data_types.grad_accum_dtype", "bf16.enabled", "fp16.enabled"),
            f'data_types.grad_accum_dtype: got "{kind}" with a model in {precision}; allowed: '
            + " or ".join(f'"{name}"' for name in allowed)
            + ".",
        )
    # With offload, DeepSpeed uses its ZeRO optimizer instead of BF16_Optimizer. It keeps gradients of another dtype
    # than the model's in param.grad_accum, which neither its sum of tied weights nor ours over tensor ranks includes.
    # The last check below refuses this.
    offload = deepspeed["zero_optimization"].get("offload_optimizer")
    device = offload.get("device", "none") if offload else "none"
    yield from _master_problems(deepspeed, precision, device != "none")
    bucket = deepspeed["zero_optimization"].get("allgather_bucket_size", 0)
    if bucket % 2 and (precision, kind) != ("bf16", "fp32"):
        yield Problem(
            ("zero_optimization.allgather_bucket_size", "bf16.enabled", "data_types.grad_accum_dtype"),
            f"zero_optimization.allgather_bucket_size: got {bucket}; DeepSpeed needs an even number.",
        )
    if precision == "bf16" and kind == "fp32" and device != "none":
        yield Problem(
            ("data_types.grad_accum_dtype", "zero_optimization.offload_optimizer", "bf16.enabled"),
            f'data_types.grad_accum_dtype: "fp32" (given or by default) with a model in bf16 cannot be combined with '
            f'zero_optimization.offload_optimizer.device "{device}"; set grad_accum_dtype "bf16" or remove '
            "offload_optimizer.",
        )


def _master_problems(deepspeed: dict[str, Any], precision: str, offloads: bool) -> Iterator[Problem]:
    """Master weights in 16 bits, which DeepSpeed's ZeRO optimizer supports only with offload and its own CPU Adam."""
    key = f"{precision}_master_weights_and_grads"
    section = deepspeed.get(precision, {})
    if not section.get(key) or deepspeed.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        return
    states_too = section.get("bf16_optimizer_states") and not offloads
    if not states_too and (not offloads or deepspeed["optimizer"]["params"]["torch_adam"]):
        other = "set bf16.bf16_optimizer_states true without offload, " if precision == "bf16" else ""
        yield Problem(
            (f"{precision}.{key}", "zero_optimization.offload_optimizer", "optimizer.params.torch_adam"),
            f'{precision}.{key}: got true with data_types.grad_accum_dtype "{precision}"; it needs '
            'zero_optimization.offload_optimizer.device "cpu" and optimizer.params.torch_adam false; set both, '
            f"{other}or remove it.",
        )


MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The package that each of DeepSpeed's monitors imports."""


def _monitor_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    for key, package in MONITORS.items():
        if deepspeed.get(key, {}).get("enabled") and not _installed(package):
            yield Problem(
                (f"{key}.enabled",),
                f"{key}.enabled: got true, but the package {package} is not installed; run `pip install {package}` on "
                "every host, or remove it.",
            )


def _installed(package: str) -> bool:
    """Whether a package is installed; a mere folder of that name, as monitors create in the working folder, is not."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


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
