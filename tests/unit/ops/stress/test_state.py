"""Is what is known of a host kept whole and bounded, and gone on from only where it fits? Are golden files trusted?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import StorageError, TraceError
from megasdc.ops.stress.golden import GoldenFolder, load_folder, load_products, save_products
from megasdc.ops.stress.run import StressPlan, _goes_on, _Test
from megasdc.ops.stress.state import ALONE, SHOWN, Count, HostState, load_state, save_state

PLAN = {"hosts": ["a"], "only": ["gemm"], "drill": None}
KEY = {"device": "x", "threads": 1}


def said(wrong: int) -> dict[str, object]:
    return {"compared": 10, "wrong": wrong, "findings": [{"what": f"case {place}"} for place in range(wrong)]}


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """All fields return; a host without a file begins with nothing, and one that was lost gets another chance."""
    state = HostState("a", PLAN, 7, KEY, True, 2, golden=["gemm"], checked=3, notes=["n"])
    state.add_results("gemm", 7, 1, said(2))
    state.meetings[ALONE] = Count(5, 1)
    state.products, state.lost = {"0": {"case": 2**64 - 1}}, {"how": "died", "detail": "x"}
    save_state(tmp_path, state)
    state.lost = None
    assert load_state(tmp_path, "a", PLAN) == state
    assert load_state(tmp_path, "b", PLAN) == HostState("b", PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_findings_are_bounded() -> None:
    """However many there are, so many are kept of each test; all are counted."""
    state = HostState("a", PLAN)
    for number in range(1, 101):
        state.add_results("gemm", number, 0, said(10))
    state.add_results("training", 1, 0, said(1))
    assert len(state.findings) == SHOWN + 1 and state.dropped == 1000 - SHOWN
    assert state.tests["gemm"] == Count(1000, 1000)


def test_another_test_cannot_go_on(tmp_path: Path) -> None:
    """A state of another plan or damaged is refused with its file named, and left as it is."""
    save_state(tmp_path, HostState("a", PLAN, 7))
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(TraceError, match=r"a\.json is of a test of"):
        load_state(tmp_path, "a", {**PLAN, "only": ["training"]})
    assert (tmp_path / "a.json").read_bytes() == before
    for damaged in (before[:-20], b"[" * 100_000):
        (tmp_path / "a.json").write_bytes(damaged)
        with pytest.raises(TraceError, match=r"a\.json is damaged"):
            load_state(tmp_path, "a", PLAN)
    with pytest.raises(StorageError, match="choose another --out"):
        save_state(tmp_path / "a.json", HostState("a", PLAN))


def test_golden_checksums_are_for_their_key(tmp_path: Path) -> None:
    """They come back for that key alone; a second recording of the same device takes the first's place."""
    file = save_products(tmp_path, KEY, {"case": 2**64 - 1}, {"host": "h"})
    assert save_products(tmp_path, KEY, {"case": 4}, {"host": "h"}) == file
    other = {**KEY, "threads": 2}
    assert save_products(tmp_path, other, {"case": 5}, {}) != file
    folder = load_folder(tmp_path)
    assert (folder.products_for(KEY), folder.products_for(other), folder.products_for({})) == (
        {"case": 4},
        {"case": 5},
        None,
    )
    assert GoldenFolder().products_for(KEY) is None and folder.training_for(KEY) is None


def test_edited_golden_checksums_are_refused(tmp_path: Path) -> None:
    """A changed value, a truncated file and an empty folder are each told; none is passed over."""
    file = save_products(tmp_path, KEY, {"case": 255}, {})
    text = file.read_text()
    file.write_text(text.replace("00000000000000ff", "00000000000000fe"))
    with pytest.raises(TraceError, match="is not what was written"):
        load_folder(tmp_path)
    file.write_text(text[:-30])
    with pytest.raises(TraceError, match="is damaged"):
        load_products(file)
    file.write_text(json.dumps({"format": "x"}))
    with pytest.raises(TraceError, match="the format is 'x'"):
        load_products(file)
    with pytest.raises(TraceError, match="megasdc stress --record"):
        load_folder(tmp_path / "none")


def test_as_many_rounds_as_were_asked_for() -> None:
    """The last one included; where time decides, at least one."""
    assert [_goes_on(StressPlan(rounds=2), number, 1, 0.0) for number in (1, 2, 3)] == [True, True, False]
    plan = StressPlan(rounds=None, minutes=0.001)
    assert [_goes_on(plan, number, 5, time.monotonic() - 60) for number in (5, 6)] == [True, False]


class Answers:
    """Links to one process that trained: it says what it compared, what was wrong, and its losses."""

    alive = ("a",)

    def __init__(self) -> None:
        self.losses = [3.0, 2.0, 1.0]

    def places(self, hosts: Iterable[str]) -> list[tuple[str, int]]:
        return [(host, 0) for host in hosts]

    def run_tasks(self, tasks: dict[Any, Any], *_: Any, **__: Any) -> dict[Any, Any]:
        wrong = int(self.losses[1] != 2.0)
        told = {**said(wrong), "losses": self.losses, "trace": "t", "key": KEY, "differences": {}}
        return {place: dict(told) for place in tasks}


def test_what_training_found_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of every round, and each finding with the step from which on the loss was another."""
    states, links = {"a": HostState("a", PLAN)}, Answers()
    test = _Test(StressPlan(), states, links)  # type: ignore[arg-type]
    monkeypatch.setattr(test, "_run_tasks", links.run_tasks)
    test._training(1)
    links.losses = [3.0, 2.5, 1.0]
    test._training(2)
    assert states["a"].tests == {"training": Count(20, 1)}
    assert [(one["round"], one["loss_step"]) for one in states["a"].findings] == [(2, 2)]
