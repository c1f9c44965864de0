"""All of a supervised run's time is in one of the parts, and in the right one."""

from __future__ import annotations

from typing import Any

import pytest

from megasdc.supervisor.goodput import PARTS, Trained, goodput
from megasdc.supervisor.journal import Entry


def entries(*turns: tuple[str, float, dict[str, Any]]) -> list[Entry]:
    """A journal: kind, time and fields of its entries."""
    return [Entry(number, time, kind, fields) for number, (kind, time, fields) in enumerate(turns, 1)]


def ended(kind: str, *trained: float) -> dict[str, Any]:
    """Fields of the end of an attempt: its diagnosis, and what was reported."""
    names = ("resumed", "began_at", "last", "last_at", "paused_s")
    return {"diagnosis": {"kind": kind}, "trained": dict(zip(names, trained, strict=True)) if trained else None}


LOST = entries(
    ("hosts", 0.0, {}),
    ("opened", 0.0, {}),
    ("planned", 100.0, {}),
    ("started", 100.0, {}),
    ("ended", 170.0, ended("host_lost", 0, 110.0, 20, 154.0, 4.0)),
    ("decided", 170.0, {}),
    ("planned", 175.0, {}),
    ("ended", 185.0, ended("launch")),
    ("tested", 186.0, {}),
    ("planned", 190.0, {}),
    ("ended", 240.0, ended("rank_lost", 15, 200.0, 25, 220.0, 0.0)),
    ("planned", 241.0, {}),
    ("ended", 300.0, ended("done", 10, 250.0, 50, 290.0, 0.0)),
    ("decided", 300.0, {}),
    ("finished", 301.0, {}),
)
"""Twenty steps of two seconds, of which ten are lost; an attempt without a step; ten of two, all lost; forty of one."""


def test_every_second_is_in_one_part() -> None:
    """Steps that are taken again are not productive, whichever attempt it is that goes back behind them."""
    found = goodput(LOST, 1e9)
    assert found is not None and found.attempts == 4
    assert found.parts == pytest.approx(
        {
            "productive": 20.0 + 0.0 + 40.0,
            "recomputed": 20.0 + 20.0,
            "paused": 4.0,
            "starting": 10.0 + 10.0 + 10.0 + 9.0,
            "detecting": 16.0 + 20.0,
            "ending": 10.0,
            "deciding": 5.0 + 5.0 + 1.0 + 1.0,
            "queued": 0.0,
        }
    )
    assert found.wall_s == pytest.approx(301.0 - 100.0) and found.share == pytest.approx(60.0 / 201.0)
    assert tuple(found.parts) == PARTS and str(found).startswith("29.9% of 201 s in 4 attempts: productive 60.0 s")


def test_a_run_that_goes_on_is_counted_until_now() -> None:
    """What its attempt has reported, and what has passed since."""
    running = entries(("opened", 0.0, {}), ("planned", 10.0, {}))
    found = goodput(running, 30.0, Trained(0, 15.0, 10, 25.0, 0.0))
    assert found is not None and found.wall_s == pytest.approx(20.0) and found.parts["productive"] == 10.0
    first = goodput(running, 30.0)
    assert first is not None and first.parts["starting"] == 20.0
    assert goodput(entries(("opened", 0.0, {})), 30.0) is None


def test_the_time_between_two_jobs_is_queued() -> None:
    """From where the first is left; also while the second waits."""
    turns = [("planned", 0.0, {}), ("ended", 50.0, ended("preempted", 0, 10.0, 20, 40.0, 0.0)), ("left", 51.0, {})]
    waiting = goodput(entries(*turns), 71.0)
    assert waiting is not None and waiting.parts["queued"] == 20.0 and waiting.wall_s == pytest.approx(71.0)
    back = [("planned", 151.0, {}), ("ended", 200.0, ended("done", 20, 160.0, 60, 190.0, 0.0)), ("finished", 200.0, {})]
    found = goodput(entries(*turns, *back), 1e9)
    assert found is not None and found.wall_s == pytest.approx(200.0)
    assert {part: found.parts[part] for part in ("queued", "deciding", "ending", "detecting")} == {
        "queued": 100.0,
        "deciding": 1.0,
        "ending": 20.0,
        "detecting": 0.0,
    }
