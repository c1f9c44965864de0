"""Which rank computed something else than the golden trace? Findings of single ranks become one verdict a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megasdc.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.compare import compare_rank, execution_key
from megasdc.sdc.trace import Trace

HEALTHY, DIVERGENT, AFFECTED = "healthy", "divergent", "affected"
NOT_COMPARABLE, DIED, HUNG, STOPPED, ABSENT = "not comparable", "died", "hung", "stopped", "no answer"
"""Verdicts. affected: received wrong values of a divergent rank; stopped: ended because another rank died or hung."""


@dataclass(frozen=True)
class Finding:
    """How one rank's trace of one run compares with the golden one.

    Args:
        compared: results that were compared.
        divergences: how many differ.
        first: the first in execution order; null if none differs.
        key: its place in that order, comparable between ranks of one cell.
    """

    compared: int
    divergences: int
    first: Address | None = None
    key: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankVerdict:
    """What is to be said of one rank.

    Args:
        status: one of the module's verdicts.
        runs: runs that were compared.
        wrong_runs: runs in which this rank was the first to differ.
        addresses: results that differed in the first of them.
        first: the first of these.
        detail: more, for people; which part of the key differs, how the process ended.
    """

    status: str
    runs: int = 0
    wrong_runs: int = 0
    addresses: int = 0
    first: Address | None = None
    detail: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def find(expected: Trace, got: Trace, dims: ParallelDims) -> Finding:
    """Compare one rank's trace of one run.

    Args:
        expected: the golden one.
        got: what was computed.
        dims: layout and place of the rank in its cell.
    """
    divergences = compare_rank(dims.rank, expected, got)
    compared = max(len(expected), len(got))
    if not divergences:
        return Finding(compared, 0)
    key, place = min((execution_key(one.address, one.place, dims), index) for index, one in enumerate(divergences))
    return Finding(compared, len(divergences), divergences[place].address, key)


def judge(findings: Mapping[int, Iterable[Finding]]) -> dict[int, RankVerdict]:
    """Name the divergent ranks of one cell.

    In each run the ranks whose first difference comes first in execution order are divergent; the others that differ
    received what these computed.

    Args:
        findings: by rank in the cell, one a run, in the same order on all ranks; a rank that did not finish has fewer.

    Returns:
        By rank: healthy, divergent or affected.
    """
    runs = {rank: list(of_rank) for rank, of_rank in findings.items()}
    wrong: dict[int, list[Finding]] = {rank: [] for rank in runs}
    affected = dict.fromkeys(runs, 0)
    for number in range(max(map(len, runs.values()), default=0)):
        differing = {
            rank: of_rank[number] for rank, of_rank in runs.items() if number < len(of_rank) and of_rank[number].key
        }
        earliest = min((finding.key for finding in differing.values()), default=())
        for rank, finding in differing.items():
            if finding.key == earliest:
                wrong[rank].append(finding)
            else:
                affected[rank] += 1
    verdicts = {}
    for rank, of_rank in runs.items():
        if wrong[rank]:
            first = wrong[rank][0]
            verdicts[rank] = RankVerdict(DIVERGENT, len(of_rank), len(wrong[rank]), first.divergences, first.first)
        else:
            verdicts[rank] = RankVerdict(AFFECTED if affected[rank] else HEALTHY, len(of_rank))
    return verdicts
