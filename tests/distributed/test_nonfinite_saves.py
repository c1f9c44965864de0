"""Does a run whose state becomes NaN keep what it can go on from, call nothing verified that is not, and say so?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, failure_of, prepare_text, train_run, write_config

from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.manifest import read_manifest
from megasdc.checkpoint.verify import list_verified, verify_checkpoint
from megasdc.ops.run_folder.summary import render, summarize_run

pytestmark = pytest.mark.distributed

NAN_ONCE = {"submodule": "2.layer.self_attention.linear_qkv", "slot": "weight.exp_avg", "phase": "optimizer_state"}
NAN_ONCE |= {"kind": "value", "value": "nan", "rank": 0, "steps": [10, 10]}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _config(tmp_path: Path, data: Path, name: str = "run", **changes: Any) -> Path:
    """Thirty steps, a save every four of them, the two newest kept, audits that verify each save."""
    options: dict[str, Any] = {
        "determinism": {"enabled": True},
        "training": {"steps": 30, "eval_interval": 0},
        "checkpoint": {"interval": 4, "keep_last": 2},
        "audit": {"enabled": True, "interval": 5, "verify_checkpoints": True},
    }
    return write_config(tmp_path / f"{name}.json", data, tmp_path / "run", **{**options, **changes})


def test_a_nan_in_the_state_leaves_what_a_run_can_go_on_from(tmp_path: Path, data: Path) -> None:
    """The newest finite checkpoints stay, no later one is verified, the run ends with 74 and names where to go on.

    The next start passes over those with NaN, and ends well.
    """
    results = train_run(_config(tmp_path, data, faults=[NAN_ONCE]), 2)
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    (_, message), _ = results
    assert {code for code, _ in results} == {74}
    assert (list_steps(folder), list_verified(folder)) == ([4, 8, 28, 30], [4, 8])
    assert f"go back to {folder / 'step_00000008'} (verified), with megasdc.checkpoint.resume_at_most=8" in message
    manifests = {step: read_manifest(folder / f"step_{step:08d}") for step in list_steps(folder)}
    assert {step: bool(one.not_finite) for step, one in manifests.items()} == {4: False, 8: False, 28: True, 30: True}
    assert {step: one.finite_step for step, one in manifests.items()} == {4: 4, 8: 8, 28: 10, 30: 10}
    report = verify_checkpoint(folder / "step_00000030")
    assert not report.ok and "its state is not finite" in report.render()
    assert all(one["step"] > 10 for one in events_of(run, "audit", "not_finite"))
    found = failure_of(run)
    assert (found.exit_code, found.verified_checkpoint) == (74, str(folder / "step_00000008"))

    assert train_run(_config(tmp_path, data, "again", faults=[]), 2) == [(0, None)] * 2
    assert [one["step"] for one in events_of(run, "resume", "checkpoint")] == [8]
    passed = {one["step"]: one["reasons"] for one in events_of(run, "skip", "checkpoint")}
    assert set(passed) == {28, 30} and all("not finite" in reason for (reason,) in passed.values())
    assert set(list_verified(folder)) & {28}, "it was saved anew, and is finite"
    summary = summarize_run(run)
    assert [(one.first, one.last) for one in summary.skipped] == [(11, 30)]
    assert "steps 11 to 30" in render(summary)
