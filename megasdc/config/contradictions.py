"""Contradictions between fields of a configuration that do not depend on the number of ranks.

They are those in the sizes of the model and in how ranks divide it, in detection, hooks, faults and a study, which name
submodules of the model, and between other sections. ``find_problems`` asks the checks of single sections, too. Two
others depend on the number of ranks: ``isolation_layout_problems`` and ``fault_place_problems``.

The catalogue of submodules is of the whole model, with the observable results of each: names, without building the
model. A rank holds one stage only; this covers all stages. A test compares it with the observations of ranks of real
models.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    BACKWARD,
    FORWARD,
    PARAMETER,
    RECOMPUTE,
    REDUCED_GRAD,
    UPDATE,
    WEIGHT_GRAD,
)
from megasdc.common.credentials import find_credentials
from megasdc.common.errors import ConfigError
from megasdc.common.user_code import can_be_loaded, file_of
from megasdc.common.wire import split_address
from megasdc.common.words import number_of
from megasdc.config.data import data_problems
from megasdc.config.deepspeed import deepspeed_problems, recompute_interval_of
from megasdc.config.detection import TRAINING, SdcSection
from megasdc.config.drop_compute import BACKWARD_PASS, drop_problems, granularity_problems
from megasdc.config.faults import (
    CLIPPED_GRAD,
    COLLECTIVE,
    COPY,
    OPTIMIZER_STATE,
    STATE_AT_REST,
    WITHOUT_SUBMODULE,
    FaultSpec,
    delay_problems,
    expand_faults,
    fault_spec_problems,
    missing_in_model,
    near_names,
    place_problems,
    process_problems,
)
from megasdc.config.fields import Problem
from megasdc.config.hooks import (
    MOMENTUM_RESET,
    SPIKE_AWARE,
    bound_problems,
    covered_problems,
    gradient_hook_problems,
)
from megasdc.config.local_sgd import AUTO
from megasdc.config.model import ModelSection, ffn_width, head_width, megatron_problems, query_groups
from megasdc.config.read import shown
from megasdc.config.sections import (
    COMPUTATION_SYNC,
    FREE_RUN,
    DeterminismSection,
    MegasdcSection,
    ParallelSection,
    StudySection,
)


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
    yield from drop_problems(file.drop_compute, bool(file.data.blend))
    yield from _local_sgd_problems(file)
    yield from granularity_problems(file.drop_compute, file.parallel.tensor, file.parallel.pipeline)
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


_L = "megasdc.local_sgd"


def _local_sgd_problems(file: MegasdcSection) -> Iterator[Problem]:
    section, training = file.local_sgd, file.training
    if section.replicas is None:
        return
    if section.replica >= section.replicas:
        yield Problem(
            (f"{_L}.replica", f"{_L}.replicas"), f"got {section.replica} of {section.replicas}; they count from 0."
        )
    intervals = {
        "training.steps": training.steps,
        "training.eval_interval": training.eval_interval,
        "checkpoint.interval": file.checkpoint.interval,
    }
    for name, value in intervals.items():
        if value % section.every:
            yield Problem(
                (f"megasdc.{name}", f"{_L}.every"),
                f"got {value}, which is no multiple of the {section.every} local steps of a round: what is evaluated, "
                f"saved and ended with are weights on which replicas agree; give a multiple, or another {_L}.every.",
            )
    rounds = training.steps // section.every
    if section.threshold == AUTO and section.replay_rounds is None and section.window_rounds >= rounds:
        yield Problem(
            (f"{_L}.window_rounds", "megasdc.training.steps"),
            f"got {section.window_rounds}, and the run has {number_of(rounds, 'round')}, so that no threshold is ever "
            "used; measure fewer rounds, or give a threshold.",
        )
    if file.study.mode is not None:
        yield Problem((f"{_L}.replicas", "megasdc.study.mode"), "replicas of a study are others; set one of them null.")
    if file.drop_compute.compensation is not None:
        yield Problem(
            ("megasdc.drop_compute.compensation", f"{_L}.replicas"),
            f'got "{file.drop_compute.compensation}", which changes the steps or samples of one replica alone; set '
            'null, with samples "defer".',
        )
    if "isolate" in {action for _, action in file.sdc.policy}:
        yield Problem(
            ("megasdc.sdc.policy", f"{_L}.replicas"),
            'got "isolate", after which a replica has another layout than the others; set "halt" or "repair".',
        )
    if file.checkpoint.other_layout == "convert":
        yield Problem(
            ("megasdc.checkpoint.other_layout", f"{_L}.replicas"),
            'got "convert", and ranks exchange the shards of one layout; set "refuse".',
        )


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


_M = "megasdc.model"
_P = "megasdc.parallel"


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


def _training_problems(file: MegasdcSection) -> Iterator[Problem]:
    if not file.logging.run_dir.strip():
        yield Problem(("megasdc.logging.run_dir",), 'got ""; needed: a folder for the run.')
    if file.training.eval_interval > 0 and file.data.split[1] == 0:
        yield Problem(
            ("megasdc.training.eval_interval", "megasdc.data.split"),
            f"got {file.training.eval_interval}, but megasdc.data.split {file.data.split} leaves nothing for "
            "validation; set 0 or give the second share.",
        )


DETERMINISTIC_MEGATRON_FIELDS = {"deterministic_mode": True, "tp_comm_overlap": False}
"""Values that deterministic mode needs of fields that `model.megatron` may set.

Source: Megatron-core, docs/user-guide/deterministic-training.md: overlapped tensor-parallel sums are not deterministic.
"""


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


MOST_SAMPLES_LOST = 0.005
"""Share of the independent samples taken by audits above which a warning is given."""


def detection_problems(file: MegasdcSection, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks; ``deepspeed`` has defaults filled in."""
    checks = {"megasdc.audit.enabled": file.audit.enabled, "megasdc.sdc.always_on.enabled": file.sdc.always_on.enabled}
    for name in (name for name, enabled in checks.items() if enabled):
        if not file.determinism.enabled:
            yield Problem(
                (name, "megasdc.determinism.enabled"),
                "got true with megasdc.determinism.enabled false; results that need not repeat cannot be compared bit "
                "by bit, and healthy ranks would be flagged; set megasdc.determinism.enabled true.",
            )
        if file.model.backend != "torch":
            yield Problem(
                (name, "megasdc.model.backend"),
                f'got true with megasdc.model.backend "{file.model.backend}", whose submodules cannot be observed; '
                'set the backend to "torch".',
            )
    yield from _isolation_problems(file)
    recomputes = bool(recompute_interval_of(deepspeed))
    always_on = file.sdc.always_on
    if always_on.enabled and always_on.recompute and not recomputes:
        yield Problem(
            ("megasdc.sdc.always_on.recompute", "pipeline.activation_checkpoint_interval"),
            "got true, but nothing is recomputed; set pipeline.activation_checkpoint_interval to 1, or recompute to "
            "null.",
        )
    if checks_nothing(file, recomputes=recomputes):
        yield Problem(
            ("megasdc.sdc.always_on.enabled",),
            "got true, but nothing is checked: parameters, finite and tokens are false and no "
            "recomputation is compared; set sdc.always_on.parameters true, or enabled false.",
        )
    if file.sdc.budget is not None and always_on.coverage != "auto":
        yield Problem(
            ("megasdc.sdc.budget", "megasdc.sdc.always_on.coverage"),
            f'got {file.sdc.budget} with a fixed coverage "{always_on.coverage}", which follows no budget; set '
            'coverage to "auto", or budget to null.',
        )
    asked = always_on.slice_elements if always_on.enabled else None
    if asked and not deepspeed["optimizer"]["params"]["torch_adam"]:
        yield Problem(
            ("megasdc.sdc.always_on.slice_elements", "optimizer.params.torch_adam"),
            f"got {asked} with optimizer.params.torch_adam false; the update is recomputed as PyTorch's optimizer does "
            "it; set torch_adam true, or slice_elements to null.",
        )


def checks_nothing(file: MegasdcSection, *, recomputes: bool) -> bool:
    """Whether checks of every step are enabled and none of them is; ``recomputes``: whether activations are."""
    section, parts = file.sdc.always_on, ("parameters", "finite", "slice_elements", "rows", "tokens")
    checked = any(getattr(section, one) for one in parts)
    return section.enabled and not checked and not (recomputes and section.recompute is not False)


def _isolation_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Problems of isolation: settings that remaining replicas need to load the state from memory at another layout."""
    memory = file.checkpoint.memory
    needed = {
        "checkpoint.memory.interval": (memory.interval, bool(memory.interval), "1"),
        "checkpoint.memory.partners": (memory.partners, memory.partners is not False, "true"),
        "checkpoint.other_layout": (file.checkpoint.other_layout, file.checkpoint.other_layout == "convert", "convert"),
        "study.replicas": (file.study.replicas, file.study.replicas is None, "null"),
    }
    for name in file.sdc.policy.isolating:
        for field, (got, fits, wanted) in needed.items():
            if not fits:
                yield Problem(
                    (f"megasdc.sdc.policy.{name}", f"megasdc.{field}"),
                    f'got "isolate" with megasdc.{field} {json.dumps(got)}; the replicas that go on take over what the '
                    f"isolated one had in the optimizer from memory; set megasdc.{field} to {wanted}, or the policy to "
                    '"halt".',
                )


def isolation_layout_problems(file: MegasdcSection, replicas: int) -> Iterator[str]:
    """Yield policies that isolate a replica where too few others would be left."""
    needed = file.sdc.isolation.min_replicas + 1
    if replicas < needed:
        for name in file.sdc.policy.isolating:
            yield (
                f'megasdc.sdc.policy.{name}: got "isolate" with {number_of(replicas, "replica")}; {needed} are '
                "needed, of which "
                f'megasdc.sdc.isolation.min_replicas go on; start more ranks, or set the policy to "halt".'
            )


def asks_golden(sdc: SdcSection, determinism: DeterminismSection) -> bool:
    """Whether a run computes the golden workload without a dispute: at the start or every ``golden_interval``."""
    asked = sdc.golden_at_start or sdc.golden_interval is not None
    return sdc.golden is not None and determinism.enabled and asked


def detects(file: MegasdcSection) -> bool:
    """Whether a run has any check while it trains."""
    return file.audit.enabled or file.sdc.always_on.enabled or asks_golden(file.sdc, file.determinism)


def samples_lost(file: MegasdcSection, micro_batches: int) -> float:
    """Upper bound of the share of independent samples that audits take; 0 without audits of training micro-batches.

    ``micro_batches`` is the number M of a step on each replica.
    """
    takes = file.audit.enabled and file.audit.micro_batch == TRAINING
    return 1 / (micro_batches * file.audit.interval) if takes else 0.0


def hook_problems(file: MegasdcSection, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield every problem of the hooks; ``deepspeed`` has defaults filled in."""
    names = parameter_names(file.model, file.parallel) if file.optimizer_hooks else []
    for place, spec in enumerate(file.optimizer_hooks):
        path = f"megasdc.optimizer_hooks.{place}"
        yield from gradient_hook_problems(spec, path, deepspeed)
        for pattern in spec.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield Problem(
                    (f"{path}.parameters",),
                    f"got {pattern!r}, which matches no parameter; names are such as {', '.join(names[:2])} and "
                    f"{names[-1]}.",
                )
    if file.optimizer_hooks and file.model.backend != "torch":
        yield Problem(
            ("megasdc.optimizer_hooks", "megasdc.model.backend"),
            f'got entries with megasdc.model.backend "{file.model.backend}", whose parameters have no full names; set '
            'the backend to "torch".',
        )
    yield from bound_problems(deepspeed) if file.optimizer_hooks else ()
    yield from _idle_problems(file, names)
    resets = [place for place, spec in enumerate(file.optimizer_hooks) if spec.hook == MOMENTUM_RESET]
    if len(resets) > 1:
        yield Problem(
            (f"megasdc.optimizer_hooks.{resets[1]}.hook",),
            "got a second momentum_reset; keep one.",
        )


def user_hook_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield the hooks of the user's own whose file or module is not there; nothing of them is run."""
    for place, entry in enumerate(file.hooks):
        if not can_be_loaded(entry.hook):
            kind = "file" if file_of(entry.hook) else "module"
            yield Problem(
                (f"megasdc.hooks.{place}.hook",),
                f"got {entry.hook!r}, whose {kind} is not found; a file is looked for from the folder of the launch, a "
                "module there and where Python looks for packages (PYTHONPATH, pip install).",
                of_host=True,
            )


def _idle_problems(file: MegasdcSection, names: list[str]) -> Iterator[Problem]:
    """Entries that would never have an effect, or that would make another check fail."""
    yield from covered_problems(file.optimizer_hooks, "megasdc.optimizer_hooks", names)
    resets = [spec for spec in file.optimizer_hooks if spec.hook == MOMENTUM_RESET]
    for place, spec in enumerate(file.optimizer_hooks):
        path = f"megasdc.optimizer_hooks.{place}"
        if spec.hook == SPIKE_AWARE:
            most = min([file.training.steps, *(reset.interval for reset in resets)])
            if spec.grace_steps >= most:
                yield Problem(
                    (f"{path}.grace_steps",),
                    f"got {spec.grace_steps}; with {most} steps to the end or the next reset it would never bound "
                    "anything; set a smaller one.",
                )
        if spec.hook == MOMENTUM_RESET and spec.warmup_steps >= spec.interval:
            yield Problem(
                (f"{path}.warmup_steps", f"{path}.interval"),
                f"got {spec.warmup_steps} with interval {spec.interval}; the learning rate would never reach its "
                "schedule; set fewer.",
            )


_MODEL_PATHS = ("megasdc.model", "megasdc.parallel")


def fault_problems(file: MegasdcSection, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield every problem of a fault, by itself or with the model.

    Args:
        deepspeed: DeepSpeed's keys with defaults filled in.
    """
    slots = submodule_slots(file.model, file.parallel) if file.faults else {}
    interval = recompute_interval_of(deepspeed)
    for index, entry in enumerate(file.faults):
        path = f"megasdc.faults.{index}"
        problems = list(fault_spec_problems(entry))
        try:
            expanded = [] if problems else expand_faults([entry])
        except ConfigError as error:
            problems += [("profile", text) for text in error.problems]
            expanded = []
        for spec in expanded:
            problems += fault_spec_problems(spec) if entry.profile is not None else ()
            problems += missing_in_model(spec, slots)
            problems += _backend_problems(spec, file.model.backend)
            if spec.phase == RECOMPUTE and not interval:
                problems.append(("phase", "nothing is recomputed; set pipeline.activation_checkpoint_interval"))
        for field, text in dict.fromkeys(problems):
            place = f"{path}.profile" if entry.profile is not None and expanded else f"{path}.{field}"
            yield Problem((place, *_MODEL_PATHS), f"{text}.")
    for index, process in enumerate(file.process_faults):
        for field, text in process_problems(process):
            place = f"megasdc.process_faults.{index}.{field}"
            yield Problem((place,), f"{text}.")


def _backend_problems(spec: FaultSpec, backend: str) -> Iterator[tuple[str, str]]:
    if backend != "torch" and spec.phase not in WITHOUT_SUBMODULE:
        yield "phase", f'results of megasdc.model.backend "{backend}" cannot be observed; set "torch" or drop the fault'


def fault_place_problems(file: MegasdcSection, tensor: int, pipeline: int, data: int) -> list[str]:
    """Problems of faults and delays on ranks that a layout does not have."""
    lists: dict[str, Sequence[Any]] = {
        "faults": file.faults,
        "process_faults": file.process_faults,
        "delay": file.delay,
    }
    apart = file.local_sgd.replicas
    counted = file.study.replicas if apart is None else apart * data
    return [
        f"megasdc.{name}.{index}.{field}: {text}."
        for name, faults in lists.items()
        for index, spec in enumerate(faults)
        for field, text in place_problems(spec, tensor, pipeline, data, counted)
    ]


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
    yield from _own_problems_of_study(study)
    yield from _submodule_problems(file)
    yield from _other_sections(file)


def _own_problems_of_study(study: StudySection) -> Iterator[Problem]:
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
    if file.drop_compute.enabled and file.drop_compute.granularity == BACKWARD_PASS:
        yield _against(
            study,
            "megasdc.drop_compute.granularity",
            f'"{BACKWARD_PASS}"; backward passes that end at different layers have no results to compare; set '
            '"micro_batch"',
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


STATES = ("master", "exp_avg", "exp_avg_sq")
_BLOCK = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attn_bda",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.activation",
    "mlp.linear_fc2",
    "mlp_bda",
)
_OF_QK_NORM = ("self_attention.q_layernorm", "self_attention.k_layernorm")
_FIRST_BLOCK = 2
_GRADIENT_SLOTS = {"core_attention": ("query", "key", "value"), "word_embeddings": ()}
_LOCAL_TERMS = ("maximum", "predicted", "sum")


def submodule_slots(model: ModelSection, parallel: ParallelSection) -> dict[str, dict[str, tuple[str, ...]]]:
    """Every submodule of the model in forward order, with its slots by phase; phases without slots are omitted."""
    return {name: _slots(name, _parameters(name, model, parallel), parallel) for name in _names(model)}


def parameter_names(model: ModelSection, parallel: ParallelSection) -> list[str]:
    """Full name of every parameter of the model, in forward order; a tied one has the name of the embedding only."""
    own = [fqn for fqn in _names(model) if not (model.tie_embeddings and fqn.endswith(".output"))]
    return [f"{fqn}.{name}" for fqn in own for name in _parameters(fqn, model, parallel)]


def _names(model: ModelSection) -> list[str]:
    block = [name for name in _BLOCK if name not in _OF_QK_NORM or model.megatron.get("qk_layernorm")]
    last = _FIRST_BLOCK + model.num_layers
    blocks = [f"{index}.layer.{name}" for index in range(_FIRST_BLOCK, last) for name in block]
    return ["0.word_embeddings", "1.positions", *blocks, f"{last}.norm", f"{last + 1}.output", "loss"]


def _parameters(fqn: str, model: ModelSection, parallel: ParallelSection) -> tuple[str, ...]:
    name = fqn.rpartition(".")[2]
    if name in ("norm", "input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm"):
        return ("weight",) if model.normalization == "RMSNorm" else ("weight", "bias")
    if name.startswith("linear_"):
        return ("weight", "bias") if model.bias or (model.qkv_bias and name == "linear_qkv") else ("weight",)
    if name == "output":  # a tied one has its own copy only on another stage than the embedding
        return () if model.tie_embeddings and parallel.pipeline == 1 else ("weight",)
    if name == "positions":
        return ("weight",) if model.position_embedding == "learned" else ()
    return ("weight",) if name == "word_embeddings" else ()


def _slots(fqn: str, parameters: tuple[str, ...], parallel: ParallelSection) -> dict[str, tuple[str, ...]]:
    if fqn == "loss":
        return {FORWARD: (*(_LOCAL_TERMS if parallel.tensor > 1 else ()), "output"), BACKWARD: ("input",)}
    states = tuple(f"{parameter}.{state}" for parameter in parameters for state in STATES)
    slots = {
        FORWARD: ("output",),
        RECOMPUTE: ("output",) if ".layer." in fqn else (),
        BACKWARD: _GRADIENT_SLOTS.get(fqn.rpartition(".")[2], ("input",)),
        **dict.fromkeys((WEIGHT_GRAD, ACCUMULATED_GRAD, REDUCED_GRAD, PARAMETER), parameters),
        **dict.fromkeys((COLLECTIVE, CLIPPED_GRAD, COPY), parameters),
        **dict.fromkeys((UPDATE, OPTIMIZER_STATE, STATE_AT_REST), states),
    }
    return {phase: names for phase, names in slots.items() if names}
