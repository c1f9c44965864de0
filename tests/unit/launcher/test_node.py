"""Time for the ranks of a host between a signal and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, subprocess, sys, time
from megasdc.launcher.node import PatientStop
rank = "import signal, time; signal.signal(15, lambda *_: (time.sleep({save_s}), open('saved', 'w'), exit(0)));"
child = subprocess.Popen([sys.executable, "-c", rank + "print('ready', flush=True); time.sleep(60)"])
PatientStop({grace_s}).register(signal.SIGTERM, lambda *_: sys.exit(1))
print('registered', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("save_s", "grace_s", "saved"), [(1, 30, True), (30, 0.5, False)])
def test_rank_has_the_grace_to_save(tmp_path: object, number: int, save_s: float, grace_s: float, saved: bool) -> None:
    """A save within the grace is finished, one beyond it is killed, and the launcher ends in both cases."""
    program = PROGRAM.format(save_s=save_s, grace_s=grace_s)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=str(tmp_path))
    assert process.stdout is not None
    # DeepSpeed's import may log to standard output too.
    waited_for = {"ready", "registered"}
    while waited_for:
        line = process.stdout.readline()
        assert line, "the launcher ended before its rank was ready"
        waited_for.discard(line.strip())
    process.send_signal(number)
    assert process.wait(timeout=20) == 1
    process.stdout.close()
    assert os.path.exists(f"{tmp_path}/saved") == saved
