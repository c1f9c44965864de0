"""Recording of a golden trace: the workload runs in two sets of processes, and must repeat exactly."""

from __future__ import annotations

import datetime
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megasdc.common.errors import HangError, PeerError, TraceError, error_of_rank
from megasdc.config.checks import check_layout
from megasdc.config.load import RunConfig
from megasdc.ops.golden.watched_ranks import CellRank, RankReport, watch_ranks
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.local_ranks import LocalMeeting, local_rank_environment
from megasdc.sdc.golden import Golden, save_golden
from megasdc.sdc.trace import Trace, compare_traces, read_trace
from megasdc.train.detection.golden import workload_cases, workload_config

LAUNCHES = 2
"""Sets of processes, forks and fresh ones; results that repeat only inside one process are not golden."""


def record_golden_trace(
    config: RunConfig,
    out: Path,
    *,
    replicas: int = 1,
    repeats: int = 3,
    timeout_s: float = 600.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Golden:
    """Record a golden trace on this host and write it.

    Args:
        config: a run's configuration; its workload is recorded.
        out: the file.
        replicas: data-parallel size of the golden layout.
        repeats: runs of each case in each of two sets of processes, at least 1.
        timeout_s: seconds without progress after which a rank hangs.
        on_progress: called with runs done and their total.

    Raises:
        ConfigError: the configuration does not fit.
        TraceError: the workload did not repeat, or a rank has no result; names the first difference, or the rank.
        HangError: a rank made no progress.
        MegasdcError: a rank failed; of the class that it failed with, or LaunchError if it died.
        StorageError: the file cannot be written.
    """
    workload = workload_config(config)
    parallel = workload.megasdc.parallel
    layout = ParallelDims(parallel.tensor, parallel.pipeline, replicas)
    check_layout(workload, layout.world_size)
    cases = workload_cases(workload)
    total = LAUNCHES * repeats * len(cases) * layout.world_size
    kept: dict[tuple[int, int], Trace] = {}
    with tempfile.TemporaryDirectory(prefix="megasdc_golden_") as scratch:
        for launch in range(LAUNCHES):
            folder = Path(scratch) / f"launch_{launch}"
            before = launch * total // LAUNCHES
            told = partial(_report, on_progress, before, total)
            reports = _run(workload, layout, folder, repeats, timeout_s, told, fresh=launch > 0)
            for repeat in range(repeats):
                for case in range(len(cases)):
                    _compare_with_first(kept, folder, launch, repeat, case, layout, workload)
    golden = Golden(
        key=reports[0].key,
        config=workload.resolved(),
        layout=layout,
        algorithm=reports[0].algorithm,
        cases=cases,
        repeats=LAUNCHES * repeats,
        recorded={"host": socket.gethostname(), "time": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")},
        traces=kept,
    )
    save_golden(out, golden)
    return golden


def _report(on_progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    on_progress(before + done, total)


def _run(
    workload: RunConfig,
    layout: ParallelDims,
    folder: Path,
    repeats: int,
    timeout_s: float,
    on_progress: Callable[[int], None],
    fresh: bool,
) -> list[RankReport]:
    request: dict[str, Any] = {
        "folder": str(folder),
        "config": workload.resolved(),
        "golden": None,
        "repeats": repeats,
        "minutes": None,
        "timeout_s": timeout_s,
        "drill": None,
    }
    meeting = LocalMeeting()
    ranks = []
    for rank in range(layout.world_size):
        report = RankReport(socket.gethostname(), rank, 0, rank)
        threads = workload.megasdc.parallel.threads
        environment = local_rank_environment(rank, layout.world_size, threads, meeting.environment)
        ranks.append(CellRank(request, environment, report, timeout_s, fresh))
    watch_ranks(ranks, lambda: on_progress(sum(len(rank.report.runs) for rank in ranks)))
    reports = [rank.report for rank in ranks]
    bad = [report for report in reports if report.ended != "done"]
    if bad:
        culprit = min(bad, key=lambda report: report.ended == "stopped" or report.code == PeerError.exit_code)
        kind = HangError if culprit.ended == "hung" else error_of_rank(culprit.code)
        raise kind(f"rank {culprit.cell_rank} {culprit.ended}: {culprit.detail}")
    return reports


def _check_not_empty(traces: dict[int, Trace], case: int, layout: ParallelDims, workload: RunConfig) -> None:
    """Raise TraceError for a rank without results, which would be healthy whatever it computes."""
    without = [rank for rank, trace in traces.items() if not trace]
    if not without:
        return
    section = workload.megasdc.trace
    chosen = ", ".join(
        f"megasdc.trace.{name} {value}"
        for name in ("phases", "layers", "micro_batches")
        if (value := getattr(section, name)) is not None
    )
    steps, micro_batches = workload.megasdc.golden.steps, workload.megasdc.golden.micro_batches
    raise TraceError(
        f"case {case} leaves no result of rank{'s' if len(without) > 1 else ''} {', '.join(map(str, without))} of "
        f"{layout}, so that nothing could be verified there: {chosen}, of {steps} steps with micro-batches 0 to "
        f"{micro_batches - 1}; choose what every rank computes, or remove these settings"
    )


def _compare_with_first(
    kept: dict[tuple[int, int], Trace],
    folder: Path,
    launch: int,
    repeat: int,
    case: int,
    layout: ParallelDims,
    workload: RunConfig,
) -> None:
    """Store the first traces of a case, and compare all others with them."""
    files = folder / f"repeat_{repeat:03d}" / f"case_{case:03d}"
    traces = {rank: read_trace(files / f"rank_{rank:05d}.arrow")[1] for rank in range(layout.world_size)}
    if (case, 0) not in kept:
        _check_not_empty(traces, case, layout, workload)
        kept.update({(case, rank): trace for rank, trace in traces.items()})
        return
    found = compare_traces({rank: kept[case, rank] for rank in traces}, traces, layout)
    if found.first:
        first = found.first[0]
        raise TraceError(
            f"the workload does not repeat: launch {launch + 1}, repeat {repeat + 1} differs from the first at "
            f"{first.address} on rank {first.rank}, {len(found.divergences)} of {found.compared} results differ; "
            "`megasdc check-determinism` names settings that make runs differ; if it finds none, the device is not "
            "to be trusted"
        )
