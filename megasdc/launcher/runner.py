"""DeepSpeed's runner (0.19.8) with what it lacks, in a process of its own.

- Over pdsh, interpreter and working folder are quoted, so that paths may hold spaces.
- Over pdsh, a signal ends this launch, not every DeepSpeed job of that interpreter on the hosts, and pdsh stays until
  the ranks have ended, so that what they say while they save has somewhere to go.
- Elsewhere SIGINT, SIGTERM and SIGUSR1 are passed on to what was started, which DeepSpeed would leave behind; to srun
  as the one signal that it hands on.
- Hosts run ``megasdc.launcher.node``, which gives ranks the time to save.
- DeepSpeed's own lines go to a file of the run folder (``megasdc.launcher.own_lines``).
- Over pdsh, the shell of a host leaves a record when what it started there has failed, however that ended.
- The runner ends when the front that started it is killed, and what it started when it is killed itself.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import psutil

if __name__ == "__main__":  # while torch is imported nothing has started: Ctrl-C needs neither care nor a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megasdc.launcher import host_failed
from megasdc.launcher.command import NODE_MODULE, RANK_MODULE, node_words
from megasdc.launcher.environment import DEEPSPEED_GRACE_S, FRONT_PID_VARIABLE, stop_grace_s
from megasdc.launcher.orphans import FOLLOW_OPTION, follow_parent
from megasdc.launcher.own_lines import FOLDER_VARIABLE, own_lines_to
from megasdc.launcher.process import SRUN, end_launcher
from megasdc.launcher.records import LAUNCH_ID_VARIABLE
from megasdc.versions.private_names import LAUNCHER, check_private_names, ends_at_launch_error

with own_lines_to(os.environ.get(FOLDER_VARIABLE), sys.argv):
    from deepspeed.launcher import runner
    from deepspeed.launcher.multinode_runner import PDSHRunner

LAUNCH_MODULE = "deepspeed.launcher.launch"
LOST_HOST_S = 15.0
REPEAT_S = 5
PDSH = "pdsh"
ERE_SPECIAL = re.compile(r"([][.^$*+?(){}|\\])")

# What reaches this launch's processes on other hosts; empty unless pdsh starts them.
_remote: dict[str, Any] = {}


class QuotingPDSHRunner(PDSHRunner):
    """DeepSpeed's pdsh backend, with what reaches remote shells quoted."""

    def get_cmd(
        self, environment: dict[str, str], active_resources: dict[str, list[int]]
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """Return command, kill command and environment as the base class does."""
        command, kill_command, environment = super().get_cmd(environment, active_resources)
        folder = os.path.abspath(".")
        _replace(command, f"cd {folder};", f"cd {shlex.quote(folder)};")
        interpreter = shlex.quote(sys.executable)
        _replace(command, sys.executable, interpreter)
        _replace(command, LAUNCH_MODULE, *_node_words(), FOLLOW_OPTION)
        command += ["||", interpreter, *host_failed.words(os.environ[host_failed.FOLDER_VARIABLE])]
        # From the start of the line: neither pdsh, ssh and the shells that hold the command, nor pkill itself.
        python = ERE_SPECIAL.sub(r"\\\1", sys.executable)
        launch_id = os.environ[LAUNCH_ID_VARIABLE]
        pattern = f"^{python} -u -m {NODE_MODULE} .*{RANK_MODULE} {launch_id} "
        pdsh = kill_command[: kill_command.index("pkill -f ")]
        _remote.update(pdsh=pdsh, pattern=shlex.quote(pattern), environment=environment)
        return command, kill_command, environment


def _replace(command: list[str], old: str, *new: str) -> None:
    """Replace one word in place; a word that is not there means another DeepSpeed, and is an error."""
    place = command.index(old)
    command[place : place + 1] = new


def _node_words() -> list[str]:
    return node_words(stop_grace_s(os.environ), os.environ.get(FOLDER_VARIABLE))


def _popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start what DeepSpeed would, with our module where it would run launch.py on this host."""
    command = list(command)
    if LAUNCH_MODULE in command:
        _replace(command, LAUNCH_MODULE, *_node_words())
    # pdsh keeps the other hosts' standard input open as long as it lives, by which they see that it has gone.
    number = {SRUN: signal.SIGUSR1, PDSH: signal.SIGKILL}.get(command[0], signal.SIGTERM)
    follow = partial(follow_parent, number, os.getpid())
    return subprocess.Popen(command, preexec_fn=follow, **options)  # noqa: PLW1509 - this process has one thread


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Pass a signal on to the process that starts the ranks, and go on waiting for it."""
    children = psutil.Process().children()
    grace = DEEPSPEED_GRACE_S if number == signal.SIGINT else stop_grace_s(os.environ)
    if children and _remote:
        name = signal.Signals(number).name.removeprefix("SIG")
        _remote["stop"] = [*_remote["pdsh"], "pkill", f"-{name}", "-f", _remote["pattern"]]
        _remote["end"] = time.monotonic() + grace + LOST_HOST_S
        _send_to_hosts()
        return
    for child in children:
        if child.name() == SRUN:
            # It hands SIGUSR1 on to its tasks; at SIGINT it only tells its state, at SIGTERM it kills them.
            child.send_signal(signal.SIGUSR1)
            signal.alarm(math.ceil(grace))
        else:
            child.send_signal(number)
    if not children:
        sys.exit(128 + number)


def _send_to_hosts() -> None:
    """Send the signal to this launch's processes on other hosts; again and again, for some may not have started yet."""
    subprocess.Popen(_remote["stop"], env=_remote["environment"], stdin=subprocess.DEVNULL)
    signal.alarm(REPEAT_S)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    """End pdsh, which waits for ever for a host that was lost, or srun and its tasks, whose time is over."""
    if _remote and time.monotonic() < _remote["end"]:
        _send_to_hosts()
        return
    for child in psutil.Process().children():
        end_launcher(child)


def main() -> None:
    """Run DeepSpeed's launcher with this process's arguments."""
    with ends_at_launch_error():
        check_private_names(LAUNCHER)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _pass_on)
    front = os.environ.pop(FRONT_PID_VARIABLE, None)  # absent under launch/no_ssh.sh
    if front:
        follow_parent(expected=int(front))
    signal.signal(signal.SIGALRM, _on_alarm)
    # DeepSpeed's own handlers end pdsh at once, and its ranks' output with it.
    runner.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    runner.PDSHRunner = QuotingPDSHRunner
    # From 0.19.7 on the runner looks it up here.
    getattr(runner, "LAUNCHER_CLASSES", {})["pdsh"] = QuotingPDSHRunner
    runner.main()


if __name__ == "__main__":
    main()
