"""The ranks of a host: time between a signal and their end, and how they have ended by themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megasdc.common import host
from megasdc.common.host import MemoryKill
from megasdc.ops.launch.records import parse_records

PROGRAM = """
import signal, subprocess, sys, time
from megasdc.ops.launch.node import PatientStop
rank = "import signal, time; signal.signal(15, lambda *_: (time.sleep({save_s}), open('saved', 'w'), exit(0)));"
child = subprocess.Popen([sys.executable, "-c", rank + "print('ready', flush=True); time.sleep(60)"])
PatientStop({grace_s}).register(signal.SIGTERM, lambda *_: sys.exit(1))
print('registered', flush=True)
time.sleep(60)
"""


ENDED = """
import contextlib, os, psutil, subprocess, sys, time
from pathlib import Path
from megasdc.ops.launch import node
from megasdc.ops.launch.node import PatientStop, Ranks
from megasdc.common.host import MemoryWatch
node.records_folder = lambda *_: Path("records")
ranks = Ranks(MemoryWatch())
node.LOGS, os.environ[node.NODE_PID_VARIABLE] = "logs", str(os.getpid())
aborted = '''
import os, sys
from megasdc.ops.launch.own_lines import native_lines_to_log
assert native_lines_to_log(".", 1)
print("a rank prints", file=sys.stderr)
os.write(2, b"[2026-11-30 07:30:47,697] [WARNING] of DeepSpeed\\\\nnative code gives up\\\\n")
os.kill(os.getpid(), 11)
'''
programs = ["exit(79)", aborted, "import time; time.sleep(60)"]
found = [
    ranks.start([sys.executable, "-c", one], env={{**os.environ, "RANK": str(rank)}})
    for rank, one in enumerate(programs)
]
while any(psutil.Process(one.pid).status() != "zombie" for one in found[:2]):
    time.sleep(0.05)
{look}
for one in found:
    with contextlib.suppress(psutil.Error):  # as launch.py
        ranks.end(one.pid)
"""
STOPPED = "PatientStop(1, ranks.report_failed)._stop(15, None, lambda *_: None)"


@pytest.mark.parametrize("look", ["found[0].poll()", STOPPED], ids=["its peer was seen first", "stopped meanwhile"])
def test_a_rank_that_a_signal_has_ended_is_told_of(tmp_path: Path, look: str) -> None:
    """Whatever the launcher sees first, its peer that has lost it or the stop that follows; not who is ended.

    What native code has said in the rank is told once, by the launcher of its host.
    """
    program = [sys.executable, "-c", ENDED.format(look=look)]
    done = subprocess.run(program, check=True, cwd=tmp_path, timeout=60, stderr=subprocess.PIPE, text=True)
    records = parse_records({one.name: one.read_text() for one in (tmp_path / "records").iterdir()})
    assert {rank: one.exit_code for rank, one in records.ended.items()} == {0: 79, 1: -11}
    host = socket.gethostname()
    assert done.stderr.splitlines() == [
        "a rank prints",
        f"{host}: rank 1 said last: native code gives up",
        f"{host}: rank 1 ended with exit code -11 (a process was ended by SIGSEGV); the others of this host are ended"
        " too",
    ]
    assert records.ended[1].time <= records.ended[0].time, "which explains the other"


@pytest.mark.slow
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


TERMINAL_GONE = """
import os, sys
from pathlib import Path
from megasdc.ops.launch import node
node.records_folder = lambda *_: Path("records")
class Watch:
    of = all_run = lambda *_: None
ranks = node.Ranks(Watch())
ranks.start([sys.executable, "-c", "exit(79)"], env={**os.environ, "RANK": "0"}).wait()
read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
ranks.report_failed()
"""


def test_a_failed_rank_is_written_down_where_nobody_can_be_told(tmp_path: Path) -> None:
    """The terminal of its launch has gone."""
    subprocess.run([sys.executable, "-c", TERMINAL_GONE], check=True, cwd=tmp_path, timeout=60)
    records = parse_records({one.name: one.read_text() for one in (tmp_path / "records").iterdir()})
    assert records.ended[0].exit_code == 79


LEFT = """
import json, os, psutil, sys, time
from megasdc.ops.launch import node
os.environ[node.NODE_PID_VARIABLE] = str(os.getpid())
class Watch:
    def of(self, pid, own):
        print(json.dumps(sorted(own)), flush=True)
program = '''
import os, signal, time
if (worker := os.fork()) == 0:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1), os.dup2(1, 2)
    {session}
    time.sleep(60)
print(worker, flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
'''
ranks = node.Ranks(Watch())
one = ranks.start([sys.executable, "-c", program], env={{**os.environ, "RANK": "0"}})
while psutil.Process(one.pid).status() != "zombie":
    time.sleep(0.05)
ranks.report_failed()
"""


@pytest.mark.parametrize("session", ["pass", "os.setsid()"])
def test_workers_that_a_killed_rank_has_left_are_no_other_programs(session: str) -> None:
    """They have another parent by then, and those of a data loader live on for seconds, with what the rank had."""
    program = [sys.executable, "-c", LEFT.format(session=session)]
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    worker, own = map(json.loads, done.stdout.splitlines()[-2:])
    try:
        assert worker in own
    finally:
        os.kill(worker, signal.SIGKILL)


FAILS = """
import os, subprocess, sys, time
from megasdc.ops.launch import node
looks = []
class Watch:
    def of(self, pid, own):
        raise RuntimeError("made up")
    def all_run(self):
        looks.append(1)
ranks = node.Ranks(Watch())
programs = ["import time; time.sleep(60)", "import os, time; time.sleep(2); os.kill(os.getpid(), 9)"]
found = [
    ranks.start([sys.executable, "-c", one], env={**os.environ, "RANK": str(rank)})
    for rank, one in enumerate(programs)
]
while found[1].poll() is None:
    found[0].poll()
    time.sleep(0.05)
assert looks, "nobody has seen that all run"
looks.clear()
time.sleep(1.1)
assert found[0].poll() is None and not looks, "not all run any more"
try:
    ranks.end(found[0].pid)
except RuntimeError:
    found[0].wait(timeout=30)  # else it would raise
    print("ended")
"""


@pytest.mark.slow
def test_other_ranks_are_ended_whatever_the_question_after_memory_meets() -> None:
    """And the kernel's count is taken as known only while all ranks run."""
    done = subprocess.run([sys.executable, "-c", FAILS], stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "ended"


SMALL = """
import json, os, psutil, sys, time
from pathlib import Path
from megasdc.ops.launch import node
from megasdc.common.host import MemoryWatch
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
node.records_folder = lambda *_: Path("records")
ranks = node.Ranks(MemoryWatch())
one = ranks.start([sys.executable, "-c", sys.argv[2]], env={**os.environ, "RANK": "0"})
while psutil.Process(one.pid).status() != "zombie":
    time.sleep(0.05)
ranks.report_failed()
"""
LIMIT = 200_000_000
ALONE = "import os; x = b'x' * {count} or os.kill(os.getpid(), 9)"
POOL = """
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from megasdc.ops.launch import records
def work():
    return len(b"x" * {count}) or os.kill(os.getpid(), 9)
records.records_dir = lambda *_: Path("records")
os.environ[records.LAUNCH_ID_VARIABLE] = "x"
try:
    with ProcessPoolExecutor(1) as pool:
        pool.submit(work).result()
except Exception as error:
    records.write_done("x", 0, 1, error)
    os._exit(1)
"""


@pytest.fixture
def small_cgroup(tmp_path: Path) -> Iterator[Path]:
    """A real memory cgroup below this process's own, with a limit; skipped where this user may make none."""
    for folder, is_second in host._folders(host.PROC, host.CGROUPS):
        own = folder / f"megasdc-test-{tmp_path.name}-{os.getpid()}"
        try:
            own.mkdir()
        except OSError:
            continue
        try:
            (own / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(str(LIMIT))
            yield own
            return
        except OSError:
            continue
        finally:
            own.rmdir()
    pytest.skip("this user may make no memory cgroup with a limit")


@pytest.mark.slow
@pytest.mark.parametrize(("program", "code"), [(ALONE, -9), (POOL, 1)], ids=["itself", "its worker"])
def test_a_rank_that_the_kernel_has_killed_for_memory_is_told_of(
    small_cgroup: Path, tmp_path: Path, program: str, code: int
) -> None:
    """In a real memory cgroup, with its numbers, as one whose worker was; what others have killed there is not."""
    for count in (400_000_000, 0):
        command = [sys.executable, "-c", SMALL, str(small_cgroup), program.format(count=count)]
        subprocess.run(command, check=True, cwd=tmp_path, timeout=100)
        records = parse_records({one.name: one.read_text() for one in (tmp_path / "records").iterdir()})
        found = records.ended[0]
        assert found.exit_code == code
        if not count:
            assert found.memory is None
            continue
        kill = MemoryKill(**(found.memory or {}))  # type: ignore[arg-type]
        assert LIMIT - 4096 <= kill.total <= LIMIT and kill.others < LIMIT // 4 and kill.before < LIMIT
