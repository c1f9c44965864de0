"""Result of a verification: a verdict for each rank, a table, JSON, an exit code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasdc.common.addresses import Address
from megasdc.common.errors import ConfigError, CorruptionError, HangError, PeerError, TraceError
from megasdc.ops.golden.watched_ranks import RankReport
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
_STYLES = {
    HEALTHY: "green",
    DIVERGENT: "bold red",
    AFFECTED: "yellow",
    INCONCLUSIVE: "bold yellow",
    NOT_COMPARABLE: "magenta",
}


@dataclass(frozen=True)
class VerifyResult:
    """Verdicts of all ranks.

    Args:
        layout: of a cell.
        reports: of each rank.
        verdicts: in the same order.
    """

    layout: ParallelDims
    reports: Sequence[RankReport]
    verdicts: Sequence[GoldenVerdict]

    @property
    def unfired(self) -> list[int]:
        """Faults of a drill that changed nothing on any rank; empty while a rank has not reported."""
        return _never([report.changed for report in self.reports])

    @property
    def unfired_process_faults(self) -> list[int]:
        """Process faults of a drill that acted on no rank; empty while a rank has not reported."""
        return _never([report.acted for report in self.reports])

    @property
    def exit_code(self) -> int:
        """By ``EXIT_CODES``; 0 if no verdict is listed there."""
        given = {verdict.status for verdict in self.verdicts}
        return next((code for status, code in EXIT_CODES.items() if status in given), 0)

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        return {
            "exit_code": self.exit_code,
            "layout": self.layout.layout,
            "unfired_faults": self.unfired,
            "unfired_process_faults": self.unfired_process_faults,
            "counts": {status: sum(v.status == status for v in self.verdicts) for status in sorted(_all(self))},
            "ranks": [
                {
                    "host": report.host,
                    "rank": report.rank,
                    "cell": report.cell,
                    "cell_rank": report.cell_rank,
                    **asdict(verdict),
                    "exit_code": report.code,
                }
                for report, verdict in zip(self.reports, self.verdicts, strict=True)
            ],
        }


def _never(counts: Sequence[list[int] | None]) -> list[int]:
    """Indices that are zero on every rank; none while a rank has not reported."""
    told = [of_rank for of_rank in counts if of_rank is not None]
    if len(told) < len(counts):
        return []
    return [place for place, total in enumerate(map(sum, zip(*told, strict=True))) if not total]


def _all(result: VerifyResult) -> set[str]:
    return {verdict.status for verdict in result.verdicts}


def judge_reports(reports: Sequence[RankReport], header: dict[str, Any]) -> VerifyResult:
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
    return VerifyResult(layout, list(reports), ordered)


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


def render_golden(result: VerifyResult, console: Console) -> None:
    """Print the table and a summary."""
    table = Table(title=f"golden verification, {result.layout}")
    for name in ("host", "rank", "place", "verdict", "runs", "compared", "first difference", "results that differ"):
        table.add_column(name)
    for report, verdict in zip(result.reports, result.verdicts, strict=True):
        dims = ParallelDims(result.layout.tensor, result.layout.pipeline, result.layout.data, report.cell_rank)
        wrong = f"{verdict.wrong_runs} of {verdict.runs} wrong" if verdict.wrong_runs else str(verdict.runs)
        table.add_row(
            report.host,
            str(report.rank),
            f"cell {report.cell}: tp {dims.tp_rank} pp {dims.pp_rank} dp {dims.dp_rank}",
            Text(verdict.status, style=_STYLES.get(verdict.status, "red")),
            wrong,
            f"{verdict.compared:,}",
            "" if verdict.first is None else str(verdict.first),
            str(verdict.addresses or ""),
        )
    console.print(table)
    for report, verdict in zip(result.reports, result.verdicts, strict=True):
        if verdict.detail:
            console.print(Text(f"{report.host} rank {report.rank}: {verdict.status}: {verdict.detail}"))
    for number in result.unfired:
        console.print(f"fault {number} of the drill never changed anything: no result matched, or no draw made it fire")
    for number in result.unfired_process_faults:
        console.print(f"process fault {number} of the drill never acted: its steps or micro-batches were not reached")
    counts = ", ".join(f"{sum(v.status == s for v in result.verdicts)} {s}" for s in sorted(_all(result)))
    console.print(f"{len(result.verdicts)} ranks: {counts}")
