"""Exit codes are a protocol: one number, one meaning, for ever."""

import inspect
import mmap
import os
import socket
import subprocess
import sys

import numpy
import pytest
import torch
from torch.distributed import TCPStore

from megasdc.common import errors
from megasdc.common.errors import as_known_error


def all_errors():
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.MegasdcError) and kind is not errors.MegasdcError
    ]


def test_exit_codes_do_not_change():
    """Numbers that scripts and supervisors rely on."""
    assert {kind.__name__: kind.exit_code for kind in all_errors()} == {
        "ConfigError": 70,
        "DataError": 71,
        "CheckpointError": 72,
        "CorruptionError": 73,
        "NonFiniteError": 74,
        "HangError": 75,
        "ExcludedNodeError": 76,
        "StorageError": 77,
        "LaunchError": 78,
        "PeerError": 79,
        "TraceError": 80,
    }


def test_every_error_is_in_the_table_under_its_own_code():
    """The table is complete, and no code is used twice, nor one that has another meaning to the system."""
    codes = [kind.exit_code for kind in all_errors()]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {0, 1, 2, 16, 17} and max(codes) < 128
    assert {kind: code for code, kind in errors.ERRORS_BY_EXIT_CODE.items()} == {
        kind: kind.exit_code for kind in all_errors()
    }


def test_config_error_lists_every_problem():
    """The message counts and lists all problems and names the file; one text is one problem."""
    error = errors.ConfigError(["a.b: wrong.", "c: wrong."], "my file.json")
    assert str(error) == "2 problems in my file.json:\n  - a.b: wrong.\n  - c: wrong."
    assert error.problems == ["a.b: wrong.", "c: wrong."]
    assert str(errors.ConfigError("only one.")) == "1 problem:\n  - only one."


def test_a_config_error_of_another_process_is_not_one_problem_more():
    """Its message, sent as text, makes the same error again: the same problems, the same place, counted once."""
    for error in (errors.ConfigError(["a: x.", "b: y."], "my file.json"), errors.ConfigError("one.")):
        again = errors.ConfigError(str(error))
        assert (str(again), again.problems, again.source) == (str(error), error.problems, error.source)


def test_a_port_in_use_is_named(monkeypatch):
    """A rendezvous on a taken port ends with 78, the port and the remedy, not as if another rank had gone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RuntimeError) as caught:
            TCPStore("127.0.0.1", port, 1, True)
    known = as_known_error(caught.value)
    assert type(known) is errors.LaunchError
    assert f"port {port} on 127.0.0.1 is in use" in str(known)
    assert "--master_port" in str(known)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**53),
        lambda: torch.empty(2**62),
        lambda: torch.empty(2**62, 2**62),
        lambda: bytearray(2**62),
        lambda: numpy.empty(2**53),
        lambda: mmap.mmap(-1, 2**60),
    ],
)
def test_memory_that_cannot_be_had_is_the_configurations(allocate):
    """An allocation that fails ends with 70, what was asked for and the remedy, whichever library asked."""
    with pytest.raises((RuntimeError, MemoryError, OSError)) as caught:
        allocate()
    known = as_known_error(caught.value)
    assert type(known) is errors.ConfigError
    assert (str(caught.value).splitlines() or ["MemoryError"])[0] in str(known)
    assert "micro-batches smaller" in str(known)


def test_a_pipe_in_place_of_a_file_of_the_run_is_storage(tmp_path):
    """A rank that would read or append to it ends with 77 and its path."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    code = "import sys; from megasdc.common.program import refuse_pipes\n"
    code += "from megasdc.common.errors import as_known_error\n"
    code += "refuse_pipes()\nfor mode in ('r', 'a', 'ab+'):\n    try:\n        open(sys.argv[1], mode)\n"
    code += "    except OSError as error:\n        print(as_known_error(error).exit_code, as_known_error(error))\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    told = f"77 {tmp_path}/metrics.jsonl cannot be written or read: it is a pipe, not a file\n"
    assert done.returncode == 0 and done.stdout.endswith(told * 3), done.stderr


def test_a_broken_collective_is_told_without_the_source_of_the_library() -> None:
    """What gloo says, without file, line and advice."""
    raw = (
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8368: Connection reset "
        "by peer. This is typically caused by a remote worker hanging. GLHF!"
    )
    told = "a collective failed because another rank has ended: Read error [127.0.0.1]:8368: Connection reset by peer."
    assert str(as_known_error(RuntimeError(raw))) == told
