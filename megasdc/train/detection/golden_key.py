"""The key of a golden trace: every property, by name, that may change a bit of the workload's results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megasdc import __version__
from megasdc.config import RunConfig, parse_config
from megasdc.config.environment import VARIABLES
from megasdc.config.repeatability import CPU_KERNEL_VARIABLES
from megasdc.errors import ConfigError, TraceError
from megasdc.model.compiled import FUSED_VERSION, code_generator
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import key_differences

CPUINFO = Path("/proc/cpuinfo")
PROCESSOR_FIELDS = (
    *("model name", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
"""Fields that identify a processor: on x86 the name alone does not, and on Arm there is none."""


def golden_key(config: RunConfig, layout: ParallelDims, algorithm: str) -> dict[str, Any]:
    """The key of a workload in this process, with its current number of threads.

    Args:
        config: the configuration of the workload.
        algorithm: of the checksums.

    Returns:
        Plain values by name: those of ``machine_key``; without a GPU ``threads``; with fused modules the version of
        their functions and their code generator; precision, layout, algorithm and a digest of the workload.
    """
    fused = {"fused": f"functions {FUSED_VERSION}, {code_generator()}"} if config.megasdc.model.fuse else {}
    threads = {} if torch.cuda.is_available() else {"threads": torch.get_num_threads()}
    return {
        **machine_key(),
        **threads,
        **fused,
        "precision": config.precision,
        "layout": str(layout),
        "algorithm": algorithm,
        "workload": workload_digest(config),
    }


def compare_key(header: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """This process's key for a golden trace, and the differences.

    Where this version cannot read the trace's configuration, only ``machine_key`` is compared.

    Returns:
        The key, and by name the parts that differ, as (golden, here).
    """
    try:
        config = workload_of(header)
    except TraceError as error:
        key = machine_key()
        differences = key_differences({name: header["key"].get(name) for name in key}, key)
        return key, {**differences, "configuration": ("read", str(error))}
    key = golden_key(config, ParallelDims(**header["layout"]), header["algorithm"])
    return key, key_differences(header["key"], key)


def workload_of(header: Mapping[str, Any]) -> RunConfig:
    """The configuration of a golden trace's workload.

    Raises:
        TraceError: this version cannot read it.
    """
    try:
        return parse_config(header["config"])
    except ConfigError as error:
        text = "; ".join(error.problems)
        raise TraceError(f"this version of megasdc does not read the golden trace's configuration: {text}") from error


def machine_key() -> dict[str, Any]:
    """The part of a key that needs no workload: versions, device, and environment variables that choose kernels.

    A deterministic-mode variable that is not set counts as its deterministic value, so that the key is the same in a
    rank and in the process that starts it.
    """
    return {
        "megasdc": __version__,
        **{name: metadata.version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "torch_build": torch.version.git_version,
        **(_gpu() if torch.cuda.is_available() else _cpu()),
    }


def workload_digest(config: RunConfig) -> str:
    """A digest of every setting that affects the workload's results."""
    sections = config.megasdc
    parts = {name: getattr(sections, name).model_dump(mode="json") for name in ("model", "parallel", "golden", "trace")}
    del parts["model"]["fuse"]  # a separate part of the key
    relevant: dict[str, Any] = {
        "deepspeed": config.deepspeed,
        **parts,
        "seed": sections.training.seed,
        "sequence_length": sections.data.sequence_length,
    }
    if not relevant["parallel"]["share_devices"]:
        del relevant["parallel"]["share_devices"]  # traces from before there was this field stay valid
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _gpu() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl,
        **{one.name: (os.environ.get(one.name) or one.value).lower() for one in VARIABLES},
    }


def _cpu() -> dict[str, Any]:
    chosen = (*CPU_KERNEL_VARIABLES, "OMP_DYNAMIC")
    return {
        "device": processor_name(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        **{name: os.environ[name].lower() for name in chosen if os.environ.get(name)},
    }


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The first processor's ``PROCESSOR_FIELDS``, from a file like Linux' ``/proc/cpuinfo``."""
    found: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    return " ".join(found[name] for name in PROCESSOR_FIELDS if name in found) or platform.machine()
