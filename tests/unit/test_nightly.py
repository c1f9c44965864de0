"""Slices of the full tests: which come first, what is noted, and that time is kept; pytest itself runs small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import nightly
from tools.nightly import MOST, Ran, in_turn, read_record, run_slice, slices_of, table, write_record

SOURCE = """
import time, pytest
pytestmark = pytest.mark.full
@pytest.mark.parametrize("n", [1, 2])
def test_right(n): pass
class TestSome:
    def test_wrong(self): assert 0
def test_elsewhere(): pytest.skip("needs a GPU")
def test_slow(): time.sleep({seconds})
"""
IDS = ["test_right[1]", "test_right[2]", "TestSome::test_wrong", "test_elsewhere", "test_slow"]


def ran(date: str, **more: object) -> Ran:
    """A slice that has run."""
    return Ran("abc", date, 100.0, 3, **more)  # type: ignore[arg-type]


def test_long_files_are_cut() -> None:
    """All tests are in one slice, each."""
    ids = [f"tests/a.py::test[{number}]" for number in range(MOST + 1)] + ["tests/b.py::test"]
    found = slices_of(ids)
    assert (
        list(found) == ["tests/a.py 1", "tests/a.py 2", "tests/b.py"]
        and [one for part in found.values() for one in part] == ids
    )


def test_the_oldest_come_first(tmp_path: Path) -> None:
    """Before them what never ran or was not finished; the record survives."""
    record = {"old": ran("2026-01-01"), "new": ran("2026-02-01"), "cut": ran("2026-03-01", unfinished=("a::b",))}
    assert in_turn(["new", "old", "cut", "never"], record) == ["never", "cut", "old", "new"]
    assert nightly.expected_s(record["cut"]) > nightly.expected_s(record["old"])
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json") == record and read_record(tmp_path / "none.json") == {}
    assert "never: never ran\ncut: 2026-03-01 on abc: 3 passed, 1 not ended, 100 s" in table(record, ["cut", "never"])


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "workers"), [(0, 2), (60, 1)])
def test_every_outcome_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, workers: int) -> None:
    """Also where the time is over before the last test."""
    (tmp_path / "test_small.py").write_text(SOURCE.format(seconds=seconds))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: x\n")
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "commit", lambda: "abc")
    found = run_slice([f"test_small.py::{one}" for one in IDS], 60.0 if not seconds else 15.0, workers)
    assert found.failed == ("test_small.py::TestSome::test_wrong",)
    assert list(found.skipped) == ["test_small.py::test_elsewhere"]
    assert found.passed == (2 if seconds else 3)
    assert found.unfinished == (("test_small.py::test_slow",) if seconds else ())


def test_what_was_printed_is_read_too() -> None:
    """Where pytest was ended before it wrote its report, with and without workers."""
    printed = (
        "a.py::test[x y] PASSED    [ 50%]\nb.py::test FAILED\nc.py::test SKIPPED (needs a GPU)   [ 70%]\n"
        "[gw1] [ 80%] PASSED d.py::test[1] \n[gw0] [ 90%] FAILED e.py::T::test \nFAILED e.py::T::test - assert 0\n"
        "[gw1] [100%] PASSED \n"
    )
    found = {name: outcome for name, (outcome, _) in nightly._printed_outcomes(printed).items()}
    right = {"a.py::test[x y]": "passed", "b.py::test": "failed", "c.py::test": "skipped", "d.py::test[1]": "passed"}
    assert found == {**right, "e.py::T::test": "failed"}
