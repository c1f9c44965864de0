"""A progress record is never read torn, outlives its writer, and counts how long phases took."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasdc.common.errors import StorageError
from megasdc.common.host import started_at
from megasdc.ops.health.agent import AgentOptions
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.record import (
    BUCKETS,
    FIRST_BUCKET_S,
    HeartbeatWriter,
    RecordReader,
    WatchedIdentity,
    bucket_limit_s,
    bucket_of,
    record_path,
)


def identity(rank: int = 0, host: str = "n0") -> WatchedIdentity:
    """Of a rank without parallelism, in this process."""
    return WatchedIdentity("run", rank, rank, 1, 0, 0, 0, host, 0, os.getpid(), started_at(os.getpid()))


def write_until_killed(folder: Path) -> None:
    """Change phases as fast as possible; step, micro-batch and phase of a line belong together."""
    writer = HeartbeatWriter(folder, identity())
    number = 0
    while True:
        number += 1
        writer.enter(Phase(number % 14), number, number % 7, str(number % 1000).encode(), number)


def test_a_record_is_never_torn_and_outlives_a_killed_writer(tmp_path: Path) -> None:
    """Read while another process writes without pause: each line is of one change of phase."""
    writer = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path,), daemon=True)
    writer.start()
    while not record_path(tmp_path, 0).exists():
        time.sleep(0.01)
    reader = RecordReader(record_path(tmp_path, 0))
    while not reader.read().number:
        time.sleep(0.01)
    numbers, until = set(), time.monotonic() + 60
    while len(numbers) < 1000 and time.monotonic() < until:
        for _ in range(50):
            found = reader.read()
            assert (found.step, found.micro_batch, found.phase) == (found.number, found.number % 7, found.number % 14)
            assert (found.group, found.sequence) == (str(found.number % 1000), found.number)
            numbers.add(found.number)
        time.sleep(0.001)  # else a loaded machine lets the writer write only between slices of time
    assert len(numbers) >= 1000, "the writer must have written meanwhile"
    writer.kill()
    writer.join()
    last = reader.read()
    assert last.step == last.number and reader.read() == last


def test_identity_requests_and_durations_come_through(tmp_path: Path) -> None:
    """What the rank writes the agent reads, and the other way round."""
    writer = HeartbeatWriter(tmp_path, identity(3))
    reader = RecordReader(record_path(tmp_path, 3))
    assert reader.identity == identity(3)
    assert reader.read().number == 0 and not writer.must_leave
    writer.enter(Phase.FORWARD, 5, 2)
    time.sleep(0.05)
    assert (reader.read().group, reader.read().sequence) == ("", -1)
    writer.enter(Phase.SAVE, 5, group=b"12345678", sequence=2**40)
    found = reader.read()
    assert (found.number, found.step, found.micro_batch, found.phase) == (2, 5, -1, Phase.SAVE)
    assert (found.group, found.sequence) == ("12345678", 2**40)
    writer.count()
    counts = reader.durations()[Phase.FORWARD]
    assert sum(counts) == 1 and sum(reader.durations()[Phase.START]) == 1
    assert 0.05 <= bucket_limit_s(counts.index(1)) < 0.5
    assert reader.request_stacks() == 1 == writer.asked and reader.answered == 0
    writer.mark_answered(1)
    reader.request_exit()
    assert reader.answered == 1 and writer.must_leave
    reader.close()
    writer.close()


def test_each_duration_is_counted_once(tmp_path: Path) -> None:
    """None is lost; that of the running phase is not known yet; a full count stays."""
    writer = HeartbeatWriter(tmp_path, identity(3))
    reader = RecordReader(record_path(tmp_path, 3))
    passes = (Phase.FORWARD, Phase.SEND_ACTIVATION, Phase.RECEIVE_GRADIENT, Phase.BACKWARD)
    for micro_batch in range(5):
        for phase in passes:
            writer.enter(phase, 1, micro_batch)
        if micro_batch % 2:
            writer.count()
    for _ in range(2):
        writer.enter(Phase.REDUCTION, 1)
    for _ in range(2):
        writer.count()
    counts = {phase: sum(counts) for phase, counts in reader.durations().items() if sum(counts)}
    assert counts == {Phase.START: 1, Phase.REDUCTION: 1, **dict.fromkeys(passes, 5)}
    writer._counts[Phase.REDUCTION * BUCKETS] = 2**32 - 1
    writer.enter(Phase.OPTIMIZER, 1)
    writer.count()
    assert reader.durations()[Phase.REDUCTION][0] == 2**32 - 1
    reader.close()
    writer.close()


def test_a_phase_that_was_taken_for_stuck_is_not_counted(tmp_path: Path) -> None:
    """Else the next standstill would be noticed ten times later; those before and after it count."""
    writer = HeartbeatWriter(tmp_path, identity(3))
    reader = RecordReader(record_path(tmp_path, 3))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        writer.enter(phase, 1)
    writer.mark_answered(reader.request_stacks())
    for phase in (Phase.REDUCTION, Phase.OPTIMIZER):
        writer.enter(phase, 1)
    writer.count()
    counted = {phase for phase, counts in reader.durations().items() if sum(counts)}
    assert counted == {Phase.START, Phase.FORWARD, Phase.REDUCTION}
    reader.close()
    writer.close()


def test_buckets_grow_by_the_root_of_two() -> None:
    """A duration is at most its bucket's limit and above that of the one before; the last takes all that is longer."""
    for index in range(BUCKETS - 1):
        limit = bucket_limit_s(index)
        assert limit == pytest.approx(FIRST_BUCKET_S * 2 ** (index / 2))
        assert bucket_of(limit * 0.999) == index and bucket_of(limit * 1.001) == index + 1
    assert bucket_of(1e9) == BUCKETS - 1


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    """A truncated file, one without identity, one whose lines are damaged, an identity that does not fit."""
    HeartbeatWriter(tmp_path, identity()).close()
    path = record_path(tmp_path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="1,000 bytes, not 4,096"):
        RecordReader(path)
    path.write_bytes(b"garbage".ljust(4096, b"\0"))
    with pytest.raises(ValueError, match="no progress record"):
        RecordReader(path)
    damaged = bytearray(whole)
    damaged[1072:1080] = (7).to_bytes(8, "little")
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        RecordReader(path).read()
    with pytest.raises(StorageError, match="1024 fit"):
        HeartbeatWriter(tmp_path, identity(host="x" * 2000))


def test_a_record_that_is_cut_off_while_it_is_read_is_told(tmp_path: Path) -> None:
    """The agent sees an error, and goes on: nothing kills it."""
    writer, path = HeartbeatWriter(tmp_path, identity()), record_path(tmp_path, 0)
    reader = RecordReader(path)
    writer.enter(Phase.FORWARD, 5)
    writer.close()
    assert reader.read().step == 5
    os.truncate(path, 1100)
    for read in (reader.read, reader.durations, reader.request_stacks):
        with pytest.raises(ValueError, match="1,100 bytes, not 4,096"):
            read()
    assert reader.answered == 0
    reader.request_exit()
    reader.close()


def test_an_agent_that_cannot_read_a_record_tells_who_starts_it(tmp_path: Path) -> None:
    """It ends with an error before it detaches."""
    record_path(tmp_path, 0).write_bytes(b"garbage")
    settings = (60.0, 900.0, 10.0, ())
    options = AgentOptions(tmp_path, tmp_path, 0, (0,), ("n0",), *settings)
    command = [sys.executable, "-m", "megasdc.ops.health.agent", options.encode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is no progress record: 7 bytes" in done.stderr
