"""What a host may send: messages of this version, bounded, among other lines; and hosts that do not read or end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.wire import HEADER_BYTES, MessageReader, WireError, encode_message
from megasdc.ops.launch import host_process
from megasdc.ops.launch.host_process import HostProcess, exchange
from megasdc.ops.launch.on_host import files
from megasdc.ops.launch.remote import HostModule, Transport
from megasdc.ops.stress import host
from megasdc.ops.stress.result import stress_outcome
from megasdc.ops.stress.run import StressPlan, run_rounds


def framed(content: bytes, version: int = 1, size: int | None = None) -> bytes:
    """What a host sends as a message."""
    return b"megasdc-message %d %d\n%s" % (version, len(content) if size is None else size, content)


SENT = {
    "too long": framed(b"", size=(64 << 20) + 1),
    "another version": framed(b'{"answer": 1}\n', version=2),
    "torn": framed(b'{"answer"', size=100),
    "no object": framed(b"[1]\n"),
}
WHY = {
    "too long": "what it sends is refused: a message of 67108865 bytes is too long, 67108864 are allowed; "
    "see that the host runs the same as others, or exclude it (--exclude h)",
    "another version": "what it sends is refused: a message of version 2, here they have version 1; "
    "install the same megasdc on all hosts; see that the host runs the same as others, or exclude it (--exclude h)",
    "torn": "the check ended with exit code 0: no message; 9 of the 100 bytes of a message have come",
    "no object": "what it sends is refused: no JSON object; "
    "see that the host runs the same as others, or exclude it (--exclude h)",
}


@pytest.mark.parametrize("kind", SENT)
def test_what_a_module_may_not_send_is_named(tmp_path: Path, kind: str) -> None:
    """As of a program."""
    (answer,) = host_that_sends(tmp_path, SENT[kind]).run(["h"], HostModule("a.module"), {}, timeout_s=60)
    assert answer.problem == f"h: {WHY[kind]}"


def host_that_sends(folder: Path, content: bytes) -> Transport:
    """The host h, on which every command sends the same, and reads all that comes."""
    (folder / "sent").write_bytes(content)
    return Transport(True, prefixes={"h": ("sh", "-c", f"cat {folder}/sent; exec cat >{folder}/got", "sh")})


@pytest.mark.parametrize("kind", SENT)
def test_what_a_host_may_not_send_is_named(tmp_path: Path, kind: str) -> None:
    """Host, size, limit and remedy; before what is too long has come."""
    transport = host_that_sends(tmp_path, SENT[kind])
    (answer,) = transport.run(["h"], Path(files.__file__), {"folder": "/"}, timeout_s=60)
    assert answer.problem == f"h: {WHY[kind]}"


@pytest.mark.parametrize("kind", SENT)
def test_a_host_of_a_stress_test_that_sends_it_is_lost(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test ends with 78, and says why this host was not tested."""
    transport = host_that_sends(tmp_path, SENT[kind])
    monkeypatch.setattr("megasdc.ops.stress.run.Transport", lambda *_: transport)
    tested, drilled, interrupted = run_rounds(StressPlan({"h": 1}, remote=True, timeout_s=60))
    result = stress_outcome(tested, None, drilled, interrupted)
    (verdict,) = result.verdicts
    assert (result.exit_code, verdict.status) == (78, "not tested")
    assert WHY[kind].partition(" (--exclude")[0] in verdict.reasons[0].text


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_messages_are_found_among_other_lines(size: int) -> None:
    """However the bytes come; what is no message is kept by its first bytes alone."""
    messages: list[dict[str, Any]] = [{"text": "two\nlines ä"}, {}, {"more": list(range(1000))}]
    noise = [b"Last login: 28 ao\373t\n", b"x" * 5000 + b"\n", b"megasdc-message of the day\n", b"\n"]
    stream = b"".join(one + encode_message(message) for one, message in zip(noise, messages, strict=False))
    stream += b"y" * 100_000
    reader, found = MessageReader(), []
    for start in range(0, len(stream), size):
        found += list(reader.feed(stream[start : start + size]))
    assert found == messages and not reader.unfinished
    assert len(reader._content) <= HEADER_BYTES


def test_a_message_that_is_too_long_is_not_sent() -> None:
    """Its size and the limit are told."""
    text = {"text": "x" * 100}
    size = len(json.dumps(text)) + 1
    assert len(encode_message(text, size)) > size
    with pytest.raises(WireError, match=f"a message of {size} bytes is too long, {size - 1} are allowed"):
        encode_message(text, size - 1)


def test_a_host_that_reads_nothing_keeps_nobody_waiting() -> None:
    """More than its pipe takes is kept here; who waits for an answer has the time limit for that alone."""
    process = started("import time; time.sleep(600)")
    process.send({"task": "x" * (4 << 20)})
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        exchange([process], 0.1)
    assert process.is_open and time.monotonic() - began < 10
    assert process.end(0.0) == -signal.SIGTERM


def test_a_host_of_a_stress_test_that_takes_no_task_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, whatever the size of the task: it has hung."""
    monkeypatch.setattr(host, "GRACE_S", 0.1)
    (tmp_path / "sent").write_bytes(framed(b'{"started": "h", "slots": 1, "processes": 2}\n'))
    prefix = ("sh", "-c", f"cat {tmp_path}/sent; exec sleep 600", "sh")
    links = host.HostLinks({"h": 1}, Transport(True, prefixes={"h": prefix}), 1.0)
    links.start()
    assert links.places(["h"]) == [("h", 0)]
    assert links.run_tasks({("h", 0): {"do": "x" * (4 << 20)}}) == {}
    assert links.lost["h"].how == host.HUNG and not links.alive
    links.close()


def test_a_stress_test_without_ssh_reaches_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    links = host.HostLinks({"h": 1}, Transport(True), 1.0)
    links.start()
    assert links.lost["h"].how == host.UNREACHABLE
    assert links.lost["h"].detail.endswith("install an SSH client on this host")
    links.close()


def test_a_message_from_a_host_that_prints_errors_without_end() -> None:
    """They are read and their end is kept, so that it does not wait for their reader."""
    text = "import sys; sys.stderr.write('e' * (1 << 20) + 'last'); print('\\nmegasdc-message 1 3\\n{}')"
    process = started(text)
    while process.is_open:
        exchange([process], 10)
    assert list(process.received()) == [{}] and process.end(60.0) == 0
    assert process.errors.endswith("last") and len(process.errors) == host_process.ERROR_BYTES


def started(text: str, *arguments: str) -> HostProcess:
    """A Python program."""
    command: Sequence[str] = [sys.executable, "-c", text, *arguments]
    return HostProcess(command)


def test_all_that_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also where it hears nothing; what it has printed until then is known."""
    text = "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    text += "child = subprocess.Popen(['sleep', '600']); print(child.pid, file=sys.stderr, flush=True); time.sleep(600)"
    process = started(text)
    while not process.errors:
        exchange([process], 10)
    assert process.end(0.1) == -signal.SIGKILL
    states = subprocess.run(["ps", "-o", "stat=", "-p", process.errors], capture_output=True, text=True, check=False)
    assert states.stdout.strip()[:1] in ("", "Z")
