"""The campaign of recoveries: every kind with layouts that have its hosts, and checks that see what is wrong."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.common.errors import ConfigError
from megasdc.events import EventLog
from tools.bench.campaign import CampaignLog
from tools.bench.checkpoints.options import RecoveryOptions
from tools.bench.checkpoints.recoveries import RecoveryResult, _hosts_of, _plan
from tools.bench.checkpoints.recovery_checks import End, check_holdings, check_start, resumed_from, why_different
from tools.bench.checkpoints.recovery_faults import FAULTS
from tools.bench.checkpoints.recovery_holdings import Holdings
from tools.bench.checkpoints.recovery_kinds import KINDS, Drill, Resumed, Strike
from tools.bench.checkpoints.recovery_start import Place

OPTIONS = RecoveryOptions()


def test_every_kind_is_drilled_where_it_can_be() -> None:
    """Kinds in turn, each with all layouts that have enough hosts; a kind without one is named."""
    assert FAULTS.keys() == KINDS.keys()
    planned = _plan(OPTIONS, {}, random.Random(1))
    drawn = {name: {layout for layout, one in planned if one.kind == name} for name in KINDS}
    for name, layouts in drawn.items():
        assert layouts == {one for one in OPTIONS.sizes if _hosts_of(one) >= KINDS[name].least_hosts}
    assert len(planned) == OPTIONS.drills
    left_out: dict[str, str] = {}
    assert {one.kind for _, one in _plan(replace(OPTIONS, layouts="1x1x2"), left_out, random.Random(1))} == (
        KINDS.keys() - {"hosts_lost"}
    )
    assert left_out == {"hosts_lost": "it needs a layout with 3 hosts"}


def test_an_unknown_kind_is_refused() -> None:
    """The message has the known ones."""
    with pytest.raises(ConfigError, match="--kinds: 'fire' is none of rank, again"):
        RecoveryOptions(kinds="rank,fire")


def test_another_end_is_seen() -> None:
    """A loss or a part of the last checkpoint that differs or is missing."""
    right = End({1: 0.5, 2: 0.25}, {"a.pt": 1, "step": 2})
    assert why_different(right, right) == []
    assert why_different(End({1: 0.5}, {"a.pt": 3, "step": 2}), right) == [
        "losses differ in 1 steps, the first is 2",
        "a.pt differs at the end",
    ]
    places = End({1: 0.5, 2: 0.25}, {"step": 2}, {1: 4, 2: 8})
    assert why_different(replace(places, places={1: 4, 2: 9}), places) == [
        "places in the data differ in 1 steps, the first is 2"
    ]


def test_a_run_of_other_replicas_is_compared_but_for_rounding() -> None:
    """Its losses, and exactly where it was in the data; not what its last checkpoint holds."""
    right = End({1: 0.5, 2: 0.25}, {"a.pt": 1}, {1: 4, 2: 8})
    near = End({1: 0.5, 2: 0.25 * (1 + 5e-5)}, {"a.pt": 2}, {1: 4, 2: 8})
    assert why_different(near, right, 1e-4) == []
    assert why_different(near, right, 1e-5) == ["losses differ in 1 steps, the first is 2"]
    assert why_different(replace(near, places={1: 4, 2: 9}), right, 1e-4) != []
    assert why_different(replace(near, losses={1: 0.5}), right, 1e-4) != []


def test_a_start_from_an_older_step_is_seen() -> None:
    """It must be the newest whole one, of memory and disk."""
    assert check_start(Resumed(7, "memory", 1), Holdings(7, 5)) == []
    assert check_start(Resumed(5, "disk", 3), Holdings(7, 5)) != []
    assert check_start(Resumed(9, "memory", 0), Holdings(7, 5)) != []


def _place(folder: Path) -> Place:
    """A run that has told of checkpoints of step 5 on the disk and 7 in memory."""
    place = Place(folder, 2, 1)
    log = EventLog(place.run, 0)
    log.emit("save", "checkpoint", step=5)
    log.emit("resume", "metrics_cut_back", step=5)
    log.close()
    line = {"step": 8, "time": 2e9, "memory/step": 7}
    (place.run / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return place


def test_a_lost_checkpoint_is_seen(tmp_path: Path) -> None:
    """What a run has told must be there, unless the fault destroys it: then the newest besides that must be."""
    place, killed, flipped = _place(tmp_path), KINDS["rank"], KINDS["slot"]
    assert check_holdings(place, killed, Holdings(7, 5), None, 0.0) == []
    assert check_holdings(place, killed, Holdings(0, 5), None, 0.0) != []
    assert check_holdings(place, killed, Holdings(7, 5), Holdings(8, 5), 0.0) != []
    assert check_holdings(place, flipped, Holdings(0, 5), None, 0.0) == []
    assert check_holdings(place, flipped, Holdings(0, 0), None, 0.0) != []
    assert check_holdings(place, flipped, Holdings(3, 0), None, 0.0) != []


def test_the_only_checkpoint_may_be_destroyed(tmp_path: Path) -> None:
    """A run that has told of one alone, in memory, begins anew after a fault in it."""
    place = Place(tmp_path, 2, 1)
    place.run.mkdir()
    line = {"step": 8, "time": 2e9, "memory/step": 7}
    (place.run / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert check_holdings(place, KINDS["slot"], Holdings(0, 0), None, 0.0) == []
    assert check_holdings(place, KINDS["rank"], Holdings(0, 0), None, 0.0) != []


def test_where_a_start_went_on_is_read_from_its_events(tmp_path: Path) -> None:
    """From the disk; of a start that is later than all events nothing is known."""
    place = _place(tmp_path)
    assert resumed_from(place, 0.0, 8) == Resumed(5, "disk", 3)
    assert resumed_from(place, 3e9, 8) is None


def test_the_bar_is_that_all_is_right() -> None:
    """One problem in one drill is a failure; the table counts it."""
    strike = Strike("rank", 1, 0, 9, 0.1, 1)
    right = Drill(strike, (1, 1, 2), (Resumed(8, "memory", 1),), (), 4.0)
    wrong = replace(right, problems=("x differs at the end",))
    assert RecoveryResult({}, None, [right], {}).passed
    result = RecoveryResult({}, None, [right, wrong], {})
    assert not result.passed
    assert [line for line in result.report() if isinstance(line, str)] == [f"1x1x2 {strike}: x differs at the end"]


def test_a_campaign_that_was_ended_goes_on_from_its_log(tmp_path: Path) -> None:
    """A drill is read back as it was."""
    drill = Drill(Strike("rank", 1, 0, 9, 0.25, 3), (1, 1, 2), (Resumed(7, "memory", 1),), ("a line",), 4.5)
    CampaignLog(tmp_path / "log", OPTIONS, Drill).add(drill)
    assert CampaignLog(tmp_path / "log", OPTIONS, Drill).outcomes == [drill]
