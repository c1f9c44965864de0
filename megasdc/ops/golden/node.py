"""Verification of a fleet under the launcher: each launched rank watches one rank of a cell; rank 0 collects.

Ranks are cut in order into cells of the golden trace's size. A cell is a world of its own, so that a hang affects no
other cell. Reports are sent over the board, never by a collective, which a dead rank would block. Errors of one host
only (no golden file, none that fits) are reports of its ranks like any other.

Messages between the watchers of a launch, through a key-value store on rank 0, so that a dead rank blocks nobody.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasdc.common.errors import ConfigError, HangError, LaunchError, MegasdcError, PeerError, TraceError
from megasdc.common.words import number_of
from megasdc.ops.golden.drill import load_drill
from megasdc.ops.golden.library import choose_golden
from megasdc.ops.golden.result import judge_reports
from megasdc.ops.golden.verify import Progress, golden_threads, layout_size
from megasdc.ops.golden.watched_ranks import REPORT_S, CellRank, RankReport, watch_ranks
from megasdc.output.outcome import Outcome
from megasdc.parallel.local_ranks import HostsMeeting, LocalMeeting, local_rank_environment
from megasdc.parallel.rendezvous import MEETING_VARIABLE, Identity, join_store, own_address_for_ranks
from megasdc.sdc.golden import GoldenVerdict, header_digest, load_header

START_S = 300.0
"""Largest difference of the ranks' start times, in seconds."""
GRACE_S = 30.0
"""Seconds without a sign of life after which a started watcher counts as gone."""
POLL_S = 0.2


class StoreMailbox:
    """Messages between the watchers of a launch, as JSON, each written once under a name.

    Raises:
        LaunchError: rank 0 cannot be reached; by every method too, once rank 0 has gone.
    """

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._errors = (RuntimeError, dist.DistError)
        with self._store_errors(f"rank {rank} cannot reach rank 0 at {place}"):
            try:
                self._store = join_store(Identity.own(rank, world, None), START_S)
            except HangError as error:
                raise LaunchError(str(error)) from error
        self.send_heartbeat()

    def send_heartbeat(self, runs: int = 0) -> None:
        """Send rank 0 a sign of life, with the number of runs that this rank has done."""
        self.write(f"alive/{self.rank}", [time.time(), runs])

    def write(self, name: str, message: Any) -> None:
        """Write a message."""
        with self._store_errors():
            self._store.set(name, json.dumps(message))

    def read(self, name: str) -> Any:
        """A message; None if it has not been written yet."""
        with self._store_errors():
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def wait(self, name: str, what: str) -> Any:
        """Wait for a message of another rank, and send signs of life meanwhile; ``what``: who must do what, for people.

        Raises:
            PeerError: it was not written in time.
        """
        deadline = time.monotonic() + START_S
        while (message := self.read(name)) is None:
            if time.monotonic() > deadline:
                raise PeerError(f"{what} within {START_S:.0f} s")
            self.send_heartbeat()
            time.sleep(POLL_S)
        return message

    def wait_for_readers(self, readers: int) -> None:
        """Wait until all ``readers`` of the last message, this rank too, have read it, for at most ``GRACE_S`` seconds.

        The launcher ends all ranks of a host as soon as one of them ends with a non-zero exit code, and the store ends
        with rank 0.
        """
        deadline = time.monotonic() + GRACE_S
        try:
            with self._store_errors():
                read = self._store.add("read", 1)
                while read < readers and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    read = self._store.add("read", 0)
        except LaunchError:
            if self.rank == 0:
                raise  # its own store; on another rank the message was read, and the store is no longer needed

    @contextmanager
    def _store_errors(self, text: str = "rank 0, which collects the reports, has ended") -> Iterator[None]:
        try:
            yield
        except MegasdcError:
            raise
        except self._errors as error:
            raise LaunchError(f"{text}: {error}") from error


def verify_as_launched(
    golden: Path,
    *,
    repeats: int,
    minutes: float | None,
    timeout_s: float,
    faults: Path | None = None,
    on_result: Callable[[Outcome[GoldenVerdict]], None] = lambda outcome: None,
    on_progress: Progress = lambda done, total: None,
) -> int:
    """Verify as one rank of a launch.

    Args:
        golden: the file, or a library folder from which each host chooses; at this path on every host.
        repeats: runs of each case.
        minutes: run time instead of repeats; None: ``repeats`` decides.
        timeout_s: seconds without progress after which a rank counts as hung.
        faults: file of faults for a drill, read on rank 0; None: none.
        on_result: called on rank 0 before any rank ends, since the launcher ends a host's ranks together.
        on_progress: on rank 0, see ``Progress``.

    Returns:
        The exit code, the same on every surviving rank.

    Raises:
        MegasdcError: rank 0 cannot begin - golden file or drill cannot be used, or the number of ranks is not a
            multiple of the golden trace's; with the same exit code on every rank.
        LaunchError: the environment is not a launcher's, or rank 0 cannot be reached.
    """
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        board = StoreMailbox(rank, world)
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"the launcher's environment lacks {error}; start this with the deepspeed launcher"
        ) from error
    plan = _make_plan(board, golden, faults) if rank == 0 else _wait_for_plan(board)
    report = RankReport(socket.gethostname(), rank, *divmod(rank, layout_size(plan)))
    request = {"repeats": repeats, "minutes": minutes, "timeout_s": timeout_s, "drill": plan["drill"]}
    total = None if minutes is not None else world * repeats * plan["cases"]
    collector = Collector(board, layout_size(plan), lambda runs: on_progress(runs, total))
    _watch_rank(board, report, golden, plan, request, lambda: None if rank else collector.poll())
    board.write(f"report/{rank}", asdict(report))
    if rank:
        return _wait_for_verdict(board)
    reports = collector.wait()
    outcome = judge_reports(reports, plan)
    try:
        on_result(outcome)
    finally:
        readers = sum(one.ended != "absent" for one in reports)
        board.write("verdict", {"exit_code": outcome.exit_code, "readers": readers})
        board.wait_for_readers(readers)
    return outcome.exit_code


def _make_plan(board: StoreMailbox, golden: Path, faults: Path | None) -> dict[str, Any]:
    """Rank 0's message to all: layout of a cell, workload, cases, drill. Hosts' files may differ, but not in layout."""
    try:
        header = load_header(choose_golden(golden, board.world) if golden.is_dir() else golden)
        if board.world % layout_size(header):
            raise ConfigError(
                f"got {number_of(board.world, 'rank')}, no multiple of the {layout_size(header)} that the golden "
                f"trace has ({header['layout']}); start a multiple, or record one for another layout"
            )
        drill = None if faults is None else load_drill(faults, header)
        plan = {"layout": header["layout"], "config": header["config"], "cases": len(header["cases"]), "drill": drill}
    except MegasdcError as error:
        board.write("plan", {"failed": str(error), "exit_code": error.exit_code})
        board.wait_for_readers(board.world)
        raise
    board.write("plan", plan)
    return plan


def _wait_for_plan(board: StoreMailbox) -> dict[str, Any]:
    plan: dict[str, Any] = board.wait("plan", "rank 0 did not report what is verified")
    if "failed" not in plan:
        return plan
    board.wait_for_readers(board.world)
    error = MegasdcError(f"rank 0 cannot start: {plan['failed']}")
    error.exit_code = plan["exit_code"]
    raise error


def _watch_rank(
    board: StoreMailbox,
    report: RankReport,
    golden: Path,
    plan: dict[str, Any],
    request: dict[str, Any],
    on_look: Callable[[], None],
) -> None:
    """Verify one rank and fill in its report; errors are reports too."""

    def report_progress() -> None:
        board.send_heartbeat(len(report.runs))
        on_look()

    meeting = _open_rendezvous(layout_size(plan)) if report.cell_rank == 0 else None
    try:
        file, environment = _join_cell(board, report, golden, plan, meeting)
        with tempfile.TemporaryDirectory(prefix="megasdc_golden_") as scratch:
            asked = {**request, "golden": str(file.resolve()), "folder": scratch}
            watch_ranks([CellRank(asked, environment, report, request["timeout_s"], fresh=True)], report_progress)
    except MegasdcError as error:
        report.ended, report.code, report.detail = "failed", error.exit_code, str(error)


def _join_cell(
    board: StoreMailbox,
    report: RankReport,
    golden: Path,
    plan: dict[str, Any],
    meeting: LocalMeeting | HostsMeeting | None,
) -> tuple[Path, dict[str, str]]:
    """This host's golden file, and the environment of a rank, whose cell meets on the host of its first rank.

    Raises:
        TraceError: there is no such file, here or for another rank of the cell, or they are not the same.
        PeerError: another rank of the cell did not start.
    """
    seat = {"host": report.host, "digest": None, "meeting": meeting.environment if meeting else None}
    try:
        file = choose_golden(golden, layout=plan["layout"]) if golden.is_dir() else golden
        header = load_header(file)
        if header["layout"] != plan["layout"]:
            raise TraceError(f"{file} is of layout {header['layout']}, but rank 0's golden trace of {plan['layout']}")
        seat["digest"] = header_digest(header)
    finally:
        board.write(f"seat/{report.rank}", seat)  # also after an error, since the other ranks of the cell wait for it
    size, first = layout_size(plan), report.rank - report.cell_rank
    names = {rank: f"rank {rank} of the same cell" for rank in range(first, first + size)}
    seats = [board.wait(f"seat/{rank}", f"{name} did not start") for rank, name in names.items()]
    for other, name in zip(seats, names.values(), strict=True):
        if other["digest"] is None:
            raise TraceError(f"{name} has no golden trace")
        if other["digest"] != seat["digest"]:
            raise TraceError(f"{name}, on {other['host']}, has another golden file; a cell needs one for all its hosts")
    environment = local_rank_environment(report.cell_rank, size, golden_threads(header), seats[0]["meeting"])
    environment["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", "0")
    return file, environment


def _open_rendezvous(ranks: int) -> LocalMeeting | HostsMeeting:
    """Where the ranks of a cell meet; of more than one, other hosts may have some, where the launch has other hosts."""
    is_local = ranks == 1 or bool(os.environ.get(MEETING_VARIABLE))
    return LocalMeeting() if is_local else HostsMeeting(own_address_for_ranks())


class Collector:
    """Collects every rank's report on rank 0; a watcher that never started or fell silent is reported as absent.

    ``size``: ranks of a cell; ``on_runs`` is called with the number of runs done by all ranks.
    """

    def __init__(self, board: StoreMailbox, size: int, on_runs: Callable[[int], None]) -> None:
        self._board = board
        self._size = size
        self._on_runs = on_runs
        self._reports: dict[int, RankReport] = {}
        self._runs = [0] * board.world
        self._seen: list[tuple[Any, float]] = [(None, time.monotonic())] * board.world
        """Of each rank its last sign of life, and when that changed."""

    def poll(self) -> None:
        """Read new reports and signs of life."""
        for rank in set(range(self._board.world)) - set(self._reports):
            said = self._board.read(f"report/{rank}")
            if said is not None:
                self._reports[rank] = RankReport(**said)
                self._runs[rank] = len(self._reports[rank].runs)
            else:
                self._check_heartbeat(rank)
        self._on_runs(sum(self._runs))

    def _check_heartbeat(self, rank: int) -> None:
        sign, now = self._board.read(f"alive/{rank}"), time.monotonic()
        if sign != self._seen[rank][0]:
            self._seen[rank], self._runs[rank] = (sign, now), sign[1]
        silent_s = now - self._seen[rank][1]
        if silent_s > (START_S if sign is None else GRACE_S):
            detail = "its watcher never started" if sign is None else f"its watcher was silent for {silent_s:.0f} s"
            self._reports[rank] = RankReport("?", rank, *divmod(rank, self._size), detail=detail)

    def wait(self) -> list[RankReport]:
        """Wait for the reports of all ranks; returns them in order."""
        self.poll()
        while len(self._reports) < self._board.world:
            time.sleep(REPORT_S)
            self.poll()
        return [self._reports[rank] for rank in range(self._board.world)]


def _wait_for_verdict(board: StoreMailbox) -> int:
    """The exit code that rank 0 decided."""
    while (verdict := board.read("verdict")) is None:
        time.sleep(REPORT_S)
    board.wait_for_readers(verdict["readers"])
    return int(verdict["exit_code"])
