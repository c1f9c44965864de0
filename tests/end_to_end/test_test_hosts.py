"""`megasdc test-hosts`: several hosts on one machine for the time of a command, and nothing of them afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(240),
]
MEGASDC = [sys.executable, "-m", "megasdc", "test-hosts"]
WAITS = """
import pathlib, signal, sys, time

def end(number, frame):
    print("stopped by", signal.Signals(number).name, flush=True)
    sys.exit(6)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, end)
pathlib.Path("started").touch()
while True:
    time.sleep(0.05)
"""


def run(*words: str, cwd: Path, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, output and messages of the command; temporary files are made in ``cwd``."""
    argv = [*before, *MEGASDC, *words]
    env = {**os.environ, "TMPDIR": str(cwd)}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout, done.stderr


def processes_of(folder: Path) -> list[int]:
    """Processes with files of a folder on their command lines."""
    lines = {one.pid: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if str(folder) in line]


def test_a_command_has_its_hosts(tmp_path: Path) -> None:
    """It runs on node1 with names and a hostfile, in its folder; logins find megasdc; its exit code; all goes."""
    (tmp_path / "own").mkdir()
    script = """
        hostname; pwd; cat {hostfile}; cmp {hostfile} "$MEGASDC_TEST_HOSTFILE"; echo "$MEGASDC_TEST_HOSTS"
        for host in $MEGASDC_TEST_HOSTS; do
            ssh $host "cd $PWD; echo \\$(hostname) >own/name; megasdc --version" | head -1
        done
        cat own/name
        ssh node2 cat "$PWD/own/name"
        ssh node2 kill 1
        ! ssh -o ConnectTimeout=1 node2 true
        exit 5
    """
    code, out, err = run("3", "--slots", "2", "--private", "own", "--", "sh", "-c", script, cwd=tmp_path)
    lines = out.splitlines()
    versions = [line for line in lines if line.startswith("megasdc ")]
    assert code == 5 and len(versions) == 3 and len(set(versions)) == 1, out + err
    assert [line for line in lines if line not in versions] == [
        *("node1", str(tmp_path), "node1 slots=2", "node2 slots=2", "node3 slots=2", "node1 node2 node3"),
        *("node1", "node2"),
    ], out + err
    assert "megasdc test-hosts: node1, node2, node3; on node1: sh -c" in err
    assert [path.name for path in tmp_path.iterdir()] == ["own"] and not list((tmp_path / "own").iterdir())
    assert not processes_of(tmp_path)


def test_a_folder_keeps_what_hosts_have(tmp_path: Path) -> None:
    """Files at home and in private folders are there the next time; the folder that stood for them is not left."""
    hosts = ("2", "--folder", "kept", "--private", "data", "--")
    code, _, err = run(*hosts, "sh", "-c", "ssh node2 'echo 1 >~/mine; echo 2 >'$PWD/data/mine", cwd=tmp_path)
    assert code == 0, err
    code, out, err = run(*hosts, "sh", "-c", "ls data; ssh node2 'cat ~/mine '$PWD/data/mine", cwd=tmp_path)
    assert (code, out.split()) == (0, ["1", "2"]), err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_power_goes_also_where_something_runs_that_was_started_from_here(tmp_path: Path) -> None:
    """A power cut ends a process that nobody waits for, without waiting itself, and the host starts again."""
    with Cluster(tmp_path, 1) as cluster:
        process = cluster.popen("node1", ["sleep", "1000"])
        cluster.power_off("node1")
        assert process.returncode == -signal.SIGKILL and not cluster.is_on("node1")
        cluster.reboot("node1")
        assert cluster.run("node1", ["hostname"]).stdout == "node1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    """The command gets a stop signal and ends as it likes; of a killed one nothing runs on either."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [*MEGASDC, "2", "--", sys.executable, "-c", WAITS, str(tmp_path)]
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 6)
    assert out == ("" if killed else f"stopped by {number.name}\n")
    while processes_of(tmp_path):
        assert killed and time.monotonic() < end
        time.sleep(0.05)
    assert killed or [path.name for path in tmp_path.iterdir()] == ["started"]


def test_what_it_needs_is_said(tmp_path: Path) -> None:
    """Root, Debian packages, a program that is there, folders that all hosts share, and -- before the command."""
    code, _, err = run("2", "--", "true", cwd=tmp_path, before=("unshare", "--user"))
    assert (code, "need root" in err, 'sudo env "PATH=$PATH"' in err) == (78, True, True), err
    hidden = 'mount --bind /dev/null "$(command -v sshd || echo /usr/sbin/sshd)"; exec "$@"'
    code, _, err = run("2", "--", "true", cwd=tmp_path, before=("unshare", "--mount", "sh", "-ec", hidden, "sh"))
    assert (code, "apt-get install openssh-server\n" in err) == (78, True), err
    code, _, err = run("1", "--", "no_such_program", cwd=tmp_path)
    assert (code, "no_such_program: there is no such program in the PATH of node1" in err) == (78, True), err
    code, _, err = run("1", "--", "true", cwd=Path("/dev/shm"))
    assert (code, "/dev/shm: each host has /dev/shm and /run of its own" in err) == (78, True), err
    code, _, err = run("2", "megasdc", "launch", "--num-ranks", "2", cwd=tmp_path)
    assert code == 2 and "put -- before the command" in err
    assert not list(tmp_path.iterdir())
