"""Verification of a running job's ranks against a golden trace.

The golden workload is run in a second model beside the run's, and the micro-batches of its first step are compared:
they do not depend on the number of replicas, so a trace of one replica serves every replica. It detects what the
comparison of replicas cannot: a fault that all of them have in common.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from megasdc.common.addresses import MICRO_BATCH_PHASES, PHASES, Address
from megasdc.common.errors import TraceError
from megasdc.config.load import parse_config
from megasdc.engine.observer import Listener
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import (
    Golden,
    GoldenAnswer,
    GoldenRun,
    compare_run,
    judge_replicas,
    load_golden,
    load_header,
    trace_gaps,
)
from megasdc.sdc.trace import Trace
from megasdc.train.detection.golden_key import compare_key
from megasdc.train.workload import Workload

_T = TypeVar("_T")


class GoldenCheck:
    """Runs a golden workload on all ranks of a run.

    ``group`` is a host group of all ranks; ``before`` are listeners that inject faults; ``keep``: the second model is
    kept for the next time.
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
        """Reasons why ranks cannot be compared with the trace, one for each such rank; empty: all can.

        Raises:
            TraceError: the file is missing or damaged where some rank reads it; on all ranks.

        Collective: all ranks of the world.
        """
        own = self._read_together(lambda: unfit_for(self.path, self._dims))
        return [reason for reason in gather_objects(own, self._group) if reason]

    def ask(self, step: int, repeats: int = 0) -> GoldenAnswer:
        """Run the workload once, and if a rank differs ``repeats`` more times; fault injection gets ``step``.

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
        config = parse_config(self._golden.config, stored=True)
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
    """The reason why this rank cannot be compared with a golden trace; None: it can.

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
