"""Device and backend of a rank: one GPU per rank with NCCL, shared GPUs with gloo, or the CPU with gloo.

NCCL refuses two ranks on one GPU. Where ranks share GPUs, gloo runs collectives through host memory. It copies GPU
tensors itself except in point-to-point messages; those of DeepSpeed's pipeline are copied here.
"""

from __future__ import annotations

import os
import socket
import types
from typing import Any

import torch
from torch import Tensor

from megasdc.common.errors import LaunchError


def device_index(share: bool) -> int:
    """Index of this rank's GPU on its host.

    Args:
        share: ranks of a host may share its GPUs, assigned round robin.

    Raises:
        LaunchError: there are fewer GPUs than ranks on this host, and they may not be shared.
    """
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices and not share:
        raise LaunchError(
            f"rank {os.environ.get('RANK', '0')} is number {local} of {socket.gethostname()} (from 0), where {devices} "
            f"GPU{'s are' if devices != 1 else ' is'} visible; start one rank a GPU, or let ranks share them with "
            "megasdc.parallel.share_devices=true"
        )
    return local % devices


def ranks_on_device(share: bool) -> int:
    """Upper bound of the ranks on this rank's GPU; DeepSpeed's launcher sets LOCAL_SIZE, the ranks of this host."""
    return -(-int(os.environ.get("LOCAL_SIZE", "1")) // torch.cuda.device_count()) if share else 1


def device_uuid() -> str | None:
    """UUID of this rank's GPU as ``nvidia-smi -L`` shows it; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def choose_backend(share: bool) -> str:
    """Make this rank's GPU the current device, for Megatron-core and DeepSpeed too, and return the groups' backend.

    Raises:
        LaunchError: see ``device_index``.
    """
    if not torch.cuda.is_available():
        return "gloo"
    index = device_index(share)
    os.environ["LOCAL_RANK"] = str(index)  # DeepSpeed takes the device from it
    torch.cuda.set_device(index)
    if not share:
        from deepspeed.accelerator import get_accelerator

        return str(get_accelerator().communication_backend_name())
    place_messages_on_host()
    return "gloo"


def place_messages_on_host() -> None:
    """Send the messages of DeepSpeed's pipeline through host memory; idempotent.

    ``runtime/pipe/p2p.py`` (0.19.8) calls ``send`` and ``recv`` of ``deepspeed.comm`` with device tensors, whose memory
    gloo cannot read. In that module alone, ``dist`` is bound to a proxy of ``deepspeed.comm`` that copies them.
    """
    from deepspeed.runtime.pipe import p2p

    if not isinstance(p2p.dist, _MessagesOnHost):
        p2p.dist = _MessagesOnHost(p2p.dist)


class _MessagesOnHost(types.ModuleType):
    """``deepspeed.comm`` whose point-to-point messages go through host memory."""

    def __init__(self, comm: Any) -> None:
        super().__init__("deepspeed.comm")
        self.comm = comm

    def send(self, tensor: Tensor, dst: int, **options: Any) -> Any:
        return self.comm.send(tensor.cpu().contiguous(), dst, **options)

    def recv(self, tensor: Tensor, src: int | None = None, **options: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        result = self.comm.recv(host, src, **options)
        tensor.copy_(host)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)
