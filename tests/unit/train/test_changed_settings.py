"""A loss scaler that was loaded takes up the settings of this start; DeepSpeed's own scalers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

from megasdc.config.changes import ChangedField
from megasdc.config.load import parse_config
from megasdc.train.resume import ChangedSettings, rescale


def _scaler(static: float = 0.0, **settings: Any) -> Any:
    dynamic = {"init_scale": 2.0**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2} | settings
    return CreateLossScaler(torch.half, static, not static, {**dynamic, "consecutive_hysteresis": False})


def test_a_dynamic_scale_goes_on_with_other_settings() -> None:
    """Scale and iterations are those of the checkpoint; window, least scale and hysteresis those of the start."""
    loaded = _scaler()
    loaded.cur_scale, loaded.cur_iter = 2.0**15, 4
    optimizer = SimpleNamespace(loss_scaler=loaded, dynamic_loss_scale=True)
    rescale(optimizer, _scaler(scale_window=2, min_scale=4, delayed_shift=1))
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.cur_iter) == (2.0**15, 4)
    assert (scaler.scale_window, scaler.min_scale, scaler.delayed_shift, scaler.cur_hysteresis) == (2, 4, 1, 1)


def test_a_fixed_scale_takes_the_place_of_a_dynamic_one_and_back() -> None:
    """Between a fixed and a dynamic scale the scaler of the start is used."""
    optimizer = SimpleNamespace(loss_scaler=_scaler(), dynamic_loss_scale=True)
    rescale(optimizer, _scaler(static=128.0))
    assert (optimizer.loss_scaler.loss_scale, optimizer.dynamic_loss_scale) == (128.0, False)
    rescale(optimizer, _scaler(static=64.0))
    assert optimizer.loss_scaler.loss_scale == 64.0
    rescale(optimizer, _scaler())
    assert (optimizer.loss_scaler.loss_scale, optimizer.dynamic_loss_scale) == (2.0**16, True)


CHOSEN = {"tau_s": 0.5, "tuned_at": 5, "chosen": {"curve": 1}, "aims": [[4, 0.5]], "owed": 2, "totals": [3, 8]}


@pytest.mark.parametrize(
    ("path", "anew"),
    [
        ("megasdc.drop_compute.window_steps", True),
        ("megasdc.drop_compute.threshold", True),
        ("gradient_accumulation_steps", True),
        ("megasdc.drop_compute.record_times", False),
        ("megasdc.drop_compute.check_agreement", False),
        ("optimizer.params.lr", False),
    ],
)
def test_a_threshold_that_was_chosen_under_other_settings_is_chosen_anew(path: str, anew: bool) -> None:
    """What it was chosen by has changed; counts go on, and so do the states of other hooks."""
    optimizer = SimpleNamespace(param_groups=[], clip_grad=0.0)
    engine: Any = SimpleNamespace(dims=SimpleNamespace(data=1), optimizer=optimizer)
    sections = {"data": {"path": "x"}, "protect": "off", "training": {"steps": 1}, "logging": {"run_dir": "x"}}
    changed = ChangedSettings(engine, parse_config({"megasdc": sections}), None)
    changed.changes = [ChangedField(path, 1, 2, "applied")]
    states = {"DropCompute": CHOSEN, "Reporter": {"a": 1}}
    unmeasured = {"tau_s": None, "tuned_at": None, "chosen": None, "aims": [], "owed": 0, "totals": [3, 8]}
    assert changed.hook_states(states) == {**states, "DropCompute": unmeasured if anew else CHOSEN}
    assert changed.hook_states({"Reporter": {"a": 1}}) == {"Reporter": {"a": 1}}
