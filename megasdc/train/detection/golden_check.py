"""Verification of a running job's ranks against a golden trace.

The golden workload is run in a second model beside the run's, and the micro-batches of its first step are compared:
they do not depend on the number of replicas, so a trace of one replica serves every replica. It detects what the
comparison of replicas cannot: a fault that all of them have in common.
"""

from __future__ import annotations

import gc
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from megasdc.addresses import MICRO_BATCH_PHASES, PHASES, Address
from megasdc.config import parse_config
from megasdc.engine.observer import Listener
from megasdc.errors import TraceError
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.compare import compare_rank, execution_key
from megasdc.sdc.evidence import Counts
from megasdc.sdc.golden import Golden, load_golden, load_header
from megasdc.sdc.replay import GOLDEN, INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, Ruling, rate_bound
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import DIVERGENT, HEALTHY, Finding, RankVerdict, judge, trace_gaps
from megasdc.sdc.verdict import INCONCLUSIVE as UNCLEAR
from megasdc.train.detection.golden_key import compare_key
from megasdc.train.workload import Workload

_T = TypeVar("_T")


@dataclass(frozen=True)
class GoldenRun:
    """One rank's result of one run of the workload.

    Args:
        finding: comparison with the trace.
        expected: checksum of the first result that differs; None: none differs, or none was expected there.
        got: its checksum here; None: none differs, or there was none.
        differing: results that differ, by phase and submodule.
    """

    finding: Finding
    expected: int | None = None
    got: int | None = None
    differing: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def alike(self, other: GoldenRun) -> bool:
        """Whether both have the same first difference."""
        return (self.finding.first, self.got) == (other.finding.first, other.got)


@dataclass(frozen=True)
class GoldenAnswer:
    """Results of all ranks, the same on all of them.

    Args:
        runs: by rank, one entry for each case and repeat, all cases of a repeat in turn.
        cases: number of cases of the workload.
        judged: of each run, the verdicts by rank.
        seconds: that it took on this rank.
    """

    runs: Sequence[Sequence[GoldenRun]]
    cases: int
    judged: Sequence[Mapping[int, RankVerdict]]
    seconds: float

    @property
    def compared(self) -> int:
        """Results that were compared, over all ranks and runs."""
        return sum(one.finding.compared for of_rank in self.runs for one in of_rank)

    def ranks(self, *statuses: str) -> list[int]:
        """Ranks with one of these verdicts of ``megasdc.sdc.verdict`` in some run."""
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

    def rulings(self, step: int, earlier: Collection[int] = ()) -> tuple[Ruling, ...]:
        """Rulings on the ranks that differ.

        Args:
            step: of the run, under which results are reported.
            earlier: ranks that were wrong in an earlier event of the run.

        Returns:
            One ruling for each named rank, and one for all of which none can be named; empty: all ranks agree with the
            trace.
        """
        found = [self._rule(rank, step, rank in earlier) for rank in self.ranks(DIVERGENT)]
        named = {ruling.rank for ruling in found}
        unclear = tuple(rank for rank in self.ranks(UNCLEAR) if rank not in named)
        if unclear:
            begun = [one for rank in unclear for one in self.runs[rank] if one.finding.first is not None]
            address = min(begun, key=lambda one: one.finding.key).finding.first
            assert address is not None, "only those that differ"
            found.append(Ruling(None, INCONCLUSIVE, GOLDEN, replace(address, step=step), suspects=unclear))
        return tuple(found)

    def _rule(self, rank: int, step: int, earlier: bool) -> Ruling:
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
        return Ruling(rank, verdict, GOLDEN, address, wrong, len(again), bound, expected=first.expected, got=got)


class GoldenCheck:
    """Runs a golden workload on all ranks of a run.

    Args:
        path: the golden file.
        dims: layout and place of this rank in the run.
        group: a host group of all ranks.
        before: listeners that come before the tracer: fault injection.
        keep: whether the second model is kept for the next time, instead of being built again.
    """

    def __init__(
        self, path: Path, dims: ParallelDims, group: Any, before: Sequence[Listener] = (), *, keep: bool = False
    ) -> None:
        self.path = path
        self._keep = keep
        self._kept: _Beside | None = None
        self._dims = dims
        self._group = group
        self._before = tuple(before)

    def unfit(self) -> list[str]:
        """Why ranks cannot be compared with the trace, one reason for each such rank; empty: all can.

        Raises:
            TraceError: the file is missing or damaged where some rank reads it; on all ranks.

        Collective: all ranks of the world.
        """
        own = self._read_together(lambda: unfit_for(self.path, self._dims))
        return [reason for reason in gather_objects(own, self._group) if reason]

    def ask(self, step: int, repeats: int = 0) -> GoldenAnswer:
        """Run the workload once, and if a rank differs ``repeats`` more times.

        Args:
            step: of the run; fault injection receives the results as those of this step.
            repeats: further runs.

        Raises:
            TraceError: the file is missing or damaged where some rank reads it; on all ranks.

        Collective: all ranks of the world.
        Sync: waits for the device. Needs memory for a second model with its optimizer, which is released unless it is
        kept.
        """
        start = time.perf_counter()
        beside = self._kept or _Beside(self._read_together(lambda: _own_part(self.path, self._dims)), self._dims)
        self._kept = beside if self._keep else None
        before = [_at_step(listener, step) for listener in self._before]
        runs = self._gather(beside, before)
        if any(one.finding.key for of_rank in runs for one in of_rank):
            for _ in range(repeats):
                runs = [old + new for old, new in zip(runs, self._gather(beside, before), strict=True)]
        judged = [
            judge_replicas([of_rank[number].finding for of_rank in runs], self._dims, beside.gaps)
            for number in range(len(runs[0]))
        ]
        cases = beside.cases
        if not self._keep:
            beside.workload.release()
            del beside
            gc.collect()  # a model has reference cycles, and managed collection may be far off
        return GoldenAnswer(runs, cases, judged, time.perf_counter() - start)

    def _read_together(self, read: Callable[[], _T]) -> _T:
        """Read the file, of which each host may have its own; an error on one rank is raised on all, so none waits."""
        found, problem = None, None
        try:
            found = read()
        except TraceError as error:
            problem = f"rank {self._dims.rank} on {socket.gethostname()}: {error}"
        if problems := [one for one in gather_objects(problem, self._group) if one is not None]:
            raise TraceError(f"{problems[0]}; {len(problems)} of {self._dims.world_size} ranks cannot read it")
        return cast(_T, found)

    def _gather(self, beside: _Beside, before: Sequence[Listener]) -> list[list[GoldenRun]]:
        return gather_objects(beside.run(before), self._group)


def _golden_rank(layout: ParallelDims, dims: ParallelDims) -> int:
    """The rank of the golden trace's first replica at the same stage and tensor rank."""
    return dims.tp_rank + layout.tensor * layout.data * dims.pp_rank


def _own_part(path: Path, dims: ParallelDims) -> Golden:
    return load_golden(path, _golden_rank(ParallelDims(**load_header(path)["layout"]), dims))


class _Beside:
    """The workload on this rank, in a model of its own.

    Collective: all ranks of the world, ``run`` too.
    """

    def __init__(self, golden: Golden, dims: ParallelDims) -> None:
        self._dims = dims
        self._golden, layout = golden, golden.layout
        self._rank = _golden_rank(layout, dims)
        self.cases = len(self._golden.cases)
        config = parse_config(self._golden.config)
        recomputes = bool(config.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval"))
        trace = config.megasdc.trace
        not_compared = {"interval": 1, "phases": [*trace.phases, *(set(PHASES) - set(MICRO_BATCH_PHASES))]}
        self.gaps = trace_gaps(trace.model_copy(update=not_compared), recomputes)
        self.workload = Workload(config, dims)
        # Dropout masks depend on a sample's index in the batch, so all replicas use those of the first recorded one.
        self.workload.engine.dims = replace(layout, rank=self._rank)

    def run(self, before: Sequence[Listener]) -> list[GoldenRun]:
        """Run the first step of each case."""
        runs = []
        for number, case in enumerate(self._golden.cases):
            got = self.workload.trace(case, self._golden.algorithm, before, steps=1)
            runs.append(compare_run(_first_step(self._golden.traces[number, self._rank]), _first_step(got), self._dims))
        return runs


def unfit_for(path: Path, dims: ParallelDims) -> str | None:
    """Why this rank cannot be compared with a golden trace; None: it can.

    Args:
        path: the golden file.
        dims: layout and place of this rank in the run.

    Raises:
        TraceError: the file is missing or damaged.
    """
    header = load_header(path)
    layout = ParallelDims(**header["layout"])
    if (layout.tensor, layout.pipeline) != (dims.tensor, dims.pipeline):
        return f"the golden trace is of {layout}, the run has {dims}: tensor and pipeline must be equal"
    differences = compare_key(header)[1]
    if differences:
        return "; ".join(f"{name}: golden {a!r}, here {b!r}" for name, (a, b) in differences.items())
    return None


def compare_run(expected: Trace, got: Trace, dims: ParallelDims) -> GoldenRun:
    """Compare one rank's trace of one run.

    Args:
        expected: the golden one.
        got: computed trace.
        dims: layout and place of the rank in the run.
    """
    found = compare_rank(dims.rank, expected, got)
    compared = max(len(expected), len(got))
    if not found:
        return GoldenRun(Finding(compared, 0))
    key, first = min(((execution_key(one.address, one.place, dims), one) for one in found), key=lambda pair: pair[0])
    differing = Counter((one.address.phase, one.address.fqn) for one in found)
    return GoldenRun(Finding(compared, len(found), first.address, key), first.expected, first.got, differing)


def judge_replicas(findings: Sequence[Finding], dims: ParallelDims, gaps: Sequence[str] = ()) -> dict[int, RankVerdict]:
    """Name the divergent ranks of one run, for each replica separately, since replicas exchange nothing before.

    Args:
        findings: by rank.
        dims: layout of the run.
        gaps: from ``trace_gaps``.
    """
    verdicts = {}
    cell = ParallelDims(dims.tensor, dims.pipeline, 1)
    for replica in range(dims.data):
        # A replica's ranks, in order, correspond to the ranks of a cell of one replica.
        ranks = [rank for rank in range(len(findings)) if rank // dims.tensor % dims.data == replica]
        judged = judge({place: [findings[rank]] for place, rank in enumerate(ranks)}, cell, gaps)
        verdicts.update({rank: judged[place] for place, rank in enumerate(ranks)})
    return verdicts


def _at_step(listener: Listener, step: int) -> Listener:
    def listen(address: Address, result: Tensor) -> Tensor | None:
        return listener(replace(address, step=step), result)

    return listen


def _first_step(trace: Trace) -> Trace:
    """Results that do not depend on a sum over replicas."""
    kept = [
        (address, value)
        for address, value in zip(trace.addresses, trace.checksums, strict=True)
        if address.step == 1 and address.phase in MICRO_BATCH_PHASES
    ]
    return Trace([address for address, _ in kept], [value for _, value in kept])
