"""Drills of hangs: which ranks they strike, and what is counted where a hang never began."""

from __future__ import annotations

import random
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megasdc.common.errors import ConfigError
from tools.bench.campaign import CampaignLog, Layout
from tools.bench.health.hang_kinds import KINDS, Drill, Strike
from tools.bench.health.hangs import HangResult
from tools.bench.health.options import HangOptions

RIGHT = Drill(Strike("data", (0,), 40), (1, 4, 1), True, "hang/behind", (0,), 3.0, 4.0, (75, 79, 79, 79))
NEVER = replace(RIGHT, happened=False, found="", named=(), seconds=None, codes=(-9,) * 4)


@pytest.mark.parametrize(
    ("layout", "reading"),
    [((1, 4, 1), {0, 3}), ((2, 3, 2), {0, 1, 2, 3, 8, 9, 10, 11}), ((1, 1, 4), {0, 1, 2, 3}), ((1, 2, 1), {0, 1})],
)
def test_only_ranks_that_read_data_are_struck_in_the_loader(layout: Layout, reading: set[int]) -> None:
    """First and last stages read; the other kinds strike every rank."""
    chance = random.Random(1)
    struck = {rank for _ in range(300) for rank in KINDS["data"].draw("data", layout, chance).ranks}
    assert struck == reading
    tensor, pipeline, data = layout
    struck = {rank for _ in range(300) for rank in KINDS["loop"].draw("loop", layout, chance).ranks}
    assert struck == set(range(tensor * pipeline * data))


def test_a_hang_that_never_began_is_an_error_of_the_drill() -> None:
    """The campaign fails and says so, and the drill is neither a miss nor late."""
    result = HangResult({}, HangOptions(drills=2), [RIGHT, NEVER], 0, 0, [])
    assert not result.passed and replace(result, drills=[RIGHT]).passed
    console = Console(width=200, file=StringIO())
    for part in result.report():
        console.print(part, soft_wrap=isinstance(part, str))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1x4x1 Strike(kind='data', ranks=(0,), step=40, phase=''): the drill failed: its hang never began" in text
    (row,) = (line for line in text.splitlines() if "data loader blocks" in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["1", "1", "0", "1"]


def test_a_campaign_that_was_ended_goes_on_from_its_log(tmp_path: Path) -> None:
    """Drills are read back as they were, also those that had to be ended; the log of other options is refused."""
    log, options = tmp_path / "hangs.jsonl", HangOptions(drills=2)
    kept = CampaignLog(log, options, Drill)
    for one in (RIGHT, NEVER):
        kept.add(one)
    assert CampaignLog(log, options, Drill).outcomes == [RIGHT, NEVER]
    with pytest.raises(ConfigError, match="runs of other options"):
        CampaignLog(log, HangOptions(drills=3), Drill)
