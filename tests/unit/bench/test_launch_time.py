"""Parts of the time from the launcher's command to the first step."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import psutil
import pytest

from megasdc.common.host import started_at
from megasdc.train.process import StartClock
from megasdc.train.report import StartReport
from tools.bench.training.launch_time import slowest_start


def test_slowest_rank_counts():
    """The rank that was last to its first step is the one reported, and the parts add up from the command to it."""
    fast = {"process_started_boot_s": 102.0, "phases": {"imports": 3.0, "first_step": 1.0}}
    slow = {"process_started_boot_s": 101.5, "phases": {"imports": 4.0, "first_step": 1.5}}
    found = slowest_start(100.0, [fast, slow])
    assert found == {"launcher": 1.5, "imports": 4.0, "first_step": 1.5}
    assert next(iter(found)) == "launcher" and sum(found.values()) == 7.0


def test_process_start_is_known():
    """The process's age by our reading of /proc agrees with psutil's, to psutil's rounding of the boot time."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started_at(os.getpid())
    assert age == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.5)


def test_phases_add_up_and_are_written_once():
    """The marks divide the time since the process's start without a gap; the event comes after the first step only."""
    written = []
    run = SimpleNamespace(
        events=SimpleNamespace(emit=lambda kind, name, **fields: written.append((kind, name, fields)))
    )
    clock = StartClock(time.monotonic())
    clock.mark("imports")
    hook = StartReport(clock)
    for step in (5, 6):
        hook.after_step(run, SimpleNamespace(step=step))
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    ((kind, name, fields),) = written
    assert (kind, name, fields["step"], list(fields["phases"])) == ("start", "phases", 5, ["imports", "first_step"])
    assert now - sum(fields["phases"].values()) == pytest.approx(fields["process_started_boot_s"], abs=0.5)
