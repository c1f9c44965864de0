"""Comparison of two runs by their trace files: equality, or the first divergence; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import TraceError
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import (
    RECORDED_ALIKE,
    TRACE_FOLDER,
    Divergence,
    Trace,
    TraceComparison,
    compare_across_layouts,
    compare_traces,
    read_folder,
)

_NOTED = ("device", "threads", "versions", "seed", "config_digest")
"""Header fields whose difference does not prevent a comparison, but may explain a divergence."""
_OF_A_LAYOUT = ("layout", "micro_batch_size", "accumulation_steps")
"""Fields of ``RECORDED_ALIKE`` for which the error suggests ``--cross-layout``."""
_NEEDED_ACROSS = ("precision", "algorithm")


@dataclass(frozen=True)
class RunTraces:
    """Traces of all ranks of a run, by rank; ``path`` as given by the user."""

    path: str
    headers: dict[int, dict[str, Any]]
    traces: dict[int, Trace]

    @property
    def header(self) -> dict[str, Any]:
        """Header of rank 0."""
        return self.headers[0]

    @property
    def layout(self) -> ParallelDims:
        """Sizes of the parallel dimensions."""
        return ParallelDims(**self.header["layout"])

    @property
    def steps(self) -> set[int]:
        """Steps that every rank recorded; ranks without any record are ignored, as none was configured for them."""
        recorded = [{address.step for address in trace.addresses} for trace in self.traces.values() if trace]
        return set.intersection(*recorded) if recorded else set()


@dataclass(frozen=True)
class TraceReport:
    """Comparison of a run with a reference run, ``expected``.

    ``steps_left_out``: steps in either run that were not compared; ``notes``: differences between the headers that may
    explain a divergence; ``totals``: number of compared results, by (step, rank, submodule).
    """

    expected: str
    got: str
    layout: ParallelDims
    steps: list[int]
    steps_left_out: list[int]
    notes: list[str]
    comparison: TraceComparison
    totals: Counter[tuple[int, int, str]]

    @property
    def same(self) -> bool:
        """Whether all compared results have equal checksums."""
        return not self.comparison.divergences

    def shares(self, column: Callable[[int, int], int]) -> dict[str, dict[int, float]]:
        """Mismatch frequency: the share of a submodule's results that differ, by submodule and column.

        ``column`` takes (step, rank) and returns what makes a column; columns are all that were compared, submodules
        without mismatch are omitted, the others are in execution order of first mismatches.
        """
        wrong: Counter[tuple[str, int]] = Counter()
        for one in self.comparison.divergences:
            wrong[one.address.fqn, column(one.address.step, one.rank)] += 1
        compared: Counter[tuple[str, int]] = Counter()
        for (step, rank, fqn), count in self.totals.items():
            compared[fqn, column(step, rank)] += count
        columns = sorted({column(step, rank) for step, rank, _ in self.totals})
        names = dict.fromkeys(one.address.fqn for one in self.comparison.divergences)
        return {
            fqn: {at: wrong[fqn, at] / compared[fqn, at] if compared[fqn, at] else 0.0 for at in columns}
            for fqn in names
        }

    def as_dict(self, limit: int) -> dict[str, Any]:
        """As plain values, with at most ``limit`` divergences."""
        return {
            "expected": self.expected,
            "got": self.got,
            "same": self.same,
            "layout": self.layout.layout,
            "steps": self.steps,
            "steps_left_out": self.steps_left_out,
            "notes": self.notes,
            "num_compared": self.comparison.compared,
            "num_divergences": len(self.comparison.divergences),
            "divergences_of_rank": {str(rank): count for rank, count in self.comparison.counts.items()},
            "first": [self.describe(one) for one in self.comparison.first],
            "divergences": [self.describe(one) for one in self.comparison.divergences[:limit]],
            "by_step": self.shares(lambda step, rank: step),
            "by_rank": self.shares(lambda step, rank: rank),
        }

    def describe(self, one: Divergence) -> dict[str, Any]:
        """One divergence as plain values; a checksum as 16 hexadecimal digits."""
        dims = ParallelDims(self.layout.tensor, self.layout.pipeline, self.layout.data, one.rank)
        return {
            "rank": one.rank,
            "dp": dims.dp_rank,
            "pp": dims.pp_rank,
            "tp": dims.tp_rank,
            "step": one.address.step,
            "micro_batch": one.address.micro_batch,
            "phase": one.address.phase,
            "submodule": one.address.fqn,
            "slot": one.address.slot,
            "expected": None if one.expected is None else f"{one.expected:016x}",
            "got": None if one.got is None else f"{one.got:016x}",
            "expected_of_rank": one.rank if one.against is None else one.against,
        }


def load_traces(path: Path) -> RunTraces:
    """Reads the traces of a run from its folder, or from a folder of trace files.

    Raises ``TraceError`` where there is none, or it cannot be read.
    """
    folder = path / TRACE_FOLDER
    ranks = read_folder(folder if folder.is_dir() else path)
    return RunTraces(
        str(path),
        {rank: header for rank, (header, _) in ranks.items()},
        {rank: one for rank, (_, one) in ranks.items()},
    )


def compare_traces_of_runs(expected: RunTraces, got: RunTraces, cross_layout: bool = False) -> TraceReport:
    """Compares two runs over the steps that both have.

    ``cross_layout``: compare only results that do not depend on the layout, of the first step that both have. Raises
    ``TraceError``, whose message names every reason, where they cannot be compared.
    """
    _check_comparable(expected, got, cross_layout)
    steps = expected.steps & got.steps
    if not steps:
        raise TraceError(
            f"{expected.path} has steps {_shown(expected.steps)}, {got.path} has {_shown(got.steps)}: no step in common"
        )
    if cross_layout:
        steps = {min(steps)}
    left_out = (_all_steps(expected) | _all_steps(got)) - steps
    theirs, ours = _only(expected.traces, steps), _only(got.traces, steps)
    totals: Counter[tuple[int, int, str]] = Counter()
    if cross_layout:
        comparison, totals = compare_across_layouts(theirs, ours, expected.header, got.header)
    else:
        comparison = compare_traces(theirs, ours, got.layout)
        for rank, trace in ours.items():
            totals.update((address.step, rank, address.fqn) for address in trace.addresses)
        # Results that only ``expected`` has were compared too.
        totals.update((d.address.step, d.rank, d.address.fqn) for d in comparison.divergences if d.got is None)
    return TraceReport(
        expected.path,
        got.path,
        got.layout,
        sorted(steps),
        sorted(left_out),
        _notes(expected, got),
        comparison,
        totals,
    )


def _check_comparable(expected: RunTraces, got: RunTraces, cross_layout: bool) -> None:
    a, b = expected.header, got.header
    wrong = [key for key in (_NEEDED_ACROSS if cross_layout else RECORDED_ALIKE) if a[key] != b[key]]
    if cross_layout and _global_batch(a) != _global_batch(b):
        wrong += ["micro_batch_size", "accumulation_steps"]
    if not wrong:
        return
    lines = [f"{key}: {a[key]} and {b[key]}" for key in wrong]
    across = "; compare what does not depend on the layout with --cross-layout"
    hint = across if set(wrong) <= {*_OF_A_LAYOUT, "sequence_parallel"} and not cross_layout else ""
    raise TraceError(f"{expected.path} and {got.path} cannot be compared, they differ in {'; '.join(lines)}{hint}")


def _global_batch(header: dict[str, Any]) -> int:
    return header["micro_batch_size"] * header["accumulation_steps"] * header["layout"]["data"]


def _notes(expected: RunTraces, got: RunTraces) -> list[str]:
    notes = []
    for key in _NOTED:
        theirs, ours = (sorted({str(header.get(key)) for header in run.headers.values()}) for run in (expected, got))
        if theirs != ours:
            notes.append(f"{key}: {' and '.join(theirs)} in the first, {' and '.join(ours)} in the second")
    return notes


def _all_steps(run: RunTraces) -> set[int]:
    return {address.step for trace in run.traces.values() for address in trace.addresses}


def _only(traces: dict[int, Trace], steps: set[int]) -> dict[int, Trace]:
    """The traces of the given steps alone."""
    kept = {}
    for rank, trace in traces.items():
        places = [i for i, address in enumerate(trace.addresses) if address.step in steps]
        kept[rank] = Trace([trace.addresses[i] for i in places], [trace.checksums[i] for i in places])
    return kept


def _shown(steps: set[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"
