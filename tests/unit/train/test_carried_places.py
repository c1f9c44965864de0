"""Are the counters of a checkpoint carried over, also from one of an earlier version?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.common.errors import CheckpointError
from megasdc.data.position import Position
from megasdc.engine.hooks import RunProgress
from megasdc.train.resume import restore_counters


def test_places_that_an_earlier_version_saved_are_believed_and_told() -> None:
    """Samples that were given up are counted from its places; from then on they have to follow."""
    told: list[Any] = []
    events = SimpleNamespace(emit=lambda *name, **fields: told.append((*name, fields)))
    run: Any = SimpleNamespace(dims=SimpleNamespace(rank=0), events=events, progress=RunProgress(10))
    order = Position().order.to_json()
    loader = {"dp_size": 2, "order": order, "consumed": {"0": 8, "1": 6}, "again": {"0": [], "1": []}}
    state: dict[str, Any] = {"step": 3, "tokens": 96, "samples": 12, "skipped_steps": 0, "loader": loader}
    state["config"] = {"megasdc": {"data": {}}}
    restore_counters(run, state)
    assert (run.progress.step, run.progress.samples, run.progress.uncounted_samples) == (3, 12, 2)
    assert told == [("resume", "place_not_known", {"step": 3, "samples": 12, "uncounted": 2})]
    restore_counters(run, {**state, "uncounted_samples": 0})
    assert run.progress.uncounted_samples == 0 and len(told) == 1
    with pytest.raises(CheckpointError, match="does not hold the places"):
        restore_counters(run, {**state, "loader": {}})
