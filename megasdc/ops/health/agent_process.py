"""The process of this host's agent: the first rank of the host starts it, and starts it again if it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from megasdc.common.host import GONE, Waker, process_state, read_own_json
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.ops.health.agent import CLOCK_FILE, AgentOptions, read_agent
from megasdc.ops.health.front.address import FrontAddress, Hello
from megasdc.ops.health.front.link import CoordinatorClient
from megasdc.ops.health.shared_folder_heartbeat import OwnState, SharedFolderHeartbeat

START_S = 60.0
LOOK_S = 2.0
MAX_RESTARTS, MAX_CLOCKS = 3, 16
STOPPED_S, STILL_S = 3.0, 30.0
"""An agent may be stopped by a signal for so long, with two looks less than the time after which it leaves out what
ranks did not do while it stood still; and not run otherwise: its threads wait for disks, it does not."""


class AgentProcess:
    """Starts the agent, and looks after it; used by one thread at a time.

    It is not one of the launch's processes: the front does not wait for it, and does not end it.

    Args:
        options: of the agent.
        front: of the launch; None: there is none. Its secret goes through a pipe.
        run: name of this start.
    """

    def __init__(self, options: AgentOptions, front: FrontAddress | None, run: str) -> None:
        self._options, self._front, self._run = options, front, run
        self._log = options.run_folder / "health" / f"agent_{options.node:05d}.log"
        self._look_at = time.monotonic() + LOOK_S
        self._restarts = 0
        self._waker = Waker(STOPPED_S, STILL_S, polls=True)
        self._ended = False
        self._clock: dict[str, Any] | None = None
        self.news: deque[tuple[str, str]] = deque()
        """What the run has to be told, as name of an event and text; the run takes it out."""
        self.clocks: deque[dict[str, Any]] = deque(maxlen=MAX_CLOCKS)
        """Likewise, how the clocks of this host differ from those of the front, each time that it has changed."""

    def start(self) -> bool:
        """Start it; returns whether that was possible, else ``news`` says why not."""
        options = self._options
        environment = {name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE}
        path = self._log
        problem = ""
        try:
            path.parent.mkdir(exist_ok=True)
            with open(path, "ab") as log:
                subprocess.run(
                    [sys.executable, "-m", "megasdc.ops.health.agent", options.encode()],
                    input=b"" if self._front is None else json.dumps(asdict(self._front)).encode(),
                    stdout=log,
                    stderr=log,
                    env=environment,
                    timeout=START_S,
                    check=True,
                )
        except subprocess.SubprocessError:
            problem = f"its agent could not be started; see {path}"
        except OSError as error:
            problem = f"its agent could not be started: {error}"
        if problem:
            self._ended = True
            self.news.append(("unwatched", problem))
        return not problem

    def _read_clock(self) -> None:
        """Read how the clocks of this host differ from those of the front, as its agent has left it."""
        with contextlib.suppress(OSError, ValueError):
            clock = read_own_json(self._options.folder / CLOCK_FILE)
            if clock != self._clock:
                self.clocks.append(clock)
                self._clock = clock

    def check(self) -> None:
        """Start it again if it has ended, at most three times; wake it where a signal has stopped it, or end it."""
        if self._ended or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        self._read_clock()
        if self._lives():
            return
        if self._restarts == MAX_RESTARTS:
            self._ended = True
            problem = f"its agent has ended {MAX_RESTARTS + 1} times; see {self._log}"
            self.news.append(("unwatched", problem))
            self._publish_for_agent(OwnState(problem=problem, unwatched=True))
            return
        self._restarts += 1
        if self.start():
            self.news.append(("agent_restarted", f"its agent had ended, see {self._log}, and was started again"))

    def _publish_for_agent(self, own: OwnState) -> None:
        """In the agent's stead: a host of which nothing is heard would be taken for lost."""
        options = self._options
        with contextlib.suppress(OSError):  # without the folder, or the front, nobody is there to be told
            board = SharedFolderHeartbeat(options.run_folder / "health", self._run, options.node, len(options.nodes))
            board.own, board.is_read = own, False
            board.exchange()
        if self._front is None:
            return
        hello = Hello(self._run, options.node, options.nodes[options.node], len(options.nodes))
        link = CoordinatorClient(self._front, hello)
        link.own = own
        with contextlib.suppress(OSError):
            link.exchange()
        link.close()

    def _lives(self) -> bool:
        try:
            found = read_agent(self._options.folder)
        except (OSError, ValueError):
            return True
        if found is None:
            return True  # it has not detached yet
        if process_state(found["pid"], found["started_at"]) == GONE:
            return False
        if done := self._waker.check(found["pid"]):
            self.news.append(("agent_stopped", f"its agent: {done}"))
        return found["pid"] not in self._waker.given_up

    def close(self) -> None:
        """Remove the records where no agent is left to do so."""
        if self._ended:
            shutil.rmtree(self._options.folder, ignore_errors=True)
