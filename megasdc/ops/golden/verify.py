"""Verification against a golden trace without a launcher: one cell on this host, or every device by itself."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.common.errors import ConfigError, TraceError
from megasdc.ops.golden.result import judge_reports
from megasdc.ops.golden.watched_ranks import CellRank, RankReport, watch_ranks
from megasdc.output.outcome import Outcome
from megasdc.parallel.local_ranks import LocalMeeting, count_accelerators, local_rank_environment
from megasdc.sdc.golden import GoldenVerdict, load_header

Progress = Callable[[int, int | None], None]
"""Called with runs done by all ranks, and the total; None where time decides."""


def verify_here(
    golden: Path,
    *,
    devices: int | None = None,
    repeats: int = 3,
    minutes: float | None = None,
    timeout_s: float = 600.0,
    drill: dict[str, Any] | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Outcome[GoldenVerdict]:
    """Verify on this host, without a launcher.

    Args:
        golden: the file.
        devices: None: one cell, with as many ranks as the golden trace. A number: so many cells of one rank each, which
            do not communicate, one for each device; on a host without accelerators, side by side on its processor.
        repeats: runs of each case.
        minutes: run time instead of repeats; None: ``repeats`` decides.
        timeout_s: seconds without progress after which a rank counts as hung.
        drill: faults to inject, from ``load_drill``; None: none.
        on_progress: see ``Progress``.

    Raises:
        TraceError: the golden file cannot be used.
        ConfigError: ``devices`` is given, and the golden trace has more than one rank, or the host fewer devices.
    """
    header = load_header(golden)
    size = layout_size(header)
    if devices is not None:
        _check_devices(devices, header)
    threads = golden_threads(header)
    cells = devices or 1
    total = None if minutes is not None else cells * size * repeats * len(header["cases"])
    ranks: list[CellRank] = []
    meetings: list[LocalMeeting] = []  # one for each cell
    with tempfile.TemporaryDirectory(prefix="megasdc_golden_") as scratch:
        for cell in range(cells):
            request = {
                "golden": str(golden.resolve()),
                "folder": str(Path(scratch) / f"cell_{cell:05d}"),
                "repeats": repeats,
                "minutes": minutes,
                "timeout_s": timeout_s,
                "drill": drill,
            }
            meetings.append(LocalMeeting())
            for rank in range(size):
                report = RankReport(socket.gethostname(), cell * size + rank, cell, rank)
                environment = local_rank_environment(rank, size, threads, meetings[cell].environment)
                environment["LOCAL_RANK"] = str(cell * size + rank)
                ranks.append(CellRank(request, environment, report, timeout_s))
        watch_ranks(ranks, lambda: on_progress(sum(len(rank.report.runs) for rank in ranks), total))
    return judge_reports([rank.report for rank in ranks], header)


def _check_devices(devices: int, header: dict[str, Any]) -> None:
    size, there = layout_size(header), count_accelerators()
    if size != 1:
        raise ConfigError(
            f"--local verifies every device alone, but the golden trace is of {size} ranks ({header['layout']}): "
            "record one with tensor 1, pipeline 1 and --replicas 1"
        )
    if there and devices > there:
        raise ConfigError(f"--local {devices}: this host has {there} devices; give at most so many, or 0 for all")


def golden_threads(header: dict[str, Any]) -> int:
    """CPU threads of a rank; 0 (PyTorch's choice) where another version of megasdc stores them elsewhere."""
    return int(header["config"].get("megasdc", {}).get("parallel", {}).get("threads", 0))


def layout_size(header: dict[str, Any]) -> int:
    """Number of ranks of a cell; TraceError: the header's layout has none."""
    layout = header["layout"]
    size = int(layout["tensor"]) * int(layout["pipeline"]) * int(layout["data"])
    if size < 1:
        raise TraceError(f"the golden trace's layout {layout} has no ranks")
    return size
