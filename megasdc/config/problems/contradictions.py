"""Contradictions between fields of a configuration that do not depend on the number of ranks.

They are those between DeepSpeed's keys, in the sizes of the model and in how ranks divide it, in the settings of a
study, and between sections.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from megasdc.common.credentials import find_credentials
from megasdc.common.imports import is_installed
from megasdc.common.wire import split_address
from megasdc.config.deepspeed_keys import SCHEDULER_PARAMS
from megasdc.config.deepspeed_part import precision_of
from megasdc.config.megatron_fields import megatron_problems
from megasdc.config.problems.detection import detection_problems
from megasdc.config.problems.drop_compute import drop_problems
from megasdc.config.problems.faults import fault_problems
from megasdc.config.problems.optimizer_hooks import hook_problems, user_hook_problems
from megasdc.config.problems.problem import Problem
from megasdc.config.read import shown
from megasdc.config.sections.data import data_problems
from megasdc.config.sections.delay import delay_problems
from megasdc.config.sections.faults import near_names
from megasdc.config.sections.megasdc import MegasdcSection
from megasdc.config.sections.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.config.sections.study import COMPUTATION_SYNC, FREE_RUN, StudySection
from megasdc.config.submodule_names import submodule_slots


def deepspeed_problems(deepspeed: dict[str, Any], given: dict[str, Any]) -> Iterator[Problem]:
    """Yield every contradiction in DeepSpeed's keys with defaults; ``given`` are those of the user, without them."""
    yield from _precision_problems(deepspeed, given)
    yield from _monitor_problems(deepspeed)
    yield from _optimizer_problems(deepspeed)
    yield from _scheduler_problems(deepspeed)


def _precision_problems(deepspeed: dict[str, Any], given: dict[str, Any]) -> Iterator[Problem]:
    if "bf16" in given and "bfloat16" in given:
        yield Problem(("bfloat16", "bf16"), "is the old name of bf16, which is given too; remove bfloat16.")
    bf16 = deepspeed.get("bf16", {})
    if bf16.get("enabled") and deepspeed.get("fp16", {}).get("enabled"):
        yield Problem(
            ("bf16.enabled", "fp16.enabled"),
            "got true together with fp16.enabled true; switch one of them off.",
        )
        return
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield Problem(
            ("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
            "got true; it needs bf16.bf16_master_weights_and_grads true.",
        )
    precision = precision_of(deepspeed)
    kind = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    allowed = ("fp32", "bf16") if precision == "bf16" else (precision,)
    if kind is not None and kind not in allowed:
        yield Problem(
            ("data_types.grad_accum_dtype", "bf16.enabled", "fp16.enabled"),
            f'got "{kind}" with a model in {precision}; allowed: ' + " or ".join(f'"{name}"' for name in allowed) + ".",
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
            f"got {bucket}; DeepSpeed needs an even number.",
        )
    if precision == "bf16" and kind == "fp32" and device != "none":
        yield Problem(
            ("data_types.grad_accum_dtype", "zero_optimization.offload_optimizer", "bf16.enabled"),
            '"fp32" (given or by default) with a model in bf16 cannot be combined with '
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
            f'got true with data_types.grad_accum_dtype "{precision}"; it needs '
            'zero_optimization.offload_optimizer.device "cpu" and optimizer.params.torch_adam false; set both, '
            f"{other}or remove it.",
        )


MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The package that each of DeepSpeed's monitors imports."""


def _monitor_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    for key, package in MONITORS.items():
        if deepspeed.get(key, {}).get("enabled") and not is_installed(package):
            yield Problem(
                (f"{key}.enabled",),
                f"got true, but the package {package} is not installed; run `pip install {package}` on every host, or "
                "remove it.",
            )


def _optimizer_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    params = deepspeed["optimizer"]["params"]
    base = "optimizer.params"
    if params["torch_adam"]:
        if "bias_correction" in params:
            yield Problem(
                (f"{base}.bias_correction", f"{base}.torch_adam"),
                "PyTorch's AdamW always corrects the bias; remove it or set torch_adam false.",
            )
        if params.get("fused") and params.get("foreach"):
            yield Problem(
                (f"{base}.foreach", f"{base}.fused"),
                "got true together with fused true; PyTorch takes one of them.",
            )
    else:
        for key in ("fused", "foreach"):
            if key in params:
                yield Problem(
                    (f"{base}.{key}", f"{base}.torch_adam"),
                    "is for PyTorch's optimizer, but torch_adam is false; remove it.",
                )


def _scheduler_problems(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    kind, params = deepspeed["scheduler"]["type"], deepspeed["scheduler"]["params"]
    allowed = SCHEDULER_PARAMS[kind]
    for key in sorted(set(params) - allowed):
        path = f"scheduler.params.{key}"
        yield Problem((path, "scheduler.type"), f"{kind} does not take it; allowed: {', '.join(sorted(allowed))}.")


def model_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks."""
    yield from _own_problems_of_model(file.model)
    yield from _tensor_problems(file)
    yield from _length_problems(file)
    yield from _pipeline_problems(file)


def _divisible(name: str, value: int, by_name: str, by: int, remedy: str) -> Iterator[Problem]:
    if value % by:
        yield Problem((name, by_name), f"got {value}, which {by_name} {by} does not divide; {remedy}.")


def _own_problems_of_model(model: ModelSection) -> Iterator[Problem]:
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
            f"the width of a head is {head_width(model)}; rope needs an even width.",
        )
    if model.backend == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        yield Problem(
            (f"{_M}.backend",),
            'got "transformer_engine", which is not installed; install it on a machine with a GPU (pip install '
            '--no-build-isolation "transformer_engine[pytorch]") or set "torch".',
        )
    if model.backend == "transformer_engine" and model.attention_dropout > 0:
        yield Problem(
            (f"{_M}.attention_dropout", f"{_M}.backend"),
            f'got {model.attention_dropout} with {_M}.backend "transformer_engine", whose dropout masks depend on the '
            'layout; set attention_dropout 0 or backend "torch".',
        )
    if model.backend == "transformer_engine" and model.fuse:
        yield Problem(
            (f"{_M}.fuse", f"{_M}.backend"),
            f'got true with {_M}.backend "transformer_engine", whose modules are fused already; set fuse false or '
            'backend "torch".',
        )
    for name, wrong in megatron_problems(model).items():
        path = f"{_M}.megatron.{name}"
        yield Problem((path,), f"got {model.megatron[name]!r}; {wrong}.".replace("?.", "?"))


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
            f'got true with {_M}.backend "transformer_engine" and {_P}.tensor {tensor}, where the gradients of these '
            'norms are not summed over tensor ranks; set tensor 1, backend "torch", or qk_layernorm false.',
        )
    if file.parallel.sequence_parallel and tensor == 1:
        yield Problem(
            (f"{_P}.sequence_parallel", f"{_P}.tensor"),
            f"got true with {_P}.tensor 1; set tensor > 1 or sequence_parallel false.",
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
                f"got {length}, more than {_M}.max_positions {file.model.max_positions}; shorten the samples or raise "
                "max_positions.",
            )


def _pipeline_problems(file: MegasdcSection) -> Iterator[Problem]:
    layers, stages, partition = file.model.num_layers, file.parallel.pipeline, file.parallel.partition
    names = (f"{_P}.pipeline", f"{_M}.num_layers", f"{_P}.partition")
    if layers < stages:
        yield Problem(
            names[:2],
            f"got {stages} stages for {layers} layers; every stage needs a layer: at most {layers}.",
        )
    elif partition == "uniform" and layers % stages:
        yield Problem(
            (names[2], *names[:2]),
            f'"uniform" needs equal stages, but {names[1]} {layers} is not divisible by {names[0]} {stages}; set '
            '"parameters" or the counts of the stages.',
        )
    if isinstance(partition, list) and (len(partition) != stages or sum(partition) != layers):
        yield Problem(
            (names[2], *names[:2]),
            f"got {partition}, which is {len(partition)} stages with {sum(partition)} layers; needed: {stages} stages "
            f"({names[0]}) with {layers} layers ({names[1]}).",
        )


_S = "megasdc.study"


def study_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks."""
    study = file.study
    if study.mode is None:
        return
    if file.health.enabled:
        yield Problem(
            (f"{_S}.mode", "megasdc.health.enabled"),
            "a study is not watched, since a replica that waits for the others is not stuck; remove health.enabled.",
        )
    yield from _own_problems(study)
    yield from _submodule_problems(file)
    yield from _other_sections(file)


def _own_problems(study: StudySection) -> Iterator[Problem]:
    if study.replicas is None:
        yield _problem("replicas", "mode", f'missing; mode "{study.mode}" needs their number, at least 2')
    elif study.trusted >= study.replicas:
        yield _problem(
            "trusted", "replicas", f"got {study.trusted}, but the replicas are 0 to {study.replicas - 1}; name one"
        )


def _submodule_problems(file: MegasdcSection) -> Iterator[Problem]:
    study = file.study
    if study.mode == COMPUTATION_SYNC and file.model.backend != "torch":
        yield Problem(
            (f"{_S}.mode", "megasdc.model.backend"),
            f'got "{study.mode}" with megasdc.model.backend "{file.model.backend}", whose submodules cannot be '
            'observed; set the backend to "torch".',
        )
    names = list(submodule_slots(file.model, file.parallel))
    for index, pattern in enumerate(study.submodules or ()):
        if not any(fnmatchcase(name, pattern) for name in names):
            path = f"{_S}.submodules.{index}"
            near = ", ".join(near_names(pattern, names))
            yield Problem((path, "megasdc.model"), f"got {pattern!r}, which matches no submodule; nearest: {near}.")


def _other_sections(file: MegasdcSection) -> Iterator[Problem]:
    study = file.study
    if not file.determinism.enabled:
        yield _against(
            study,
            "megasdc.determinism.enabled",
            "false; results that need not repeat differ between healthy replicas too; set it true",
        )
    if file.drop_compute.enabled and file.drop_compute.replay_decisions is None:
        yield _against(
            study,
            "megasdc.drop_compute.enabled",
            "true; each replica would drop different micro-batches; set it false, or replay decisions",
        )
    if file.delay:
        yield _against(study, "megasdc.delay", f"{len(file.delay)} entries; delays change no result; remove them")
    if file.checkpoint.memory.interval:
        yield _against(
            study,
            "megasdc.checkpoint.memory.interval",
            f"{file.checkpoint.memory.interval}; a study resumes from a checkpoint that all replicas have, and memory "
            "need not hold it; set it to 0",
        )
    if file.checkpoint.keep_last == 1:
        yield _against(
            study,
            "megasdc.checkpoint.keep_last",
            "1; a study resumes from a checkpoint that all replicas have, and one killed while saving has only the one "
            "before; set it to 2 or more, or 0",
        )
    if study.mode == FREE_RUN and not file.training.eval_interval:
        yield _against(
            study,
            "megasdc.training.eval_interval",
            "0; the models are evaluated at the end, on eval_samples; set an interval",
        )
    if study.mode == COMPUTATION_SYNC:
        again = "; micro-batches that one replica recomputes are compared with nothing; set it false"
        for path, section in (("sdc.always_on", file.sdc.always_on), ("audit", file.audit)):
            if section.enabled:
                yield _against(study, f"megasdc.{path}.enabled", f"true{again}")


def _against(study: StudySection, other: str, text: str) -> Problem:
    return Problem((f"{_S}.mode", other), f'got "{study.mode}" with {other} {text}.')


def _problem(field: str, other: str, text: str) -> Problem:
    return Problem((f"{_S}.{field}", f"{_S}.{other}"), f"{text}.")


def find_problems(deepspeed: dict[str, Any], given: dict[str, Any], file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks.

    Args:
        deepspeed: DeepSpeed's keys with defaults filled in.
        given: DeepSpeed's keys as the user gave them.
    """
    yield from model_problems(file)
    yield from data_problems(file.data)
    yield from _training_problems(file)
    yield from _determinism_problems(file)
    yield from _trace_problems(file)
    yield from detection_problems(file, deepspeed)
    yield from hook_problems(file, deepspeed)
    yield from user_hook_problems(file)
    yield from drop_problems(file)
    yield from deepspeed_problems(deepspeed, given)
    yield from fault_problems(file, deepspeed)
    yield from delay_problems(file.delay)
    yield from study_problems(file)
    yield from _address_problems(file)
    if file.checkpoint.require_verified == "always" and not file.audit.enabled:
        yield Problem(
            ("megasdc.checkpoint.require_verified", "megasdc.audit.enabled"),
            'got "always", but without audits no checkpoint is ever verified and the run could never be resumed; set '
            'megasdc.audit.enabled true, or "auto".',
        )
    if file.checkpoint.writing == "async" and any(fault.phase == "checkpoint" for fault in file.faults):
        yield Problem(
            ("megasdc.checkpoint.writing", "megasdc.faults"),
            'got "async", but faults of phase checkpoint are injected right after the step, when the checkpoint is not '
            'written yet; set "sync".',
        )
    local = file.checkpoint.storage == "node_local"
    if local and file.supervise.min_hosts is not None:
        yield Problem(
            ("megasdc.supervise.min_hosts", "megasdc.checkpoint.storage"),
            f'got {file.supervise.min_hosts} with "node_local", where a checkpoint of more hosts is lost with one of '
            'them; set null, or "shared".',
        )
    if local and file.checkpoint.other_layout == "convert":
        yield Problem(
            ("megasdc.checkpoint.other_layout", "megasdc.checkpoint.storage"),
            'got "convert" with "node_local", where no rank sees the files of all ranks; set "refuse", or "shared".',
        )
    if deepspeed["checkpoint"]["use_node_local_storage"] is not local:
        yield Problem(
            ("checkpoint.use_node_local_storage", "megasdc.checkpoint.storage"),
            f'got {str(not local).lower()}, but megasdc.checkpoint.storage is "{file.checkpoint.storage}"; remove the '
            "first.",
        )


def _address_problems(file: MegasdcSection) -> Iterator[Problem]:
    if file.logging.prometheus is not None:
        try:
            split_address(file.logging.prometheus)
        except ValueError as error:
            yield Problem(("megasdc.logging.prometheus",), f"{error}.")
    yield from _archive_problems(file)


def _archive_problems(file: MegasdcSection) -> Iterator[Problem]:
    archive, path = file.checkpoint.archive, "megasdc.checkpoint.archive"
    if archive.address is None:
        return
    if problem := find_credentials(archive.address):
        yield Problem((f"{path}.address",), f"is refused and not shown here: {problem}.")
    if file.study.replicas is not None:
        yield Problem(
            (f"{path}.address", "megasdc.study.replicas"),
            f"got {shown(archive.address)} with megasdc.study.replicas {file.study.replicas}; replicas share the id of "
            "one launch: archive their checkpoints afterwards with `megasdc archive push`.",
        )


DETERMINISTIC_MEGATRON_FIELDS = {"deterministic_mode": True, "tp_comm_overlap": False}
"""Values that deterministic mode needs of fields that `model.megatron` may set.

Source: Megatron-core, docs/user-guide/deterministic-training.md: overlapped tensor-parallel sums are not deterministic.
"""

_M = "megasdc.model"
_P = "megasdc.parallel"


def _training_problems(file: MegasdcSection) -> Iterator[Problem]:
    if not file.logging.run_dir.strip():
        yield Problem(("megasdc.logging.run_dir",), 'got ""; needed: a folder for the run.')
    if file.training.eval_interval > 0 and file.data.split[1] == 0:
        yield Problem(
            ("megasdc.training.eval_interval", "megasdc.data.split"),
            f"got {file.training.eval_interval}, but megasdc.data.split {file.data.split} leaves nothing for "
            "validation; set 0 or give the second share.",
        )


def _determinism_problems(file: MegasdcSection) -> Iterator[Problem]:
    path = "megasdc.determinism.enabled"
    if not file.determinism.enabled:
        return
    if file.parallel.threads == 0:
        yield Problem(
            (f"{_P}.threads", path),
            f"got 0, which leaves the number of threads to each machine, with {path} true; sums depend on that "
            "number: give one.",
        )
    for field, wanted in DETERMINISTIC_MEGATRON_FIELDS.items():
        if file.model.megatron.get(field, wanted) != wanted:
            name = f"{_M}.megatron.{field}"
            yield Problem(
                (name, path),
                f"got {str(not wanted).lower()} with {path} true, which needs {str(wanted).lower()}; remove it.",
            )


def _trace_problems(file: MegasdcSection) -> Iterator[Problem]:
    last = file.model.num_layers + 3  # before the transformer layers: words, positions; after: norm, output
    beyond = [layer for layer in file.trace.layers or () if layer > last]
    if beyond:
        yield Problem(
            ("megasdc.trace.layers", f"{_M}.num_layers"),
            f"got {beyond[0]}, but with {_M}.num_layers {file.model.num_layers} the last place in the pipeline is "
            f"{last}, the output; the transformer layers are 2 to {last - 2}.",
        )
    if file.trace.enabled and file.model.backend != "torch":
        yield Problem(
            ("megasdc.trace.enabled", f"{_M}.backend"),
            f'got true with {_M}.backend "{file.model.backend}", whose submodules cannot be observed; set it to '
            '"torch", or trace.enabled false.',
        )
