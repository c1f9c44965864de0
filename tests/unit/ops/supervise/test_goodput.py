"""All of a supervised run's time is in one of the parts, and in the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megasdc.ops.supervise.attempt_progress import AttemptProgress
from megasdc.ops.supervise.command import _open
from megasdc.ops.supervise.goodput import PARTS, Goodput, goodput
from megasdc.ops.supervise.history import JournalHistory
from megasdc.ops.supervise.journal import Journal, JournalEntry


def entries(*turns: tuple[str, float, dict[str, Any]]) -> list[JournalEntry]:
    """A journal: kind, time and fields of its entries."""
    return [JournalEntry(number, time, kind, fields) for number, (kind, time, fields) in enumerate(turns, 1)]


def planned(attempt: int, time: float) -> tuple[str, float, dict[str, Any]]:
    """The plan of an attempt on two hosts."""
    return "planned", time, {"attempt": attempt, "slots": {"a": 1, "b": 1}, "launch_id": f"id{attempt}"}


def ended(time: float, kind: str, *trained: float, **seconds: float) -> tuple[str, float, dict[str, Any]]:
    """The end of an attempt: its diagnosis, and what was reported."""
    names = ("resumed", "began_at", "last", "last_at")
    said = dict(zip(names, trained, strict=True)) | seconds if trained else None
    return "ended", time, {"diagnosis": {"kind": kind, "text": f"it was {kind}"}, "trained": said}


def decided(time: float, action: str) -> tuple[str, float, dict[str, Any]]:
    """What follows."""
    return "decided", time, {"action": action}


def parts(found: Goodput | None, wall_s: float) -> dict[str, float]:
    """The parts that are not empty; their sum is the wall time."""
    assert found is not None and tuple(found.parts) == PARTS
    assert found.wall_s == pytest.approx(wall_s) and min(found.parts.values()) >= 0.0
    return {name: seconds for name, seconds in found.parts.items() if seconds}


LOST = entries(
    ("hosts", 0.0, {}),
    ("opened", 0.0, {}),
    planned(1, 100.0),
    ("started", 100.0, {}),
    ended(170.0, "host_lost", 0, 110.0, 20, 154.0, evaluating_s=3.0, saving_s=1.0),
    decided(170.0, "replace hosts"),
    planned(2, 175.0),
    ended(185.0, "launch"),
    ("tested", 186.0, {}),
    planned(3, 190.0),
    ended(240.0, "rank_lost", 15, 200.0, 25, 220.0, loading_s=2.0),
    planned(4, 241.0),
    ended(300.0, "done", 10, 250.0, 50, 295.0, loading_s=4.0, stalled_s=5.0),
    decided(300.0, "finish"),
    ("finished", 301.0, {}),
)
"""Twenty steps of two seconds, of which ten are lost; an attempt without a step; ten of two, all lost; forty of one."""


def test_every_second_is_in_one_part() -> None:
    """Steps that are taken again are not productive, whichever attempt it is that goes back behind them."""
    found = goodput(LOST, 1e9)
    assert parts(found, 301.0 - 100.0) == pytest.approx(
        {
            "productive": 20.0 + 0.0 + 40.0,
            "recomputed": 20.0 + 20.0,
            "evaluating": 3.0,
            "saving": 1.0,
            "stalled": 5.0,
            "starting": 10.0 + 10.0 + (10.0 - 2.0) + (9.0 - 4.0),
            "loading": 2.0 + 4.0,
            "detecting": 16.0 + 20.0,
            "ending": 5.0,
            "deciding": 5.0 + 5.0 + 1.0 + 1.0,
        }
    )
    assert found is not None and found.effective_ratio == pytest.approx(60.0 / 201.0)
    assert str(found).startswith("29.9% of 201 s in 4 attempts: productive 60.0 s, recomputed 40.0 s, evaluating 3.0 s")
    told = [(one.number, one.hosts, one.resumed, one.last, one.ended, one.decided) for one in found.attempts]
    assert told == [
        (1, ("a", "b"), 0, 20, "host_lost", "replace hosts"),
        (2, ("a", "b"), None, None, "launch", ""),
        (3, ("a", "b"), 15, 25, "rank_lost", ""),
        (4, ("a", "b"), 10, 50, "done", "finish"),
    ]
    assert [one.seconds for one in found.attempts] == pytest.approx([75.0, 15.0, 51.0, 60.0])


def test_a_run_that_goes_on_is_counted_until_now() -> None:
    """Since the last line it is productive so far, which is said; a silent one is stalled; then it is being decided."""
    running = entries(("opened", 0.0, {}), planned(1, 10.0))
    trained = AttemptProgress(0, 15.0, 10, 25.0, line_s=1.0)
    found = goodput(running, 30.0, trained)
    assert parts(found, 20.0) == {"productive": 15.0, "starting": 5.0}
    assert found is not None and found.unreported_s == 5.0 and "(5.0 s of the productive ones are not" in str(found)
    assert parts(goodput(running, 145.0, trained), 135.0) == {"productive": 130.0, "starting": 5.0}
    silent = goodput(running, 146.0, trained)
    assert parts(silent, 136.0) == {"productive": 10.0, "stalled": 121.0, "starting": 5.0}
    assert silent is not None and silent.unreported_s == 0.0
    slow = AttemptProgress(0, 15.0, 10, 25.0, line_s=100.0)
    assert parts(goodput(running, 525.0, slow), 515.0) == {"productive": 510.0, "starting": 5.0}
    assert parts(goodput(running, 30.0), 20.0) == {"starting": 20.0}
    failed = [*running, *entries(ended(30.0, "hang", 0, 15.0, 10, 25.0))]
    known = {"productive": 10.0, "starting": 5.0, "detecting": 5.0}
    assert parts(goodput(failed, 37.0), 27.0) == known | {"deciding": 7.0}
    assert goodput(entries(("opened", 0.0, {})), 30.0) is None


TAKEN_OVER = [
    planned(1, 0.0),
    ("started", 1.0, {}),
    ("taken_over", 50.0, {}),
    ("taken_over", 1000.0, {}),
    ended(1002.0, "rank_lost", 0, 10.0, 40, 90.0),
    ("taken_over", 1500.0, {}),
    decided(1501.0, "start again"),
    planned(2, 1506.0),
    ended(1600.0, "done", 40, 1510.0, 80, 1590.0),
    decided(1600.0, "finish"),
    ("finished", 1600.0, {}),
]
"""A supervisor that was killed twice while an attempt ran, which it outlived once, and once before it decided."""


def test_time_without_a_supervisor_is_idle_but_while_the_attempt_ran() -> None:
    """From the end of the front of the attempt; where that was killed too, from the last step that was reported."""
    others = {"productive": 160.0, "starting": 14.0, "ending": 10.0, "deciding": 6.0}
    killed = parts(goodput(entries(*TAKEN_OVER), 1e9), 1600.0)
    assert killed == pytest.approx(others | {"idle": (1000.0 - 90.0) + (1500.0 - 1002.0), "detecting": 2.0})
    known = parts(goodput(entries(*TAKEN_OVER), 1e9, fronts={1: 100.0, 2: 1600.0}), 1600.0)
    assert known == pytest.approx(others | {"idle": (1000.0 - 100.0) + (1500.0 - 1002.0), "detecting": 12.0})
    outlived = entries(*TAKEN_OVER[:3], ended(95.0, "done", 0, 10.0, 40, 90.0), ("finished", 95.0, {}))
    found = parts(goodput(outlived, 1e9, fronts={1: 94.0}), 95.0)
    assert found == {"productive": 80.0, "starting": 10.0, "ending": 5.0}


def test_an_attempt_that_has_ended_unseen_is_idle_until_now() -> None:
    """No supervisor has noted the end of its front."""
    trained = AttemptProgress(0, 10.0, 40, 90.0)
    found = parts(goodput(entries(planned(1, 0.0)), 500.0, trained, {1: 100.0}), 500.0)
    assert found == {"productive": 80.0, "starting": 10.0, "detecting": 10.0, "idle": 400.0}


def test_a_run_that_is_begun_anew_days_later_was_idle() -> None:
    """From its end to the command that goes on with it, also before that has planned anything."""
    again = entries(
        planned(1, 0.0),
        ended(60.0, "input", 0, 10.0, 40, 50.0),
        ("finished", 61.0, {}),
        ("hosts", 1e6, {}),
        ("opened", 1e6, {}),
        planned(2, 1e6 + 2),
        ended(1e6 + 62, "done", 30, 1e6 + 12, 60, 1e6 + 62),
        ("finished", 1e6 + 62, {}),
    )
    assert parts(goodput(again, 2e6), 1e6 + 62) == pytest.approx(
        {
            "productive": 30.0 + 50.0,
            "recomputed": 10.0,
            "starting": 20.0,
            "detecting": 10.0,
            "deciding": 3.0,
            "idle": 1e6 - 61,
        }
    )
    assert parts(goodput(again[:5], 1e6 + 1), 1e6 + 1)["idle"] == 1e6 - 61
    assert "idle" not in parts(goodput(again[:3], 1e6), 61.0), "nobody says that it goes on"


def test_clocks_that_differ_change_no_sum() -> None:
    """What ranks report may lie before the plan and after the end of an attempt, and take more time than there is."""
    wrong = {"loading_s": 1e3, "evaluating_s": 1e3, "saving_s": 1e3, "stalled_s": 1e3}
    for began, last in ((-50.0, 40.0), (10.0, 300.0), (200.0, 100.0), (500.0, 600.0)):
        skewed = entries(
            planned(1, 0.0), ended(60.0, "hang", 0, began, 40, last, **wrong), planned(2, 70.0), ended(80.0, "launch")
        )
        assert sum(parts(goodput(skewed, 80.0), 80.0).values()) == pytest.approx(80.0)


def test_the_time_between_two_jobs_is_queued() -> None:
    """From where the first is left; also while the second waits."""
    turns = [planned(1, 0.0), ended(50.0, "preempted", 0, 10.0, 20, 40.0), ("left", 51.0, {})]
    assert parts(goodput(entries(*turns), 71.0), 71.0)["queued"] == 20.0
    back = [("taken_over", 150.0, {}), planned(2, 151.0), ended(200.0, "done", 20, 160.0, 60, 190.0)]
    found = parts(goodput(entries(*turns, *back, ("finished", 200.0, {})), 1e9), 200.0)
    assert found == {"productive": 60.0, "starting": 19.0, "ending": 20.0, "deciding": 1.0, "queued": 100.0}


def test_a_supervisor_that_goes_on_says_so(tmp_path: Path) -> None:
    """Each that finds a run which is not finished adds an entry, which leaves the run as it was."""
    config, slots = tmp_path / "c.json", {"a": 1, "b": 1}
    for _ in range(3):
        with Journal(tmp_path, print) as journal:
            _open(journal, str(config), slots, 2, [2])
            found = journal.entries
    assert [one.kind for one in found] == ["hosts", "opened", "taken_over", "taken_over"]
    assert JournalHistory.of(found) == JournalHistory.of(found[:2])
    with Journal(tmp_path, print) as journal:
        journal.write("finished", exit_code=0, text="done")
        _open(journal, str(config), slots, 2, [2])
        assert journal.entries[-1].kind == "opened"
