"""The agent of a host: watches the records of its ranks, names who is stuck, and ends them; no torch.

One process a host, started by the host's first rank and detached, so that it survives that rank. It reads the records
in shared memory, keeps ``health/NODE.jsonl`` in the run folder, and ends when its ranks have. Ranks never wait for it:
without it a run goes on as without health. It never waits for a disk or the network itself: threads do that.

When no rank of its host has moved for as long as its phase may last (``megasdc.health.limits``), the agent asks the
ranks for their stacks and tells what it knows: to the front of the launch, if there is one that knows all hosts
(``megasdc.health.front_server``), and in the run folder (``megasdc.health.board``). Once every host that still shows
signs of life has done so, the front, or each agent for itself, comes to the same blame (``megasdc.health.blame``),
writes the incident, and the ranks are told to leave with exit code 75; those that do not are killed. Hosts without a
front whose run folder is not shared know only of their own ranks, and say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.durable import replacing
from megasdc.health.alert import alert
from megasdc.health.background import Background
from megasdc.health.blame import GONE
from megasdc.health.board import FolderBoard, OwnState, node_name
from megasdc.health.devices.telemetry import Telemetry
from megasdc.health.front_link import FrontLink
from megasdc.health.incident import Conclusion, conclude
from megasdc.health.journal import Journal
from megasdc.health.limits import Limits, keep_durations, load_durations
from megasdc.health.phases import Phase
from megasdc.health.process_state import started_at
from megasdc.health.watched import WatchedRanks
from megasdc.health.wire import FrontAddress, Hello

POLL_S = 1.0
LAST_WORDS_S = 10.0
"""Seconds that disk and network have for what an agent tells at its end."""
DURATIONS_FILE, AGENT_FILE = "durations.json", "agent.json"


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is started with.

    Args:
        folder: of the records, in shared memory.
        run_folder: of the run.
        node: index of this host.
        ranks: ranks of this host.
        nodes: host names by index.
        alert_command: see ``megasdc.health.alert``.
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
        self._ranks = ranks = WatchedRanks(options.folder, options.ranks)
        self._board = FolderBoard(self._health, ranks.run, options.node, len(options.nodes))
        self._kept = load_durations(self._health / DURATIONS_FILE)
        self._journal = Journal(self._health, node_name(options.node), ranks.run)
        hello = Hello(ranks.run, options.node, options.nodes[options.node], len(options.nodes))
        self._link = None if front is None else FrontLink(front, hello)
        self._telemetry = Telemetry(options.run_folder)
        self._report: dict[str, Any] | None = None
        self._own_conclusion: Conclusion | None = None

    def run(self) -> None:
        """Watch until all ranks of this host have ended."""
        self._telemetry.start()  # threads do not survive the fork before
        disk = Background("disk", [self._board.exchange, self._journal.flush])
        network = None if self._link is None else Background("network", [self._link.exchange])
        self._threads = [disk, *([] if network is None else [network])]
        self._note("begins")
        while True:
            time.sleep(POLL_S)
            self._ranks.look()
            if self._ranks.ended:
                break
            self._watch_for_standstill()
            self._note()
            if (leave := self._decision(disk)) is not None:
                self._ranks.end(leave, self._note)
                break
        self._finish(disk)

    def _watch_for_standstill(self) -> None:
        """Report what is known of the ranks once they are stuck, and take it back if something moves again."""
        own = self._options
        durations = self._ranks.durations(self._kept)
        limits = Limits(own.hang_floor_s, own.slow_floor_s, own.hang_factor, durations)
        stuck = self._ranks.are_stuck(limits)
        if stuck and self._report is None:
            self._report = {**self._ranks.report(limits), "devices": self._telemetry.as_dict()}
        elif not stuck and self._report is not None:  # it was slow, not stuck
            self._report = None
            self._note("moved again")
        self._tell(OwnState(self._report))

    def _tell(self, state: OwnState) -> None:
        self._board.own = state
        if self._link is not None:
            self._link.own = state

    def _decision(self, disk: Background) -> Mapping[str, Any] | None:
        """How the ranks must leave; None: they may go on."""
        if self._link is not None and self._link.judges:
            return self._link.leave
        if self._report is None or not self._board.all_stuck():
            return None
        nodes = self._options.nodes
        conclusion = conclude(self._health, nodes, self._board.reports(), [nodes[node] for node in self._board.lost()])
        disk.once(conclusion.write)
        self._own_conclusion = conclusion
        return conclusion.leave

    def _note(self, note: str = "") -> None:
        """Take down where the ranks are, with what has happened."""
        devices, changes = self._telemetry.line()
        more: dict[str, Any] = {"devices": devices}
        for rank in self._ranks:
            if rank.damaged:
                more.setdefault("damaged", {})[str(rank.identity.rank)] = rank.damaged
        if failed := {thread.name: thread.problem for thread in self._threads if thread.problem}:
            more["problems"] = failed
        note = "; ".join(filter(None, (note, changes)))
        self._journal.write([rank.position() for rank in self._ranks], note, **more)

    def _finish(self, disk: Background) -> None:
        gone = [rank.identity.rank for rank in self._ranks if rank.state == GONE and rank.progress.phase != Phase.DONE]
        self._note(f"ends; rank {', '.join(map(str, gone))} had gone before its last step" if gone else "ends")
        self._tell(OwnState(self._report, ended=True))
        if self._options.node == 0:
            durations = self._ranks.durations(self._kept)
            disk.once(lambda: keep_durations(self._health / DURATIONS_FILE, durations))
        for thread in self._threads:
            thread.close(LAST_WORDS_S)
        if self._link is not None:
            self._link.close()
        with contextlib.suppress(OSError):
            self._alert()
            self._journal.close()
        shutil.rmtree(self._options.folder, ignore_errors=True)

    def _alert(self) -> None:
        """Tell the user's command of the incident that this agent has written."""
        if self._own_conclusion is None:
            return
        if problem := alert(self._options.alert_command, self._own_conclusion.path):
            self._note(problem)
            self._journal.flush()


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
        json.dump({"pid": os.getpid(), "started_at": started_at(os.getpid())}, file)
    agent.run()


if __name__ == "__main__":
    main(sys.argv[1:])
