"""Does the page of a run that was really trained show it, whole and cut short?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from whole_runs import events_of, metrics_of, prepare_text, train_run, write_config

from megasdc.cli import app

pytestmark = pytest.mark.distributed


def report(*arguments: object) -> dict[str, Any]:
    """What the real command says as JSON."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_trained_runs_are_shown(tmp_path: Path) -> None:
    """Steps, losses and counts of a harmed run; beside the healthy one the increase, and where their losses part."""
    data = prepare_text(tmp_path)
    folders = [tmp_path / "healthy", tmp_path / "harmed"]
    harm = [{"submodule": "*.mlp.linear_fc1", "phase": "forward", "rank": 1, "kind": "scale", "factor": 30.0}]
    for folder, faults in zip(folders, ([], harm), strict=True):
        config = write_config(tmp_path / f"{folder.name}.json", data, folder, faults=faults, checkpoint__interval=2)
        assert [code for code, _ in train_run(config, 2)] == [0, 0]
    found = report(folders[1])
    rows = [[row["train/loss"] for row in metrics_of(folder) if "train/loss" in row] for folder in folders]
    assert (found["state"], found["step"], found["loss"]) == ("done", 6, rows[1][-1])
    assert found["marks"]["fault injected"] == len(events_of(folders[1], "fault", "injected")) > 0
    assert found["marks"]["save"] == 3
    page = Path(found["page"]).read_text()
    assert "tensor 1, pipeline 1, data 2" in page
    assert "torch 2." in page, "the start tells versions"
    compared = report(*folders, "--out", tmp_path / "page.html")
    _, harmed = compared["runs"]
    assert harmed["increase"] == pytest.approx(rows[1][-1] / rows[0][-1] - 1)
    first = next(step for step, pair in enumerate(zip(*rows, strict=True), 1) if pair[0] != pair[1])
    assert harmed["first_difference_at_step"] == first
    assert "parameters" in compared["figures"], "both keep checkpoints"
