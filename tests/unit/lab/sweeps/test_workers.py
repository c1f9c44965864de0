"""How many runs of a sweep are made side by side? As cores and devices allow, never more than there are devices for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megasdc.common.errors import ConfigError
from megasdc.lab.sweeps import sweep
from megasdc.lab.sweeps.plan import SweepPlan, build_plan
from megasdc.lab.sweeps.sweep import choose_workers
from megasdc.lab.sweeps.sweep_file import load_sweep

SMOKE = Path(__file__).parents[4] / "configs" / "smoke.json"


@pytest.fixture
def plan(tmp_path: Path) -> SweepPlan:
    """One run of two ranks with one thread each."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"name": "one", "base": str(SMOKE), "ranks": 2}))
    return build_plan(load_sweep(path, None))


def _host(monkeypatch: pytest.MonkeyPatch, cores: int, devices: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(sweep, "count_accelerators", lambda: devices)


@pytest.mark.parametrize(
    ("cores", "devices", "asked", "workers"),
    [(1, 0, None, 1), (9, 0, None, 4), (2, 0, 3, 3), (96, 8, None, 4), (4, 8, None, 2), (96, 8, 3, 3), (96, 8, 4, 4)],
)
def test_each_rank_has_its_core_and_its_device(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch, cores: int, devices: int, asked: int | None, workers: int
) -> None:
    """Without devices the user's word counts; with some it counts as far as they suffice."""
    _host(monkeypatch, cores, devices)
    assert choose_workers(plan, asked) == workers


@pytest.mark.parametrize(
    ("devices", "asked", "problem"),
    [
        (1, None, "a run of 2 ranks needs a device for each rank, and there are 1"),
        (8, 5, "5 runs of 2 ranks side by side need a device for each rank, and there are 8"),
    ],
)
def test_a_rank_without_a_device_is_refused(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch, devices: int, asked: int | None, problem: str
) -> None:
    """It would compute on the processor, beside others that do not."""
    _host(monkeypatch, 96, devices)
    with pytest.raises(ConfigError, match=problem):
        choose_workers(plan, asked)
