"""The parts of an agent keep their memory and files bounded, and what grows is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.bench.health import week
from tools.bench.health.week import Growth, measure_growth


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grow", "count"),
    [
        (week.journal_growth, 1200),
        (week.telemetry_growth, 3000),
        (week.straggler_growth, 1200),
        (week.link_growth, 300),
        (week.duration_growth, 1000),
    ],
)
def test_nothing_grows(grow: Callable[[Path, int], Growth], count: int, tmp_path: Path) -> None:
    """After half of the time there is as much as in the end; the whole week is the benchmark's."""
    found = grow(tmp_path, count)
    assert found.passed, found
    assert not found.file_limit_bytes or found.file_bytes > 0, "its file was looked at"


@pytest.mark.slow
def test_the_journal_and_the_speeds_stay_below_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that would be several times as large as their limits are cut."""
    monkeypatch.setattr("megasdc.ops.health.agent.MAX_LINES_BYTES", 20_000)
    monkeypatch.setattr("megasdc.ops.health.slow.report.LARGEST_BYTES", 2_000)
    assert 20_000 < week.journal_growth(tmp_path, 1200).file_bytes < 22_000
    assert 2_000 < week.straggler_growth(tmp_path, 1200).file_bytes < 2_400


def test_what_grows_is_seen() -> None:
    """A part that keeps a number for each call fails, as does a file above its limit."""

    def keeps_all() -> week.Step:
        kept: list[float] = []
        return lambda number: kept.append(number + 0.5)

    assert not measure_growth("all kept", 4000, keeps_all).passed
    assert not Growth("file", 1, 0, 0, 2, 1).passed
