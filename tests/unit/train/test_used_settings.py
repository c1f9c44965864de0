"""Whose settings of a step are wrong, where there is no majority?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from megasdc.optim.bounds import MomentumReset, RateWarmup
from megasdc.sdc.used_settings import Own, UsedSettings, judge_settings

RESET = MomentumReset(interval=3, warmup_steps=2, warmup_start=0.1, restart_bias_correction=True)
"""Before steps 4 and 7; the learning rate is lower in steps 4, 5, 7 and 8."""


def _steps(wrong: Mapping[int, str], skipped: int | None = None) -> Iterator[Own]:
    """What a replica used in steps from 1 on, some of them with a wrong learning rate or count."""
    flat = torch.nn.Parameter(torch.ones(4))
    inner = torch.optim.AdamW([flat], lr=1e-3)
    schedule = WarmupLR(inner, warmup_max_lr=1e-3, warmup_num_steps=20)
    optimizer = SimpleNamespace(optimizer=inner, single_partition_of_fp32_groups=[flat], clip_grad=1.0)
    engine: Any = SimpleNamespace(
        optimizer=optimizer, lr_scheduler=schedule, step_number=0, fp16_enabled=lambda: False, dims=None
    )
    used = UsedSettings(SimpleNamespace(engine=engine, host_group=None, events=None))  # type: ignore[arg-type]
    used.reset = RESET
    warmup = RateWarmup(inner)
    used.start()
    schedule.step()
    for step in range(1, 10):
        engine.step_number, warmup.factor = step, RESET.rate_factor(step)
        if RESET.is_due(step):
            RESET.reset(inner)
        if step == skipped:
            yield used.settings_of(step)
            continue
        if wrong.get(step) == "lr":
            inner.param_groups[0]["lr"] *= 1.01
        if wrong.get(step) == "step":
            inner.state[flat]["step"] += 2
        flat.grad = torch.ones(4)
        inner.step()
        schedule.step()
        yield used.settings_of(step)


@pytest.mark.parametrize("setting", ["lr", "step"])
@pytest.mark.parametrize(("step", "skipped"), [(2, None), (4, None), (5, None), (7, None), (5, 4), (6, 4)])
def test_of_two_replicas_the_wrong_one_is_named_also_when_moments_were_reset(
    setting: str, step: int, skipped: int | None
) -> None:
    """The other has what schedule and warm-up say, and counts from the reset on, even one in a skipped step."""
    for right, wrong in zip(_steps({}, skipped), _steps({step: setting}, skipped), strict=True):
        found = judge_settings(step, {0: right, 1: wrong})
        if found:
            break
    assert [one.rank for one in found] == [1]
