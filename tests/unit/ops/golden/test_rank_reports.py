"""Is each rank's end told rightly: whom others waited for, what is not comparable, when those left over are ended?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import ConfigError, HangError, LaunchError, PeerError, TraceError, error_of_rank
from megasdc.ops.golden import verify
from megasdc.ops.golden.result import judge_reports
from megasdc.ops.golden.watched_ranks import RankReport, watch_ranks
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import Golden, save_golden

HEADER = {"layout": {"tensor": 2, "pipeline": 1, "data": 1}, "config": {}}


def _verdicts(*ends: dict[str, Any]) -> list[str]:
    reports = [RankReport("a", rank, 0, rank, **end) for rank, end in enumerate(ends)]
    return [verdict.status for verdict in judge_reports(reports, HEADER).verdicts]


@pytest.mark.parametrize("kind", [TraceError, ConfigError])
def test_what_cannot_be_compared_has_not_died(kind: type) -> None:
    """A rank that ends with the code for traces or configurations is not comparable; its peer is stopped."""
    failed = {"ended": "failed", "code": kind.exit_code, "detail": "why"}
    lost = {"ended": "failed", "code": PeerError.exit_code}
    assert _verdicts(failed, lost) == ["not comparable", "stopped"]


def test_who_waits_for_a_rank_that_ended_has_not_hung() -> None:
    """The only rank that hangs is not named, where another of its cell died, fell silent or failed by itself."""
    hung = {"ended": "hung", "code": 0, "detail": "no progress for 9 s"}
    assert _verdicts(hung, {"ended": "died", "code": -9}) == ["stopped", "died"]
    assert _verdicts(hung, {"ended": "absent"}) == ["stopped", "no answer"]
    assert _verdicts(hung, {"ended": "failed", "code": ConfigError.exit_code}) == ["stopped", "not comparable"]
    assert _verdicts(hung, {"ended": "failed", "code": HangError.exit_code}) == ["hung", "stopped"]


class _Rank:
    """A watched rank that ends in a way, after so many looks at it, or never."""

    def __init__(self, cell: int, ended: str, looks: int | None = 1) -> None:
        self.report = RankReport("a", 0, cell, 0)
        self._ended = ended
        self._looks = looks

    def poll(self) -> bool:
        if self._looks is None:
            return False
        self._looks -= 1
        if self._looks == 0:
            self.report.ended = self._ended
        return self._looks == 0

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("ended", ["failed", "died", "hung"])
def test_nobody_is_waited_for_after_a_failure(ended: str) -> None:
    """Once a rank of a cell has failed in any way, the others of it are ended after a moment; other cells go on."""
    ranks = [_Rank(0, ended), _Rank(0, "done", None), _Rank(1, "done", 9)]
    watch_ranks(ranks, grace_s=0.0)  # type: ignore[arg-type]
    assert [rank.report.ended for rank in ranks] == [ended, "stopped", "done"]


def test_the_error_of_a_rank() -> None:
    """A documented exit code means its class; any other that the rank did not report."""
    assert [error_of_rank(code) for code in (70, 75, 1, -9)] == [ConfigError, HangError, LaunchError, LaunchError]


def test_more_devices_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--local beyond the accelerators of a host is refused with their number."""
    save_golden(tmp_path / "a", Golden({}, {"megasdc": {}}, ParallelDims(1, 1, 1), "xxh3_64.v1", (), 1, {}, {}))
    monkeypatch.setattr(verify, "count_accelerators", lambda: 2)
    with pytest.raises(ConfigError, match="--local 3: this host has 2 devices"):
        verify.verify_here(tmp_path / "a", devices=3)


def test_progress_is_told_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a cell x repeats x cases, from the first look on; null where time decides."""
    monkeypatch.setattr(verify, "load_header", lambda path: {**HEADER, "cases": [1, 2, 3]})
    monkeypatch.setattr(verify, "CellRank", lambda *_: _Rank(0, "done"))
    totals: list[int | None] = []
    for minutes in (None, 1.0):
        verify.verify_here(tmp_path, repeats=5, minutes=minutes, on_progress=lambda done, total: totals.append(total))
    assert totals == [2 * 5 * 3, None]
