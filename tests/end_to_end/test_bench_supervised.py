"""A sample of the campaign of supervised runs: its verdict follows from what happened."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasdc.common.errors import ConfigError
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.launch.command import NODE_MODULE
from megasdc.ops.supervise.goodput import PARTS
from megasdc.ops.supervise.journal import FOLDER, Journal, JournalEntry
from tools.bench.commands import app
from tools.bench.supervised.campaign import _plan, _truthful_end
from tools.bench.supervised.drill import Drill, Excluded, Strike, Tried, excluded, used_again, used_up
from tools.bench.supervised.faults import CONDITIONS, FULL_S, KINDS
from tools.bench.supervised.options import SupervisedOptions
from tools.bench.supervised.target import RUN_BYTES, SshTarget, _own_file_system
from tools.bench.supervised.verdict import SupervisedResult
from tools.clock import clock_library
from tools.slurm_hosts import slurm_unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]


def attempt(number: int, planned_at: float, ended: str, resumed: int | None, source: str = "", **parts: float) -> Tried:
    """One on two hosts, after which the run was started again."""
    whole = {**dict.fromkeys(PARTS, 0.0), **parts}
    return Tried(number, ("a", "b"), planned_at, resumed, 9, ended, "", "start again", whole, 0.0, source)


LOST = attempt(1, 100.0, "rank_lost", 0, starting=5.0, productive=10.0, detecting=2.0, deciding=1.0)
NOTHING = attempt(2, 118.0, "launch", None, starting=4.0, deciding=2.0)
DONE = attempt(3, 124.0, "done", 8, "memory", starting=6.0, loading=1.0, productive=20.0)
RIGHT = Drill(("rank",), (1, 1, 2), (Strike("rank", 115.5),), (LOST, NOTHING, DONE), (), (), 60.0)


def test_one_run_that_is_not_right_decides() -> None:
    """Whatever its problem is; all rows count it."""
    drills = [RIGHT, replace(RIGHT, problems=("losses differ in 1 steps, the first is 7",))]
    result = SupervisedResult("here", SupervisedOptions(), drills)  # type: ignore[arg-type]
    assert not result.passed and replace(result, drills=drills[:1]).passed
    assert list(result.report())[-1] == "run 1, 1x1x2, rank: losses differ in 1 steps, the first is 7"


def test_times_of_a_recovery_follow_from_the_attempts() -> None:
    """From the end of each to the next first step; attempts without one count; a fault belongs to what it met."""
    first, second = RIGHT.recoveries
    assert (LOST.ended_at, first.seconds, second.seconds) == (117.0, 1 + 6 + 7, 2 + 7)
    assert first.parts["lost attempts"] == 6 and second.parts["loading"] == 1
    assert RIGHT.struck(RIGHT.strikes[0]) is LOST
    assert RIGHT.struck(Strike("rank", 117.5)) is NOTHING, "it came between two attempts"
    assert RIGHT.struck(Strike("rank", 200.0)) is None


def test_hosts_are_away_until_they_have_passed() -> None:
    """Or to the end; a spare that fails its test is away from then on."""
    entries = [
        ("ended", 10.0, {"diagnosis": {"kind": "corrupt_one_of"}}),
        ("decided", 11.0, {"replaced": ["a", "b"]}),
        ("tested", 31.0, {"host": "a", "exit_code": 0}),
        ("tested", 35.0, {"host": "c", "exit_code": 73}),
        ("finished", 71.0, {}),
    ]
    found = excluded([JournalEntry(number, at, kind, fields) for number, (kind, at, fields) in enumerate(entries, 1)])
    assert found == (
        Excluded("a", "corrupt_one_of", 20.0, returned=True),
        Excluded("b", "corrupt_one_of", 60.0, returned=False),
        Excluded("c", "", 36.0, returned=False),
    )


def test_kinds_are_those_that_can_come_about() -> None:
    """All by default; one of the other engine is refused, not left out."""
    drawn, in_jobs = SupervisedOptions().drawn, SupervisedOptions(slurm=True).drawn
    assert {"supervisor", "wrong"} <= set(drawn) and "requeue" not in drawn
    assert {"requeue", "limit", "step", "wrong"} <= set(in_jobs) and "supervisor" not in in_jobs
    with pytest.raises(ConfigError, match="requeue cannot come about without --slurm"):
        SupervisedOptions(kinds="rank,requeue")


def test_conditions_are_kinds_of_their_own() -> None:
    """They are drawn together by one word, from as few to as many a run as is said; none is of a SLURM job."""
    options = SupervisedOptions(drills=40, kinds="conditions", faults=3, fewest=1)
    assert set(options.drawn) == set(CONDITIONS) <= set(SupervisedOptions().drawn)
    planned = _plan(options, random.Random(1))
    assert {len(kinds) for _, kinds, _ in planned} == {1, 2, 3}
    assert {kind for _, kinds, _ in planned for kind in kinds} == set(CONDITIONS)
    with pytest.raises(ConfigError, match="--fewest: 4 is more than --faults 3"):
        SupervisedOptions(faults=3, fewest=4)
    with pytest.raises(ConfigError, match="no_data cannot come about under SLURM"):
        SupervisedOptions(slurm=True, kinds="conditions")


@pytest.mark.parametrize(
    ("code", "unfit", "said", "reason"),
    [
        (71, {"node2", "node3"}, "ERROR: node3: the data differ", "ERROR: node3: the data differ"),
        (71, {"node2", "node3"}, "ERROR: the data differ", ""),
        (71, {"node3"}, "ERROR: node3: the data differ", ""),
        (70, {"node2", "node3"}, "ERROR: node3: the data differ", ""),
        (0, {"node2", "node3"}, "ERROR: node3: the data differ", ""),
    ],
    ids=["right", "no host named", "hosts are left", "another exit code", "no error"],
)
def test_an_end_for_want_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, unfit: set[str], said: str, reason: str
) -> None:
    """It is truthful where too few are left, the exit code is the condition's, and one of its hosts is named."""
    hosts = Cluster(tmp_path / "hosts", 4)
    monkeypatch.setattr(hosts, "is_on", lambda host: True)
    target = SshTarget(hosts, tmp_path, 2, 1, random.Random(1), unfit=unfit)
    (tmp_path / "supervisor.log").write_text(f"INFO: node4 is a spare\n{said}\n")
    assert _truthful_end(target, ["rank", "bad_data"], code) == reason


def test_a_clock_that_is_off(tmp_path: Path) -> None:
    """Programs of a host have its wall clock, whatever they read it by; other clocks, and other hosts, keep theirs."""
    script = "import datetime, time; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    with Cluster(tmp_path / "hosts", 2, {"LD_PRELOAD": str(clock_library(tmp_path))}) as hosts:
        hosts.run("node1", ["sh", "-ec", "echo -3600 >/run/clock_off"])
        found = {}
        for host in hosts.names:
            done = hosts.run(host, [sys.executable, "-c", script])
            wall, date, monotonic = map(float, done.stdout.split())
            assert abs(wall - date) < 5
            found[host] = round((wall - time.time()) / 60), round((monotonic - time.monotonic()) / 60)
        date_s = float(hosts.run("node1", ["date", "+%s"]).stdout)
    assert found == {"node1": (-60, 0), "node2": (0, 0)} and round((date_s - time.time()) / 60) == -60


def test_a_run_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can write for the time that is said, though files are deleted; then all the room is there again."""
    target = SshTarget(Cluster(tmp_path / "hosts", 2), tmp_path, 1, 1, random.Random(1))
    strike, now = KINDS["run_full"].strike, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with _own_file_system(target.run):
        for name in ("kept", "old"):
            (target.run / name).write_bytes(bytes(1 << 20))
        assert strike is not None
        strike(target)
        (target.run / "old").unlink()
        for now[0] in (0.3, FULL_S[0] - 0.1):
            target.undo()
            with pytest.raises(OSError, match="No space left"):
                (target.run / "new").write_bytes(bytes(1))
            (target.run / "new").unlink()
        now[0] = FULL_S[1]
        target.undo()
        (target.run / "new").write_bytes(bytes(RUN_BYTES // 2))
        (target.run / "new").unlink()
    assert not target.back


def test_launchers_of_hosts_are_found(tmp_path: Path) -> None:
    """By the launch, which their command lines have instead of the folder: a fault that finds none strikes nothing."""
    target = SshTarget(Cluster(tmp_path / "hosts", 2), tmp_path, 1, 1, random.Random(1))
    with Journal(target.run / FOLDER, print) as journal:
        journal.write("planned", launch_id="20260102-030405-abcdef")
    program = [sys.executable, "-S", "-c", "import time; time.sleep(60)", NODE_MODULE]
    with (
        subprocess.Popen([*program, "20260102-030405-abcdef"]) as launcher,
        subprocess.Popen([*program, "20260102-030405-fedcba"]) as other,
        subprocess.Popen(["sh", "-c", "sleep 60 && true", NODE_MODULE, "20260102-030405-abcdef"]) as carrier,
    ):
        assert [one.pid for one in target.launchers()] == [launcher.pid]
        strike = KINDS["launcher"].strike
        assert strike is not None
        strike(target)
        assert launcher.wait(10) == -signal.SIGKILL and other.poll() is None
        other.kill()
        carrier.kill()


def test_a_fault_that_is_waited_out_ends_no_attempt() -> None:
    """Beside others an attempt may end for those, but not for want of room, unless one of them met it."""
    full = replace(LOST, ended="folder_full")
    assert not used_up(["run_full"], [DONE]) and not used_up(["run_full", "rank"], [LOST, DONE])
    assert used_up(["run_full"], [LOST, DONE]) == ["attempt 1 ended as rank_lost, for a fault that is waited out"]
    assert used_up(["run_full", "rank"], [full, DONE]) and not used_up([], [LOST, DONE])
    for kind, at, is_excused in (("rank", 101.0, True), ("rank", 118.5, False), ("run_full", 101.0, False)):
        assert bool(used_up(["run_full", "rank"], [full, DONE], [Strike(kind, at)])) is not is_excused


def test_a_host_that_computed_wrong_results_is_not_used_again() -> None:
    """Nor is it in an allocation that was asked for without it; one that was lost may be used again."""

    def entries(*kinds: tuple[str, dict[str, object]]) -> list[JournalEntry]:
        return [JournalEntry(number, 0.0, kind, fields) for number, (kind, fields) in enumerate(kinds, 1)]

    def ended(kind: str) -> list[tuple[str, dict[str, object]]]:
        return [("ended", {"diagnosis": {"kind": kind}}), ("decided", {"replaced": ["a"]})]

    again: tuple[str, dict[str, object]] = ("planned", {"slots": {"a": 1, "b": 1}})
    assert used_again(entries(again, *ended("corrupt_again"), again)) == ["a is used again"]
    assert not used_again(entries(again, *ended("host_lost"), again))
    left: list[tuple[str, dict[str, object]]] = [("left", {"away": ["a"]}), ("hosts", {"slots": {"a": 1, "c": 1}})]
    assert used_again(entries(*left)) == ["a is in a later allocation"]


@pytest.mark.full
@pytest.mark.skipif(slurm_unavailable_reason() is not None, reason=str(slurm_unavailable_reason()))
def test_a_sample_in_a_slurm_job(tmp_path: Path) -> None:
    """Its step is cancelled, and it is requeued: the run ends as without that, and no attempt has failed."""
    log = tmp_path / "log.jsonl"
    options = ["--slurm", "--drills", "1", "--kinds", "step,requeue", "--layouts", "1x1x2"]
    done = CliRunner().invoke(app, ["supervised", *options, "--log", str(log)])
    (line,) = map(json.loads, log.read_text().splitlines()[1:])
    assert not line["problems"] and done.exit_code == 0, (done.output, done.exception)
    kinds = [one["ended"] for one in line["attempts"]]
    assert kinds[-1] == "done" and set(kinds[:-1]) <= {"preempted"}, line


@pytest.mark.full
def test_a_sample(tmp_path: Path) -> None:
    """A rank is killed on real test hosts: the run ends as without that, in two attempts at most."""
    out, log = tmp_path / "out.json", tmp_path / "log.jsonl"
    options = ["--drills", "1", "--faults", "1", "--kinds", "rank", "--layouts", "1x1x2"]
    done = CliRunner().invoke(app, ["supervised", *options, "--log", str(log), "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    (line,) = map(json.loads, log.read_text().splitlines()[1:])
    assert not line["problems"] and done.exit_code == 0
    kinds = [one["ended"] for one in line["attempts"]]
    assert kinds[-1] == "done" and set(kinds[:-1]) <= {"rank_lost"} and len(kinds) <= 2
    parts = [one["parts"] for one in line["attempts"]]
    assert all(tuple(one) == PARTS for one in parts) and parts[-1]["productive"] > 0
    assert sum(sum(one.values()) for one in parts) == pytest.approx(line["seconds"], rel=0.3)
