"""Agent on each host: starts its processes, forwards tasks to them and their answers back, ends with its caller.

Started as ``python -m megasdc.ops.stress.host SLOTS``, over SSH or directly. When its standard input is closed, it
kills all processes, so that none remain after the caller or the connection is gone. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

from megasdc.parallel.local_ranks import base_environment

MARK = "megasdc-stress:"
"""Prefix of each line of the protocol; a login shell may print other lines."""
TAIL_CHARACTERS = 2000


class Host:
    """The processes of this host; ``slots``: devices to test, 0: all accelerators, or 1 where there is none."""

    def __init__(self, slots: int) -> None:
        devices = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else len(list(Path("/dev").glob("nvidia[0-9]*")))
        self.slots = slots or max(1, devices)
        self.processes = self.slots if devices else max(2, self.slots)
        self._lock = threading.Lock()
        self._logs = [tempfile.TemporaryFile() for _ in range(self.processes)]  # noqa: SIM115 - as long as the host
        self._running = [self._start(number) for number in range(self.processes)]
        for number in range(self.processes):
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        """Sends one line to the caller."""
        with self._lock:
            sys.stdout.write(MARK + json.dumps(message) + "\n")
            sys.stdout.flush()

    def hand_on(self, line: str) -> None:
        """Forward a task to the process number ``slot`` of its line."""
        process = self._running[json.loads(line)["slot"]]
        assert process.stdin is not None, "it was given a pipe"
        with contextlib.suppress(OSError):  # it has ended, which its listener reports
            process.stdin.write(line.encode())
            process.stdin.flush()

    def close(self) -> None:
        """Kills all processes."""
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        environment = {**base_environment(1), "LOCAL_RANK": str(number)}
        command = [sys.executable, "-m", "megasdc.ops.stress.worker", str(number)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._logs[number]}
        return subprocess.Popen(command, env=environment, **pipes)

    def _listen(self, number: int) -> None:
        process = self._running[number]
        assert process.stdout is not None, "it was given a pipe"
        for line in process.stdout:
            self.say({"slot": number, **json.loads(line)})
        code = process.wait()
        self.say({"slot": number, "ended": code, "tail": _tail(self._logs[number])})


def _tail(log: BinaryIO) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - TAIL_CHARACTERS))
    return " | ".join(log.read().decode(errors="replace").splitlines()[-3:])


def main() -> None:
    """Serves until the caller has gone."""
    host = Host(int(sys.argv[1]))
    try:
        host.say({"started": socket.gethostname(), "slots": host.slots, "processes": host.processes})
        for line in sys.stdin:
            host.hand_on(line)
    finally:
        host.close()


if __name__ == "__main__":
    main()
