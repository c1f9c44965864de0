"""Gathering of all ranks' traces on every rank: all checksums, but addresses only where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
import xxhash

from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import repeated_value, to_repeat
from megasdc.sdc.vote import Ballot


def gather_traces(trace: Trace, dims: ParallelDims, group: dist.ProcessGroup | None) -> dict[int, Trace]:
    """Every rank's trace, on every rank, through a host group of all ranks.

    Replicas record the same addresses; only those of the first replica are sent, and those of ranks that differ from
    it.

    Collective: all ranks of the world; only after a disagreement, because the message grows with the number of ranks.
    """
    text = "\n".join(map(str, trace.addresses))
    names = gather_objects(xxhash.xxh3_64_intdigest(text.encode()), group)
    first = dims.first_replica_rank
    own = dims.rank == first or names[dims.rank] != names[first]
    sent = gather_objects((trace.addresses if own else None, trace.checksums), group)
    found = {}
    for rank, (addresses, checksums) in enumerate(sent):
        known = addresses or sent[dims.at(rank).first_replica_rank][0] or []
        found[rank] = Trace(list(known), list(checksums))
    return found


def repeat_disputed(
    ballot: Ballot,
    audit: Mapping[int, Trace],
    compute: Callable[[], Trace],
    times: int,
    dims: ParallelDims,
    group: dist.ProcessGroup | None,
) -> dict[tuple[int, int], list[int | None]]:
    """Repeat the work that replicas disagree on; what ``megasdc.sdc.verdict.settle`` needs of that.

    Args:
        ballot: the vote on ``audit``, the traces of all ranks.
        compute: does the work once more; returns this rank's trace.

    Collective: all ranks of the world.
    """
    again = [gather_traces(compute(), dims, group) for _ in range(times)]
    return {
        (rank, place): [repeated_value(rank, place, audit, one, dims) for one in again]
        for rank, place in to_repeat(ballot)
    }
