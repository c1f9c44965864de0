"""What does not count as a hang: time in which the whole host stood still, and a rank that moves while it is asked."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megasdc.common.host import started_at
from megasdc.ops.health import shared_folder_heartbeat, watched
from megasdc.ops.health.limits import PhaseLimits
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.record import HeartbeatWriter, WatchedIdentity
from megasdc.ops.health.shared_folder_heartbeat import OwnState, SharedFolderHeartbeat
from megasdc.ops.health.watched import WatchedRanks

SHORT = PhaseLimits(0.2, 0.2, 1.0, {})


@pytest.fixture
def record(tmp_path: Path) -> HeartbeatWriter:
    """Record of a rank, in this process, that is in its forward pass and gives no answers."""
    own = WatchedIdentity("run", 0, 0, 1, 0, 0, 0, "n0", 0, os.getpid(), started_at(os.getpid()))
    writer = HeartbeatWriter(tmp_path, own)
    writer.enter(Phase.FORWARD, 9, 0)
    return writer


def test_time_in_which_the_host_stood_still_does_not_count(tmp_path: Path, record: HeartbeatWriter) -> None:
    """A rank that is stuck by the clock is not, until its limit has passed once more."""
    ranks = WatchedRanks(tmp_path, [0])
    time.sleep(0.3)
    assert ranks.are_stuck(SHORT)
    ranks.count_from_now()
    assert not ranks.are_stuck(SHORT) and ranks.stuck_s < 0.2
    time.sleep(0.3)
    assert ranks.are_stuck(SHORT)


@pytest.mark.slow
def test_a_rank_that_moves_while_it_is_asked_is_not_reported(
    tmp_path: Path, record: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was slow; one that does not move is reported, with the phase in which it is."""
    monkeypatch.setattr(watched, "ANSWER_S", 0.5)
    ranks = WatchedRanks(tmp_path, [0])
    mover = threading.Timer(0.1, record.enter, (Phase.BACKWARD, 9, 0))
    mover.start()
    assert ranks.report(SHORT) is None
    mover.join()
    report = ranks.report(SHORT)
    assert report is not None and report["states"][0]["phase"] == Phase.BACKWARD


def test_other_hosts_are_not_read_while_the_front_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their signs are looked at again once it does no more."""
    monkeypatch.setattr(shared_folder_heartbeat, "SIGN_S", 0.0)
    first, second = (SharedFolderHeartbeat(tmp_path, "r", node, 2) for node in range(2))
    second.exchange()
    first.is_read = False
    first.exchange()
    assert not first.answers
    first.is_read, first.own = True, OwnState({"run": "r"})
    first.exchange()
    assert first.answers and not first.all_stuck(), "the other one moves"
