"""Verdicts on ranks compared with a golden trace, from the findings of all ranks of a cell.

A rank is named only where no other can have caused its first difference. How ranks mix in a step: tensor ranks and
stages of a replica exchange results that are observed before they are sent; then come, each observed after it only,
the sums of gradients over tied stages and tensor ranks (``accumulated_grad``), the sum over replicas
(``reduced_grad``), the norm of the whole gradient (``update``), and the all-gather over replicas (``parameter``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megasdc.common.addresses import ACCUMULATED_GRAD, PARAMETER, PHASES, RECOMPUTE, REPLICA_PHASES, UPDATE, Address
from megasdc.config.sections.megasdc import TraceSection
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, compare_rank, execution_key
from megasdc.sdc.verdict import INCONCLUSIVE

HEALTHY, DIVERGENT, AFFECTED = "healthy", "divergent", "affected"
NOT_COMPARABLE, DIED, HUNG, STOPPED, ABSENT = "not comparable", "died", "hung", "stopped", "no answer"
"""Verdicts. affected: received wrong values of a divergent rank; inconclusive: something is wrong, and this rank is one
of several that may have caused it; stopped: ended because another rank died or hung."""
FINEST = "gemm"


@dataclass(frozen=True)
class GoldenComparison:
    """Comparison of one rank's trace of one run with the golden one.

    Args:
        first: the first in execution order; None if none differs.
        key: its execution key, comparable between ranks of one cell.
    """

    compared: int
    divergences: int
    first: Address | None = None
    key: tuple[int, ...] = ()


@dataclass(frozen=True)
class GoldenVerdict:
    """The verdict on one rank.

    Args:
        status: one of the module's verdicts.
        wrong_runs: runs in which this rank was the first to differ; of an inconclusive one, runs that leave it open.
        addresses: results that differed in the first of them.
        first: the first of these.
        detail: for people: which part of the key differs, how the process ended.
        compared: results that were compared, over all runs.
    """

    status: str
    runs: int = 0
    wrong_runs: int = 0
    addresses: int = 0
    first: Address | None = None
    detail: str = ""
    compared: int = 0


def find(expected: Trace, got: Trace, dims: ParallelDims) -> GoldenComparison:
    """Compare one rank's trace of one run with the golden one; ``dims`` are the rank's in its cell."""
    divergences = compare_rank(dims.rank, expected, got)
    compared = max(len(expected), len(got))
    if not divergences:
        return GoldenComparison(compared, 0)
    key, place = min((execution_key(one.address, one.place, dims), index) for index, one in enumerate(divergences))
    return GoldenComparison(compared, len(divergences), divergences[place].address, key)


def trace_gaps(trace: TraceSection, recomputes: bool) -> tuple[str, ...]:
    """Settings that exclude results from a trace; with any, a rank's first difference may be a value it received."""
    missing = set(PHASES) - set(trace.phases) - (set() if recomputes else {RECOMPUTE})
    gaps = [] if not missing else [f"phases without {', '.join(phase for phase in PHASES if phase in missing)}"]
    if trace.granularity != FINEST:
        gaps.append(f"granularity {trace.granularity}")
    if trace.interval != 1:
        gaps.append(f"interval {trace.interval}")
    gaps += [f"{name} {value}" for name in ("micro_batches", "layers") if (value := getattr(trace, name)) is not None]
    return tuple(gaps)


def judge_cell(
    findings: Mapping[int, Iterable[GoldenComparison]], layout: ParallelDims, gaps: Sequence[str] = ()
) -> dict[int, GoldenVerdict]:
    """Name the divergent ranks of one cell.

    Args:
        findings: by rank in the cell, one a run, in the same order on all ranks; a rank that did not finish has fewer.
        gaps: from ``trace_gaps``; without effect for a cell of one rank, which receives nothing.

    Returns:
        By rank: healthy, divergent, affected, inconclusive, or not comparable where nothing was compared.
    """
    runs = {rank: list(findings.get(rank, ())) for rank in range(layout.world_size)}
    given: dict[int, list[tuple[str, str, GoldenComparison]]] = {rank: [] for rank in runs}
    for number in range(max(map(len, runs.values()), default=0)):
        of_run = {rank: of_rank[number] for rank, of_rank in runs.items() if number < len(of_rank)}
        for rank, (status, reason) in _judge_run(of_run, layout, gaps).items():
            given[rank].append((status, reason, of_run.get(rank, GoldenComparison(0, 0))))
    return {rank: _of_all_runs(runs[rank], given[rank]) for rank in runs}


def _of_all_runs(runs: list[GoldenComparison], given: list[tuple[str, str, GoldenComparison]]) -> GoldenVerdict:
    compared = sum(finding.compared for finding in runs)
    for status in (DIVERGENT, INCONCLUSIVE):
        those = [(reason, finding) for one, reason, finding in given if one == status]
        if those:
            reason, first = those[0]
            return GoldenVerdict(
                status, len(runs), len(those), first.divergences, first.first, detail=reason, compared=compared
            )
    if runs and not compared:
        nothing = "no result was compared: the golden trace holds none of this rank; record it again"
        return GoldenVerdict(NOT_COMPARABLE, len(runs), detail=nothing)
    return GoldenVerdict(AFFECTED if given else HEALTHY, len(runs), compared=compared)


def _judge_run(
    of_run: Mapping[int, GoldenComparison], layout: ParallelDims, gaps: Sequence[str]
) -> dict[int, tuple[str, str]]:
    """Status and reason by rank, of the ranks that differ or are suspect in one run."""
    differing = {rank: finding for rank, finding in of_run.items() if finding.key}
    if not differing:
        return {}
    silent = [rank for rank in range(layout.world_size) if rank not in of_run or not of_run[rank].compared]
    reason = ""
    if silent:
        reason = f"{_ranks(silent)} reported no result of this run, and may have computed something else first"
    elif gaps and layout.world_size > 1:
        reason = f"the trace lacks what this rank may have received ({'; '.join(gaps)}); record a complete one"
    if reason:
        return dict.fromkeys(differing, (INCONCLUSIVE, reason))
    given = dict.fromkeys(differing, (AFFECTED, ""))
    for suspects in _causes(differing, layout):
        if len(suspects) == 1:
            given[suspects[0]] = DIVERGENT, ""
        else:
            begun = min((differing[rank] for rank in suspects if rank in differing), key=lambda one: one.key)
            reason = (
                f"one of {_ranks(suspects)}: the first difference, {begun.first}, comes after they exchanged values"
            )
            given |= dict.fromkeys(suspects, (INCONCLUSIVE, reason))
    return given


def _causes(differing: Mapping[int, GoldenComparison], layout: ParallelDims) -> list[list[int]]:
    """Groups of ranks; as far as can be known, exactly one rank of each group is a cause."""
    start = min(differing.values(), key=lambda finding: finding.key).first
    assert start is not None, "a finding with a key has an address"
    begun = {
        rank: finding.first.phase
        for rank, finding in differing.items()
        if finding.first is not None and finding.first.step == start.step
    }
    if start.phase in REPLICA_PHASES:  # until gradients are summed, replicas exchange no values
        causes = []
        for dp_rank in range(layout.data):
            own = {
                rank: differing[rank].key
                for rank, phase in begun.items()
                if phase in REPLICA_PHASES and _dims(layout, rank).dp_rank == dp_rank
            }
            causes += _of_replica(own, begun)
        return causes
    first = [rank for rank, phase in begun.items() if phase == start.phase]
    if start.phase == UPDATE:  # the norm of the whole gradient affects every update
        return [first]
    causes = []
    for group in sorted({tuple(_replicas_of(layout, rank)) for rank in first}):
        holders = [rank for rank in group if rank in first]
        # Only a shard's owner records the sum: any rank of the group may be wrong. A lone wrong copy is its holder's.
        causes.append(holders if start.phase == PARAMETER and len(holders) == 1 else list(group))
    return causes


def _of_replica(own: Mapping[int, tuple[int, ...]], begun: Mapping[int, str]) -> list[list[int]]:
    """Ranks of one replica that differed first, before gradients were summed over replicas."""
    if not own:
        return []
    earliest = min(own.values())
    first = [rank for rank, key in own.items() if key == earliest]
    if begun[first[0]] == ACCUMULATED_GRAD:  # tied stages and tensor ranks sum some gradients
        return [list(own)]
    return [[rank] for rank in first]  # at the same place, neither received it from the other


def _replicas_of(layout: ParallelDims, rank: int) -> list[int]:
    """The ranks that hold the same parameters."""
    own = _dims(layout, rank)
    every = (_dims(layout, other) for other in range(layout.world_size))
    return [one.rank for one in every if (one.tp_rank, one.pp_rank) == (own.tp_rank, own.pp_rank)]


def _dims(layout: ParallelDims, rank: int) -> ParallelDims:
    return ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the cell"
