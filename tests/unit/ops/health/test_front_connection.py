"""Agents and front know each other by a secret; the front decides once it has heard all hosts; garbage ends nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.common import wire
from megasdc.common.wire import WireError, encode_message
from megasdc.ops.health import agent_process, shared_folder_heartbeat
from megasdc.ops.health.agent import AGENT_FILE, AgentOptions
from megasdc.ops.health.agent_process import AgentProcess
from megasdc.ops.health.front import server as front_server
from megasdc.ops.health.front.address import FrontAddress, Hello, claim_front, front_path
from megasdc.ops.health.front.link import CoordinatorClient
from megasdc.ops.health.front.server import Coordinator, HangMonitor
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.shared_folder_heartbeat import LOST_S, OwnState, SharedFolderHeartbeat


@pytest.fixture
def said() -> list[str]:
    """What the front has told people."""
    return []


@pytest.fixture
def server(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    """A front that waits two seconds for a greeting, and whose command for alerts writes to the file ``alert``."""
    monkeypatch.setattr(wire, "HANDSHAKE_S", 2.0)
    alert = ["dd", f"of={tmp_path / 'alert'}"]
    found = Coordinator("launch-1", "127.0.0.1", tmp_path / "health", said.append, alert)
    yield found
    found.close()


def link(server: Coordinator, node: int = 0, run: str = "r", num_nodes: int = 2) -> CoordinatorClient:
    """Agent of a host."""
    return CoordinatorClient(server.front, Hello(run, node, f"n{node}", num_nodes))


def stuck(rank: int, run: str = "r", phase: Phase = Phase.FORWARD) -> OwnState:
    """State of a host whose only rank does not move."""
    state: dict[str, Any] = {"rank": rank, "host": f"n{rank}", "pp_rank": rank, "tp_rank": 0, "dp_rank": 0, "step": 7}
    state |= {"micro_batch": 0, "phase": int(phase), "stuck_s": 61.0, "process": "running", "groups": {}, "where": ""}
    return OwnState(
        {"run": run, "states": [state], "stacks": {str(rank): {"main": ["a.py:1 f"]}}, "devices": {}, "addresses": []}
    )


def raw_connection(server: Coordinator) -> socket.socket:
    """A connection of somebody."""
    return socket.create_connection((server.front.address, server.front.port), timeout=5)


def wait_for(condition: Any) -> None:
    """Until it holds, at most five seconds."""
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_front_decides_when_all_hosts_are_stuck(server: Coordinator, said: list[str], tmp_path: Path) -> None:
    """Two stages: the second computes, the first waits for it; both hear with which code and message to leave."""
    first, second = link(server, 0), link(server, 1)
    first.exchange()
    assert not first.judges, "the other host has not connected yet"
    second.exchange()
    first.own = stuck(0, phase=Phase.RECEIVE_GRADIENT)
    first.exchange()
    assert first.judges and first.leave is None, "the other host still moves"
    second.own = stuck(1)
    second.exchange()
    first.exchange()
    assert first.leave == second.leave and first.leave is not None and first.leave["exit_code"] == 75
    assert "rank 1 on n1" in first.leave["message"] and said == [f"health: {first.leave['message']}"]
    server.standstill.close()
    text = (tmp_path / "health" / "incidents" / "hang_r.json").read_text()
    assert (tmp_path / "alert").read_text() == text
    incident = json.loads(text)
    assert incident["ranks"] == [1] and incident["waits"]["0"].startswith("waits for rank 1")
    again = link(server, 0, run="s", num_nodes=1)
    again.exchange()
    assert again.judges and again.leave is None, "a run that is started again begins from nothing"
    first.exchange()
    assert not first.judges, "an agent of the start before is told nothing more"


def test_a_host_that_moves_again_is_not_ended(server: Coordinator) -> None:
    """It takes back what it has reported before the other host is stuck, too."""
    first, second = link(server, 0), link(server, 1)
    first.own = stuck(0)
    for one in (first, second):
        one.exchange()
    first.own, second.own = OwnState(), stuck(1)
    for one in (first, second, first):
        one.exchange()
        assert one.leave is None


def test_a_host_that_is_silent_is_told_and_named(
    server: Coordinator, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the other one is stuck, the silent host is the cause, with the exit code of a lost one."""
    first, second = link(server, 0), link(server, 1)
    for one in (first, second):
        one.exchange()
    monkeypatch.setattr(front_server, "LOST_S", 0.3)
    first.own = stuck(0, phase=Phase.RECEIVE_GRADIENT)

    def told() -> bool:
        first.exchange()
        return first.leave is not None

    wait_for(told)
    assert first.leave is not None and first.leave["exit_code"] == 79 and "n1" in first.leave["message"]
    wait_for(lambda: "health: nothing is heard from n1 for 0 s" in said)


def test_a_front_that_stood_still_takes_no_host_for_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped by a signal, with its host or alone: what it did not hear meanwhile does not count."""
    now = [0.0]
    monkeypatch.setattr(front_server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hosts = [Hello("r", node, f"n{node}", 2) for node in (0, 1)]
    messages: list[dict[str, Any]] = [{"stuck": True, "report": stuck(node).report} for node in (0, 1)]
    for both_speak in (True, False):
        front = HangMonitor(tmp_path, lambda text: None)
        for hello in hosts:
            front.greet(hello)
            front.handle_message(hello, {})
        front.check()
        now[0] += 60
        answer = front.handle_message(hosts[0], messages[0])
        assert answer["leave"] is None and not front.silent_s(), "the other may speak"
        if both_speak:
            leave = front.handle_message(hosts[1], messages[1])["leave"]
        else:
            for _ in range(round(LOST_S) + 2):
                now[0] += 1
                front.check()
                leave = front.handle_message(hosts[0], messages[0])["leave"]
        assert leave is not None and leave["exit_code"] == (75 if both_speak else 79)
        front.close()


def test_a_host_whose_agent_has_ended_for_good_is_not_taken_for_lost(
    server: Coordinator, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rank tells front and folder so; when the other host is stuck, nobody is named, and it is not known."""
    run, records = tmp_path / "run", tmp_path / "records"
    for folder in (run / "health", records):
        folder.mkdir(parents=True)
    (records / AGENT_FILE).write_text('{"pid": 1, "started_at": -1}')  # a process that is none
    options = AgentOptions(records, run, 1, (1,), ("n0", "n1"), 60.0, 900.0, 10.0, ())
    monkeypatch.setattr(agent_process, "MAX_RESTARTS", 0)
    monkeypatch.setattr(agent_process, "LOOK_S", 0.0)
    monkeypatch.setattr(front_server, "LOST_S", 0.3)
    first = link(server, 0)
    first.exchange()
    agent = AgentProcess(options, server.front, "r")
    agent.check()
    assert [name for name, _ in agent.news] == ["unwatched"] and "n1: its agent has ended 1 times" in said[0]
    folder_board = SharedFolderHeartbeat(run / "health", "r", 0, 2)
    folder_board.exchange()
    for _ in range(5):
        time.sleep(0.1)
        first.exchange()
    assert folder_board.lost() == [] and folder_board.all_stuck()
    first.own = stuck(0, phase=Phase.RECEIVE_GRADIENT)
    first.exchange()
    assert first.leave is not None and first.leave["exit_code"] == 75
    assert "no sign of life" not in first.leave["message"] and "nothing is known of n1" in first.leave["message"]
    assert not [text for text in said if "nothing is heard" in text]
    agent.close()


def test_a_wrong_secret_is_refused_on_both_sides(server: Coordinator, said: list[str]) -> None:
    """The front tells it once; an agent does not believe a front without the secret, and tries again later."""
    stranger = CoordinatorClient(replace(server.front, secret="00" * 32), Hello("r", 0, "n0", 1))
    with pytest.raises(OSError, match=r"closed|reset"):
        stranger.exchange()
    stranger.exchange()
    assert not stranger.judges and stranger.leave is None, "it waits before it tries again"
    wait_for(lambda: said)
    assert "does not know the secret" in said[0] and server.front.secret not in "".join(said)
    assert server.front.secret not in repr(server.front)


def test_a_false_front_is_not_believed() -> None:
    """Who answers with a proof of another secret has no influence on an agent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        front = FrontAddress("launch-1", "127.0.0.1", listening.getsockname()[1], "11" * 32)
        agent = CoordinatorClient(front, Hello("r", 0, "n0", 1))

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(encode_message({"number": "22"}))
                lines.readline()
                leave = encode_message({"judges": True, "leave": {"exit_code": 0, "message": ""}})
                connection.sendall(encode_message({"proof": "33"}) + leave)
                with contextlib.suppress(ConnectionError):  # the agent has left without reading on
                    lines.read()

        import threading

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WireError, match="does not know the secret"):
            agent.exchange()
        thread.join()
        assert not agent.judges


def framed(content: bytes, version: int = 1, size: int | None = None) -> bytes:
    """What somebody sends as a message."""
    return b"megasdc-message %d %d\n%s" % (version, len(content) if size is None else size, content)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nested": framed(b"[" * 4000 + b"\n"),
    "bytes": framed(b"\xff\x00\n"),
    "no line": b"x" * 10_000,
    "wrong type": framed(b'{"number": 7}\n'),
    "no object": framed(b"[7]\n"),
    "too long": framed(b"", size=1 << 40),
    "another version": framed(b"{}\n", version=2),
    "closed": b"",
    "torn": framed(b'{"numb', size=100),
    "silent": b"megasdc-mess",
}
REASONS = {
    "too long": "a message of 1099511627776 bytes is too long, 4096 are allowed",
    "another version": "a message of version 2, here they have version 1; install the same megasdc on all hosts",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_on_the_port_changes_nothing(server: Coordinator, said: list[str], kind: str) -> None:
    """It is refused and told, and agents are served beside it and after it."""
    garbage = GARBAGE[kind]
    with raw_connection(server) as connection:
        connection.sendall(garbage)
        if not garbage:
            connection.shutdown(socket.SHUT_WR)
        agent = link(server, num_nodes=1)
        agent.exchange()
        assert agent.judges
        wait_for(lambda: said)
    assert said[0].startswith(f"health: refused a connection from 127.0.0.1: {REASONS.get(kind, '')}")
    agent.exchange()
    assert agent.judges


SLOW = """
import socket, sys, time
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("connected", flush=True)
while True:
    time.sleep(0.2)
    for one in connections:
        try:
            one.sendall(b" ")
        except OSError:
            pass
"""
"""A program of somebody who keeps connections open and sends a byte on each now and then."""


@pytest.mark.parametrize("strangers", [64, 200])
def test_slow_strangers_do_not_lock_agents_out(server: Coordinator, said: list[str], strangers: int) -> None:
    """As many as are allowed at a time, or more, each byte of theirs in time: an agent is served at once."""
    command = [sys.executable, "-c", SLOW, str(server.front.port), str(strangers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout is not None and attacker.stdout.readline()
        agent = link(server, num_nodes=1)
        agent.exchange()
        assert agent.judges
        wait_for(lambda: said)
        attacker.kill()
    assert len(said) == 1 and said[0].startswith("health: refused a connection from 127.0.0.1: ")


@pytest.mark.slow
def test_a_stranger_has_one_deadline_for_all_that_it_sends(server: Coordinator, said: list[str]) -> None:
    """A byte now and then does not prolong it."""
    command = [sys.executable, "-c", SLOW, str(server.front.port), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
        wait_for(lambda: said)
        attacker.kill()
    assert "not done within 2 s" in said[0]


def test_a_report_that_is_no_report_is_told_and_left_out(server: Coordinator, said: list[str]) -> None:
    """An agent that knows the secret and sends nonsense: the front judges by the reports that it can read."""
    agent = link(server, num_nodes=1)
    agent.own = OwnState({"run": "r", "states": [{"rank": "x"}], "stacks": {}, "devices": {}, "addresses": []})
    agent.exchange()
    agent.exchange()
    assert agent.judges and agent.leave is None and len(said) == 1 and "cannot be read" in said[0]
    agent, other = link(server, 0, "s"), link(server, 1, "s")
    agent.own, other.own = OwnState({"run": "s", "states": [{"rank": "x"}]}), stuck(1, "s")
    agent.exchange()
    other.exchange()
    assert other.leave is not None, "the other host's is enough"


def test_the_front_is_known_from_a_file_that_is_read_once(tmp_path: Path, server: Coordinator) -> None:
    """Of another launch, damaged, or absent: there is no front."""
    content = json.dumps(vars(server.front))
    for text, launch_id, expected in (
        (content, "launch-1", server.front),
        (content, "launch-2", None),
        (content, None, None),
        (content[:30], "launch-1", None),
    ):
        path = front_path(tmp_path, "launch-1")
        path.write_text(text)
        assert claim_front(tmp_path, launch_id) == expected
        assert path.exists() == (expected is None), "that of another launch stays"
    path.unlink()
    assert claim_front(tmp_path, "launch-1") is None
    assert shared_folder_heartbeat.LOST_S == front_server.LOST_S
