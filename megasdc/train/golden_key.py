"""For whom does a golden trace hold? Everything that may change a bit of the workload's results, by name."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megasdc.config import RunConfig
from megasdc.parallel.dims import ParallelDims


def golden_key(config: RunConfig, layout: ParallelDims, algorithm: str) -> dict[str, Any]:
    """The key of this machine for a workload, the same in a rank and in what starts it.

    Args:
        config: the configuration of the workload.
        layout: sizes of the parallel dimensions.
        algorithm: of the checksums.

    Returns:
        Plain values by name: versions, device, threads, type, layout, algorithm, digest of the workload.
    """
    return {
        **{name: _version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "torch_build": torch.version.git_version,
        **_device(config),
        "precision": config.precision,
        "layout": str(layout),
        "algorithm": algorithm,
        "workload": workload_digest(config),
    }


def workload_digest(config: RunConfig) -> str:
    """A digest of every setting that has a part in the workload's results."""
    sections = config.megasdc
    relevant = {
        "deepspeed": config.deepspeed,
        **{name: getattr(sections, name).model_dump(mode="json") for name in ("model", "parallel", "golden", "trace")},
        "seed": sections.training.seed,
        "sequence_length": sections.data.sequence_length,
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _device(config: RunConfig) -> dict[str, Any]:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return {
            "device": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": nccl,
        }
    return {
        "device": _processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": config.megasdc.parallel.threads or torch.get_num_threads(),
    }


def _processor() -> str:
    """Model name of the processor, and family, model and stepping where the name alone does not tell."""
    wanted = ("model name", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    return " ".join(found[name] for name in wanted if name in found) or platform.machine()


def _version(package: str) -> str:
    return metadata.version(package)
