"""Agents measure the clocks of hosts over their connection: differences and steps are told, ends get an order."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megasdc.common.origin import HostClock
from megasdc.ops.health.agent import CLOCK_FILE, AgentOptions
from megasdc.ops.health.agent_process import AgentProcess
from megasdc.ops.health.front import clocks
from megasdc.ops.health.front.clocks import (
    ClockMeasurement,
    ClockReading,
    HostClocks,
    describe_differing_dates,
    has_changed,
)


@pytest.mark.parametrize("ahead_s", [sign * s for s in (2.0, 300.0, 7200.0, 259200.0) for sign in (1, -1)])
def test_differences_and_steps_are_told_once(tmp_path: Path, ahead_s: float) -> None:
    """A host's date is ahead or behind, then is set right; small differences and garbage are not told."""
    said: list[str] = []
    front = HostClocks(tmp_path / "clocks.json", said.append)
    agent = ClockMeasurement()
    for second in range(3):  # a round trip of 0.2 s; the front has read its clocks in the middle of it
        answer = {"clock": [1e9 + second, 50.0 + second]}
        sent, received = (ClockReading(1e9 + second + ahead_s + d, 900.0 + second + d) for d in (-0.1, 0.1))
        agent.add_exchange(sent, answer, received)
        front.update("n1", agent.clock)
    assert len(said) == 1 and said[0].startswith(f"clocks: the date of n1 is {abs(ahead_s):,.1f} s ")
    found = front.of_host["n1"]
    assert found.monotonic_s == pytest.approx(850.0) and found.ahead_s == pytest.approx(ahead_s)
    assert found.uncertainty_s == pytest.approx(0.1)
    assert len(describe_differing_dates(tmp_path)) == 1
    agent.add_exchange(ClockReading(1e9 + 2.9, 902.9), {"clock": [1e9 + 3, 53.0]}, ClockReading(1e9 + 3.1, 903.1))
    front.update("n1", agent.clock)
    assert said[1:] == [f"clocks: the date of n1 was set by {-ahead_s:+.1f} s: it is that of the launch's front again"]
    assert describe_differing_dates(tmp_path) == []
    for garbage in (None, 3, {}, {**asdict(found), "ahead_s": "x"}, {**asdict(found), "at": float("nan")}):
        front.update("n1", garbage)
    front.update("n2", asdict(HostClock("b", 0.0, 0.5, 0.001, 0.0)))
    assert len(said) == 2


def test_a_step_of_the_own_date_is_no_step_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front's date is set by an hour: that is told, and not that all hosts have been set back."""
    said: list[str] = []
    front = HostClocks(tmp_path / "clocks.json", said.append)
    front.update("n1", asdict(HostClock("b", 0.0, 0.0, 0.001, 0.0)))
    last = front._last
    monkeypatch.setattr(
        clocks.ClockReading, "now", classmethod(lambda cls: cls(last.date + 3601.0, last.monotonic + 1.0))
    )
    front.check_own_date()
    front.update("n1", asdict(HostClock("b", 0.0, -3600.0, 0.001, 0.0)))
    assert said == ["clocks: the date of this host, where the launch was started, was set by +3600.0 s"]


def test_what_an_agent_has_left_is_told_once_until_it_changes(tmp_path: Path) -> None:
    """The rank beside it takes the measurement of its host, and the next one only where that says something new."""
    options = AgentOptions(tmp_path, tmp_path, 0, (0,), ("n1",), 1.0, 1.0, 1.0, ())
    process = AgentProcess(options, None, "r")
    first = {"boot_id": "b", "monotonic_s": 0.0, "ahead_s": 20.0, "uncertainty_s": 0.4, "at": 1.0}
    sharper, jumped = {**first, "uncertainty_s": 0.1}, {**first, "uncertainty_s": 0.1, "ahead_s": -7200.0}
    assert not has_changed(first, {**first, "at": 9.0}) and has_changed(first, sharper) and has_changed(sharper, jumped)
    for left in (first, first, jumped):
        (tmp_path / CLOCK_FILE).write_text(json.dumps(left))
        process._look_at = 0.0
        process.check()
    assert list(process.clocks) == [first, jumped]
