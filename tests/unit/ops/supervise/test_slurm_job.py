"""A SLURM job as the hosts of a run: what its environment says, which commands it is asked by, what it is left with."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from megasdc.checkpoint.host_memory import memory_folder
from megasdc.common.errors import LaunchError
from megasdc.ops.launch.command import parse_launcher_args
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise import attempt_process
from megasdc.ops.supervise.attempt_process import FrontResult
from megasdc.ops.supervise.diagnosis import diagnose
from megasdc.ops.supervise.history import Attempt
from megasdc.ops.supervise.journal import FOLDER
from megasdc.ops.supervise.launch_backend import LaunchBackend
from megasdc.ops.supervise.slurm import SlurmJob, fields_of, is_down, tasks_per_node

ENVIRON = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURMD_NODENAME": "node1",
}
JOB = (
    "JobId=7 JobName=a b JobState={state} Requeue={requeue} Restarts={restarts} BatchFlag=1 "
    "ExcNodeList={excluded} Command=/x y"
)
"""As SLURM 22.05 prints it, shortened."""


class Programs:
    """Programs that stand in for SLURM's: what each prints, and the command lines that they got.

    Args:
        folder: they lie in, the only one on PATH.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "log"
        self.job()
        self.write("srun", 'case "$*" in *=node2*) exit 1;; esac')
        self.write("sinfo", "echo 'node1 mixed'; echo 'node2 down*'; echo 'node3 idle'")

    def job(self, state: str = "RUNNING", requeue: int = 1, excluded: str = "(null)", restarts: int = 0) -> None:
        """What ``scontrol`` shows of the job."""
        shown = JOB.format(state=state, requeue=requeue, excluded=excluded, restarts=restarts)
        names = 'show\\ hostnames\\ node9) echo node9;; show\\ hostnames*) printf "node1\\nnode2\\nnode3\\n";;'
        self.write("scontrol", f'case "$*" in {names} *show\\ job*) echo "{shown}";; esac')

    def write(self, name: str, text: str) -> None:
        """Make a program."""
        path = self._folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self._log}"\n{text}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """Command lines, oldest first."""
        return self._log.read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """They are found before all others."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return Programs(tmp_path / "bin")


def attempt(job: str = "7.0", **slots: int) -> Attempt:
    """An attempt on some hosts."""
    return Attempt(1, slots or {"node2": 2, "node1": 1}, "launch", 100.0, job)


@pytest.mark.parametrize(
    ("text", "tasks"), [("1", [1]), ("2(x3)", [2, 2, 2]), ("8(x2),1", [8, 8, 1]), ("1,2(x2),3", [1, 2, 2, 3])]
)
def test_tasks_of_nodes_are_written_in_short(text: str, tasks: list[int]) -> None:
    """The forms of sbatch's manual page."""
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "x", "2x3", "2(3)", "1,"])
def test_another_form_is_an_error(text: str) -> None:
    """It names the variable."""
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE"):
        tasks_per_node(text)


def test_states_and_fields() -> None:
    """A star is a node that does not respond; a value with spaces does no harm."""
    assert [is_down(state) for state in ("down", "down*", "idle*", "unknown", "mixed", "allocated", "draining")] == [
        *[True] * 4,
        *[False] * 3,
    ]
    assert fields_of(JOB.format(state="RUNNING", requeue=1, excluded="n[1-2]", restarts=0))["ExcNodeList"] == "n[1-2]"


def test_the_hosts_of_a_job_are_its_nodes(programs: Programs) -> None:
    """With the tasks of each as ranks; its start is counted; a job that SLURM may not requeue cannot be left."""
    job = SlurmJob(ENVIRON)
    assert (job.slots, job.job, job.can_be_left) == ({"node1": 2, "node2": 2, "node3": 2}, "7.0", True)
    assert SlurmJob({**ENVIRON, "SLURM_RESTART_COUNT": "2"}).job == "7.2"
    programs.job(requeue=0)
    assert not SlurmJob(ENVIRON).can_be_left


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_JOB_ID": ""}, "--hostfile is missing, and this is no SLURM job"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_TASKS_PER_NODE": "1"}, "has 3 nodes, and SLURM_TASKS_PER_NODE=1 is of 1"),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, "each needs as many ranks"),
    ],
)
def test_what_is_no_job_is_refused(programs: Programs, changes: dict[str, str], text: str) -> None:
    """It says what is missing and what to do."""
    with pytest.raises(LaunchError, match=text):
        SlurmJob({**ENVIRON, **changes})


def test_without_slurms_commands_it_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="srun, scontrol, sinfo is not on PATH"):
        SlurmJob(ENVIRON)


def test_an_attempt_is_one_step_on_its_hosts_in_their_order(programs: Programs) -> None:
    """The launcher takes the words, and no host but these is named."""
    request = SlurmJob(ENVIRON).request(LaunchRequest(Path("c.json"), launcher_args=("--quiet",)), attempt())
    assert request.backend == "slurm" and parse_launcher_args(request.launcher_args)
    assert request.launcher_args[0] == "--quiet"
    words = request.launcher_args[1].removeprefix("--launcher_args=").split()
    assert {"--nodes=2", "--nodelist=node2,node2,node1", "--distribution=arbitrary", "--overlap"} <= set(words)


def test_hosts_without_a_step_are_unreachable_unless_none_can_be_had(programs: Programs) -> None:
    """The supervisor's own node is asked too; of an earlier job SLURM's state counts; of one that ends nothing does."""
    job = SlurmJob(ENVIRON)
    assert job.unreachable(attempt(node2=1, node3=1)) == ("node2",)
    asked = [line.split("--nodelist=")[1].split()[0] for line in programs.calls if "srun" in line]
    assert sorted(asked) == ["node1", "node3"], "SLURM calls node2 down"
    programs.write("sinfo", "echo 'node2 idle'; echo 'node3 idle'")
    assert job.unreachable(attempt(node2=1, node3=1)) == ("node2",), "no step can be started there"
    assert job.unreachable(attempt("6.0", node2=1, node3=1)) == ()
    programs.write("sinfo", "echo 'node2 down*'; echo 'node3 idle'")
    assert job.unreachable(attempt("6.0", node2=1, node3=1)) == ("node2",)
    programs.write("srun", "exit 1")
    assert job.unreachable(attempt(node2=1, node3=1)) == ("node2",)
    programs.write("srun", 'case "$*" in *=node2*) exit 1;; esac')
    job.is_ending = True
    assert job.unreachable(attempt(node2=1, node3=1)) == ()


def test_hosts_release_their_memory_in_a_step_of_the_job(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes often refuse SSH; what lies there would stay for ``linger_s``, or until the job ends."""
    programs.write("srun", 'while case "$1" in --*) true;; *) false;; esac; do shift; done; exec "$@"')
    folder = memory_folder(f"test-{os.getpid()}")
    folder.mkdir(mode=0o700)
    try:
        (folder / "owner").write_text(json.dumps({"linger_s": 600.0}))
        SlurmJob(ENVIRON).release(["node1"], f"test-{os.getpid()}")
        assert json.loads((folder / "owner").read_text()) == {"linger_s": 0.0}
    finally:
        shutil.rmtree(folder)
    assert any("--overlap" in call and "--nodelist=node1" in call for call in programs.calls)


def test_a_job_is_left_by_requeueing_it_without_the_nodes(programs: Programs) -> None:
    """In this order: SLURM takes a list of excluded nodes for waiting jobs only; those of before stay excluded."""
    assert SlurmJob(ENVIRON).requeue(["node2", "node3"]) == ""
    assert programs.calls[-2:] == ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=node2,node3"]
    programs.job(excluded="node9")
    assert SlurmJob(ENVIRON).requeue(["node2"]) == ""
    assert programs.calls[-1] == "scontrol update JobId=7 ExcNodeList=node9,node2"
    programs.job()
    assert SlurmJob(ENVIRON).requeue([]) == "" and programs.calls[-1] == "scontrol requeue 7"


def test_a_job_that_others_have_requeued_is_left_as_it_is(programs: Programs) -> None:
    """An administrator: the supervisor only says which nodes it is to come back without."""
    job = SlurmJob(ENVIRON)
    programs.job(state="COMPLETING", restarts=1)
    assert job.requeue(["node2"]) == "" and programs.calls[-1] == "scontrol update JobId=7 ExcNodeList=node2"
    assert "scontrol requeue 7" not in programs.calls


def test_a_cancelled_job_is_not_requeued(programs: Programs) -> None:
    """Who has cancelled it does not want it; a job that SLURM refuses says why."""
    programs.job(state="COMPLETING")
    assert SlurmJob(ENVIRON).requeue(["node2"]) == "job 7 is COMPLETING, and is not requeued"
    assert not [line for line in programs.calls if "requeue" in line]
    programs.write("scontrol", 'case "$*" in requeue*) echo no >&2; exit 1;; *job*) echo JobState=RUNNING;; esac')
    with pytest.raises(LaunchError):
        SlurmJob(ENVIRON)


def test_a_cancelled_step_is_told_from_one_that_lost_a_node(programs: Programs) -> None:
    """By SLURM's own lines."""
    job, line = SlurmJob(ENVIRON), "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-26T04:00:00"
    assert job.was_cancelled(f"step 5\n{line} ***\n") and not job.was_cancelled("step 5")
    assert not job.was_cancelled(f"{line} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***")


@pytest.mark.parametrize("tasks", ["task 1", "tasks 0-3", "tasks 0,2-4"])
def test_a_rank_that_slurm_says_was_out_of_memory_was(programs: Programs, tmp_path: Path, tasks: str) -> None:
    """Its front sees only that it was killed: the cause is no host, and not that of another rank that failed."""
    said = f"srun: error: node2: {tasks}: Out Of Memory\n"
    engine = LaunchBackend(tmp_path / "run", 50, [], 0, LaunchRequest(Path("c.json")), SlurmJob(ENVIRON), {})
    (folder := tmp_path / "run" / FOLDER).mkdir(parents=True)
    ended = "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-26T04:00:00 ***"  # by the front, after it
    attempt_process.attempt_file(folder, 1, "launch", "log").write_text(f"step 5\n{said}{ended}\n")

    def memory(failed_rank: int | None) -> str | None:
        result = FrontResult(78, failed_rank, "node2", ["rank 1 on node2: no done record"], ended_by=9)
        attempt_process.attempt_file(folder, 1, "launch", "json").write_text(json.dumps(asdict(result)))
        evidence = engine.evidence(attempt(node1=2, node3=3), {})
        assert diagnose(evidence).kind == ("memory" if evidence.memory else "rank_lost" if failed_rank else "launch")
        return evidence.memory

    named = 1 if tasks != "tasks 0,2-4" else 2
    assert (memory(named), memory(None), memory(1 if "4" in tasks else 4)) == ("run", "run", None)


def test_an_attempt_that_ended_from_outside_is_known(programs: Programs, tmp_path: Path) -> None:
    """With its job, or while that is about to end; that of this job is not."""
    job = SlurmJob(ENVIRON)
    engine = LaunchBackend(tmp_path / "run", 50, [], 0, LaunchRequest(Path("c.json")), job, {})
    assert engine.evidence(attempt("6.0", node1=1), {}).interrupted == "its job has ended"
    assert not engine.evidence(attempt(node1=1), {}).interrupted
    job.is_ending = True
    assert engine.evidence(attempt(node1=1), {}).interrupted == "SLURM job 7 is about to end"
