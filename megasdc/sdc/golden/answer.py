"""Results of the golden workload on a run's ranks: comparison with the trace, verdicts and rulings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden_compare import DIVERGENT, HEALTHY, GoldenComparison, GoldenVerdict, judge_cell
from megasdc.sdc.trace import Counts, Trace, compare_rank, execution_key
from megasdc.sdc.verdict import GOLDEN, INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, RankVerdict, rate_bound


@dataclass(frozen=True)
class GoldenRun:
    """One rank's result of one run of the workload, compared with the trace.

    ``expected`` and ``got`` are the checksums of the first result that differs, None where there is none;
    ``differing`` counts results by phase and submodule.
    """

    finding: GoldenComparison
    expected: int | None = None
    got: int | None = None
    differing: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def alike(self, other: GoldenRun) -> bool:
        """Whether both have the same first difference."""
        return (self.finding.first, self.got) == (other.finding.first, other.got)


@dataclass(frozen=True)
class GoldenAnswer:
    """Results of all ranks, the same on all of them except ``seconds``.

    ``runs`` are by rank, one entry for each case and repeat, all cases of a repeat in turn; ``judged`` are the verdicts
    by rank, of each run.
    """

    runs: Sequence[Sequence[GoldenRun]]
    cases: int
    judged: Sequence[Mapping[int, GoldenVerdict]]
    seconds: float

    @property
    def compared(self) -> int:
        """Results that were compared, over all ranks and runs."""
        return sum(one.finding.compared for of_rank in self.runs for one in of_rank)

    def ranks(self, *statuses: str) -> list[int]:
        """Ranks with one of these verdicts of ``megasdc.sdc.golden_compare`` in some run."""
        return [rank for rank in range(len(self.runs)) if any(one[rank].status in statuses for one in self.judged)]

    @property
    def verified(self) -> dict[int, bool]:
        """By rank, whether it reproduces the trace; absent: it received wrong values, or cannot be judged."""
        healthy = [rank for rank in range(len(self.runs)) if all(one[rank].status == HEALTHY for one in self.judged)]
        return dict.fromkeys(healthy, True) | dict.fromkeys(self.ranks(DIVERGENT), False)

    @property
    def counts(self) -> Counts:
        """Results that differ, over all runs, by phase, submodule and rank."""
        counts: Counts = {}
        for rank, of_rank in enumerate(self.runs):
            for (phase, fqn), count in sum((Counter(one.differing) for one in of_rank), Counter()).items():
                counts.setdefault(phase, {}).setdefault(fqn, {})[rank] = count
        return counts

    def rulings(self, step: int, earlier: Collection[int] = ()) -> tuple[RankVerdict, ...]:
        """Rulings on the ranks that differ: one for each named rank, and one for all of which none can be named.

        Empty: all ranks agree with the trace. ``step``: of the run, under which results are reported; ``earlier``:
        ranks that were wrong in an earlier event of the run.
        """
        found = [self._rule(rank, step, rank in earlier) for rank in self.ranks(DIVERGENT)]
        named = {ruling.rank for ruling in found}
        unclear = tuple(rank for rank in self.ranks(INCONCLUSIVE) if rank not in named)
        if unclear:
            begun = [one for rank in unclear for one in self.runs[rank] if one.finding.first is not None]
            address = min(begun, key=lambda one: one.finding.key).finding.first
            assert address is not None, "only those that differ"
            found.append(RankVerdict(None, INCONCLUSIVE, GOLDEN, replace(address, step=step), suspects=unclear))
        return tuple(found)

    def _rule(self, rank: int, step: int, earlier: bool) -> RankVerdict:
        number = next(index for index, of_run in enumerate(self.judged) if of_run[rank].status == DIVERGENT)
        first = self.runs[rank][number]
        again = [one for one in range(number % self.cases, len(self.judged), self.cases) if one != number]
        wrong = sum(self.judged[one][rank].status == DIVERGENT for one in again)
        healthy = sum(self.judged[one][rank].status == HEALTHY for one in again)
        bound = None
        if not again:
            verdict = INCONCLUSIVE
        elif all(self.runs[rank][one].alike(first) for one in again):
            verdict = PERSISTENT
        elif wrong or number >= self.cases or (healthy and earlier):
            verdict = INTERMITTENT
        elif healthy == len(again):
            verdict, bound = NOT_REPRODUCED, rate_bound(healthy)
        else:
            verdict = INCONCLUSIVE  # in some repeat it may have received wrong values of another rank
        address = first.finding.first
        assert address is not None, "a divergent rank has a first difference"
        got = {} if first.got is None else {rank: first.got}
        address = replace(address, step=step)
        return RankVerdict(rank, verdict, GOLDEN, address, wrong, len(again), bound, expected=first.expected, got=got)


def compare_run(expected: Trace, got: Trace, dims: ParallelDims) -> GoldenRun:
    """Compare one rank's trace of one run with the golden one."""
    found = compare_rank(dims.rank, expected, got)
    compared = max(len(expected), len(got))
    if not found:
        return GoldenRun(GoldenComparison(compared, 0))
    key, first = min(((execution_key(one.address, one.place, dims), one) for one in found), key=lambda pair: pair[0])
    differing = Counter((one.address.phase, one.address.fqn) for one in found)
    return GoldenRun(GoldenComparison(compared, len(found), first.address, key), first.expected, first.got, differing)


def judge_replicas(
    findings: Sequence[GoldenComparison], dims: ParallelDims, gaps: Sequence[str] = ()
) -> dict[int, GoldenVerdict]:
    """Name the divergent ranks of one run, for each replica separately, since replicas exchange nothing before.

    ``findings`` are by rank, ``gaps`` come from ``trace_gaps``.
    """
    verdicts = {}
    cell = ParallelDims(dims.tensor, dims.pipeline, 1)
    for replica in range(dims.data):
        # A replica's ranks, in order, correspond to the ranks of a cell of one replica.
        ranks = [rank for rank in range(len(findings)) if rank // dims.tensor % dims.data == replica]
        judged = judge_cell({place: [findings[rank]] for place, rank in enumerate(ranks)}, cell, gaps)
        verdicts.update({rank: judged[place] for place, rank in enumerate(ranks)})
    return verdicts
