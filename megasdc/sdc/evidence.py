"""Number of differing results by rank and submodule, as evidence for people; it names no rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.compare import execution_key
from megasdc.sdc.trace import Trace

Counts = dict[str, dict[str, dict[int, int]]]
"""Number of differing results by phase, submodule and rank."""


def count_differing(
    traces: Mapping[int, Trace], layout: ParallelDims, wrong: Collection[int] = ()
) -> tuple[int, Counts]:
    """Compare each rank with the most frequent value at its position, without the ranks known to be wrong.

    If two values are equally frequent, all ranks there count as differing.

    Args:
        traces: by global rank, of work that was the same on all replicas.
        wrong: ranks that were named; their replicas are not used as reference, unless there is no other.

    Returns:
        Results that were compared over all ranks, and those that differ, in execution order.
    """
    found: list[tuple[tuple[int, ...], int, str, str]] = []
    harmed = {rank // layout.tensor % layout.data for rank in wrong}
    trusted = set(range(layout.data)) - harmed or set(range(layout.data))
    for position in range(layout.tensor * layout.pipeline):
        stage, tensor = divmod(position, layout.tensor)
        ranks = [tensor + layout.tensor * (replica + layout.data * stage) for replica in range(layout.data)]
        values = {rank: dict(zip(traces[rank].addresses, traces[rank].checksums, strict=True)) for rank in ranks}
        for rank in ranks:
            dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
            for place, address in enumerate(traces[rank].addresses):
                counts = Counter(values[ranks[replica]].get(address) for replica in trusted)
                ((usual, most), *rest) = counts.most_common(2)
                if values[rank][address] != usual or (rest and rest[0][1] == most):
                    found.append((execution_key(address, place, dims), rank, address.phase, address.fqn))
    table: Counts = {}
    for _, rank, phase, fqn in sorted(found):
        of_submodule = table.setdefault(phase, {}).setdefault(fqn, {})
        of_submodule[rank] = of_submodule.get(rank, 0) + 1
    return sum(map(len, traces.values())), table
