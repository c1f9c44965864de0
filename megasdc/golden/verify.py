"""Does every rank compute what the golden trace says? Alone on this host, or every device of it by itself."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.errors import ConfigError, TraceError
from megasdc.golden.cells import RankReport, WatchedRank, free_port, watch
from megasdc.golden.result import VerifyResult, judge_reports
from megasdc.parallel.local_ranks import build_operator, rank_environment
from megasdc.sdc.golden import load_header

Progress = Callable[[int, int | None], None]
"""Called with runs done by all ranks, and of how many; null where time decides."""


def golden_request(
    golden: Path, repeats: int, minutes: float | None, timeout_s: float, drill: dict[str, Any] | None
) -> dict[str, Any]:
    """What ranks are asked, but for their folder.

    Args:
        golden: the file.
        repeats: runs of each case.
        minutes: instead of repeats: so long.
        timeout_s: seconds without progress after which a rank hangs.
        drill: faults that harm the ranks on purpose, from ``load_drill``; null: none.

    Raises:
        TraceError: the file cannot be used.
    """
    header = load_header(golden)
    return {
        "config": header["config"],
        "golden": str(golden.resolve()),
        "repeats": repeats,
        "minutes": minutes,
        "timeout_s": timeout_s,
        "drill": drill,
    }


def verify_here(
    golden: Path,
    *,
    devices: int | None = None,
    repeats: int = 3,
    minutes: float | None = None,
    timeout_s: float = 600.0,
    drill: dict[str, Any] | None = None,
    on_progress: Progress = lambda done, total: None,
) -> VerifyResult:
    """Verify on this host, without a launcher.

    Args:
        golden: the file.
        devices: null: one cell, as many ranks as the golden trace has. A number: so many cells of one rank each, that
            do not communicate, one a device.
        repeats: runs of each case.
        minutes: instead of repeats: so long.
        timeout_s: seconds without progress after which a rank hangs.
        drill: faults that harm the ranks on purpose, from ``load_drill``; null: none.
        on_progress: see ``Progress``.

    Raises:
        TraceError: the golden file cannot be used.
        ConfigError: ``devices`` is given, and the golden trace has more than one rank.
    """
    header = load_header(golden)
    size = layout_size(header)
    if devices is not None and size != 1:
        raise ConfigError(
            f"--local verifies every device alone, but the golden trace is of {size} ranks ({header['layout']}): "
            "record one with tensor 1, pipeline 1 and --replicas 1"
        )
    threads = int(header["config"]["megasdc"]["parallel"]["threads"])
    build_operator()
    cells = devices or 1
    total = None if minutes is not None else cells * size * repeats * len(header["cases"])
    ranks: list[WatchedRank] = []
    with tempfile.TemporaryDirectory(prefix="megasdc_golden_") as scratch:
        for cell in range(cells):
            request = golden_request(golden, repeats, minutes, timeout_s, drill)
            request["folder"] = str(Path(scratch) / f"cell_{cell:05d}")
            port = free_port()
            for rank in range(size):
                report = RankReport(socket.gethostname(), cell * size + rank, cell, rank)
                environment = rank_environment(rank, size, threads, "127.0.0.1", port)
                environment["LOCAL_RANK"] = str(cell * size + rank)
                ranks.append(WatchedRank(request, environment, report, timeout_s))
        watch(ranks, lambda: on_progress(sum(len(rank.report.runs) for rank in ranks), total))
    return judge_reports([rank.report for rank in ranks], header)


def layout_size(header: dict[str, Any]) -> int:
    """Ranks of a cell.

    Raises:
        TraceError: the header's layout has none.
    """
    layout = header["layout"]
    size = int(layout["tensor"]) * int(layout["pipeline"]) * int(layout["data"])
    if size < 1:
        raise TraceError(f"the golden trace's layout {layout} has no ranks")
    return size


def count_devices() -> int:
    """Accelerators of this host; without one, its processor counts as one device."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 1
