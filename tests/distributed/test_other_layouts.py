"""Starts of one run at different layouts, in one folder: each goes on from the newest checkpoint of whatever layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_distributed
from whole_runs import events_of, leave_with_the_code, metrics_of, prepare_text, train_run, write_config

from megasdc.checkpoint.manifest import read_manifest
from megasdc.metrics.writer import read_metrics

pytestmark = pytest.mark.distributed
STEPS = 10
CONVERT = "megasdc.checkpoint.other_layout=convert"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _config(folder: Path, data: Path) -> Path:
    return write_config(
        *(folder / "c.json", data, folder / "run"),
        deepspeed__train_batch_size=12,
        training__steps=STEPS,
        checkpoint={"interval": 3, "keep_last": 0},
    )


def _stream_ends(run: Path) -> list[float]:
    return [row["data/stream_end"] for row in read_metrics(run) if "data/stream_end" in row]


def _losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in metrics_of(run) if "train/loss" in row]


def test_a_run_changes_its_layout_and_returns(tmp_path: Path, data: Path) -> None:
    """Two replicas, then two stages, then three replicas: the same samples each step, and the losses of one layout."""
    straight = tmp_path / "straight"
    straight.mkdir()
    assert train_run(_config(straight, data), 3) == [(0, None)] * 3
    config, run = _config(tmp_path, data), tmp_path / "run"
    fault = 'megasdc.process_faults=[{"kind": "exit", "rank": 1, "steps": [%d, %d], "exit_code": 17}]'
    run_distributed(leave_with_the_code, 2, str(config), fault % (4, 4), init=False, expect_exit={1: 17})
    stages = [CONVERT, "megasdc.parallel.pipeline=2", fault % (8, 8)]
    run_distributed(leave_with_the_code, 2, str(config), *stages, init=False, expect_exit={1: 17})
    assert train_run(config, 3, CONVERT) == [(0, None)] * 3
    found = [(one["step"], one["saved_layout"]) for one in events_of(run, "resume", "other_layout")]
    assert found == [(3, "TP1 x PP1 x DP2"), (6, "TP1 x PP2 x DP1")]
    layouts = [str(read_manifest(path).layout) for path in sorted((run / "checkpoints").glob("step_*"))]
    assert layouts == ["TP1 x PP1 x DP2", "TP1 x PP2 x DP1", "TP1 x PP1 x DP3", "TP1 x PP1 x DP3"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")) == []
    assert _stream_ends(run) == _stream_ends(straight / "run")
    assert _losses(run) == pytest.approx(_losses(straight / "run"), rel=1e-5)
