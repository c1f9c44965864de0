"""DeepSpeed's launch.py (0.19.8) on one host, with time for ranks to save when a stop is requested.

DeepSpeed kills a rank 30 s after SIGTERM, and does not handle SIGUSR1. Here SIGTERM and SIGUSR1 are sent as SIGTERM to
the ranks of this host at once, which then have ``MEGASDC_STOP_GRACE_S`` to finish the step and save; SIGINT leaves them
DeepSpeed's 30 s. A rank's failure is written down at once, not only when the others have ended too.
Called as ``python -m megasdc.ops.launch.node --stop_grace_s=S [--launcher_logs=FOLDER] [--follow_input]`` with the
arguments of launch.py after that; the last option, for hosts that are reached over SSH, makes the end of standard input
a SIGTERM.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

if __name__ == "__main__":  # no rank has started during imports: Ctrl-C needs no cleanup
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

import psutil

from megasdc.common.errors import PeerError
from megasdc.common.host import NAME_VARIABLE, MemoryKill, MemoryWatch, deepspeed_buffer, remove_buffers
from megasdc.common.program import line_start
from megasdc.common.versions import ends_at_launch_error
from megasdc.ops.launch.command import GRACE_OPTION, RANK_MODULE
from megasdc.ops.launch.environment import DEEPSPEED_GRACE_S, FRONT_PID_VARIABLE
from megasdc.ops.launch.launch_alone import import_launch
from megasdc.ops.launch.launch_verdict import describe_code
from megasdc.ops.launch.on_host import private
from megasdc.ops.launch.on_host.build_locks import BuildLocks
from megasdc.ops.launch.orphans import FOLLOW_OPTION, NODE_PID_VARIABLE, follow_input, follow_parent
from megasdc.ops.launch.own_lines import last_native_lines, own_lines_to, pop_folder_option
from megasdc.ops.launch.rank import RankCommand
from megasdc.ops.launch.records import read_done, records_dir, write_ended
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE
from megasdc.parallel.rendezvous import PRIVATE_VARIABLE

LOGS = pop_folder_option(sys.argv)
with ends_at_launch_error(), own_lines_to(LOGS, sys.argv):
    launch = import_launch()

POLL_S = 0.2
LINGER_S = 3.0
"""Other ranks of a launch on this host alone take longer than that to end: what they wait for is told before."""
ENDED_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})
"""Signals from outside: a rank that one of them has ended had nothing to say."""

Handler = Callable[[int, FrameType | None], None]


class PatientStop:
    """Waits for the ranks of this host before DeepSpeed's own signal handler ends the rest.

    Args:
        grace_s: seconds that ranks have after SIGTERM or SIGUSR1.
        before: called before they are sent it.
    """

    def __init__(self, grace_s: float, before: Callable[[], None] = lambda: None) -> None:
        self._grace_s, self._before = grace_s, before
        self._deadline: float | None = None

    def register(self, number: int, handler: Handler) -> None:
        """Replacement of ``signal.signal`` in launch.py, which registers one handler for SIGINT and SIGTERM."""
        signal.signal(number, lambda got, frame: self._stop(got, frame, handler))
        if number == signal.SIGTERM:
            signal.signal(signal.SIGUSR1, lambda got, frame: self._stop(got, frame, handler))

    def _stop(self, number: int, frame: FrameType | None, handler: Handler) -> None:
        grace = DEEPSPEED_GRACE_S if number == signal.SIGINT else self._grace_s
        deadline = time.monotonic() + grace
        if self._deadline is not None:
            # The first call still waits; a later SIGINT shortens its time.
            self._deadline = min(self._deadline, deadline)
            return
        self._deadline = deadline
        self._before()
        # Only the ranks: a data loader's worker that ended before its rank would make the save fail.
        ranks = psutil.Process().children()
        for rank in ranks:
            try:
                rank.send_signal(signal.SIGTERM)
            except psutil.NoSuchProcess:
                continue
        while ranks and time.monotonic() < self._deadline:
            ranks = psutil.wait_procs(ranks, timeout=POLL_S)[1]
        for rank in ranks:
            kill_tree(rank)
        handler(number, frame)


def kill_tree(process: psutil.Process) -> None:
    """Kill a process and everything that it started."""
    try:
        for victim in [*process.children(recursive=True), process]:
            victim.kill()
    except psutil.NoSuchProcess:
        return


class _Rank(subprocess.Popen[bytes]):
    """A rank's process, which reports when launch.py has seen that it runs."""

    def __init__(self, command: list[str], runs: Callable[[], None], **options: Any) -> None:
        super().__init__(command, **options)
        self._runs = runs

    def poll(self) -> int | None:
        """As of any process."""
        if (code := super().poll()) is None:
            self._runs()
        return code


class Ranks:
    """The ranks of this host, as launch.py starts and ends them.

    Args:
        extensions: folder of the extensions that they compile; None: it is not known.
    """

    def __init__(self, memory: MemoryWatch, extensions: str | None = None) -> None:
        self._memory, self._locks = memory, BuildLocks(extensions)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._buffers: list[str] = []
        self._end = launch.terminate_process_tree
        self._are_ended = False
        self._lingering: threading.Timer | None = None
        self._num_all = 0
        self._looked_at = time.monotonic()

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Replacement of ``subprocess.Popen`` in launch.py."""
        process = _Rank(command, self._poll, **options)
        self._num_all = int(options["env"].get("WORLD_SIZE", 0))
        self._processes[options["env"]["RANK"]] = process
        self._buffers.append(deepspeed_buffer(options["env"]["RANK"], options["env"]))
        return process

    def _poll(self) -> None:
        """launch.py has seen that a rank runs; it looks at each of them every second."""
        now = time.monotonic()
        if now - self._looked_at < 1.0 or any(
            subprocess.Popen.poll(one) is not None for one in self._processes.values()
        ):
            return
        self._looked_at = now
        self._locks.record_open(one.pid for one in self._processes.values())
        with suppress(OSError, ValueError):
            self._memory.all_run()

    def remove_buffers(self) -> None:
        """Remove what DeepSpeed has left of them in shared memory, of those that were killed too."""
        remove_buffers(self._buffers)

    def remove_locks(self) -> None:
        """Remove the locks of extensions that they were compiling when they were ended."""
        self._locks.remove_left(own_descendants, print_message)

    def end(self, pid: int) -> None:
        """Replacement of ``terminate_process_tree``, with which launch.py ends the ranks after one has failed."""
        try:
            self.report_failed()
        finally:
            self._end(pid)

    def report_failed(self) -> None:
        """Write down which ranks have failed by themselves, once, before the others are ended.

        launch.py looks at them every second, in any order, and stops at the first that has failed: that one may have
        waited for another, which a signal has ended and which leaves no record itself. The front's verdict tells all
        of that. It comes when all ranks have ended: where those of other hosts, or lingering ones of this host, are
        waited for, the cause is printed before.
        """
        if self._are_ended:
            return
        self._are_ended = True
        failed = [(rank, code) for rank, process in self._processes.items() if (code := process.poll())]
        causes = [one for one in failed if one[1] != PeerError.exit_code] or failed
        lines = []
        for rank, code in sorted(failed, key=lambda one: one[1] > 0):  # those that a signal has ended come first
            folder = records_folder(LOGS, sys.argv)
            kill = self._killed_for_memory(rank, code, folder)
            what = "it" if code < 0 else "a worker of it"
            why = f", since the kernel had no memory for {what}" if kill is not None else ""
            if (rank, code) in causes:
                lines.append(
                    f"rank {rank} ended with {describe_code(code)}{why}; the others of this host are ended too"
                )
            if folder is not None:
                write_ended(folder, int(rank), code, kill)
            if LOGS is not None and code < 0 and -code not in ENDED_BY_OTHERS:
                for line in last_native_lines(Path(LOGS), int(rank), self._processes[rank].pid):
                    print_message(f"rank {rank} said last: {line}")
        if self._num_all != len(self._processes):
            self._print_all(lines)
            return
        self._lingering = threading.Timer(LINGER_S, self._print_all, [lines])
        self._lingering.daemon = True
        self._lingering.start()

    @staticmethod
    def _print_all(lines: Sequence[str]) -> None:
        for line in lines:
            print_message(line)

    def close(self) -> None:
        """All ranks have ended."""
        if self._lingering is not None:
            self._lingering.cancel()

    def _killed_for_memory(self, rank: str, code: int, folder: Path | None) -> MemoryKill | None:
        """That the kernel has ended a rank, or a worker that it cannot do without; None: there is no sign of it."""
        with suppress(OSError, ValueError, psutil.Error):
            if code == -signal.SIGKILL:
                return self._memory.of(self._processes[rank].pid, own_processes())
            done = None if code < 0 or folder is None else read_done(folder, int(rank))
            if done is not None and done.message:
                return self._memory.of_worker(done.message, own_processes())
        return None


def own_processes() -> set[int]:
    """Processes of this launch on this host, those too whose ranks have ended, and which are no children any more.

    By the variable that ranks and what they start have, or by the session; one of the user's own counts as well, since
    to blame the host for less is safer.
    """
    found, session = own_descendants(), os.getsid(0)
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == session:
                found.add(pid)
    return found


def own_descendants() -> set[int]:
    """Processes of this host's ranks, and what these have started, also where who started it has ended."""
    found = {one.pid for one in psutil.Process().children(recursive=True)}
    sign = f"{NODE_PID_VARIABLE}={os.getpid()}".encode()
    for pid in psutil.pids():
        with suppress(OSError):
            if sign in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def records_folder(logs: str | None, argv: Sequence[str]) -> Path | None:
    """Folder of the launch's records, by that of its logs and the launch id behind the module; None: not known."""
    if logs is None or RANK_MODULE not in argv[:-1]:
        return None
    return records_dir(Path(logs).parent, argv[argv.index(RANK_MODULE) + 1])


def rank_variable(argv: Sequence[str], name: str) -> str | None:
    """A variable that the launch sets for its ranks; None: it sets none."""
    if RANK_MODULE not in argv[:-2]:
        return None
    return RankCommand.decode(argv[argv.index(RANK_MODULE) + 2]).environment.get(name)


def print_message(line: str) -> None:
    """Print a message in one write, since many processes share the stream; where that has gone, nobody can be told."""
    with suppress(OSError):
        sys.stderr.write(f"{line_start(sys.stderr)}{socket.gethostname()}: {line}\n")
        sys.stderr.flush()


def main() -> None:
    """Run launch.py with this process's arguments."""
    front = os.environ.pop(FRONT_PID_VARIABLE, None)  # set if the front started this process itself
    if front:
        follow_parent(expected=int(front))
    ranks = Ranks(MemoryWatch(), rank_variable(sys.argv, EXTENSIONS_VARIABLE))
    stop = PatientStop(float(sys.argv.pop(1).removeprefix(GRACE_OPTION)), ranks.report_failed)
    launch.signal = SimpleNamespace(signal=stop.register, SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM)
    launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ranks.start})
    launch.terminate_process_tree = ranks.end
    os.environ[NODE_PID_VARIABLE] = str(os.getpid())
    os.environ.setdefault(NAME_VARIABLE, secrets.token_hex(16))
    name = ""
    if sys.argv[1] == FOLLOW_OPTION:
        sys.argv.pop(1)
        follow_input()
        name = rank_variable(sys.argv, PRIVATE_VARIABLE) or ""  # what the front calls the folder with what is secret
        os.environ.update(private.pop_environment(name) if name else {})  # ranks inherit it
    try:
        launch.main()
    finally:
        ranks.close()
        ranks.remove_buffers()
        ranks.remove_locks()
        if name:  # the front does so, too, unless it was killed
            private.remove_private(name)


if __name__ == "__main__":
    main()
