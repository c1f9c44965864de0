"""A rank that is asked to stop while it starts ends soon, also where its main thread is in native code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasdc.parallel.local_ranks import free_port
from megasdc.parallel.rendezvous import MEETING_VARIABLE

pytestmark = pytest.mark.timeout(60)
PROGRAM = """
import ctypes, os, sys, time
from megasdc.train import signals
def leave(code, error):
    print("left", type(error).__name__, flush=True)
    os._exit(code)
stop = signals.StopSignals(leave)
signals.STUCK_S, signals.POLL_S = 0.8, 0.2
mutex = ctypes.create_string_buffer(64)
if {met}:
    stop.start.met()
if {closed}:
    stop.start.close()
print("ready", flush=True)
while {stuck}:  # the second lock never returns, whatever signal comes
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
began = time.monotonic()
while not stop.received or time.monotonic() - began < 1.6:
    time.sleep(0.01)
print("received", stop.received, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize(
    ("met", "closed", "stuck", "code", "said"),
    [
        (False, False, True, 0, "left NoneType"),  # nothing to save, nobody counts on it
        (False, False, False, 0, "left NoneType"),
        (True, False, True, 79, "left PeerError"),
        (True, False, False, 0, "received {number}"),  # it goes on and stops at the first step
        (False, True, False, 0, "received {number}"),  # it trains
    ],
)
def test_a_stop_during_the_start(number, met, closed, stuck, code, said):
    """Before the ranks have met it leaves at once; after that where it is stuck, else it remembers the signal."""
    program = PROGRAM.format(met=met, closed=closed, stuck=stuck)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(number)
    assert process.stdout.readline().strip() == said.format(number=int(number))
    assert process.wait(timeout=30) == code
    process.stdout.close()


RANKS = """
import os, sys, time
import torch.distributed as dist
from megasdc.parallel import rendezvous
from megasdc.parallel.rendezvous import Identity
from megasdc.train import signals
def leave(code, error):
    print("left", type(error).__name__, flush=True)
    os._exit(code)
stop = signals.StopSignals(leave)
store = rendezvous.meet(Identity.own(int(os.environ["RANK"]), 2, None), 60.0)
stop.start.met(rendezvous.AskedRanks(int(os.environ["RANK"]), 2))
print("ready", flush=True)
if sys.argv[1] == "waits":
    try:
        store.get("what nobody sets")
    except Exception:  # as a training does where a rank has gone that holds the store
        stop.start.wait_where_all_leave()
        raise
began = time.monotonic()
while not stop.received or time.monotonic() - began < float(sys.argv[1]):
    time.sleep(0.01)
stop.close()
print("received", stop.received, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_folder", [True, False])
@pytest.mark.parametrize("everyone", [True, False])
def test_a_start_that_all_ranks_are_to_stop_is_over(tmp_path: Path, everyone: bool, in_folder: bool) -> None:
    """They leave with success, whatever they do, also where one waits at the store; of one rank it is remembered."""
    (tmp_path / "meeting").mkdir(0o700)
    place = {MEETING_VARIABLE: str(tmp_path / "meeting") if in_folder else ""}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **place}
    what = ("600", "waits") if everyone else ("4", "600")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, what[rank]],
            env={**os.environ, **address, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outs = [one.stdout for one in ranks if one.stdout is not None]
    try:
        assert [out.readline() for out in outs] == ["ready\n"] * 2
        time.sleep(0.2)
        for one in ranks if everyone else ranks[:1]:
            one.send_signal(signal.SIGTERM)
        if everyone:
            assert [(out.readline().strip(), one.wait(30)) for out, one in zip(outs, ranks, strict=True)] == [
                ("left NoneType", 0)
            ] * 2
        else:
            assert (outs[0].readline().strip(), ranks[0].wait(30)) == (f"received {int(signal.SIGTERM)}", 0)
            assert ranks[1].poll() is None
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        for out in outs:
            out.close()


def test_a_second_interrupt_does_not_wait_for_the_step():
    """The first SIGINT is a request to save and end, of a rank that trains the second one ends it at once."""
    program = PROGRAM.format(met=False, closed=True, stuck=False).replace("while not stop.received or", "while True or")
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == -signal.SIGINT and "KeyboardInterrupt" in process.stderr.read()
