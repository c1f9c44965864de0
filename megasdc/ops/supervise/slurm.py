"""Attempts inside a SLURM job: its nodes are the hosts, job steps start ranks, and a requeued job goes on.

All is done by SLURM's own commands. A step (``srun``) overlaps others, so that it does not wait for what a lost node
still holds. The tasks are placed in the order of the hosts (``--distribution=arbitrary``): else SLURM would sort them,
and ranks would move when a host is replaced.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from megasdc.common.errors import LaunchError
from megasdc.ops.launch.remote import MAX_PARALLEL
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise.allocation import PROBE_S, Allocation
from megasdc.ops.supervise.history import Attempt

JOB_VARIABLE, RESTART_VARIABLE, NODE_VARIABLE = "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME"
_NODES_VARIABLE, _TASKS_VARIABLE = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
_PROGRAMS = ("srun", "scontrol", "sinfo")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ (?:DUE TO (?P<why>[^*]*))?\*\*\*")
_NO_MEMORY = re.compile(
    r"^srun: error: \S+: tasks? (?P<tasks>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*): Out Of Memory$", re.MULTILINE
)
"""What srun (22.05, ``launch_slurm.so``) says of tasks whose cgroup counts one that was killed for want of memory."""
_ANSWER_S = 60.0
_STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--quit-on-interrupt")


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node, from SLURM's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        LaunchError: it is of another form.
    """
    found: list[int] = []
    for part in text.split(","):
        if (match := _TASKS.fullmatch(part)) is None:
            raise LaunchError(f"environment variable {_TASKS_VARIABLE}={text}: need numbers such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def fields_of(text: str) -> dict[str, str]:
    """Fields of a line of ``scontrol --oneliner show``; of a value with spaces the first word."""
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


class SlurmJob(Allocation):
    """The job that this process runs in.

    Args:
        environ: of this process.

    Raises:
        LaunchError: this is no job, a program of SLURM is missing, or SLURM does not answer.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        if not (number := environ.get(JOB_VARIABLE)):
            raise LaunchError(
                "--hostfile is missing, and this is no SLURM job: a supervisor chooses hosts from one of them; "
                "for this host alone, write `localhost slots=N` there"
            )
        if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
            raise LaunchError(
                f"this is SLURM job {number}, and {', '.join(missing)} is not on PATH; install SLURM's client commands "
                "there, or give --hostfile to reach hosts over SSH"
            )
        for name in (_NODES_VARIABLE, _TASKS_VARIABLE, NODE_VARIABLE):
            if not environ.get(name):
                raise LaunchError(f"this is SLURM job {number}, and {name} is not set; start this in its batch script")
        nodes = _scontrol("show", "hostnames", environ[_NODES_VARIABLE]).split()
        tasks = tasks_per_node(environ[_TASKS_VARIABLE])
        if len(nodes) != len(tasks):
            raise LaunchError(
                f"SLURM job {number} has {len(nodes)} nodes, and {_TASKS_VARIABLE}={environ[_TASKS_VARIABLE]} is of "
                f"{len(tasks)}; start this in its batch script"
            )
        if len(set(tasks)) > 1:  # DeepSpeed's launcher would refuse it, too
            raise LaunchError(
                f"SLURM job {number} has {environ[_TASKS_VARIABLE]} tasks on its nodes; each needs as many ranks: give "
                "sbatch --nodes and --ntasks-per-node"
            )
        super().__init__(f"SLURM job {number}", dict(zip(nodes, tasks, strict=True)))
        self._number, self._own = number, environ[NODE_VARIABLE]
        self.job = f"{number}.{environ.get(RESTART_VARIABLE, '0')}"
        shown = self._show()
        self.can_be_left = shown.get("BatchFlag") == "1" and shown.get("Requeue") == "1"

    def request(self, request: LaunchRequest, attempt: Attempt) -> LaunchRequest:
        """See ``Allocation``."""
        tasks = ",".join(host for host, count in attempt.slots.items() for _ in range(count))
        words = ["--overlap", "--kill-on-bad-exit=0", "--mpi=none", f"--nodes={len(attempt.slots)}"]
        words += ["--distribution=arbitrary", f"--nodelist={tasks}"]
        options = (*request.launcher_args, f"--launcher_args={shlex.join(words)}")
        return replace(request, backend="slurm", launcher_args=options)

    def unreachable(self, attempt: Attempt) -> tuple[str, ...]:
        """See ``Allocation``: hosts that SLURM calls down, and of this job those on which no step can be started.

        Where no step can be started on the supervisor's own node either, that says nothing of the others.
        """
        if self.is_ending:
            return ()
        down = _down(attempt.hosts)
        if attempt.job != self.job:
            return down
        asked = list(dict.fromkeys([*(host for host in attempt.hosts if host not in down), self._own]))
        with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(asked))) as pool:
            failed = {host for host, well in zip(asked, pool.map(_step_starts, asked), strict=True) if not well}
        failed = set() if self._own in failed else failed
        return tuple(host for host in attempt.hosts if host in down or host in failed)

    def was_cancelled(self, log: str) -> bool:
        """See ``Allocation``: a node failure and a time limit of the step are no cancellation."""
        return any(match["why"] is None for match in _CANCELLED.finditer(log))

    def lacked_memory(self, log: str, rank: int | None) -> bool:
        """See ``Allocation``: srun says so, where SLURM counts it (``TaskPlugin=task/cgroup``); a task is a rank."""
        told = [part.split("-") for match in _NO_MEMORY.finditer(log) for part in match["tasks"].split(",")]
        return any(rank is None or int(one[0]) <= rank <= int(one[-1]) for one in told)

    def prefix(self, host: str) -> list[str]:
        """See ``Allocation``."""
        return [*_STEP, f"--nodelist={host}"]

    def requeue(self, away: Sequence[str]) -> str:
        """See ``Allocation``: the job is requeued, and while it waits SLURM takes the list of nodes to leave out.

        Others may have requeued it already, which SLURM counts at once.
        """
        shown = self._show()
        was_requeued = self.job != f"{self._number}.{shown['Restarts']}"
        if not was_requeued and shown["JobState"] != "RUNNING":  # it was cancelled, or is over its limit
            return f"job {self._number} is {shown['JobState']}, and is not requeued"
        try:
            if not was_requeued:
                _scontrol("requeue", self._number)
            if excluded := [*_listed(shown.get("ExcNodeList", "")), *away]:
                _scontrol("update", f"JobId={self._number}", f"ExcNodeList={','.join(dict.fromkeys(excluded))}")
        except LaunchError as error:
            return str(error)
        return ""

    def _show(self) -> dict[str, str]:
        return fields_of(_scontrol("--oneliner", "show", "job", self._number))


def _down(hosts: Sequence[str]) -> tuple[str, ...]:
    asked = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T"]
    states = dict(line.split() for line in _answer(asked).splitlines())
    return tuple(host for host in hosts if is_down(states.get(host, "down")))


def is_down(state: str) -> bool:
    """Whether a node cannot be reached, by its state; ``*``: it does not respond."""
    return state.startswith(("down", "unknown")) or state.endswith("*")


def _listed(text: str) -> list[str]:
    """Nodes that a job leaves out already."""
    return [] if text in ("", "(null)") else _scontrol("show", "hostnames", text).split()


def _step_starts(host: str) -> bool:
    try:
        done = subprocess.run(
            [*_STEP, f"--nodelist={host}", "--input=none", "true"],
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _scontrol(*words: str) -> str:
    return _answer(["scontrol", *words])


def _answer(command: Sequence[str]) -> str:
    """What a command of SLURM prints.

    Raises:
        LaunchError: it fails.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names and comments of jobs are anyone's
            timeout=_ANSWER_S,
            check=False,
            preexec_fn=_deaf_to_sigterm,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"`{shlex.join(command)}` gave no answer in {_ANSWER_S:g} s; is slurmctld up?") from error
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"`{shlex.join(command)}` failed: {said}")
    return done.stdout


def _deaf_to_sigterm() -> None:
    """A job that is requeued gets SIGTERM at once, in all of its processes; what is to be said is said nevertheless."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
