"""The end of a conversion: nobody of DeepSpeed's process group writes any more when it returns."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Killed processes stay in their group until somebody waits for them; this program adopts them and takes its time.
PROGRAM = """
import ctypes, os, subprocess, sys, threading, time
from megasdc.interchange.convert import _end_group

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
code = "import subprocess, sys, time; subprocess.Popen(['sleep', '100']); print('up', flush=True); time.sleep(100)"
leader = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
)
leader.stdout.readline()
workers = [int(pid) for pid in open(f"/proc/{leader.pid}/task/{leader.pid}/children").read().split()]
gone = threading.Event()

def reap():
    time.sleep(1.0)
    gone.set()
    os.waitpid(workers[0], 0)

threading.Thread(target=reap).start()
_end_group(leader)
print("waited" if gone.is_set() else "left early", leader.returncode)
"""


@pytest.mark.slow
def test_killed_workers_are_waited_for() -> None:
    """A worker that takes a while to die holds the end up, so that what it wrote can be removed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split("\n")[0] == "waited -9", done.stderr
