"""The part of a golden trace's key that is of the machine: versions, device, variables that choose kernels."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megasdc import __version__
from megasdc.config.environment import VARIABLES
from megasdc.config.repeatability import CPU_KERNEL_VARIABLES

CPUINFO = Path("/proc/cpuinfo")
PROCESSOR_FIELDS = (
    *("model name", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
"""Fields that identify a processor: on x86 the name alone does not, and on Arm there is none."""


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
