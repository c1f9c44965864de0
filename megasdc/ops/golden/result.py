"""Outcome of a verification: a verdict for each rank, from the reports of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megasdc.common.addresses import Address
from megasdc.common.errors import ConfigError, CorruptionError, HangError, PeerError, TraceError
from megasdc.ops.golden.watched_ranks import RankReport
from megasdc.output.outcome import Outcome, code_of, count_statuses, counted
from megasdc.output.page import Cell, Page, PageSection, State, Table
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import (
    ABSENT,
    AFFECTED,
    DIED,
    DIVERGENT,
    HEALTHY,
    HUNG,
    NOT_COMPARABLE,
    STOPPED,
    GoldenComparison,
    GoldenVerdict,
    describe_differences,
    judge_cell,
    trace_gaps,
)
from megasdc.sdc.verdict import INCONCLUSIVE
from megasdc.train.detection.golden_key import workload_of

EXIT_CODES = {
    DIVERGENT: CorruptionError.exit_code,
    INCONCLUSIVE: CorruptionError.exit_code,
    HUNG: HangError.exit_code,
    DIED: PeerError.exit_code,
    ABSENT: PeerError.exit_code,
    NOT_COMPARABLE: TraceError.exit_code,
    STOPPED: PeerError.exit_code,
}
"""Exit code by verdict; of several verdicts, the first in this order decides."""
_FAILED = {
    PeerError.exit_code: STOPPED,
    HangError.exit_code: STOPPED,
    TraceError.exit_code: NOT_COMPARABLE,
    ConfigError.exit_code: NOT_COMPARABLE,
}
"""Verdict by exit code of a rank that ended with a documented error; any other code is a death."""
_GOOD = {HEALTHY: "good", AFFECTED: ""}
"""Look of verdicts that are not bad."""


def _never(counts: Sequence[list[int] | None]) -> list[int]:
    """Indices that are zero on every rank; none while a rank has not reported."""
    told = [of_rank for of_rank in counts if of_rank is not None]
    if len(told) < len(counts):
        return []
    return [place for place, total in enumerate(map(sum, zip(*told, strict=True))) if not total]


def judge_reports(reports: Sequence[RankReport], header: dict[str, Any]) -> Outcome[GoldenVerdict]:
    """The verdict on every rank of all cells; ``header`` is the golden file's."""
    layout = ParallelDims(**header["layout"])
    gaps = _gaps_of(header)
    cells: defaultdict[int, list[RankReport]] = defaultdict(list)
    for report in reports:
        cells[report.cell].append(report)
    verdicts: dict[tuple[int, int], GoldenVerdict] = {}
    for cell, members in cells.items():
        findings = {report.cell_rank: [_finding(run) for run in report.runs] for report in members}
        compared = judge_cell(findings, layout, gaps)
        wrong = any(verdict.status in (DIVERGENT, INCONCLUSIVE) for verdict in compared.values())
        behind = _behind(members, wrong)
        for report in members:
            verdicts[cell, report.cell_rank] = _verdict(report, compared[report.cell_rank], behind)
    ordered = [verdicts[report.cell, report.cell_rank] for report in reports]
    statuses = [verdict.status for verdict in ordered]
    contents = {
        "layout": layout.layout,
        "unfired_faults": _never([report.changed for report in reports]),
        "unfired_process_faults": _never([report.acted for report in reports]),
        "counts": count_statuses(statuses),
        "ranks": [
            {
                "host": report.host,
                "rank": report.rank,
                "cell": report.cell,
                "cell_rank": report.cell_rank,
                **asdict(verdict),
                "exit_code": report.code,
            }
            for report, verdict in zip(reports, ordered, strict=True)
        ],
    }
    page = _page(layout, reports, ordered, contents)
    return Outcome(code_of(statuses, EXIT_CODES), contents, page, ordered)


def _gaps_of(header: dict[str, Any]) -> tuple[str, ...]:
    """Settings that exclude results from the trace, as far as this version can read them."""
    try:
        config = workload_of(header)
    except TraceError:
        return ("a configuration that this version does not read",)
    recomputes = bool(config.recompute_interval)
    return trace_gaps(config.megasdc.trace, recomputes)


def _verdict(report: RankReport, compared: GoldenVerdict, behind: set[int]) -> GoldenVerdict:
    if compared.status == DIVERGENT:  # whatever happened after
        return replace(compared, detail=report.detail)
    if compared.status == INCONCLUSIVE:
        return replace(compared, detail="; ".join(filter(None, (compared.detail, report.detail))))
    if report.ended == "hung":
        if report.cell_rank not in behind:
            return replace(compared, status=STOPPED, detail=f"waits for other ranks of its cell; {report.detail}")
        if not _frozen(report):
            text = f"{report.detail}; no rank of its cell has fewer results, but it may itself wait for others"
            return replace(compared, status=HUNG, detail=text)
    ends = {"died": DIED, "hung": HUNG, "stopped": STOPPED, "absent": ABSENT}
    if report.ended in ends:
        return replace(compared, status=ends[report.ended], detail=report.detail)
    if report.ended == "failed":
        return replace(compared, status=_FAILED.get(report.code, DIED), detail=report.detail)
    if report.differences:
        return GoldenVerdict(NOT_COMPARABLE, detail=describe_differences(report.differences))
    if not report.runs:
        return GoldenVerdict(NOT_COMPARABLE, detail="another rank of its cell is not comparable")
    return compared


def _behind(members: Sequence[RankReport], wrong: bool) -> set[int]:
    """Hung ranks that others seem to wait for: frozen ones, else those with the fewest results.

    The latter is only a hint: a rank that skips a step on its own runs ahead, and the healthy ones wait behind it.
    Where a run is already ``wrong``, that explains the hang, and ranks are not told apart by their results; nor where
    another rank ended by itself, since the others waited for that one.
    """
    hung = [report for report in members if report.ended == "hung"]
    frozen = {report.cell_rank for report in hung if _frozen(report)}
    if frozen or wrong or any(_ended_alone(report) for report in members):
        return frozen
    fewest = min((report.position for report in hung), default=0)
    return {report.cell_rank for report in hung if report.position == fewest}


def _frozen(report: RankReport) -> bool:
    return "no sign of life" in report.detail


def _ended_alone(report: RankReport) -> bool:
    return report.ended in ("died", "absent") or (report.ended == "failed" and _FAILED.get(report.code) != STOPPED)


def _finding(run: dict[str, Any]) -> GoldenComparison:
    first = run["first"]
    return GoldenComparison(
        run["compared"], run["divergences"], None if first is None else Address(**first), tuple(run["key"])
    )


def _page(
    layout: ParallelDims, reports: Sequence[RankReport], verdicts: Sequence[GoldenVerdict], contents: dict[str, Any]
) -> Page:
    rows, told = [], list[str]()
    for report, verdict in zip(reports, verdicts, strict=True):
        dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, report.cell_rank)
        rows.append(
            (
                report.host,
                report.rank,
                f"cell {report.cell}: tp {dims.tp_rank} pp {dims.pp_rank} dp {dims.dp_rank}",
                Cell(verdict.status, look=_GOOD.get(verdict.status, "bad")),
                f"{verdict.wrong_runs} of {verdict.runs} wrong" if verdict.wrong_runs else verdict.runs,
                verdict.compared,
                "" if verdict.first is None else str(verdict.first),
                verdict.addresses or "",
            )
        )
        if verdict.detail:
            told.append(f"{report.host} rank {report.rank}: {verdict.status}: {verdict.detail}")
    told += [
        f"fault {number} of the drill never changed anything: no result matched, or no draw made it fire"
        for number in contents["unfired_faults"]
    ]
    told += [
        f"process fault {number} of the drill never acted: its steps or micro-batches were not reached"
        for number in contents["unfired_process_faults"]
    ]
    headings = ("host", "rank", "place", "verdict", "runs", "compared", "first difference", "results that differ")
    section = PageSection(f"golden verification, {layout}", items=told, tables=[Table("ranks", headings, rows)])
    state: State = "same" if contents["counts"].keys() <= _GOOD.keys() else "different"
    return Page("Golden verification", counted("rank", contents["counts"]), state, sections=[section])
