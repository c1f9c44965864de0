"""Collectives of one group, compared with known results; the group's failure does not affect other groups."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.engine.observer import Listener
from megasdc.model.randomness import mix
from megasdc.ops.stress.sums import DTYPES, MOVED, SUMMED, Exchange, contribution, known_result
from megasdc.tensors.bits import as_bits, count_flips

HOST_SIZES = (1, 1000, 65_539)
DEVICE_SIZES = (1, 1000, 65_539, 4_194_304)
GIVEN, RECEIVED = "collective", "reduced_grad"
"""Phases of faults that are injected into a rank's contribution, and into its result."""
SHOWN = 20


def exchanges(ranks: int, round_number: int, on_accelerator: bool) -> Iterator[Exchange]:
    """The collectives of a round (first is 1), the same on all ranks of a group; larger on an accelerator.

    Contributions depend on the round.
    """
    for size in DEVICE_SIZES if on_accelerator else HOST_SIZES:
        for place, dtype in enumerate(DTYPES):
            for operation in (*SUMMED, *MOVED):
                yield Exchange(operation, dtype, size, ranks, mix(round_number, size, place))


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

    def run(self, exchange: Exchange, given: Tensor) -> Tensor:
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


def check_group(group: Group, round_number: int, harm: Listener | None = None) -> dict[str, Any]:
    """Runs all collectives of a round (first is 1) and compares this rank's results with the known ones.

    ``harm``: a drill's injector, None: none. Returns ``compared`` and ``wrong``: numbers of collectives; ``findings``:
    the first wrong ones.

    Raises:
        RuntimeError: another rank did not take part.

    Collective: all ranks of the group.
    """
    compared, findings, wrong = 0, [], 0
    for exchange in exchanges(group.ranks, round_number, group.device.type == "cuda"):
        given = contribution(exchange, group.rank).to(group.device)
        given = _harmed(harm, round_number, GIVEN, exchange, given)
        got = group.run(exchange, given)
        got = _harmed(harm, round_number, RECEIVED, exchange, got).cpu()
        expected = known_result(exchange, group.rank)
        compared += 1
        if not torch.equal(as_bits(got), as_bits(expected)):
            wrong += 1
            findings.append(describe(exchange.name, expected, got))
    return {"compared": compared, "wrong": wrong, "findings": findings[:SHOWN]}


def _harmed(harm: Listener | None, round_number: int, phase: str, exchange: Exchange, tensor: Tensor) -> Tensor:
    if harm is None or not tensor.is_floating_point():
        return tensor  # faults are defined for floating-point numbers
    answer = harm(Address(round_number, 0, phase, exchange.name, "output"), tensor)
    return tensor if answer is None else answer


def describe(what: str, expected: Tensor, got: Tensor) -> dict[str, Any]:
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
