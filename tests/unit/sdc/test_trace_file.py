"""Is what was written read back, up to the last whole step, and is anything else refused?"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megasdc.common.addresses import MICRO_BATCH_PHASES, PHASES, Address
from megasdc.common.errors import TraceError
from megasdc.sdc import trace as trace_file
from megasdc.sdc.trace import Trace, TraceWriter, read_folder, read_trace, set_traces_aside, trace_path


def header(**changes: Any) -> dict[str, Any]:
    """A header with every field that has to be alike."""
    alike = {key: 1 for key in trace_file.RECORDED_ALIKE}
    return {**alike, "layout": {"tensor": 1, "pipeline": 1, "data": 1}, **changes}


def step_trace(step: int, value: int = 0) -> Trace:
    """A step whose names differ from those of other steps, with checksums over the whole range."""
    chance = random.Random(step * 1000 + value)
    names = [f"{step * k}.layer.mlp" for k in range(5)]
    addresses = [
        Address(step, None if phase not in MICRO_BATCH_PHASES else 1, phase, fqn, f"slot{step}")
        for phase in PHASES
        for fqn in names[: 1 + step]
    ]
    checksums = [chance.getrandbits(64) for _ in addresses]
    checksums[:2] = [0, 2**64 - 1]
    return Trace(list(dict.fromkeys(addresses)), checksums[: len(dict.fromkeys(addresses))])


def write(path: Path, steps: list[int], value: int = 0, **changes: Any) -> list[int]:
    """Write steps and return the size of the file after each."""
    writer = TraceWriter(path, header(**changes))
    sizes = []
    for step in steps:
        writer.append(step_trace(step, value))
        sizes.append(path.stat().st_size)
    writer.close()
    return sizes


def together(*traces: Trace) -> Trace:
    """One trace after the other."""
    whole = Trace()
    for trace in traces:
        whole.extend(trace)
    return whole


def test_round_trip(tmp_path: Path) -> None:
    """Header, addresses with null micro-batches, new names in later steps, and all 64 bits come back."""
    path = tmp_path / "a.trace"
    write(path, [1, 2, 3], host="näme")
    found, trace = read_trace(path)
    assert found == header(host="näme")
    assert trace == together(step_trace(1), step_trace(2), step_trace(3))


@pytest.mark.slow
def test_every_byte_of_a_killed_writer(tmp_path: Path) -> None:
    """Cut off at any byte, a file gives exactly its whole steps; without the first it is refused."""
    path, cut = tmp_path / "a.trace", tmp_path / "b.trace"
    sizes = write(path, [1, 2, 3])
    content = path.read_bytes()
    assert len(content) == sizes[-1]
    for length in range(len(content) + 1):
        cut.write_bytes(content[:length])
        whole = sum(length >= size for size in sizes)
        if whole:
            assert read_trace(cut)[1] == together(*map(step_trace, range(1, whole + 1)))
        else:
            with pytest.raises(TraceError, match="beginning is missing"):
                read_trace(cut)


def test_one_changed_bit_anywhere_is_told(tmp_path: Path) -> None:
    """No changed bit is read as another trace, nor as a shorter one."""
    path, changed = tmp_path / "a.trace", tmp_path / "b.trace"
    write(path, [1, 2])
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        changed.write_bytes(bytes(damaged))
        with pytest.raises(TraceError, match="damaged"):
            read_trace(changed)


@pytest.mark.parametrize("content", [b"", b"step,checksum\n" * 9, b"\0" * 100])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    """What is no trace file is refused by name."""
    path = tmp_path / "a.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.trace"):
        read_trace(path)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the format found and the one that is needed."""
    path = tmp_path / "a.trace"
    monkeypatch.setattr(trace_file, "FORMAT", "megasdc.trace.v0")
    write(path, [1])
    monkeypatch.undo()
    with pytest.raises(TraceError, match=r"megasdc\.trace\.v0.*megasdc\.trace\.v1"):
        read_trace(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]"])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Nested for ever, too: with the name of the file, not a traceback."""
    path = tmp_path / "a.trace"
    with monkeypatch.context() as patched:
        patched.setattr(trace_file.json, "dumps", lambda _: text)
        write(path, [1])
    with pytest.raises(TraceError, match=r"a\.trace: this is not a trace file"):
        read_trace(path)


def test_an_unknown_phase_is_refused(tmp_path: Path) -> None:
    """A phase of another version is not read as one of ours."""
    path = tmp_path / "a.trace"
    writer = TraceWriter(path, header())
    writer.append(Trace([Address(1, 0, "sideways", "loss", "output")], [1]))
    writer.close()
    with pytest.raises(TraceError, match="sideways"):
        read_trace(path)


def test_names_are_written_once(tmp_path: Path) -> None:
    """A step without new names, and one with one, cost their checksums and little else."""
    path = tmp_path / "a.trace"
    chance = random.Random(1)
    names = [chance.randbytes(200).hex() for _ in range(51)]  # compression cannot shorten them much
    writer = TraceWriter(path, header())
    sizes = []
    for step, count in ((1, 50), (2, 50), (3, 51)):
        writer.append(Trace([Address(step, 0, "forward", name, "output") for name in names[:count]], [step] * count))
        sizes.append(path.stat().st_size)
    writer.close()
    assert sizes[0] > 10_000
    assert sizes[1] - sizes[0] < 2500 and sizes[2] - sizes[1] < 3000


def test_a_killed_process_leaves_its_whole_steps(tmp_path: Path) -> None:
    """After SIGKILL everything that ``append`` had returned from is readable."""
    path = tmp_path / "a.trace"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from test_trace_file import *\n"
        "writer = TraceWriter(Path(sys.argv[2]), header())\n"
        "for step in (1, 2, 3): writer.append(step_trace(step))\n"
        "print('written', flush=True); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert read_trace(path)[1] == together(*map(step_trace, (1, 2, 3)))


def test_a_writer_without_steps_leaves_no_file(tmp_path: Path) -> None:
    """A run that ends before its first step leaves the folder as it was."""
    TraceWriter(tmp_path / "a.trace", header()).close()
    assert list(tmp_path.iterdir()) == []


def test_steps_that_were_run_again_count_once(tmp_path: Path) -> None:
    """A resumed run's file takes the place of the steps from its first on."""
    write(trace_path(tmp_path, 0, 1), [1, 2, 3])
    write(trace_path(tmp_path, 0, 3), [3, 4], value=7)
    (trace,) = (trace for _, trace in read_folder(tmp_path).values())
    assert trace == together(step_trace(1), step_trace(2), step_trace(3, 7), step_trace(4, 7))


def test_what_a_run_begun_anew_replaces_is_set_aside(tmp_path: Path) -> None:
    """Later files of an earlier run, and those of ranks that are gone, are renamed and not read; none is lost."""
    for rank, first in ((0, 1), (0, 5), (0, 9), (1, 1), (2, 1), (3, 1)):
        write(trace_path(tmp_path, rank, first), [first])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(set_traces_aside(tmp_path, 0, 2, 5)) == 3
    assert len(set_traces_aside(tmp_path, 1, 2, 5)) == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left & set(before) == {trace_path(tmp_path, 0, 1).name, trace_path(tmp_path, 1, 1).name}
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == sorted(before.values())
    assert set_traces_aside(tmp_path, 0, 2, 5) == []


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    """Ranks of a node whose files are not there are not taken for ranks that agree."""
    write(trace_path(tmp_path, 0, 1), [1], layout={"tensor": 1, "pipeline": 1, "data": 2})
    with pytest.raises(TraceError, match="ranks 0, but the run had 2"):
        read_folder(tmp_path)


def test_files_recorded_otherwise_are_refused(tmp_path: Path) -> None:
    """Parts of a run with different granularity are not one trace; the message names both."""
    write(trace_path(tmp_path, 0, 1), [1], granularity="gemm")
    write(trace_path(tmp_path, 0, 2), [2], granularity="layer")
    with pytest.raises(TraceError, match=r"granularity layer.*gemm"):
        read_folder(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """The message says what would be there."""
    with pytest.raises(TraceError, match="holds no trace"):
        read_folder(tmp_path)


def test_arrow_is_what_is_inside(tmp_path: Path) -> None:
    """Frames aside, the file is one Arrow stream with the documented columns."""
    path = tmp_path / "a.trace"
    write(path, [1, 2])
    table = pa.ipc.open_stream(trace_file._whole_frames(path)).read_all()
    assert table.column_names == ["step", "micro_batch", "phase", "fqn", "slot", "checksum"]
    assert table.num_rows == len(step_trace(1)) + len(step_trace(2))
