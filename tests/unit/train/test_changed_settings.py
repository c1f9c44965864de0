"""A loss scaler that was loaded takes up the settings of this start; DeepSpeed's own scalers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

from megasdc.train.changed_settings import rescale


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
