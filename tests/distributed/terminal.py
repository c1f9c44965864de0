"""How do tests see what a command draws on a terminal? A pseudo-terminal of a known size, read while it runs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_LEAVE_SCREEN = "\x1b[?1049l"


class Terminal:
    """A command of megasdc in a terminal of its own.

    Args:
        arguments: of megasdc.
        cwd: working folder.
    """

    def __init__(
        self, arguments: list[str], rows: int = 40, columns: int = 120, cwd: str | os.PathLike[str] | None = None
    ) -> None:
        self.columns = columns
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        command = [sys.executable, "-m", "megasdc", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=cwd)
        os.close(slave)
        self._drawn = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 1 << 16):
                self._drawn += data
        except OSError:
            pass  # the command has closed it

    @property
    def _parts(self) -> tuple[str, str]:
        before, _, after = self._drawn.decode(errors="replace").partition(_LEAVE_SCREEN)
        return _CONTROL.sub("", before), _CONTROL.sub("", after)

    @property
    def screens(self) -> str:
        """All that was drawn on the screen of its own."""
        return self._parts[0]

    @property
    def after(self) -> str:
        """What was printed below what was there before."""
        return self._parts[1]

    @property
    def lines(self) -> list[str]:
        """All lines, as they stand now, those that have left the screen too; one that was wrapped is several."""
        rows, row, column = [[""]], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.|\n", self._drawn.decode(errors="replace"), re.DOTALL):
            if part == "\n":
                row += 1
            elif part == "\r":
                column = 0
            elif part.startswith("\x1b"):
                if part[-1] == "A":
                    row -= int(part[2:-1] or 1)
                elif part[-1] == "K":
                    rows[row][column if part == "\x1b[K" else 0 :] = []
            else:
                if column == self.columns:
                    row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
                rows[row] += " " * (column - len(rows[row]))
                rows[row][column : column + 1] = [part]
                column += 1
            rows += [[] for _ in range(row + 1 - len(rows))]
        return ["".join(one).rstrip() for one in rows]

    @property
    def drawn(self) -> str:
        """All that was sent to the terminal, without control sequences."""
        return _CONTROL.sub("", self._drawn.decode(errors="replace"))

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Until it has been drawn."""
        until = time.monotonic() + timeout_s
        while text not in self.screens:
            assert time.monotonic() < until and self._process.poll() is None, self.screens
            time.sleep(0.05)

    def type(self, line: str) -> None:
        """Type a line, with its end."""
        os.write(self._master, f"{line}\n".encode())

    def wait(self, timeout_s: float = 60.0) -> int:
        """Until the command has ended by itself; returns its exit code."""
        try:
            return self._process.wait(timeout_s)
        finally:
            self._process.kill()
            self._reader.join(5)
            os.close(self._master)
