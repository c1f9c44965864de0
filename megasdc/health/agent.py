"""The agent of a host: watches the records of its ranks, names who is stuck, and ends them; no torch.

One process a host, started by the host's first rank and detached, so that it survives that rank. It reads the records
in shared memory, keeps ``health/NODE.jsonl`` in the run folder, and ends when its ranks have. Ranks never wait for it:
without it a run goes on as without health.

When no rank of its host has moved for as long as its phase may last (``megasdc.health.limits``), the agent asks the
ranks for their stacks and writes what it knows to ``health/stalls/``. Once every host that still shows signs of life
has done so, the agents read each other's files, come to the same blame (``megasdc.health.blame``), write the incident,
and tell their ranks to leave with exit code 75; ranks that do not are killed. Hosts whose run folder is not shared
know only of their own ranks, and say so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.durable import replacing, write_durably
from megasdc.errors import HangError, PeerError
from megasdc.health.blame import GONE, GONE_KIND, RUNNING, find_blame
from megasdc.health.devices.telemetry import Telemetry
from megasdc.health.incident import read_state, state_of, write_incident
from megasdc.health.limits import Limits, keep_durations, load_durations, merged
from megasdc.health.phases import Phase
from megasdc.health.process_state import process_state
from megasdc.health.rank_watch import answer_path
from megasdc.health.record import LEAVE_FILE, Identity, Progress, RecordReader, record_path

POLL_S = 1.0
SIGN_S = 5.0
"""Seconds between signs of life in the run folder; a host that has given none for three times that is lost."""
ANSWER_S = 3.0
"""Seconds that ranks have to answer."""
LEAVE_S = 5.0
"""Seconds that ranks have to leave before they are killed."""
LINE_S = 10.0
MAX_LINES_BYTES = 4 << 20
SIGN, STALL_FOLDER, DURATIONS_FILE = "status", "stalls", "durations.json"


def node_name(node: int) -> str:
    """How the files of a host begin."""
    return f"node_{node:05d}"


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is started with.

    Args:
        folder: of the records, in shared memory.
        run_folder: of the run.
        node: index of this host.
        ranks: ranks of this host.
        nodes: host names by index.
    """

    folder: Path
    run_folder: Path
    node: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    hang_floor_s: float
    slow_floor_s: float
    hang_factor: float

    def encode(self) -> str:
        """As one argument."""
        return json.dumps({**asdict(self), "folder": str(self.folder), "run_folder": str(self.run_folder)})

    @classmethod
    def decode(cls, text: str) -> AgentOptions:
        """From what ``encode`` gave."""
        raw = json.loads(text)
        for name in ("folder", "run_folder"):
            raw[name] = Path(raw[name])
        return cls(**{**raw, "ranks": tuple(raw["ranks"]), "nodes": tuple(raw["nodes"])})


@dataclass
class WatchedRank:
    """A rank as its agent sees it.

    Args:
        first_step: of its process.
        state: of its process, at the last look.
    """

    record: RecordReader
    first_step: int
    progress: Progress
    state: str = RUNNING

    @property
    def identity(self) -> Identity:
        """Its identity."""
        return self.record.identity

    @property
    def ended(self) -> bool:
        """Whether it has finished, or its process is gone."""
        return self.state == GONE or self.progress.phase == Phase.DONE

    @property
    def stuck_s(self) -> float:
        """Seconds since its last change of phase."""
        return time.monotonic() - self.progress.time

    def look(self) -> None:
        """Read where it is, and what its process does."""
        self.progress = self.record.read()
        self.state = process_state(self.identity.pid, self.identity.started_at)


class Agent:
    """Watches the ranks of this host until they have ended."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._health = options.run_folder / "health"
        self._stalls = self._health / STALL_FOLDER
        self._stalls.mkdir(parents=True, exist_ok=True)
        self._kept = load_durations(self._health / DURATIONS_FILE)
        self._ranks = [self._open(rank) for rank in options.ranks]
        self._run = self._ranks[0].identity.run
        self._sign_at = self._line_at = 0.0
        self._telemetry = Telemetry(options.run_folder)
        self._reported: dict[str, Any] | None = None

    def _open(self, rank: int) -> WatchedRank:
        record = RecordReader(record_path(self._options.folder, rank))
        progress = record.read()
        return WatchedRank(record, max(progress.step, 1), progress)

    @property
    def name(self) -> str:
        """Name of this host's files."""
        return node_name(self._options.node)

    def run(self) -> None:
        """Watch until all ranks of this host have ended."""
        self._telemetry.start()
        self._write_line()
        while True:
            time.sleep(POLL_S)
            for rank in self._ranks:
                rank.look()
            if all(rank.ended for rank in self._ranks):
                break
            self._give_sign()
            if time.monotonic() >= self._line_at:
                self._write_line()
            if self._reported is None and self._is_stuck():
                self._report_stall()
            elif self._reported is not None and not self._is_stuck():
                self._withdraw()
            if self._reported is not None and self._all_stuck():
                self._end_hang()
                break
        self._finish()

    def _finish(self) -> None:
        self._write_line()
        self._give_sign(ended=True)
        if self._options.node == 0:
            keep_durations(self._health / DURATIONS_FILE, self._durations())
        shutil.rmtree(self._options.folder, ignore_errors=True)

    # --- is anything moving? ------------------------------------------------------------------------------------

    def _durations(self) -> dict[Phase, list[int]]:
        return merged([self._kept, *(rank.record.durations() for rank in self._ranks)])

    def _is_stuck(self) -> bool:
        """Whether every rank of this host that has not ended has been where it is for longer than it may."""
        own = self._options
        limits = Limits(own.hang_floor_s, own.slow_floor_s, own.hang_factor, self._durations())
        waiting = [rank for rank in self._ranks if not rank.ended]
        return all(rank.stuck_s > limits.of(rank.progress, rank.first_step) for rank in waiting)

    def _give_sign(self, *, ended: bool = False) -> None:
        """Write a sign of life where other hosts look."""
        if not ended and time.monotonic() < self._sign_at:
            return
        self._sign_at = time.monotonic() + SIGN_S
        sign = {"run": self._run, "time": time.time(), "ended": ended, "stuck": self._reported is not None}
        with replacing(self._health / f"{self.name}.{SIGN}", "w") as file:
            json.dump(sign, file)

    def _read_nodes(self, folder: Path, ending: str) -> dict[int, dict[str, Any]]:
        """What the agents of this start have written under this ending, by node."""
        found = {}
        for node in range(len(self._options.nodes)):
            try:
                content = json.loads((folder / f"{node_name(node)}.{ending}").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if content.get("run") == self._run:
                found[node] = content
        return found

    def _signs(self) -> dict[int, dict[str, Any]]:
        """Last sign of life of each host that has written here."""
        return self._read_nodes(self._health, SIGN)

    def _lost(self) -> list[str]:
        """Hosts that have given signs of life in this launch, and do no more."""
        now = time.time()
        return [
            self._options.nodes[node]
            for node, sign in self._signs().items()
            if not sign["ended"] and now - sign["time"] > 3 * SIGN_S
        ]

    # --- a standstill -------------------------------------------------------------------------------------------

    def _report_stall(self) -> None:
        """Ask the ranks, and write what is known of them."""
        asked = {rank.identity.rank: rank.record.ask() for rank in self._ranks if rank.state == RUNNING}
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until and any(
            rank.record.answered < asked.get(rank.identity.rank, 0) for rank in self._ranks
        ):
            time.sleep(0.05)
        states, stacks = [], {}
        for rank in self._ranks:
            rank.look()
            answer = self._answer(rank, asked)
            stacks[rank.identity.rank] = answer.get("stacks", {})
            states.append(asdict(state_of(rank.identity, rank.progress, rank.state, answer)))
        self._reported = {"run": self._run, "states": states, "stacks": stacks, "devices": self._telemetry.as_dict()}
        write_durably(self._stalls / f"{self.name}.json", json.dumps(self._reported) + "\n")
        self._sign_at = 0.0
        self._give_sign()

    def _answer(self, rank: WatchedRank, asked: Mapping[int, int]) -> dict[str, Any]:
        number = rank.identity.rank
        if rank.record.answered < asked.get(number, 1):
            return {}
        try:
            found: dict[str, Any] = json.loads(answer_path(self._options.folder, number).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def _withdraw(self) -> None:
        """Something moved again: it was slow, not stuck."""
        self._reported = None
        (self._stalls / f"{self.name}.json").unlink(missing_ok=True)
        self._sign_at = 0.0
        self._give_sign()
        self._write_line(note="moved again")

    def _all_stuck(self) -> bool:
        """Whether every other host that shows signs of life is stuck, too."""
        now = time.time()
        return all(
            sign["stuck"] or sign["ended"] or now - sign["time"] > 3 * SIGN_S
            for node, sign in self._signs().items()
            if node != self._options.node
        )

    def _end_hang(self) -> None:
        """Name the cause, write the incident, end the ranks of this host."""
        reports = self._read_nodes(self._stalls, "json").values()
        states = sorted((read_state(one) for report in reports for one in report["states"]), key=lambda one: one.rank)
        stacks = {rank: found for report in reports for rank, found in report["stacks"].items()}
        lost = self._lost()
        blame = find_blame(states, lost)
        hosts = sorted({one.host for one in states if one.rank in blame.ranks}) or lost
        message = f"nothing moved for {min(one.stuck_s for one in states):.0f} s: {blame.text}"
        unseen = set(self._options.nodes) - {one.host for one in states} - set(lost)
        if unseen:
            message += f" (nothing is known of {', '.join(sorted(unseen))}, which do not share this run folder)"
        devices = [one["devices"] for one in reports]
        path = write_incident(self._health, self._run, message, blame, states, hosts, stacks, devices)
        code = PeerError.exit_code if blame.kind == GONE_KIND else HangError.exit_code
        leave = {"exit_code": code, "message": f"{message}; see {path}"}
        write_durably(self._options.folder / LEAVE_FILE, json.dumps(leave) + "\n")
        self._end_ranks()

    def _end_ranks(self) -> None:
        """Tell the ranks to leave; kill those that do not."""
        for rank in self._ranks:
            rank.record.tell_to_leave()
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and not all(rank.state == GONE for rank in self._ranks):
            time.sleep(0.1)
            for rank in self._ranks:
                rank.look()
        for rank in self._ranks:
            if rank.state != GONE:
                self._write_line(note=f"rank {rank.identity.rank} did not leave and was killed")
                os.kill(rank.identity.pid, signal.SIGKILL)

    def _write_line(self, note: str = "") -> None:
        """Append where the ranks are to this host's file, whose older half goes when it is too long."""
        self._line_at = time.monotonic() + LINE_S
        devices, changes = self._telemetry.line()
        line = {
            "run": self._run,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "note": "; ".join(filter(None, (note, changes))),
            "ranks": [
                {
                    "rank": rank.identity.rank,
                    "step": rank.progress.step,
                    "micro_batch": rank.progress.micro_batch,
                    "phase": rank.progress.phase.label,
                    "stuck_s": round(rank.stuck_s, 3),
                    "process": rank.state,
                }
                for rank in self._ranks
            ],
            "devices": devices,
        }
        path = self._health / f"{self.name}.jsonl"
        if path.exists() and path.stat().st_size > MAX_LINES_BYTES:
            lines = path.read_bytes().splitlines(keepends=True)
            with replacing(path, "wb") as file:
                file.writelines(lines[len(lines) // 2 :])
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(argv: Sequence[str]) -> None:
    """Watch the ranks of this host; ``argv``: the encoded options.

    It detaches from the rank that has started it once it has read all records, so that this rank learns what is wrong
    with them.
    """
    agent = Agent(AgentOptions.decode(argv[0]))
    if os.fork():
        os._exit(0)
    os.setsid()
    agent.run()


if __name__ == "__main__":
    main(sys.argv[1:])
