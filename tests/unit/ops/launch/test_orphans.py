"""A process is told when the one that started it has gone, however that ended."""

import os
import subprocess
import sys
import time

import pytest

from megasdc.common.run_lock import start_ticks
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, collect, write_done

pytestmark = pytest.mark.timeout(60)

CHILD = """
import os, signal, sys
from megasdc.ops.launch.orphans import follow_input, follow_parent
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"told\\n"), os._exit(0)))
{follow}
os.write(1, b"ready\\n")  # print may be in the middle of its buffer when the signal comes
while True:
    signal.pause()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_killed_parent_is_noticed():
    """SIGKILL leaves the parent no time to say anything."""
    child = CHILD.format(follow="follow_parent()")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.readline() == "told\n"
    parent.stdout.close()


def test_a_parent_that_had_gone_before_is_noticed():
    """A process that finds another parent than it was told of ends at once, with 78."""
    child = CHILD.format(follow="follow_parent(expected=1 << 22)")
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert "which started it, has ended" in done.stderr


def test_a_rank_of_a_launcher_that_has_gone_does_not_start():
    """The ranks' own module looks before it becomes the training script."""
    from megasdc.ops.launch.rank import RankCommand

    word = RankCommand(os.getcwd(), ["/no/script.py"], [], {}, [], {}).encode()
    done = subprocess.run(
        [sys.executable, "-m", "megasdc.ops.launch.rank", "id", word],
        env={**os.environ, NODE_PID_VARIABLE: str(1 << 22)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78, done.stderr
    assert "has ended" in done.stderr


def test_the_end_of_input_is_noticed():
    """What SSH shows on the other host when this side has gone."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(follow="follow_input()")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.stdin.close()
    assert child.stdout.readline() == "told\n"
    assert child.wait(timeout=30) == 0
    child.stdout.close()


def test_a_launcher_of_which_a_thread_still_ends_has_gone():
    """A rank is told of the end of the thread that started it, while its parent is the same until the last one ends."""
    child = """
import os
from megasdc.ops.launch.orphans import launcher_has_gone
os.environ["MEGASDC_NODE_PID"] = str(os.getppid())
print(launcher_has_gone(), flush=True)
input()
print(launcher_has_gone(), flush=True)
"""
    parent = """
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
threading.Thread(target=child.wait).start()
time.sleep(float(sys.argv[2]))
ctypes.CDLL(None).syscall(60, 0)  # exit(2) ends this thread alone
"""
    command = [sys.executable, "-c", parent, child, "0.5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "False\n"
        while start_ticks(process.pid) is not None:
            time.sleep(0.05)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        process.kill()


def test_a_record_tells_that_the_launcher_had_gone(tmp_path, monkeypatch):
    """The rank's own word for the front, which may be on another host."""
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "id")
    for rank, node in enumerate((os.getppid(), 1 << 22)):
        monkeypatch.setenv(NODE_PID_VARIABLE, str(node))
        write_done(tmp_path, rank, 0)
    monkeypatch.delenv(NODE_PID_VARIABLE)  # no launcher of ours started it
    write_done(tmp_path, 2, 0)
    assert [done.launcher_gone for _, done in sorted(collect(tmp_path, "id").done.items())] == [False, True, False]
