"""Traces, one exact checksum for every observed result of a rank in execution order, and their comparison.

No torch, so that traces can be read without it; ``megasdc.sdc.tracer`` records them, ``megasdc.sdc.trace_file`` stores
them.

Two sets of traces first diverge by execution order over all ranks. Results are recorded before collectives mix ranks,
so the rank that comes first in this order computed a different value, and others received it. Not so from
``reduced_grad`` on with several replicas, whose results come after a sum over them; ``megasdc.sdc.golden`` decides who
can be named. ``count_differing`` names no rank: its numbers are evidence for people.

Of two layouts only results whose bits do not depend on the layout are comparable: ``LAYOUT_FREE``, measured with the
GPT and Llama styles of ``tests/distributed/test_trace_layouts.py``, tied and untied, fp32 and bf16. It holds for one
step with equal weights. After it weights differ: the norm of the gradient and, between replicas or tensor ranks, the
gradient itself are sums in another order, so that in the next step results are equal only by chance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    BACKWARD,
    FORWARD,
    MICRO_BATCH_PHASES,
    PARAMETER,
    RECOMPUTE,
    REDUCED_GRAD,
    UPDATE,
    WEIGHT_GRAD,
    Address,
)
from megasdc.common.errors import TraceError
from megasdc.model.kinds import EMBEDDING, HEAD, KINDS, POSITIONS, submodule_kind
from megasdc.parallel.dims import ParallelDims


@dataclass
class Trace:
    """Addresses and unsigned 64-bit checksums of results, in the order in which one rank computed them."""

    addresses: list[Address] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.addresses)

    def extend(self, other: Trace) -> None:
        """Append a later trace of the same rank."""
        self.addresses += other.addresses
        self.checksums += other.checksums


def trace_digest(trace: Trace) -> int:
    """One number for a trace, which changes with any address (except its step) or checksum."""
    state = xxhash.xxh3_64()
    for address, value in zip(trace.addresses, trace.checksums, strict=True):
        state.update(f"{address.micro_batch} {address.phase} {address.fqn} {address.slot} {value:x}\n".encode())
    return state.intdigest()


_STEP_PHASES = {ACCUMULATED_GRAD: 1, REDUCED_GRAD: 2, UPDATE: 3, PARAMETER: 4}


@dataclass(frozen=True)
class Divergence:
    """One result that differs from the expected one.

    Args:
        place: how many results the rank recorded before it.
        expected: expected checksum; None where no result was expected.
        got: computed checksum; None where there is none.
        against: rank that computed the expected value, where the layouts differ; None: the same rank.
    """

    rank: int
    address: Address
    place: int
    expected: int | None
    got: int | None
    against: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Result of comparing several ranks' traces.

    Args:
        compared: results that were compared, over all ranks.
        divergences: in execution order over all ranks.
        first: the earliest of ``divergences``; of several ranks only where several were wrong at the same place.
    """

    compared: int
    divergences: tuple[Divergence, ...]
    first: tuple[Divergence, ...]

    @property
    def counts(self) -> dict[int, int]:
        """Number of divergences by rank; ranks without any are absent."""
        counts: dict[int, int] = {}
        for divergence in self.divergences:
            counts[divergence.rank] = counts.get(divergence.rank, 0) + 1
        return counts


def execution_key(address: Address, place: int, dims: ParallelDims) -> tuple[int, ...]:
    """Sort key of a result in the order in which one replica computes a step.

    A micro-batch runs forward through the stages and backward through them in reverse; micro-batches do not influence
    each other before gradients are reduced. Ranks of one stage run the same program, so the number of earlier results
    orders them too.

    Args:
        place: how many results its rank recorded before it.
    """
    if address.phase not in MICRO_BATCH_PHASES:
        return address.step, _STEP_PHASES[address.phase], 0, 0, 0, place
    assert address.micro_batch is not None, "every result of these phases belongs to a micro-batch"
    forward = address.phase == FORWARD
    stage = dims.pp_rank if forward else dims.pipeline - 1 - dims.pp_rank
    return address.step, 0, address.micro_batch, int(not forward), stage, place


def compare_traces(expected: Mapping[int, Trace], got: Mapping[int, Trace], layout: ParallelDims) -> Comparison:
    """Compare every rank's trace with the expected one.

    Args:
        expected: trace by global rank.
        got: trace by global rank; of the same layout.

    Raises:
        ValueError: the ranks are not the same.
    """
    if set(expected) != set(got):
        raise ValueError(f"traces of ranks {sorted(got)} are compared with those of ranks {sorted(expected)}")
    compared = 0
    found: list[Divergence] = []
    for rank in sorted(expected):
        found += compare_rank(rank, expected[rank], got[rank])
        compared += max(len(expected[rank]), len(got[rank]))
    return in_execution_order(compared, found, layout)


def in_execution_order(compared: int, found: Iterable[Divergence], layout: ParallelDims) -> Comparison:
    """Sort divergences of several ranks of one layout by execution order; ``compared`` is passed on."""
    places = {}
    keyed = []
    for one in found:
        if one.rank not in places:
            places[one.rank] = ParallelDims(layout.tensor, layout.pipeline, layout.data, one.rank)
        keyed.append((execution_key(one.address, one.place, places[one.rank]), one))
    keyed.sort(key=lambda pair: (pair[0], pair[1].rank))
    first = tuple(one for key, one in keyed if key == keyed[0][0])
    return Comparison(compared, tuple(one for _, one in keyed), first)


def compare_rank(rank: int, expected: Trace, got: Trace) -> list[Divergence]:
    """Every difference between two traces of one rank: in the order of ``got``, then what ``got`` lacks."""
    if expected.addresses == got.addresses:
        pairs = enumerate(zip(got.addresses, expected.checksums, got.checksums, strict=True))
        return [Divergence(rank, address, place, a, b) for place, (address, a, b) in pairs if a != b]
    wanted = {address: (place, value) for place, (address, value) in enumerate(_pairs(expected))}
    found = []
    for place, (address, value) in enumerate(_pairs(got)):
        known = wanted.pop(address, None)
        if known is None or known[1] != value:
            found.append(Divergence(rank, address, place, None if known is None else known[1], value))
    return found + [Divergence(rank, address, place, value, None) for address, (place, value) in wanted.items()]


def _pairs(trace: Trace) -> list[tuple[Address, int]]:
    return list(zip(trace.addresses, trace.checksums, strict=True))


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


_ALL = frozenset(KINDS)
LAYOUT_FREE: dict[str, dict[str, frozenset[str]]] = {
    # A tied embedding gets the output's gradient on its own stage where there is one stage, later where there are more.
    "pipeline": {
        FORWARD: _ALL,
        RECOMPUTE: _ALL,
        BACKWARD: _ALL,
        WEIGHT_GRAD: _ALL - {EMBEDDING},
        ACCUMULATED_GRAD: _ALL - {EMBEDDING, HEAD},
    },
    # The loss is divided by the micro-batches of a replica before the backward pass, and so are all gradients.
    "data": {FORWARD: _ALL, RECOMPUTE: _ALL},
    # Tensor ranks compute parts, whose sums round differently; a sum of one embedding and zeros does not.
    "tensor": {FORWARD: frozenset({POSITIONS})},
}
"""Kinds of submodules whose results are bit-equal, by the dimension in which two layouts differ and by phase."""


def free_kinds(expected: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Kinds of submodules, by phase, whose results are equal in the layouts of two trace headers; empty: none."""
    differ = {name for name in LAYOUT_FREE if expected["layout"][name] != got["layout"][name]}
    if expected["sequence_parallel"] != got["sequence_parallel"] or ("tensor" in differ and got["sequence_parallel"]):
        return {}
    phases = set.intersection(*(set(LAYOUT_FREE[name]) for name in differ)) if differ else set(LAYOUT_FREE["pipeline"])
    return {phase: _ALL.intersection(*(LAYOUT_FREE[name][phase] for name in differ)) for phase in phases}


def compare_across_layouts(
    expected: Mapping[int, Trace],
    got: Mapping[int, Trace],
    expected_header: Mapping[str, Any],
    got_header: Mapping[str, Any],
) -> tuple[Comparison, Counter[tuple[int, int, str]]]:
    """Compare traces of two layouts, each result with those of the same samples and submodule.

    A micro-batch is identified by its samples' indices in the global batch, so another replica may have computed the
    expected result. With different tensor sizes every tensor rank is compared with every other.

    Args:
        expected: trace by global rank, of one step.
        got: trace by global rank, of the same step.

    Returns:
        The comparison, and the number of compared results by (step, rank, submodule).

    Raises:
        TraceError: nothing can be compared; the message says why.
    """
    free = free_kinds(expected_header, got_header)
    wanted = _by_sample(expected, expected_header, free)
    layout, other = _layout(got_header), _layout(expected_header)
    compared: Counter[tuple[int, int, str]] = Counter()
    found = []
    for rank, trace in got.items():
        tp_rank = _dims(layout, rank).tp_rank
        for place, (address, value) in enumerate(zip(trace.addresses, trace.checksums, strict=True)):
            key = _key(address, got_header, _dims(layout, rank))
            for against, result in wanted.get(key, ()):
                if layout.tensor == other.tensor and _dims(other, against).tp_rank != tp_rank:
                    continue
                compared[address.step, rank, address.fqn] += 1
                if result != value:
                    found.append(Divergence(rank, address, place, result, value, against))
    if not compared:
        raise TraceError(
            f"traces of layouts {other} and {layout} have no result in common that is independent of the layout; "
            "record the same phases, micro-batches and layers of both, with the same global batch"
        )
    return in_execution_order(compared.total(), found, layout), compared


def _by_sample(
    traces: Mapping[int, Trace], header: Mapping[str, Any], free: Mapping[str, frozenset[str]]
) -> dict[Any, list[tuple[int, int]]]:
    """(rank, checksum) of all results that do not depend on the layout, by ``_key``."""
    found = defaultdict(list)
    layout = _layout(header)
    for rank, trace in traces.items():
        dims = _dims(layout, rank)
        for address, value in zip(trace.addresses, trace.checksums, strict=True):
            if submodule_kind(address.fqn) in free.get(address.phase, ()):
                found[_key(address, header, dims)].append((rank, value))
    return found


def _key(address: Any, header: Mapping[str, Any], dims: ParallelDims) -> Any:
    """Identity of a result in any layout: step, indices of its samples in the global batch, phase, name, slot."""
    samples = None
    if address.micro_batch is not None:
        first = address.micro_batch * header["micro_batch_size"]
        samples = tuple((first + i) * dims.data + dims.dp_rank for i in range(header["micro_batch_size"]))
    return address.step, samples, address.phase, address.fqn, address.slot


def _layout(header: Mapping[str, Any]) -> ParallelDims:
    return ParallelDims(**header["layout"])


def _dims(layout: ParallelDims, rank: int) -> ParallelDims:
    return ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
