"""Is what `trace.details` says of a step what the engine computed, and does it change nothing?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from whole_runs import metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.metrics.writer import read_details

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(1, 1, 2), (2, 2, 4)], ids=["dp2", "tp2 pp2"])
def test_details_add_up_to_the_step(tmp_path: Path, data: Path, tensor: int, pipeline: int, ranks: int) -> None:
    """Samples give the loss, gradients DeepSpeed's norm, weights the norm of parameters; no bit of the run differs."""
    common = {"training__eval_interval": 0, "parallel__tensor": tensor, "parallel__pipeline": pipeline}
    common["trace__enabled"] = True
    found = {}
    for name, details in (("off", False), ("on", True)):
        config = write_config(tmp_path / f"{name}.json", data, tmp_path / name, trace__details=details, **common)
        assert {code for code, _ in train_run(config, ranks)} == {0}
        found[name] = state_of(tmp_path / name / "checkpoints" / "step_00000006"), metrics_of(tmp_path / name)
    assert found["on"] == found["off"]
    assert not (tmp_path / "off" / "details.jsonl").exists()
    details_of, rows = read_details(tmp_path / "on"), {row["step"]: row for row in found["on"][1]}
    assert sorted(details_of) == [1, 2, 3, 4, 5, 6]
    for step, one in details_of.items():
        losses = [loss for sample in one.samples for loss in sample.losses]
        assert len(losses) == 4 and one.loss == pytest.approx(sum(losses) / 4, rel=1e-6)
        assert one.loss == pytest.approx(rows[step]["train/loss"], rel=1e-12)
        assert one.grad_norm == rows[step]["train/grad_norm"]
        gradients = math.sqrt(sum(parameter.gradient_norm**2 for parameter in one.parameters.values()))
        assert gradients == pytest.approx(one.grad_norm, rel=1e-5)
        if step > 1:  # the norm that is logged is after the update of the step before
            weights = math.sqrt(sum(parameter.weight_norm**2 for parameter in one.parameters.values()))
            assert weights == pytest.approx(rows[step - 1]["train/param_norm"], rel=1e-5)
        assert all(parameter.largest_gradient <= parameter.gradient_norm for parameter in one.parameters.values())
        rate = rows[step]["train/learning_rate"]
        assert all((parameter.update_norm > 0) == (rate > 0) for parameter in one.parameters.values())
        assert all((parameter.moment_norm > 0) == (step > 1) for parameter in one.parameters.values())
