"""Samples of the benchmarks of saves and restarts: they run, and their verdicts follow from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.bench.checkpoints.restore import COLD, WARM, Rate, parts_of
from tools.bench.checkpoints.stall import _worst, stall_of
from tools.bench.checkpoints.stall_clock import Moved
from tools.bench.checkpoints.stall_rank import ASYNC, MEMORY, OTHER, QUIET, SYNC, RankStall, StallStep
from tools.bench.commands import app
from tools.bench.small.gpt import SmallGpt

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.mark.full  # writers have idle priority: beside other tests they hardly come to their turn
def test_a_sample_of_stalls(tmp_path: Path) -> None:
    """Each kind of save was made and timed, and quiet steps and those beside something lie between them."""
    out, small = tmp_path / "out.json", ["--sequence", "16", "--micro-batches", "2", "--rounds", "1"]
    done = CliRunner().invoke(app, ["save-stall", "--sizes", "32x1", "--ranks", "1", *small, "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    (found,) = json.loads(out.read_text())["stalls"]
    assert len(found["sync_s"]) == len(found["async_s"]) == len(found["duration_s"]) == 1
    assert all(seconds > 0 for seconds in (*found["sync_s"], *found["async_s"], *found["parts_s"].values()))
    assert all(wait < stall < whole for wait, stall, whole in zip(*(found[n] for n in TIMES), strict=True))
    assert found["quiet_s"]["count"] >= 2 and found["memory"]["count"] >= 1
    assert {one["saver"] for one in found["copies"]} == {one["saver"] for one in found["stores"]} == {ASYNC, MEMORY}
    assert done.exit_code == int(not found["passed"])


TIMES = ("waits_s", "async_s", "duration_s")


def steps(stall: float = 0.002, wait: float = 0.001, beside: float = 1.0, memory: float = 1.01) -> RankStall:
    """A rank whose quiet steps take a second, and a save that waits another one."""
    half = {ASYNC: stall / 2, "async/wait": 0.0, "async/capture": stall / 4}
    found = [
        StallStep(QUIET, "", 1.0, {}),
        StallStep(QUIET, SYNC, 2.0, {SYNC: 1.0}),
        StallStep(OTHER, "", 7.0, {}),
        StallStep(QUIET, ASYNC, 1.0 + stall / 2, half),
        StallStep(OTHER, "", 1.0 + stall / 2, {ASYNC: stall / 2, "async/wait": wait}),
        StallStep(OTHER, "", 7.0, {}),
        StallStep(QUIET, MEMORY, 1.0, {MEMORY: 0.001}),
        StallStep(MEMORY, MEMORY, memory, {MEMORY: 0.001}),
    ]
    times = [
        (0, 0.0, 1.0),
        (1, 10.0, 11.0),
        (1, 20.0, 21.0),
        (1, 30.0, 30.0 + beside),
        (1, 31.5, 34.0),
        (1, 40.0, 41.0),
    ]
    copies, stores = [Moved(ASYNC, 20.0, 100, 1.0)], [Moved(ASYNC, 29.0, 100, 3.0)]
    return RankStall(0, found, times, copies, stores, 0)


def test_each_bar_of_a_stall_fails_alone() -> None:
    """A long stall, a long rest, a slow step beside the writer or in memory, and a snapshot that was skipped."""
    gpt = SmallGpt()
    good = stall_of(gpt, steps(), 1)
    assert good.passed and good.verdicts == dict.fromkeys(("ratio", "rest", "copy", "beside", "memory"), True)
    assert good.ratio == pytest.approx(0.002) and good.rest == pytest.approx(0.001)
    for number, bad in {
        "ratio": steps(stall=0.06, wait=0.06),
        "rest": steps(stall=0.02),
        "beside": steps(beside=1.05),
        "memory": steps(memory=1.04),
    }.items():
        assert [name for name, met in stall_of(gpt, bad, 1).verdicts.items() if met is False] == [number]
    assert not stall_of(gpt, replace(steps(), skipped=1), 1).passed
    assert stall_of(gpt, steps(memory=1.04), 2).verdicts["memory"] is None
    both = [replace(stall_of(gpt, steps(stall=stall), 2), rank=rank) for rank, stall in enumerate((0.002, 0.004))]
    assert _worst(both).rank == _worst(both[::-1]).rank == 1, "of several ranks the one that stands still longest"


def test_a_sample_of_the_rate(tmp_path: Path) -> None:
    """Engines were restored from both places, and each part took its time."""
    out = tmp_path / "out.json"
    small = ["--sizes", "32x1", "--blocks", "2", "--restarts", "0", "--folder", str(tmp_path)]
    done = CliRunner().invoke(app, ["restore", *small, "--out", str(out)])
    assert out.exists(), (done.output, done.exception)
    found = json.loads(out.read_text())
    assert [one["place"] for one in found["rates"]] == [WARM, COLD]
    for one in found["rates"]:
        assert len(one["read_s"]) == len(one["parts_s"]) == 2 and one["size_bytes"] > 0
        assert all(0 < parts["verify"] < parts["find"] and parts["load"] > 0 for parts in one["parts_s"])
    assert done.exit_code == int(not found["passed"])


def test_the_rate_has_a_bar_from_the_disk_alone() -> None:
    """A restore that takes 1.2 times as long as reading passes, one that takes 1.3 times as long does not."""
    for place, load, passed in ((COLD, 0.2, True), (COLD, 0.3, False), (WARM, 0.3, True)):
        assert Rate((32, 1), place, 100, [1.0] * 3, [{"find": 1.0, "load": load}] * 3).passed is passed


def test_parts_of_a_restart_add_up() -> None:
    """What a resume does besides its known parts is a part of its own."""
    phases = {"imports": 4.0, "resume": 3.0, "first_step": 1.0}
    found = parts_of(0.5, phases, {"load into the engine": 2.0})
    assert sum(found.values()) == pytest.approx(8.5) and found["other of the resume"] == pytest.approx(1.0)
    assert list(found) == ["process", "imports", "load into the engine", "other of the resume", "first_step"]
