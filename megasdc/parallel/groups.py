"""Device, backend and process groups of a rank: starts and stops the default group and Megatron-core's parallel state.

This is the only module that initialises ``megatron.core.parallel_state``. A rank with a GPU of its own uses NCCL;
without a GPU, or where ranks share one, which NCCL refuses, gloo runs collectives through host memory. It copies GPU
tensors itself except in point-to-point messages; those of DeepSpeed's pipeline are copied here.
"""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megasdc.common.errors import LaunchError
from megasdc.common.versions import check_private_names
from megasdc.common.wire import raise_descriptor_limit
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.rendezvous import Identity, meet, unsigned_store


def device_index(share: bool) -> int:
    """Index of this rank's GPU on its host.

    Args:
        share: whether ranks of a host may share its GPUs, assigned round robin.

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


def init_process_group(
    timeout_s: float,
    store: dist.Store | None = None,
    run_dir: str | None = None,
    on_met: Callable[[], None] = lambda: None,
    share_devices: bool = False,
) -> None:
    """Join the default process group named by the launcher's environment.

    Args:
        timeout_s: timeout in seconds, of collectives and of the rendezvous.
        store: rendezvous store that the ranks have joined; None: they join one at the launcher's port. It is kept until
            ``shutdown``.
        run_dir: run folder as configured, which distinguishes launches; None where there is none.
        on_met: called when all ranks have joined; a rank that exits alone after that may leave the others waiting.
        share_devices: whether ranks of a host may share its GPUs.

    Raises:
        LaunchError: another launch uses that port, this host has fewer GPUs than ranks, or a library lacks a
            private name that megasdc builds on.
        HangError: a rank did not join in time.

    Collective: all ranks of the world.
    """
    import deepspeed

    raise_descriptor_limit()
    check_private_names()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29500")
    backend = choose_backend(share_devices)  # before Megatron-core asks for the current device
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store or meet(Identity.own(rank, world_size, run_dir), timeout_s)
    _stores[:] = [store]
    share_network_thread()
    dist.init_process_group(
        backend,
        store=unsigned_store(store, rank == 0) if backend == "nccl" else store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" and world_size > 1 else None,
    )
    on_met()
    if backend == "gloo":
        # A rank that exits right after joining is noticed here. Without this barrier, creating the next group would
        # wait for that rank's address until the timeout.
        dist.barrier()
    with without_inference_operator():
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )


@contextmanager
def without_inference_operator() -> Iterator[None]:
    """Context in which ``deepspeed.init_distributed`` does not build the shared-memory operator of inference layers.

    On a CPU it would compile the operator under a lock that a killed process does not release, leave 66 MB of buffers
    per rank in /dev/shm, and wait for its peers without handling signals (0.19.8, ``csrc/cpu/comm/shm.cpp``).
    Only ``inference_all_reduce`` uses it, which training never calls.
    """
    backend = importlib.import_module("deepspeed.comm.torch")  # attribute access would give the torch package
    original = backend.build_shm_op
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        backend.build_shm_op = original  # type: ignore[attr-defined]


def default_store() -> dist.Store:
    """The store in which the ranks of the world have met; signed, where they have a secret, with NCCL too."""
    assert _stores, "the process group is not initialised"
    return _stores[-1]


_stores: list[dist.Store] = []
"""The default store: torch keeps only a part of it, and under NCCL another one."""


def init_model_parallel(tensor: int, pipeline: int, timeout_s: float) -> ParallelDims:
    """Create Megatron-core's groups for a layout and return this rank's coordinates.

    Args:
        tensor: tensor-parallel size.
        pipeline: number of pipeline stages.
        timeout_s: timeout of the groups, in seconds.

    Raises:
        ValueError: the world size is not a multiple of ``tensor * pipeline``.

    Collective: all ranks of the world.
    """
    from megatron.core import parallel_state

    dims = ParallelDims.from_world(tensor, pipeline, dist.get_world_size(), dist.get_rank())
    if not torch.cuda.is_available():
        place_collectives_on_host()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),  # for the exact value: set_all_timeouts
        create_gloo_process_groups=torch.cuda.is_available(),
    )
    return dims


@contextmanager
def single_process() -> Iterator[None]:
    """Context of a world of one rank, with the groups that Megatron-core's modules need; no port, no launcher.

    Groups that are there are used, and those of Megatron-core added where they are missing. An interface that gloo is
    to use (``GLOO_SOCKET_IFNAME``) is one of the hosts that train, and need not be here.

    Raises:
        RuntimeError: the process is a rank of a larger world.
    """
    if dist.is_initialized():
        if dist.get_world_size() != 1:
            raise RuntimeError(f"this process is one of {dist.get_world_size()} ranks, needed is one alone")
        with _own_model_parallel():
            yield
        return
    with _any_interface():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with _own_model_parallel():
            yield
    finally:
        shutdown()


@contextmanager
def _own_model_parallel() -> Iterator[None]:
    """Context of Megatron-core's groups of one rank; groups that are there are left as they are."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    try:
        with _any_interface():
            init_model_parallel(1, 1, 600.0)
        yield
    finally:
        parallel_state.destroy_model_parallel()


@contextmanager
def _any_interface() -> Iterator[None]:
    """Context in which gloo chooses the interface: a group of one rank talks to nobody."""
    given = os.environ.pop("GLOO_SOCKET_IFNAME", None)
    try:
        yield
    finally:
        if given is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = given


def set_all_timeouts(timeout_s: float) -> int:
    """Set the timeout of every process group of this rank, those of DeepSpeed included; returns their number.

    DeepSpeed creates groups with torch's default of 30 minutes and ignores the timeout that it was given (0.19.8).
    """
    groups = list(distributed_c10d._world.pg_map)
    for group in groups:
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return len(groups)


def new_host_group(ranks: list[int]) -> dist.ProcessGroup:
    """A gloo group with the default group's timeout, for point-to-point messages too.

    ``set_all_timeouts`` is not enough: it changes the timeout of gloo's collectives, while point-to-point messages
    keep the timeout with which their group was created (torch 2.13).

    Collective: all ranks of the world.
    """
    world = dist.group.WORLD
    assert world is not None, "the process group is not initialised"
    timeout = world._get_backend(world._device_types[0]).options._timeout
    return dist.new_group(ranks, timeout, backend="gloo")


@contextmanager
def own_model_groups() -> Iterator[None]:
    """Context to build a second engine; afterwards DeepSpeed uses the groups of the first engine again."""
    from deepspeed.utils import groups

    first = groups.mpu
    try:
        yield
    finally:
        groups.mpu = first or groups.mpu


def shutdown() -> None:
    """Destroy Megatron-core's groups and the default process group; idempotent."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    if isinstance(distributed_c10d.ProcessGroupGloo, _OneDevice):
        distributed_c10d.ProcessGroupGloo.device = None
    _stores.clear()


def share_network_thread() -> None:
    """Let gloo's groups that this process makes from now on share one network thread; idempotent.

    torch gives each group a device of its own, whose thread wakes up a hundred times a second also while nothing is
    sent (gloo's ``transport/tcp/loop.cc``; torch 2.13): the 20 to 30 groups of a rank together take 4 to 6 % of a core.
    """
    if not isinstance(distributed_c10d.ProcessGroupGloo, _OneDevice):
        distributed_c10d.ProcessGroupGloo = _OneDevice()  # type: ignore[misc,assignment]


class _OneDevice:
    """Makes gloo's groups on one device; as an argument of ``isinstance`` it stands for their class."""

    def __init__(self) -> None:
        self.device: Any = None

    def __call__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        self.device = self.device or dist.ProcessGroupGloo.create_default_device()
        options._devices, options._timeout = [self.device], timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(self, one: object) -> bool:
        return isinstance(one, dist.ProcessGroupGloo)


def place_collectives_on_host() -> None:
    """Let Megatron-core's sequence-parallel collectives allocate on the CPU; idempotent.

    ``tensor_parallel/mappings.py``, ``tensor_parallel/layers.py`` and the memory buffer in ``utils.py`` (0.16.1)
    allocate with ``device=torch.cuda.current_device()`` also for CPU tensors. In those three modules alone, the name
    ``torch`` is bound to a proxy of the torch module whose ``cuda.current_device()`` returns the CPU device.
    """
    from megatron.core import utils
    from megatron.core.tensor_parallel import layers, mappings

    for module in (layers, mappings, utils):
        if not isinstance(module.torch, _TorchOnHost):
            module.torch = _TorchOnHost()


class _HostCuda(types.ModuleType):
    """``torch.cuda`` whose current device is the CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnHost(types.ModuleType):
    """``torch`` with ``_HostCuda`` as ``torch.cuda``."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
