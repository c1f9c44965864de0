"""Does a run that goes on with a changed configuration do what the new one says, from the first step on, or refuse?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_runs import events_of, metrics_of, prepare_text, train_run, write_config

pytestmark = pytest.mark.distributed

OLD = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
NEW = {"lr": 4e-3, "betas": [0.6, 0.7], "eps": 1e-3, "weight_decay": 0.5}
SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _shard(run_dir: Path, step: int) -> dict[str, Any]:
    (path,) = (run_dir / "checkpoints" / f"step_{step:08d}").glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return state


def _values(shard: dict[str, Any], group: int) -> dict[str, torch.Tensor]:
    """Master weights, moments and count of steps of a group, in float64."""
    state = shard["base_optimizer_state"]["state"][group]
    found = {name: state[name].double() for name in ("exp_avg", "exp_avg_sq", "step")}
    return {"master": shard["single_partition_of_fp32_groups"][group].double(), **found}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_changed_settings_act_from_the_next_step(tmp_path: Path, data: Path, precision: str) -> None:
    """Rate, decays, eps and clip of the first resumed step are the new ones, by AdamW's formula in float64."""
    run_dir = tmp_path / "run"
    common: dict[str, Any] = {"training__steps": 4, "training__eval_interval": 0, "checkpoint__interval": 1}
    common |= {"deepspeed__scheduler": SCHEDULE, "deepspeed__bf16": {"enabled": precision == "bf16"}}
    config = write_config(tmp_path / "a.json", data, run_dir, deepspeed__optimizer={"params": OLD}, **common)
    assert train_run(config, 1, "megasdc.training.stop_step=3") == [(0, None)]
    new = {"deepspeed__optimizer": {"params": NEW}, "deepspeed__gradient_clipping": 0.01}
    assert train_run(write_config(tmp_path / "b.json", data, run_dir, **new, **common), 1) == [(0, None)]

    ratio = 0.1 + 0.9 * (1 + math.cos(math.pi * 1 / 6)) / 2  # of the schedule's third value, 1 of 6 steps down
    rate = NEW["lr"] * ratio  # type: ignore[operator]
    assert metrics_of(run_dir)[-1]["train/learning_rate"] == pytest.approx(rate, rel=1e-9)
    before, after = _shard(run_dir, 3), _shard(run_dir, 4)
    (beta1, beta2), eps = NEW["betas"], NEW["eps"]  # type: ignore[misc]
    squares = 0.0
    for group, decay in enumerate((NEW["weight_decay"], 0.0)):
        old, found = _values(before, group), _values(after, group)
        gradient = (found["exp_avg"] - beta1 * old["exp_avg"]) / (1 - beta1)
        squares += float(gradient.square().sum())
        second = beta2 * old["exp_avg_sq"] + (1 - beta2) * gradient.square()
        torch.testing.assert_close(found["exp_avg_sq"], second, rtol=1e-3, atol=1e-12)
        count = float(found["step"])
        scaled = found["exp_avg_sq"].div(1 - beta2**count).sqrt() + eps
        update = found["exp_avg"].div(1 - beta1**count) / scaled
        expected = old["master"] * (1 - rate * decay) - rate * update  # type: ignore[operator]
        torch.testing.assert_close(found["master"], expected, rtol=1e-6, atol=1e-7)
    assert math.sqrt(squares) == pytest.approx(0.01, rel=1e-3)

    told = {
        event["path"]: (event["old"], event["new"], event["step"]) for event in events_of(run_dir, "resume", "changed")
    }
    assert told == {
        **{f"optimizer.params.{name}": (OLD[name], NEW[name], 3) for name in OLD},
        "gradient_clipping": (1.0, 0.01, 3),
    }
    resolved = json.loads((run_dir / "resolved.json").read_text())
    assert resolved["optimizer"]["params"].items() >= NEW.items()


def test_what_may_not_change_is_refused(tmp_path: Path, data: Path) -> None:
    """Another model is refused, other dropout and batches need a flag; all are named, and nothing is touched."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "a.json", data, run_dir, checkpoint__interval=1)
    assert train_run(config, 2, "megasdc.training.stop_step=1") == [(0, None)] * 2
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "checkpoints").rglob("*")}
    before[run_dir / "resolved.json"] = (run_dir / "resolved.json").stat().st_mtime_ns
    changed = ("megasdc.model.num_attention_heads=4", "megasdc.model.hidden_dropout=0.1", "train_batch_size=8")
    for code, message in train_run(config, 2, *changed):
        assert code == 72
        assert "megasdc.model.num_attention_heads: saved with 2, now 4" in str(message)
        assert "--allow-changed train_batch_size --allow-changed megasdc.model.hidden_dropout" in str(message)
        assert "more failed" not in str(message)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    asked = ("megasdc.model.hidden_dropout", "train_batch_size")
    results = train_run(config, 2, *changed[1:], "megasdc.training.stop_step=2", allow=asked)
    assert results == [(0, None)] * 2
    events = {event["path"]: event["flag"] for event in events_of(run_dir, "resume", "changed")}
    assert events == {asked[0]: True, asked[1]: True, "gradient_accumulation_steps": False}
    shared = json.loads((run_dir / "checkpoints" / "step_00000002" / "megasdc.json").read_text())
    assert shared["samples"] == 4 + 8
    assert train_run(config, 2, *changed[1:], "megasdc.training.stop_step=3") == [(0, None)] * 2
