"""DeepSpeed's runner (0.19.8) with fixes, in a process of its own.

- Over pdsh, interpreter and working folder are quoted, so that paths may hold spaces.
- Over pdsh, a signal ends this launch, not every DeepSpeed job of that interpreter on the hosts, and pdsh keeps running
  until the ranks have ended, so that their output during the save is not lost.
- With other backends SIGINT, SIGTERM and SIGUSR1 are forwarded to the started process, which DeepSpeed would leave
  running; to srun as SIGUSR1, which it passes to its tasks.
- Hosts run ``megasdc.ops.launch.node``, which gives ranks time to save.
- DeepSpeed's own lines go to a file of the run folder (``megasdc.ops.launch.own_lines``).
- Over pdsh, the shell of a host writes a record when its launcher has failed, however that ended.
- The runner ends when its front is killed, and its child process ends when the runner is killed.
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

if __name__ == "__main__":  # nothing has started during imports: Ctrl-C needs no cleanup
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megasdc.common.imports import frozen_imports
from megasdc.common.versions import LAUNCHER, check_private_names, ends_at_launch_error
from megasdc.ops.launch import host_failed
from megasdc.ops.launch.command import NODE_MODULE, RANK_MODULE, node_words
from megasdc.ops.launch.environment import DEEPSPEED_GRACE_S, FRONT_PID_VARIABLE, private_environment, stop_grace_s
from megasdc.ops.launch.orphans import FOLLOW_OPTION, follow_parent
from megasdc.ops.launch.own_lines import FOLDER_VARIABLE, own_lines_to
from megasdc.ops.launch.process import SRUN, end_launcher
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE

with own_lines_to(os.environ.get(FOLDER_VARIABLE), sys.argv), frozen_imports():
    from deepspeed.launcher import runner
    from deepspeed.launcher.multinode_runner import PDSHRunner

LAUNCH_MODULE = "deepspeed.launcher.launch"
LOST_HOST_S = 15.0
REPEAT_S = 5
PDSH = "pdsh"
ERE_SPECIAL = re.compile(r"([][.^$*+?(){}|\\])")

# pdsh command, pattern and environment to signal this launch's processes on other hosts; empty without pdsh.
_remote: dict[str, Any] = {}
_private: dict[str, str] = {}
"""Variables with secrets: DeepSpeed, which would export some on command lines, does not see them."""


class QuotingPDSHRunner(PDSHRunner):
    """DeepSpeed's pdsh backend, with quoting for remote shells."""

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
        # Anchored at the line's start: matches neither pdsh, ssh and shells with this command, nor pkill itself.
        python = ERE_SPECIAL.sub(r"\\\1", sys.executable)
        launch_id = os.environ[LAUNCH_ID_VARIABLE]
        pattern = f"^{python} -u -m {NODE_MODULE} .*{RANK_MODULE} {launch_id} "
        pdsh = kill_command[: kill_command.index("pkill -f ")]
        _remote.update(pdsh=pdsh, pattern=shlex.quote(pattern), environment=environment)
        return command, kill_command, environment


def _replace(command: list[str], old: str, *new: str) -> None:
    """Replace one word in place; ValueError if it is missing, which means another DeepSpeed."""
    place = command.index(old)
    command[place : place + 1] = new


def _node_words() -> list[str]:
    return node_words(stop_grace_s(os.environ), os.environ.get(FOLDER_VARIABLE))


def _popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start DeepSpeed's command, with our module in place of launch.py if that runs on this host."""
    command = list(command)
    if LAUNCH_MODULE in command:
        _replace(command, LAUNCH_MODULE, *_node_words())
    # pdsh keeps the other hosts' standard input open while it lives; its end tells them that pdsh has gone.
    number = {SRUN: signal.SIGUSR1, PDSH: signal.SIGKILL}.get(command[0], signal.SIGTERM)
    follow = partial(follow_parent, number, os.getpid())
    options["env"] = {**options.get("env", os.environ), **_private}
    return subprocess.Popen(command, preexec_fn=follow, **options)  # noqa: PLW1509 - this process has one thread


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Forward a signal to the process that starts the ranks, and keep waiting for it."""
    children = psutil.Process().children()
    grace = DEEPSPEED_GRACE_S if number == signal.SIGINT else stop_grace_s(os.environ)
    if children and _remote:
        name = signal.Signals(number).name.removeprefix("SIG")
        _remote["stop"] = [*_remote["pdsh"], "pkill", f"-{name}", "-u", "$(id -u)", "-f", _remote["pattern"]]
        _remote["end"] = time.monotonic() + grace + LOST_HOST_S
        _send_to_hosts()
        return
    for child in children:
        if child.name() == SRUN:
            # srun passes SIGUSR1 to its tasks; on SIGINT it only reports its state, on SIGTERM it kills them.
            child.send_signal(signal.SIGUSR1)
            signal.alarm(math.ceil(grace))
        else:
            child.send_signal(number)
    if not children:
        sys.exit(128 + number)


def _send_to_hosts() -> None:
    """Send the signal to this launch's processes on other hosts; repeated, since some may not have started yet."""
    subprocess.Popen(_remote["stop"], env=_remote["environment"], stdin=subprocess.DEVNULL)
    signal.alarm(REPEAT_S)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    """Repeat the signal until the deadline, then end pdsh, which waits forever for a lost host, or srun with tasks."""
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
    _private.update(private_environment(os.environ))
    for name in _private:
        del os.environ[name]
    # DeepSpeed's own handlers would end pdsh at once, and lose the ranks' output.
    runner.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    runner.PDSHRunner = QuotingPDSHRunner
    # From 0.19.7 on the runner looks the class up here.
    getattr(runner, "LAUNCHER_CLASSES", {})["pdsh"] = QuotingPDSHRunner
    runner.main()


if __name__ == "__main__":
    main()
