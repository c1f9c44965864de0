"""DeepSpeed's runner (0.19.8) with what it lacks, in a process of its own.

- Over pdsh, interpreter and working folder are quoted, so that paths may hold spaces.
- Over pdsh, SIGINT or SIGTERM ends this launch, not every DeepSpeed job of that interpreter on the hosts.
- On one host, SIGINT and SIGTERM are passed on to the ranks, which DeepSpeed would leave behind.
- The runner ends when the front that started it is killed.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import sys
from types import FrameType

import psutil
from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import PDSHRunner

from megasdc.launcher.environment import FRONT_PID_VARIABLE
from megasdc.launcher.records import LAUNCH_ID_VARIABLE

PR_SET_PDEATHSIG = 1


class QuotingPDSHRunner(PDSHRunner):
    """DeepSpeed's pdsh backend, with what reaches remote shells quoted."""

    def get_cmd(
        self, environment: dict[str, str], active_resources: dict[str, list[int]]
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """Return command, kill command and environment as the base class does."""
        command, kill_command, environment = super().get_cmd(environment, active_resources)
        folder = os.path.abspath(".")
        _replace(command, f"cd {folder};", f"cd {shlex.quote(folder)};")
        _replace(command, sys.executable, shlex.quote(sys.executable))
        # The brackets keep the pattern from matching the shell that runs pkill.
        pattern = f"[d]eepspeed.launcher.launch .*megasdc.launcher.rank {os.environ[LAUNCH_ID_VARIABLE]} "
        pdsh = kill_command[: kill_command.index("pkill -f ")]
        return command, [*pdsh, "pkill", "-f", shlex.quote(pattern)], environment


def _replace(command: list[str], old: str, new: str) -> None:
    """Replace one word in place; a word that is not there means another DeepSpeed, and is an error."""
    command[command.index(old)] = new


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Pass a signal on to the process that starts the ranks, and go on waiting for it; over pdsh DeepSpeed does so."""
    children = psutil.Process().children()
    for child in children:
        child.send_signal(number)
    if not children:
        sys.exit(128 + number)


def main() -> None:
    """Run DeepSpeed's launcher with this process's arguments."""
    if os.environ.get(FRONT_PID_VARIABLE) == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    runner.PDSHRunner = QuotingPDSHRunner
    runner.LAUNCHER_CLASSES["pdsh"] = QuotingPDSHRunner
    runner.main()


if __name__ == "__main__":
    main()
