"""Versions of Python and the libraries: those permitted, those run together, those installed, and their private names.

The tables of versions in the documentation are generated from here (``megasdc config-table --write FILE``).

``OWNERS`` lists the private names of DeepSpeed, Megatron-core and PyTorch that megasdc builds on, which are looked for
at every start. Any release may remove a private name. Without the check that would be a traceback in the middle of a
start, or, for an override that is no longer called, a silently wrong result.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from types import CodeType
from typing import Any

from megasdc.common.errors import LaunchError

RUN_HERE = "run here"
RUN_ON_GPU = "run on a GPU machine"
NOT_RUN = "not run"

NAMES = {"python": "Python", "torch": "PyTorch", "deepspeed": "DeepSpeed", "megatron-core": "Megatron-core"}
"""Component by its key: ``python``, or the name of a distribution."""


@dataclass(frozen=True)
class ReleaseRange:
    """Permitted releases of a component: ``X.Y``, oldest first.

    ``parts``: how many numbers of a version are compared: 2, or 3 where a patch release may break megasdc.
    """

    minors: tuple[str, ...]
    parts: int = 2

    def __str__(self) -> str:
        return self.minors[0] if len(self.minors) == 1 else f"{self.minors[0]} to {self.minors[-1]}"


PERMITTED = {
    "python": ReleaseRange(("3.11", "3.12", "3.13")),
    "torch": ReleaseRange(("2.10", "2.11", "2.12", "2.13")),
    "deepspeed": ReleaseRange(("0.19",), parts=3),
    "megatron-core": ReleaseRange(("0.16", "0.17", "0.18", "0.19")),
}
"""``setup.py`` permits the same. DeepSpeed by patch release, since megasdc builds on its private names."""


@dataclass(frozen=True)
class Combination:
    """Versions that were run together, such as ``3.11.7``, on an ISO 8601 date; ``what``: what was run, with counts.

    ``state`` is ``RUN_HERE``: trained on CPUs, with gloo; ``RUN_ON_GPU``: on NVIDIA GPUs; ``NOT_RUN``: nothing was
    trained with them, whatever unit tests said.
    """

    python: str
    torch: str
    deepspeed: str
    megatron_core: str
    state: str
    what: str
    date: str

    @property
    def versions(self) -> dict[str, str]:
        """Version by component."""
        return dict(zip(NAMES, (self.python, self.torch, self.deepspeed, self.megatron_core), strict=True))


COMBINATIONS = (
    Combination("3.11.7", "2.13.0", "0.19.8", "0.16.1", RUN_HERE, "everything that CI runs", "2026-11-23"),
    Combination(
        *("3.11.7", "2.10.0", "0.19.0", "0.16.0", RUN_HERE),
        "`tests/versions.sh`: the smoke run; unit tests: 3,272 passed, 35 skipped, 1 failed; checkpoints carried to "
        "and from the first set",
        "2026-11-24",
    ),
    Combination(
        *("3.12.1", "2.11.0", "0.19.4", "0.17.1", RUN_HERE),
        "`tests/versions.sh`: the smoke run; unit tests: 3,273 passed, 35 skipped",
        "2026-11-24",
    ),
    Combination(
        *("3.12.1", "2.11.0", "0.19.8", "0.16.1", RUN_HERE),
        "`tests/gpu.sh` on a processor, DeepSpeed and Megatron-core as wheels, without a compiler",
        "2026-11-23",
    ),
    Combination(
        *("3.12.3", "2.11.0", "0.19.8", "0.16.1", RUN_ON_GPU),
        "`tests/gpu.sh` on one H100, in parts: training, determinism, kernels, checks, referee",
        "2026-11-27",
    ),
    Combination(
        *("3.12.1", "2.12.1", "0.19.8", "0.18.2", RUN_HERE),
        "`tests/versions.sh`: the smoke run; unit tests: 3,297 passed, 11 skipped",
        "2026-11-24",
    ),
    Combination(
        *("3.13.0", "2.13.0", "0.19.8", "0.19.2", RUN_HERE),
        "`tests/versions.sh`, its install included: the smoke run; unit tests: 3,296 passed, 11 skipped, 1 failed",
        "2026-11-23",
    ),
)


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.10.0a0+b4e4ee8`` is (2, 10, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def short_version(component: str, version: str) -> str:
    """The numbers of a version that are compared: ``2.10.0a0+b4e4ee8`` is PyTorch 2.10."""
    return ".".join(map(str, version_numbers(version)[: PERMITTED[component].parts]))


def versions_state(versions: Mapping[str, str], on_gpu: bool) -> str:
    """State of a combination of versions by component; other packages are ignored.

    One of the three states; on a GPU, versions that were run on CPUs only are ``RUN_HERE``.
    """
    wanted = _short(versions)
    states = {one.state for one in COMBINATIONS if _short(one.versions) == wanted}
    first, second = (RUN_ON_GPU, RUN_HERE) if on_gpu else (RUN_HERE, RUN_ON_GPU)
    return first if first in states else second if second in states else NOT_RUN


def _short(versions: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(short_version(name, versions[name]) for name in NAMES)


def spell(versions: Mapping[str, str]) -> str:
    """Versions as text: ``Python 3.11.7, PyTorch 2.13.0, DeepSpeed 0.19.8, Megatron-core 0.16.1``."""
    return ", ".join(f"{NAMES[name]} {versions[name]}" for name in NAMES)


def render_tables() -> str:
    """Markdown tables: each component's permitted versions by state, and the combinations that were run."""
    lines = [f"| component | permitted | {RUN_HERE} | {RUN_ON_GPU} | {NOT_RUN} |", "|---|---|---|---|---|"]
    for name, permitted in PERMITTED.items():
        seen = {
            state: _unique([one.versions[name] for one in COMBINATIONS if one.state == state])
            for state in (RUN_HERE, RUN_ON_GPU)
        }
        known = {".".join(version.split(".")[:2]) for versions in seen.values() for version in versions}
        left = [minor for minor in permitted.minors if minor not in known]
        if permitted.parts > 2:
            left.append("other patch releases")
        cells = (NAMES[name], str(permitted), *(", ".join(seen[state]) for state in seen), ", ".join(left))
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    lines += ["", f"| {' | '.join(NAMES.values())} | state | what was run | date |", "|---|---|---|---|---|---|---|"]
    for one in COMBINATIONS:
        lines.append("| " + " | ".join((*one.versions.values(), one.state, one.what, one.date)) + " |")
    return "\n".join(lines) + "\n"


def _unique(versions: list[str]) -> list[str]:
    """Distinct versions, oldest first."""
    return sorted(set(versions), key=lambda version: (version_numbers(version), version))


ANY_VARIABLE = "MEGASDC_ANY_VERSION"
"""1: versions outside the permitted range are used, with a warning at the start."""


def component_versions() -> dict[str, str]:
    """Version by component, read from package metadata without importing; absent where there is no metadata."""
    found = {"python": platform.python_version()}
    for name in NAMES:
        if name not in found:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue  # a source tree on PYTHONPATH
    return found


def range_problems(versions: Mapping[str, str | None]) -> list[str]:
    """A sentence for each component whose version is known and outside the permitted range."""
    problems = []
    for name, permitted in PERMITTED.items():
        version = versions.get(name)
        if version and ".".join(version.split(".")[:2]) not in permitted.minors:
            problems.append(f"{NAMES[name]} {version} is outside the permitted range {permitted}")
    return problems


def check_range(versions: Mapping[str, str | None]) -> None:
    """Refuses versions, by component, that megasdc does not permit.

    Raises:
        LaunchError: one is outside its range, and ``MEGASDC_ANY_VERSION=1`` is not set.
    """
    problems = range_problems(versions)
    if problems and os.environ.get(ANY_VARIABLE) != "1":
        raise LaunchError(
            f"{'; '.join(problems)}: install a permitted version (launch/constraints.txt has the tested ones), or set "
            f"{ANY_VARIABLE}=1 to try these anyway"
        )


def untested_versions(versions: Mapping[str, str], on_gpu: bool) -> str | None:
    """A warning that versions were not run together, or not on this kind of device; None: they were.

    Args:
        versions: version by component; a missing one counts as not run.
        on_gpu: whether ranks compute on NVIDIA GPUs.
    """
    unknown = [NAMES[name] for name in NAMES if name not in versions]
    here = {name: versions.get(name, "of unknown version") for name in NAMES}
    state = NOT_RUN if unknown else versions_state(versions, on_gpu)
    if state == (RUN_ON_GPU if on_gpu else RUN_HERE):
        return None
    if state == NOT_RUN:
        done = f"were not run together{_alone(versions)}"
    else:
        done = f"were run on {'CPUs' if on_gpu else 'GPUs'} only"
    tested = "; ".join(f"{spell(one.versions)} ({one.state})" for one in COMBINATIONS if one.state != NOT_RUN)
    return f"{spell(here)} {done}: look at first results with care, or install what was run: {tested}"


def _alone(versions: Mapping[str, str]) -> str:
    """The versions that were not run in any combination, in brackets; empty: none."""
    never = [
        f"{NAMES[name]} {version}"
        for name, version in versions.items()
        if name in NAMES
        and short_version(name, version)
        not in {short_version(name, one.versions[name]) for one in COMBINATIONS if one.state != NOT_RUN}
    ]
    return f" ({', '.join(never)} in no combination)" if never else ""


def describe_versions() -> str:
    """The installed versions and their state, two lines for ``megasdc --version``."""
    versions = component_versions()
    lines = [f"{NAMES[name]} {versions.get(name, 'not installed')}" for name in NAMES]
    if problems := range_problems(versions):
        return f"{', '.join(lines)}\nnot permitted: {'; '.join(problems)}"
    state = versions_state(versions, on_gpu=False) if set(NAMES) <= versions.keys() else NOT_RUN
    return f"{', '.join(lines)}\nthese together: {state}"


DISTRIBUTIONS = {"deepspeed": "deepspeed", "megatron": "megatron-core", "torch": "torch"}
"""Distribution by its top package."""

TRAINING, LAUNCHER, NODE, GUARD = "training", "launcher", "node", "guard"
"""The process that uses a name: a rank; DeepSpeed's runner; DeepSpeed's launch.py on a host; a guarded training."""


@dataclass(frozen=True)
class NameOwner:
    """A module, class or function, and the private names that megasdc needs in it.

    Args:
        where: ``package.module``, ``package.module:Class`` or ``package.module:function``.
        needed_by: name of the feature that breaks without them.
        names: attributes that it must have; of a class also inherited ones.
        mentioned: names that its code must read or set: attributes of its objects, calls that an override replaces.
        used_by: kind of process: ``TRAINING``, ``LAUNCHER``, ``NODE`` or ``GUARD``.
    """

    where: str
    needed_by: str
    names: tuple[str, ...] = ()
    mentioned: tuple[str, ...] = ()
    used_by: str = TRAINING


_PIPE = "deepspeed.runtime.pipe"

OWNERS = (
    NameOwner(
        f"{_PIPE}.engine:PipelineEngine",
        "megasdc's engine, which subclasses it",
        names=(
            *("_exec_forward_pass", "_exec_backward_pass", "_exec_reduce_tied_grads", "_exec_reduce_grads"),
            *("_exec_optimizer_step", "_exec_schedule", "_INSTRUCTION_MAP"),
            *("_aggregate_total_loss", "_reduce_outputs", "_bcast_pipe_scalar", "_backward_prologue_per_tensor"),
            *("_backward_epilogue",),
        ),
        mentioned=(
            *("_exec_schedule", "_INSTRUCTION_MAP", "_aggregate_total_loss", "_reduce_outputs"),
            *("_bcast_pipe_scalar", "pipe_buffers", "total_loss"),
        ),
    ),
    NameOwner(
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "backward passes that end between layers",
        names=("non_reentrant_checkpoint",),
    ),
    NameOwner(
        f"{_PIPE}.schedule",
        "the order of a step",
        names=(
            *("ForwardPass", "BackwardPass", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep", "LoadMicroBatch"),
            *("SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
        ),
    ),
    NameOwner(f"{_PIPE}.topology", "the layout of ranks", names=("PipeModelDataParallelTopology",)),
    NameOwner(f"{_PIPE}.p2p", "ranks that share a GPU", names=("dist", "send", "recv")),
    NameOwner(f"{_PIPE}.p2p:send", "ranks that share a GPU", mentioned=("dist", "send")),
    NameOwner(f"{_PIPE}.p2p:recv", "ranks that share a GPU", mentioned=("dist", "recv")),
    NameOwner("deepspeed.runtime.config", "the batch of a run", names=("DeepSpeedConfig",)),
    NameOwner(
        f"{_PIPE}.schedule:TrainSchedule",
        "DropCompute's order of micro-batches",
        names=("_step_to_micro_batch", "_valid_micro_batch", "_buffer_idx", "num_pipe_buffers"),
    ),
    NameOwner(
        f"{_PIPE}.module:PipelineModule",
        "stages of given sizes, and the names of their submodules",
        names=("_partition_layers", "_set_bounds"),
        mentioned=(
            *("_partition_layers", "_set_bounds", "_topo", "_grid", "_layer_specs", "_num_layers", "_local_start"),
            *("_local_stop", "forward_funcs", "tied_comms"),
        ),
    ),
    NameOwner(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "saving checkpoints",
        names=("_copy_recovery_script", "_checkpoint_tag_validation"),
        mentioned=("_copy_recovery_script", "_checkpoint_tag_validation", "checkpoint_engine"),
    ),
    NameOwner(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "a guard's audits, just before optimizer steps",
        names=("_take_model_step",),
        mentioned=("_take_model_step", "is_compiled"),
        used_by=GUARD,
    ),
    NameOwner(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "a guard's look at gradients",
        mentioned=("averaged_gradients", "cpu_offload", "local_overflow"),
        used_by=GUARD,
    ),
    NameOwner(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        "a guard's look at gradients",
        mentioned=("fp32_groups_gradient_flat_partition", "fp32_groups_gradients_flat"),
        used_by=GUARD,
    ),
    NameOwner(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "a guard's look at gradients before they are summed",
        names=(
            *("reduce_independent_p_g_buckets_and_remove_grads", "get_gradient_for_reduction"),
            "_gradient_reduction_buffer_dtype",
        ),
        mentioned=("reduce_independent_p_g_buckets_and_remove_grads",),
        used_by=GUARD,
    ),
    NameOwner(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "a guard's look at gradients before they are summed",
        names=("buffered_allreduce_fallback",),
        used_by=GUARD,
    ),
    NameOwner("torch.nn:Parameter", "telling tensors that were changed in place", names=("_version",), used_by=GUARD),
    NameOwner("torch.nn:Module", "telling compiled modules", names=("_compiled_call_impl",), used_by=GUARD),
    NameOwner(
        "torch.nn:Module",
        "copies in fp64 of a guarded model's own layers",
        mentioned=("_non_persistent_buffers_set",),
        used_by=GUARD,
    ),
    NameOwner(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "gradients, norm and shards in fp32 and fp16",
        names=("scaled_global_norm", "has_overflow", "_load_global_state", "_model_parallel_all_reduce"),
        mentioned=(
            *("averaged_gradients", "params_in_partition", "single_partition_of_fp32_groups", "bit16_groups"),
            *("scaled_global_norm", "has_overflow", "grad_accum", "_hp_mapping"),
        ),
    ),
    NameOwner(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step",
        "skipping a step on all ranks",
        mentioned=("check_grad_overflow",),
    ),
    NameOwner(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        "gradients, norm and shards in bf16",
        names=(
            *("_lazy_init_hp_params_optimizer_state", "update_lp_params", "clear_hp_grads", "clear_lp_grads"),
            "_load_global_state",
        ),
        mentioned=(
            *("fp32_groups_gradients_flat", "fp32_groups_has_gradients", "fp32_groups_flat_partition"),
            *("fp32_groups_gradient_flat_partition", "bf16_groups", "_hp_grad", "_hp_mapping", "_global_grad_norm"),
        ),
    ),
    NameOwner("deepspeed.runtime.utils", "the norm of bf16 gradients", names=("get_global_norm_of_tensors",)),
    NameOwner("deepspeed.runtime.utils", "faults in copies that are gathered", names=("all_gather_dp_groups",)),
    NameOwner("deepspeed.runtime.lr_schedules:WarmupLR", "a changed learning-rate schedule", mentioned=("_last_lr",)),
    NameOwner("deepspeed.utils.groups", "a second engine in one process", names=("mpu",)),
    NameOwner("deepspeed.comm.torch", "a start on a CPU without a compiler", names=("build_shm_op",)),
    NameOwner(
        "deepspeed.launcher.runner",
        "`megasdc launch`",
        names=("main", "signal", "subprocess", "PDSHRunner"),
        used_by=LAUNCHER,
    ),
    NameOwner(
        "deepspeed.launcher.multinode_runner:PDSHRunner", "`megasdc launch` over pdsh", ("get_cmd",), used_by=LAUNCHER
    ),
    NameOwner(
        "deepspeed.launcher.launch",
        "time for ranks to save when a stop is requested",
        names=("main", "signal", "subprocess", "terminate_process_tree"),
        used_by=NODE,
    ),
    NameOwner("megatron.core.utils", "sequence parallel without a GPU", names=("torch",)),
    NameOwner("megatron.core.tensor_parallel.mappings", "sequence parallel without a GPU", names=("torch",)),
    NameOwner(
        "megatron.core.tensor_parallel.layers",
        "sequence parallel without a GPU, and linear layers whose local results are observed",
        names=("torch", "linear_with_grad_accumulation_and_async_allreduce"),
    ),
    NameOwner(
        "megatron.core.tensor_parallel:ColumnParallelLinear",
        "local results of linear layers",
        mentioned=("_forward_impl", "disable_grad_reduce"),
    ),
    NameOwner(
        "megatron.core.tensor_parallel:RowParallelLinear", "local results of linear layers", (), ("_forward_impl",)
    ),
    NameOwner(
        "torch.utils._python_dispatch", "audits inside one device (`audit.permuted`)", names=("TorchDispatchMode",)
    ),
    NameOwner("torch", "saves beside training (`checkpoint.writing`)", names=("_utils",)),
    NameOwner("torch._utils", "the same", names=("_rebuild_tensor_v2", "_rebuild_parameter")),
    NameOwner(
        "torch.distributed.distributed_c10d",
        "timeouts and network threads of process groups",
        names=("_set_pg_timeout", "_world", "ProcessGroupGloo"),
    ),
    NameOwner(
        "torch.distributed.distributed_c10d:ProcessGroup",
        "timeouts of process groups",
        names=("_get_backend", "_device_types"),
    ),
    NameOwner("torch._C._distributed_c10d", "the cause of a hang (`health`)", names=("_dump_fr_trace_json",)),
    NameOwner("torch.distributed.distributed_c10d:_world", "the same", names=("pg_group_ranks", "pg_map", "pg_names")),
    NameOwner("torch.distributed:ProcessGroup", "the same", names=("_get_sequence_number_for_group",)),
    NameOwner(
        "torch.distributed:ProcessGroupGloo._Options",
        "timeouts and network threads of process groups",
        names=("_timeout", "_devices", "_threads"),
    ),
    NameOwner(
        "torch.distributed:ProcessGroupGloo", "network threads of process groups", names=("create_default_device",)
    ),
    NameOwner(
        "torch.distributed:ProcessGroupGloo",
        "`megasdc stress`",
        names=("_reduce_scatter_base", "_allgather_base", "alltoall_base"),
    ),
)
"""Every private name that megasdc builds on, except ``_checkpoint_offset``, torch's offset of a storage in a file: C++
code sets it, and only a test checks it."""


def missing_names(owners: Iterable[NameOwner]) -> list[str]:
    """A sentence for every missing name; imports the owners' modules."""
    problems = []
    for owner in owners:
        try:
            found = resolve(owner.where)
        except (ImportError, AttributeError):
            problems.append(_problem(owner, owner.where))
            continue
        absent = [name for name in owner.names if not hasattr(found, name)]
        if owner.mentioned:
            known = names_in(found)
            absent += [name for name in owner.mentioned if name not in known]
        problems += [_problem(owner, f"{owner.where.replace(':', '.')}: {name}") for name in dict.fromkeys(absent)]
    return problems


def check_private_names(used_by: str = TRAINING) -> None:
    """Refuses to start where a private name is missing.

    Args:
        used_by: the kind of process that starts, ``TRAINING``, ``LAUNCHER``, ``NODE`` or ``GUARD``.

    Raises:
        LaunchError: with every missing name, what needs it, and the versions that have it.
    """
    problems = missing_names(owner for owner in OWNERS if owner.used_by == used_by)
    if problems:
        raise LaunchError("\n".join(problems))


@contextmanager
def ends_at_launch_error() -> Iterator[None]:
    """Prints a LaunchError of the code inside to stderr and exits with its exit code; for processes of the launcher.

    Use it around ``own_lines_to``, never inside, or the message would go to that file.
    """
    try:
        yield
    except LaunchError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


@contextmanager
def names_checked() -> Iterator[None]:
    """Checks the names of training after the imports inside, also where one of these imports fails.

    Raises:
        LaunchError: a private name is missing.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        try:
            check_private_names()
        except LaunchError as explained:
            raise explained from error
        raise
    check_private_names()


def resolve(where: str) -> Any:
    """The module, class or function named by ``NameOwner.where``.

    Raises:
        ImportError: there is no such module.
        AttributeError: there is no such class or function in it.
    """
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


def names_in(found: Any) -> set[str]:
    """Names of attributes and globals that a function, or the functions of a class (not inherited), read or set."""
    members = vars(found).values() if isinstance(found, type) else [found]
    names: set[str] = set()
    for member in members:
        for function in (member.fget,) if isinstance(member, property) else (member,):
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if isinstance(code, CodeType):
                names |= _names_in_code(code)
    return names


def _names_in_code(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for one in inner for name in _names_in_code(one))}


def _problem(owner: NameOwner, name: str) -> str:
    distribution = DISTRIBUTIONS[owner.where.partition(".")[0]]
    label, version = NAMES[distribution], component_versions().get(distribution, "of unknown version")
    needed_by = f"{owner.needed_by}," if "," in owner.needed_by else owner.needed_by
    return (
        f"{label} {version} has no {name}, which {needed_by} needs; {label} {PERMITTED[distribution]} have it: install "
        "one of them (launch/constraints.txt has the tested one)"
    )
