"""DeepSpeed's runner with three repairs of its pdsh backend (0.19.8), in a process of its own.

- Interpreter and working folder are quoted, so that paths may hold spaces.
- On SIGINT or SIGTERM DeepSpeed ends every DeepSpeed job of that interpreter on the hosts; here only this launch.
- The runner ends when the front that started it is killed.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import sys

from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import PDSHRunner

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


def main() -> None:
    """Run DeepSpeed's launcher with this process's arguments."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    runner.PDSHRunner = QuotingPDSHRunner
    runner.main()


if __name__ == "__main__":
    main()
