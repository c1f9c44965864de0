"""Collectives of one group, compared with known results; the group's failure does not affect other groups.

Known results of collectives: contributions of integers, and their sums, which every rank can compute.

The integers are so small that every partial sum is representable: a sum is exact in any order and with any algorithm,
and one wrong bit is a fault. Data that are only moved are random bits, each of which must arrive.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.engine.observer import Listener
from megasdc.model.randomness import mix
from megasdc.tensors.bits import as_bits, count_flips

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}
LARGEST_SUM = {"fp32": 1 << 24, "bf16": 1 << 8, "fp16": 1 << 11, "int32": (1 << 31) - 1, "int64": 1 << 62}
"""Largest magnitude of a sum, up to which all integers are representable."""
SUMMED = ("all_reduce", "reduce_scatter")
MOVED = ("all_gather", "broadcast", "all_to_all")


@dataclass(frozen=True)
class StressCollective:
    """One collective of a group: an operation of ``SUMMED`` or ``MOVED``, and a name of ``DTYPES``.

    ``elements``: n, received by each rank from each rank, or of the sum; ``seed``: of the contributions.
    """

    operation: str
    dtype: str
    elements: int
    ranks: int
    seed: int

    @property
    def name(self) -> str:
        """Name in messages and addresses."""
        return f"{self.operation}.{self.dtype}.{self.elements}"

    @property
    def pieces(self) -> int:
        """Pieces of n elements that a rank contributes: one per receiver, where receivers get different pieces."""
        return self.ranks if self.operation in ("reduce_scatter", "all_to_all") else 1


def contribution(exchange: StressCollective, rank: int) -> Tensor:
    """Contribution of one rank, [pieces n] on the host.

    Raises:
        ValueError: there are too many ranks for an exact sum in this dtype.
    """
    dtype, size = DTYPES[exchange.dtype], exchange.pieces * exchange.elements
    generator = torch.Generator().manual_seed(mix(exchange.seed, rank, exchange.elements))
    if exchange.operation in MOVED:
        width = 8 * dtype.itemsize
        integer = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
        limit = torch.iinfo(integer)
        return torch.randint(limit.min, limit.max, (size,), generator=generator, dtype=integer).view(dtype)
    most = LARGEST_SUM[exchange.dtype] // exchange.ranks
    if most < 1:
        raise ValueError(f"{exchange.ranks} ranks have no exact sum in {exchange.dtype}")
    return torch.randint(-most, most + 1, (size,), generator=generator).to(dtype)


def expected_result(exchange: StressCollective, rank: int) -> Tensor:
    """Correct result of one rank, on the host: [n]; for an all-gather and an all-to-all [ranks n].

    A broadcast is from rank ``seed`` modulo the number of ranks.
    """
    n, ranks = exchange.elements, range(exchange.ranks)
    if exchange.operation == "broadcast":
        return contribution(exchange, exchange.seed % exchange.ranks)
    given = [contribution(exchange, one) for one in ranks]
    if exchange.operation == "all_gather":
        return torch.cat(given)
    piece = slice(rank * n, (rank + 1) * n) if exchange.pieces > 1 else slice(0, n)
    if exchange.operation == "all_to_all":
        return torch.cat([one[piece] for one in given])
    return torch.stack([one[piece].to(torch.int64) for one in given]).sum(0).to(DTYPES[exchange.dtype])


HOST_SIZES = (1, 1000, 65_539)
DEVICE_SIZES = (1, 1000, 65_539, 4_194_304)
GIVEN, RECEIVED = "collective", "reduced_grad"
"""Phases of faults that are injected into a rank's contribution, and into its result."""
SHOWN = 20


def exchanges(ranks: int, round_number: int, on_accelerator: bool) -> Iterator[StressCollective]:
    """The collectives of a round (first is 1), the same on all ranks of a group; larger on an accelerator.

    Contributions depend on the round.
    """
    for size in DEVICE_SIZES if on_accelerator else HOST_SIZES:
        for place, dtype in enumerate(DTYPES):
            for operation in (*SUMMED, *MOVED):
                yield StressCollective(operation, dtype, size, ranks, mix(round_number, size, place))


class Group:
    """A process group outside torch's default group, so that it can fail alone; NCCL on CUDA, else gloo.

    ``store`` is one that all its ranks have; ``timeout_s`` is of a collective.

    Collective: all ranks of the group.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        limit = datetime.timedelta(seconds=timeout_s)
        self._store = store
        self.rank, self.ranks, self.device = rank, ranks, device
        self._backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._backend = dist.ProcessGroupNCCL(store, rank, ranks, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, ranks, limit)

    def run(self, exchange: StressCollective, given: Tensor) -> Tensor:
        """Runs one collective and returns this rank's result; ``given`` is on the group's device and not modified.

        Raises:
            RuntimeError: another rank did not take part.

        Collective: all ranks of the group.
        """
        n, group = exchange.elements, self._backend
        if exchange.operation == "all_reduce":
            got = given.clone()
            work = group.allreduce([got])
        elif exchange.operation == "reduce_scatter":
            got = given.new_empty(n)
            work = group._reduce_scatter_base(got, given)
        elif exchange.operation == "all_gather":
            got = given.new_empty(self.ranks * n)
            work = group._allgather_base(got, given)
        elif exchange.operation == "all_to_all":
            got = given.new_empty(self.ranks * n)
            work = group.alltoall_base(got, given, [], [])
        else:
            got = given.clone()
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = exchange.seed % exchange.ranks, 0
            work = group.broadcast([got], options)
        work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return got

    def close(self) -> None:
        """Shuts down after a barrier, since the others may still use the store of rank 0."""
        self._backend.barrier().wait()
        self._backend.shutdown()


def check_group(group: Group, round_number: int, injector: Listener | None = None) -> dict[str, Any]:
    """Runs all collectives of a round (first is 1) and compares this rank's results with the known ones.

    ``injector``: of a drill, None: none. Returns ``compared`` and ``wrong``: numbers of collectives; ``findings``:
    the first wrong ones.

    Raises:
        RuntimeError: another rank did not take part.

    Collective: all ranks of the group.
    """
    compared, findings, wrong = 0, [], 0
    for exchange in exchanges(group.ranks, round_number, group.device.type == "cuda"):
        given = contribution(exchange, group.rank).to(group.device)
        given = _injected(injector, round_number, GIVEN, exchange, given)
        got = group.run(exchange, given)
        got = _injected(injector, round_number, RECEIVED, exchange, got).cpu()
        expected = expected_result(exchange, group.rank)
        compared += 1
        if not torch.equal(as_bits(got), as_bits(expected)):
            wrong += 1
            findings.append(count_differences(exchange.name, expected, got))
    return {"compared": compared, "wrong": wrong, "findings": findings[:SHOWN]}


def _injected(
    injector: Listener | None, round_number: int, phase: str, exchange: StressCollective, tensor: Tensor
) -> Tensor:
    if injector is None or not tensor.is_floating_point():
        return tensor  # faults are defined for floating-point numbers
    answer = injector(Address(round_number, 0, phase, exchange.name, "output"), tensor)
    return tensor if answer is None else answer


def count_differences(what: str, expected: Tensor, got: Tensor) -> dict[str, Any]:
    """Number of elements that differ, and of differences in each bit; tensors of equal dtype and shape, on the host."""
    places = (as_bits(expected) != as_bits(got)).flatten().nonzero().flatten()
    flips = count_flips(expected, got)
    return {
        "what": what,
        "elements": len(places),
        "of": expected.numel(),
        "first": int(places[0]) if len(places) else None,
        "bits": {str(bit): count for bit, count in enumerate(flips) if count},
    }
