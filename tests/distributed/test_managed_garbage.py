"""Does managed garbage collection keep a run's numbers, and collect when it says?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import metrics_of, prepare_text, state_of, train_run, write_config

pytestmark = pytest.mark.distributed


def test_a_managed_run_has_the_same_bits_and_collects_at_its_steps_only(tmp_path: Path) -> None:
    """Losses and weights are those of a run that Python collects for; only every third step stands still for it."""
    data = prepare_text(tmp_path)
    options = {"training__garbage_collection": "managed", "training__garbage_collection_interval": 3}
    for name, changes in (("python", {}), ("managed", options)):
        config = write_config(tmp_path / f"{name}.json", data, tmp_path / name, **changes)
        results = train_run(config, 2)
        assert [code for code, _ in results if code] == [], results
    final = "checkpoints/step_00000006"
    assert state_of(tmp_path / "python" / final) == state_of(tmp_path / "managed" / final)
    assert metrics_of(tmp_path / "python") == metrics_of(tmp_path / "managed")
    rows = [json.loads(line) for line in (tmp_path / "managed" / "metrics.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["time/garbage_collection_s"] for row in rows if "time/garbage_collection_s" in row}
    assert [step for step, value in sorted(seconds.items()) if value > 0] == [3, 6] and len(seconds) == 6
