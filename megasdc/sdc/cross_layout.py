"""Comparison of traces of two layouts: what is comparable, and which rank's result corresponds to which.

Only results whose bits do not depend on the layout are comparable: ``LAYOUT_FREE``, measured with the GPT and Llama
styles of ``tests/distributed/test_trace_layouts.py``, tied and untied, fp32 and bf16. It holds for one step with equal
weights. After it weights differ: the norm of the gradient and, between replicas or tensor ranks, the gradient itself
are sums in another order, so that in the next step results are equal only by chance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from megasdc.common.addresses import ACCUMULATED_GRAD, BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD
from megasdc.common.errors import TraceError
from megasdc.model.kinds import EMBEDDING, HEAD, KINDS, POSITIONS, submodule_kind
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.compare import Comparison, Divergence, in_execution_order
from megasdc.sdc.trace import Trace

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
