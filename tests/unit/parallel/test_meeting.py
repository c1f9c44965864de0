"""Ranks of one launch meet within a time limit; those of another launch are refused and leave no trace."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from test_local_ranks import listening

from megasdc.common.errors import HangError, LaunchError, as_known_error
from megasdc.parallel import rendezvous
from megasdc.parallel.local_ranks import LocalMeeting, free_port
from megasdc.parallel.rendezvous import (
    MEETING_NAME_VARIABLE,
    MEETING_VARIABLE,
    AskedRanks,
    Identity,
    differing_properties,
    folder_store,
    join_store,
    meet,
)

FIRST = Identity(0, 2, "launch-a", None, "runs/a", "node1", "boot pid:[1]", "0", (100, 5000))
STRANGER = replace(FIRST, launch="launch-b", run_dir="runs/b", parent=(200, 6000))


@pytest.fixture(autouse=True)
def port(monkeypatch):
    """Where the ranks of a test, which are threads of this process, meet."""
    found = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(found))
    return found


def test_a_stranger_is_refused_and_leaves_no_trace(port):
    """Both ranks of a second launch end with both launches' names and the port; the first one meets undisturbed."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, FIRST, 20.0)
        while not first.running():
            time.sleep(0.01)
        time.sleep(0.2)
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use by launch launch-a") as taken:
            join_store(STRANGER, 20.0)
        assert "runs/a" in str(taken.value) and "--master_port" in str(taken.value)
        with pytest.raises(LaunchError, match=f"another launch uses port {port}") as refused:
            meet(replace(STRANGER, rank=1), 20.0)
        assert "launch-a" in str(refused.value) and "launch-b" in str(refused.value)
        plain = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        assert plain.num_keys() == 1  # what rank 0 wrote; torch itself leaves none without wait_for_workers
        second = meet(replace(FIRST, rank=1), 20.0)
        first.result().set("a", "1")
        assert second.get("a") == b"1"


def test_ranks_without_a_secret_are_told(caplog, port):
    """Once, by rank 0, with what helps; nobody can reach them from another host, where they are all on one."""
    with ThreadPoolExecutor() as pool:
        stores = [one.result() for one in [pool.submit(meet, replace(FIRST, rank=rank), 20.0) for rank in (0, 1)]]
    (said,) = [one for one in caplog.messages if "not authenticated" in one]
    assert f"port {port} of 127.0.0.1" in said and "megasdc launch" in said and "security.md" in said
    assert f"0100007F:{port:04X}" in listening(os.getpid())
    del stores


def test_a_rank_number_is_taken_once():
    """A launch started twice under one id: who comes second is refused, and both are named."""
    store = join_store(FIRST, 20.0)
    again = replace(FIRST, rank=1, host="node2", processes="other boot", parent=(7, 7))
    join_store(replace(FIRST, rank=1), 20.0)
    with pytest.raises(LaunchError, match=r"rank 1 has connected to port .* twice") as refused:
        join_store(again, 20.0)
    assert "node1" in str(refused.value) and "node2" in str(refused.value)
    del store


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_time():
    """One rank of three stays away: the others give up together, with its number."""
    three = [replace(FIRST, rank=rank, world_size=3) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        waiting = [pool.submit(meet, three[rank], 3.0) for rank in (0, 2)]
        for future in waiting:
            with pytest.raises(HangError):
                future.result()
        assert 2.5 < time.monotonic() - began < 15.0
        assert "rank 1 did not connect" in str(waiting[0].exception())


@pytest.mark.slow
def test_ranks_meet_in_a_folder_and_some_of_them_again(monkeypatch):
    """On one host without a port; those that go on without others are a launch of their own; who is absent is named."""
    meeting = LocalMeeting()
    monkeypatch.setenv("MEGASDC_MEETING", str(meeting.folder))
    monkeypatch.delenv("MASTER_PORT")
    three = [replace(FIRST, rank=rank, world_size=3) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        stores = [one.result() for one in [pool.submit(meet, rank, 20.0) for rank in three]]
        stores[0].set("a", "1")
        assert stores[2].get("a") == b"1"
        monkeypatch.setenv("MEGASDC_MEETING_NAME", "/again")
        again = [pool.submit(meet, replace(rank, world_size=2), 20.0) for rank in three[:2]]
        assert not any(one.result().check(["a"]) for one in again)
        monkeypatch.setenv("MEGASDC_MEETING_NAME", "/third")
        for rank in (0, 2):
            with pytest.raises(HangError, match=f"did not connect to {meeting.folder}"):
                meet(three[rank], 1.0)


@pytest.mark.slow
def test_a_timeout_of_the_folders_store_is_a_hang():
    """As is one of torch's own store."""
    meeting = LocalMeeting()
    store = folder_store(meeting.folder)
    store.set_timeout(timedelta(seconds=0.1))
    for wait in (lambda: store.get("x"), lambda: store.wait(["x"])):
        with pytest.raises(RuntimeError) as error:
            wait()
        assert isinstance(as_known_error(error.value), HangError)


@pytest.mark.slow
@pytest.mark.parametrize("listening", [False, True])
def test_without_rank_0_the_others_give_up_in_time(port, listening):
    """Nobody listens, or somebody who never answers, towards whom torch itself waits for ever."""
    with socket.socket() as silent:
        if listening:
            silent.bind(("", port))
            silent.listen()
        with pytest.raises(HangError, match=f"rank 1 found no rank 0 of a megasdc run at port {port}"):
            meet(replace(FIRST, rank=1), 1.0)


@pytest.mark.slow
def test_another_program_on_the_port_is_told(port):
    """Rank 0 cannot listen and says so, also where the other program is silent."""
    with socket.socket() as silent:
        silent.bind(("", port))
        silent.listen()
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use by another program"):
            meet(FIRST, 60.0)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (replace(FIRST, rank=1), []),
        (replace(FIRST, rank=1, host="node2", processes="other", node="1", parent=(9, 9)), []),
        (replace(FIRST, launch=None), ["launch id"]),
        (replace(FIRST, world_size=3), ["number of ranks"]),
        (replace(FIRST, run_dir="runs/b"), ["run folder"]),
        (replace(FIRST, run_dir=None), []),
        (replace(FIRST, job="slurm 7.1"), []),
        (replace(FIRST, parent=(100, 5001)), ["launcher process"]),  # the same process id, given again
        (replace(FIRST, parent=(101, 5000), node="1"), []),  # two launchers on one host, for two parts of a launch
    ],
)
def test_what_tells_launches_apart(other, found):
    """Ranks of one launch may differ in host, number and launcher of another node, in nothing else."""
    assert differing_properties(FIRST, other) == differing_properties(other, FIRST) == found


def test_scheduler_step_tells_launches_apart():
    """Two steps of a SLURM job are two launches."""
    one, other = (Identity.own(0, 1, None, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step}) for step in "12")
    assert differing_properties(one, other) == ["scheduler's job step"]
    assert Identity.decode(one.encode()) == one


@pytest.mark.parametrize("in_folder", [True, False])
def test_all_ranks_agree_whether_they_leave(tmp_path, monkeypatch, in_folder):
    """Though one goes on between the looks of two others, and however often each asks: the first to decide does."""
    if in_folder:
        tmp_path.chmod(0o700)
        monkeypatch.setenv(MEETING_VARIABLE, str(tmp_path))
    held = join_store(FIRST, 20.0)
    a, b, c = (AskedRanks(rank, 3) for rank in range(3))
    assert [one.record_request() for one in (a, a, b, a)] == [False] * 4
    assert c.record_request() and not a.go_on() and b.record_request()
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        list(pool.map(lambda one: one.settle(20.0), (a, b, c)))
    assert time.monotonic() - began < 10.0, "each knows that all know"
    monkeypatch.setenv(MEETING_NAME_VARIABLE, "/later")
    a, b = (AskedRanks(rank, 2) for rank in range(2))
    assert not a.record_request() and a.go_on() and not b.record_request() and not a.record_request()
    del held


@pytest.mark.parametrize("silent", [True, False])
def test_a_rank_goes_on_where_no_store_answers(monkeypatch, port, silent):
    """The rank that holds it has gone, or is stopped: it is asked for seconds, and this one's first step finds out."""
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.2)
    alone, began = AskedRanks(1, 2), time.monotonic()
    with socket.create_server(("127.0.0.1", port)) if silent else nullcontext():
        assert not alone.record_request() and alone.go_on()
        alone.settle(5.0)
    assert time.monotonic() - began < 20.0
    assert AskedRanks(0, 1).record_request(), "it is all there are"
