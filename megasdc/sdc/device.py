"""Where a rank computes: its device, its host, its place in the layout."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.incidents.incident import RankPlace


def device_id(device: torch.device) -> str:
    """Identifier of a rank's device on its host: a GPU's UUID, or ``cpu-`` and the rank's local number."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu-{os.environ.get('LOCAL_RANK', '0')}"


def device_name(device: torch.device) -> str:
    """Name of a rank's device: the GPU's, or the processor's with the instruction set that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def gather_places(device: torch.device, dims: ParallelDims, group: dist.ProcessGroup | None) -> list[RankPlace]:
    """The place of every rank; ``group``: a host group of all ranks, which call it together."""
    here = (socket.gethostname(), device_name(device), dims.dp_rank, dims.pp_rank, dims.tp_rank)
    return [RankPlace(rank, *place) for rank, place in enumerate(gather_objects(here, group))]
