"""How is a fleet verified under the launcher? Each launched rank watches one rank of a cell; rank 0 collects.

Ranks are cut into cells of as many as the golden trace has, in order. A cell is a world of its own, so that one that
hangs holds up no other. Reports travel through a key-value store, never through a collective: what died cannot answer.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasdc.errors import ConfigError, LaunchError
from megasdc.golden.cells import RankReport, WatchedRank, free_port, watch
from megasdc.golden.result import VerifyResult, judge_reports
from megasdc.golden.verify import golden_request, layout_size
from megasdc.parallel.local_ranks import rank_environment
from megasdc.sdc.golden import load_header

START_S = 300.0
"""Seconds that ranks may differ in when they start."""
GRACE_S = 30.0
POLL_S = 0.2


def verify_as_launched(
    golden: Path,
    *,
    repeats: int,
    minutes: float | None,
    timeout_s: float,
    drill: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, VerifyResult | None]:
    """Verify as one rank of a launch.

    Args:
        golden: the file, the same on every node.
        repeats: runs of each case.
        minutes: instead of repeats: so long.
        timeout_s: seconds without progress after which a rank hangs.
        drill: faults that harm ranks on purpose, from ``load_drill``; null: none.

        on_progress: on rank 0, told ranks that have answered, and of how many.

    Returns:
        The exit code, the same on every rank that lives to see it, and on rank 0 the result.

    Raises:
        TraceError: the golden file cannot be used.
        ConfigError: the number of ranks is not a multiple of the golden trace's.
        LaunchError: the environment is not a launcher's, or rank 0 cannot be reached.
    """
    import torch.distributed as dist

    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"the launcher's environment lacks {error}; start this with the deepspeed launcher"
        ) from error
    header = load_header(golden)
    size = layout_size(header)
    if world % size:
        raise ConfigError(
            f"{world} ranks are not a multiple of the {size} that the golden trace has ({header['layout']}); start "
            "a multiple, or record one for another layout"
        )
    try:
        store = dist.TCPStore(
            host, port, is_master=rank == 0, wait_for_workers=False, timeout=datetime.timedelta(seconds=START_S)
        )
    except (RuntimeError, dist.DistError) as error:
        raise LaunchError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from error
    cell, cell_rank = divmod(rank, size)
    report = RankReport(socket.gethostname(), rank, cell, cell_rank)
    request = golden_request(golden, repeats, minutes, timeout_s, drill)
    threads = int(header["config"]["megasdc"]["parallel"]["threads"])
    with tempfile.TemporaryDirectory(prefix="megasdc_golden_") as scratch:
        address, cell_port = _meet(store, cell, cell_rank)
        environment = rank_environment(cell_rank, size, threads, address, cell_port)
        environment["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", "0")
        watched = WatchedRank(request | {"folder": scratch}, environment, report, timeout_s)
        watch([watched], lambda: _answer(store, report))
    _answer(store, report, final=True)
    if rank:
        return _wait_for_verdict(store), None
    limit_s = timeout_s + GRACE_S + START_S
    result = judge_reports(_collect(store, world, size, limit_s, on_progress), header)
    store.set("verdict", str(result.exit_code))
    _let_others_read(store, world)
    return result.exit_code, result


def _meet(store: Any, cell: int, cell_rank: int) -> tuple[str, int]:
    """Where the ranks of a cell meet: on the host of its first, which says so to the others."""
    if cell_rank == 0:
        address = _own_address(), free_port()
        store.set(f"cell/{cell}", json.dumps(address))
        return address
    store.wait([f"cell/{cell}"])
    host, port = json.loads(store.get(f"cell/{cell}"))
    return host, int(port)


def _own_address() -> str:
    """The address under which other hosts reach this one: where a packet to rank 0's host would leave from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


def _answer(store: Any, report: RankReport, final: bool = False) -> None:
    """Tell rank 0 that this watcher lives, and at the end what became of its rank."""
    store.set(f"alive/{report.rank}", str(time.time()))
    if final:
        store.set(f"report/{report.rank}", json.dumps(asdict(report)))


def _collect(
    store: Any, world: int, size: int, limit_s: float, on_progress: Callable[[int, int], None]
) -> list[RankReport]:
    """Every rank's report; of a watcher that falls silent for too long, that it gave none."""
    reports: dict[int, RankReport] = {}
    seen: dict[int, tuple[str, float]] = {}
    while len(reports) < world:
        now = time.monotonic()
        for rank in set(range(world)) - set(reports):
            if store.check([f"report/{rank}"]):
                reports[rank] = RankReport(**json.loads(store.get(f"report/{rank}")))
                continue
            sign = store.get(f"alive/{rank}").decode() if store.check([f"alive/{rank}"]) else ""
            if rank not in seen or seen[rank][0] != sign:
                seen[rank] = sign, now
            silent = now - seen[rank][1]
            if silent > (limit_s if not sign else GRACE_S):
                detail = f"its watcher has been silent for {silent:.0f} s" if sign else "its watcher never started"
                reports[rank] = RankReport("?", rank, *divmod(rank, size), detail=detail)
        on_progress(len(reports), world)
        time.sleep(POLL_S)
    return [reports[rank] for rank in range(world)]


def _wait_for_verdict(store: Any) -> int:
    """The exit code that rank 0 found; rank 0 leaves last."""
    import torch.distributed as dist

    try:
        while not store.check(["verdict"]):
            time.sleep(POLL_S)
        code = int(store.get("verdict"))
        store.add("read", 1)
    except (RuntimeError, dist.DistError) as error:
        raise LaunchError(f"rank 0, which collects the reports, has gone: {error}") from error
    return code


def _let_others_read(store: Any, world: int) -> None:
    deadline = time.monotonic() + GRACE_S
    while store.add("read", 0) < world - 1 and time.monotonic() < deadline:
        time.sleep(POLL_S)
