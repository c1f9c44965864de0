"""The agent of a host: watches the records of its ranks, names who is stuck, and ends them; no torch.

One process a host, started by the host's first rank and detached, so that it survives that rank. It reads the records
in shared memory, keeps ``health/NODE.jsonl`` in the run folder, and ends when its ranks have. Ranks never wait for it:
without it a run goes on as without health. It never waits for a disk or the network itself: threads do that.

When no rank of its host has moved for as long as its phase may last (``megasdc.ops.health.limits``), the agent asks the
ranks for their stacks and tells what it knows: to the front of the launch, if there is one that knows all hosts
(``megasdc.ops.health.front.server``), and in the run folder (``megasdc.ops.health.shared_folder_heartbeat``). Once
every host that still shows signs of life has done so, the front, or each agent for itself, comes to the same blame
(``megasdc.ops.health.blame``), writes the incident, and the ranks are told to leave with exit code 75; those that do
not are killed. Hosts without a front whose run folder is not shared know only of their own ranks, and say so.

Work on a disk or a network that may not answer, in a thread: who asks for it never waits.

What an agent writes for people and programs: ``health/NODE.jsonl``, and where its ranks are now.

A line every ten seconds, and one for each note. The older half goes when the file is too long. ``NODE.now`` is
replaced each second and goes with the agent.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.host_memory import linger, memory_folder
from megasdc.common.durable import append_bounded, replacing
from megasdc.common.host import GONE, PAUSE_S, read_own_json, started_at
from megasdc.common.user_code import LIMIT_S, alert
from megasdc.ops.devices.telemetry import Telemetry
from megasdc.ops.health.front.address import FrontAddress, Hello
from megasdc.ops.health.front.clocks import has_changed
from megasdc.ops.health.front.link import CoordinatorClient
from megasdc.ops.health.incident import HangConclusion, conclude
from megasdc.ops.health.limits import PhaseLimits, load_durations, save_durations
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.shared_folder_heartbeat import OwnState, SharedFolderHeartbeat, node_name
from megasdc.ops.health.watched import WatchedRanks

Task = Callable[[], None]


class RetryingWorker:
    """Calls tasks once a second, in order, and once more at the end.

    A task that fails is tried again a second later; ``problem`` is what it raised last, empty: the last round was well.

    Args:
        name: of the thread.
        tasks: what is done each time.
    """

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self.name, self._tasks = name, tasks
        self._once: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.problem = ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def once(self, task: Task) -> None:
        """Do something once, before the other tasks of the next round; again where it fails."""
        self._once.put(task)

    def close(self, timeout_s: float) -> bool:
        """Do everything a last time; returns whether that ended in time."""
        self._closed.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._closed.wait(POLL_S):
            self._round()
        self._round()

    def _round(self) -> None:
        problems, failed = [], []
        while not self._once.empty():
            task = self._once.get()
            if problem := self._problem_of(task):
                problems.append(problem)
                failed.append(task)
        for task in failed:
            self._once.put(task)
        problems += [problem for task in self._tasks if (problem := self._problem_of(task))]
        self.problem = "; ".join(dict.fromkeys(problems))

    @staticmethod
    def _problem_of(task: Task) -> str:
        """Do it; returns what it raised, empty: nothing."""
        try:
            task()
        except OSError as error:
            return str(error)
        except Exception as error:  # the thread goes on; whatever it was is reported
            return repr(error)
        return ""


LINE_S = 10.0
MAX_LINES_BYTES = 4 << 20
MAX_WAITING = 100
"""Lines that wait for a disk that does not answer; older ones are dropped and counted."""


class AgentLog:
    """The files of one host.

    Args:
        health: folder of the run, which exists.
        name: with which the files of this host begin.
        run: name of this start.
        launch: id of the launch; None: without ``megasdc launch``.
    """

    def __init__(self, health: Path, name: str, run: str, launch: str | None) -> None:
        self._path, self._now = health / f"{name}.jsonl", health / f"{name}.now"
        self._start = {"run": run, "launch": launch}
        self._line_at = 0.0
        self._latest = ""
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)
        self._dropped = 0
        self._closed = False

    def write(self, ranks: list[dict[str, Any]], note: str = "", **more: Any) -> None:
        """Log where the ranks are: as a line, too, if it is time for one or there is a note; does not wait.

        Args:
            ranks: their positions.
            note: what has happened; empty: nothing.
            **more: further values for the line.
        """
        line = {**self._start, "time": time.time(), "monotonic": time.monotonic(), "note": note, "ranks": ranks}
        line.update(more)
        if self._dropped:
            line["dropped_lines"] = self._dropped
        self._latest = json.dumps(line) + "\n"
        if note or time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_S
            self._dropped += len(self._waiting) == MAX_WAITING
            self._waiting.append(self._latest)

    def flush(self) -> None:
        """Write what was taken down; may wait for the disk.

        Raises:
            OSError: it cannot be written; lines are kept.
        """
        while self._waiting:
            append_bounded(self._path, self._waiting[0], MAX_LINES_BYTES)
            self._waiting.popleft()
        if self._closed:
            self._now.unlink(missing_ok=True)
            return
        part = self._now.with_name(f".{self._now.name}")
        part.write_text(self._latest, encoding="utf-8")
        os.replace(part, self._now)  # not worth waiting until it is on the disk

    def close(self) -> None:
        """From the next ``flush`` on, nothing tells where the ranks are now."""
        self._closed = True


POLL_S = 1.0
KEEP_S = 300.0
"""Seconds between two times that durations are kept, for runs that do not end by themselves."""
LAST_WORK_S = 10.0 + LIMIT_S
"""Seconds that disk, network and the user's command have at an agent's end."""
DURATIONS_FILE, AGENT_FILE, CLOCK_FILE = "durations.json", "agent.json", "clock.json"


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is started with.

    Args:
        folder: of the records, in shared memory.
        run_folder: of the run.
        node: index of this host.
        ranks: ranks of this host.
        nodes: host names by index.
        alert_command: see ``megasdc.common.user_code``.
        launch: id of the launch; None: without ``megasdc launch``. The agent is none of its processes.
    """

    folder: Path
    run_folder: Path
    node: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    hang_floor_s: float
    slow_floor_s: float
    hang_factor: float
    alert_command: tuple[str, ...]
    launch: str | None = None

    def encode(self) -> str:
        """As one argument."""
        return json.dumps({**asdict(self), "folder": str(self.folder), "run_folder": str(self.run_folder)})

    @classmethod
    def decode(cls, text: str) -> AgentOptions:
        """From what ``encode`` gave."""
        raw = json.loads(text)
        for name in ("folder", "run_folder"):
            raw[name] = Path(raw[name])
        tuples = {name: tuple(raw[name]) for name in ("ranks", "nodes", "alert_command")}
        return cls(**{**raw, **tuples})


class Agent:
    """Watches the ranks of this host until they have ended.

    Args:
        options: of this host.
        front: of the launch; None: there is none.
    """

    def __init__(self, options: AgentOptions, front: FrontAddress | None) -> None:
        self._options = options
        self._health = options.run_folder / "health"
        self._ranks = ranks = WatchedRanks(options.folder, options.ranks, _first_steps(options.folder))
        self._board = SharedFolderHeartbeat(self._health, ranks.run, options.node, len(options.nodes))
        self._kept = load_durations(self._health / DURATIONS_FILE)
        self._journal = AgentLog(self._health, node_name(options.node), ranks.run, options.launch)
        hello = Hello(ranks.run, options.node, options.nodes[options.node], len(options.nodes))
        self._link = None if front is None else CoordinatorClient(front, hello)
        self._telemetry = Telemetry(options.run_folder)
        self._report: dict[str, Any] | None = None
        self._own: HangConclusion | None = None
        self._clock: dict[str, Any] | None = None

    @property
    def first_steps(self) -> dict[int, int]:
        """First steps of the ranks' processes by rank, which an agent that takes this one's place cannot see."""
        return {rank.identity.rank: rank.first_step for rank in self._ranks}

    def run(self) -> None:
        """Watch until all ranks of this host have ended, and hold their memory after they have failed."""
        self._telemetry.start()  # threads do not survive the fork before
        self._disk = disk = RetryingWorker("disk", [self._board.exchange, self._journal.flush])
        network = None if self._link is None else RetryingWorker("network", [self._link.exchange])
        self._threads = [disk, *([] if network is None else [network])]
        self._log_positions("begins")
        looked_at = time.monotonic()
        keep_at = looked_at + KEEP_S
        while True:
            time.sleep(POLL_S)
            if (paused_s := time.monotonic() - looked_at) > PAUSE_S:
                self._ranks.count_from_now()
                self._log_positions(f"this host, or its agent, stood still for {paused_s:.0f} s")
            looked_at = time.monotonic()
            self._ranks.update()
            if self._ranks.ended:
                break
            if looked_at >= keep_at:
                self._save_durations()
                keep_at = looked_at + KEEP_S
            self._watch_for_standstill()
            self._leave_clock()
            self._log_positions()
            if (conclusion := self._conclusion()) is not None:
                self._ranks.end(conclusion, self._log_positions)
                break
        self._finish()
        run, attempt, _ = self._ranks.run.rsplit(".", 2)
        linger(memory_folder(run), f"{run}.{attempt}")

    def _limits(self) -> PhaseLimits:
        own = self._options
        return PhaseLimits(own.hang_floor_s, own.slow_floor_s, own.hang_factor, self._ranks.durations(self._kept))

    def _watch_for_standstill(self) -> None:
        """Report what is known of the ranks once they are stuck, and take it back if something moves again."""
        limits = self._limits()
        stuck = self._ranks.are_stuck(limits)
        if stuck and self._report is None:
            self._report = self._build_report(limits)
        elif not stuck and self._report is not None:  # it was slow, not stuck
            self._report = None
            self._log_positions("moved again")
        self._publish(OwnState(self._report, problem=self._problem()))

    def _leave_clock(self) -> None:
        """Leave for the host's first rank how its clocks differ from those of the front, where that has changed."""
        clock = None if self._link is None else self._link.clock
        if clock is None or (self._clock is not None and not has_changed(self._clock, clock)):
            return
        self._clock = clock
        with suppress(OSError), replacing(self._options.folder / CLOCK_FILE) as file:
            json.dump(clock, file)

    def _build_report(self, limits: PhaseLimits) -> dict[str, Any] | None:
        """What is known of the ranks and this host; None: a rank has just moved."""
        known, also = self._ranks.report(limits), {"launch": self._options.launch}
        return None if known is None else {**known, **also, "devices": self._telemetry.as_dict()}

    def _problem(self) -> str:
        """What keeps this agent from its work; empty: nothing."""
        return "; ".join(f"{thread.name}: {thread.problem}" for thread in self._threads if thread.problem)

    def _publish(self, state: OwnState) -> None:
        self._board.own = state
        if self._link is not None:
            self._link.own = state
            self._board.is_read = not self._link.judges

    def _conclusion(self) -> Mapping[str, Any] | None:
        """How the ranks must leave; None: they may go on."""
        if self._link is not None and self._link.judges:
            return self._link.leave
        nodes = self._options.nodes
        if self._report is None or not self._board.all_stuck():
            return None
        if len(nodes) > 1 and not self._board.answers and self._ranks.stuck_s < self._options.slow_floor_s:
            return None  # nothing is known of the other hosts, which may be at work
        lost = [nodes[node] for node in self._board.lost()]
        self._own = conclude(self._health, nodes, self._board.reports(), lost)
        self._disk.once(self._own.write)
        return self._own.leave

    def _log_positions(self, note: str = "") -> None:
        """Log where the ranks are, with what has happened."""
        devices, changes = self._telemetry.line()
        more: dict[str, Any] = {"devices": devices}
        for rank in self._ranks:
            if rank.damaged:
                more.setdefault("damaged", {})[str(rank.identity.rank)] = rank.damaged
        if problem := self._problem():
            more["problem"] = problem
        note = "; ".join(filter(None, (note, changes)))
        self._journal.write([rank.position() for rank in self._ranks], note, **more)

    def _finish(self) -> None:
        """Publish the last state, save what the next start can use, remove the records."""
        gone = [rank.identity.rank for rank in self._ranks if rank.state == GONE and rank.progress.phase != Phase.DONE]
        if gone and self._report is None:
            self._report = self._build_report(self._limits())  # that they are gone, for hosts that wait for them
        self._save_durations()
        self._log_positions(f"ends; rank {', '.join(map(str, gone))} had gone before its last step" if gone else "ends")
        self._publish(OwnState(self._report, ended=True, problem=self._problem()))
        shutil.rmtree(self._options.folder, ignore_errors=True)
        self._journal.close()
        self._disk.once(self._board.exchange)
        self._disk.once(self._alert)
        for thread in self._threads:
            thread.close(LAST_WORK_S)
        if self._link is not None:
            self._link.close()

    def _save_durations(self) -> None:
        """Keep how long phases take for the next start; by the first host."""
        if self._options.node == 0:
            durations = self._ranks.durations(self._kept)
            self._disk.once(lambda: save_durations(self._health / DURATIONS_FILE, durations))

    def _alert(self) -> None:
        """Give the incident that this agent has concluded to the user's command."""
        if self._own is not None and (problem := alert(self._options.alert_command, self._own.path, self._own.text)):
            self._log_positions(problem)


def _first_steps(folder: Path) -> dict[int, int]:
    """First steps of the ranks' processes by rank, where an earlier agent of this start has kept them."""
    try:
        found = (read_agent(folder) or {})["first_steps"]
        return {int(rank): int(step) for rank, step in found.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def read_agent(folder: Path) -> dict[str, Any] | None:
    """What the agent of a host has left of itself: ``pid``, ``started_at``, ``first_steps``; None: it has not yet.

    Raises:
        ValueError: it cannot be so.
        OSError: it cannot be read, or another user has written it.
    """
    try:
        found = read_own_json(folder / AGENT_FILE)
    except FileNotFoundError:
        return None
    pid, began_at = found.get("pid"), found.get("started_at")
    if type(pid) is not int or pid < 1 or type(began_at) not in (int, float):
        raise ValueError(f"{folder / AGENT_FILE} names no process")
    return found


def main(argv: Sequence[str]) -> None:
    """Watch the ranks of this host; ``argv``: the encoded options. Standard input: the front as JSON, or nothing.

    It detaches from the rank that has started it once it has read all records, so that this rank learns what is wrong
    with them.
    """
    options = AgentOptions.decode(argv[0])
    front = sys.stdin.read()
    agent = Agent(options, FrontAddress(**json.loads(front)) if front else None)
    if os.fork():
        os._exit(0)
    os.setsid()
    with replacing(options.folder / AGENT_FILE) as file:
        own = {"pid": os.getpid(), "started_at": started_at(os.getpid())}
        json.dump({**own, "first_steps": agent.first_steps}, file)
    agent.run()


if __name__ == "__main__":
    main(sys.argv[1:])
