"""Which steps are audited?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasdc.config.detection import AuditSection, SdcSection
from megasdc.config.drop_compute import DropComputeSection
from megasdc.engine.hooks import Run, RunProgress
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.budget import CheckBudget, CheckPlan
from megasdc.sdc.cost import Cadence
from megasdc.sdc.slice_checks import Checkable
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.budget import share_text
from megasdc.train.detection.step_checker import CheckSettings, StepChecker


def detection(folder: Path, save_interval: int, **audit: Any) -> StepChecker:
    """What decides it, for a stage without layers."""
    stage = SimpleNamespace(forward_funcs=[], _local_start=0, loss_fn=None, named_parameters=lambda: ())
    engine: Any = SimpleNamespace(module=stage, most_micro_batches=1, device=torch.device("cpu"))
    budget = CheckBudget(CheckPlan(Cadence(1), ()), engine)
    nothing: Any = None
    run = Run(folder, ParallelDims(1, 1, 1, 0), engine, nothing, iter(()), nothing, None, RunProgress(100))
    settings = CheckSettings(
        AuditSection.model_validate(audit),
        SdcSection(),
        default_algorithm(torch.device("cpu")),
        recomputes=False,
        save_interval=save_interval,
        checkable=Checkable(),
        drops=DropComputeSection(),
    )
    return StepChecker(settings, run, nothing, nothing, nothing, nothing, budget, nothing)


@pytest.mark.parametrize(
    ("save_interval", "audit", "steps"),
    [
        (3, {"enabled": False, "interval": 2, "verify_checkpoints": True}, []),
        (3, {"enabled": True, "interval": 7}, [7, 14]),
        (3, {"enabled": True, "interval": 7, "verify_checkpoints": True}, [4, 7, 10, 13, 14, 16]),
        (0, {"enabled": True, "interval": 7, "verify_checkpoints": True}, [7, 14]),
        (1, {"enabled": True, "interval": 7, "verify_checkpoints": True}, list(range(2, 17))),
        (20, {"enabled": True, "interval": 100, "verify_checkpoints": True}, []),
    ],
    ids=["off", "interval", "verify", "no saves", "each saved", "never"],
)
def test_every_interval_and_the_step_after_each_save(
    tmp_path: Path, save_interval: int, audit: dict[str, Any], steps: list[int]
) -> None:
    """Multiples of the interval; with verify_checkpoints also the first step that computes with what was saved."""
    checked = detection(tmp_path, save_interval, **audit)
    assert [step for step in range(1, 17) if checked.is_audit(step)] == steps


def test_an_upper_bound_has_few_digits() -> None:
    """Two digits below a tenth of a step, whole percents above."""
    shares = (5.7794, 0.2311, 0.0582, 0.0058, 0.000349, 0.0)
    assert [share_text(share) for share in shares] == ["578%", "23%", "5.8%", "0.58%", "0.035%", "0%"]


@pytest.mark.parametrize(("micro_batch", "extra"), [("training", [5]), ("extra", [5, 6, 12])])
def test_the_first_step_of_a_start_is_audited_by_an_extra_micro_batch(
    tmp_path: Path, micro_batch: str, extra: list[int]
) -> None:
    """Whatever the setting, unless it is due anyway: then a run that was not interrupted audits it, too."""
    for first, audited, by_extra in ((5, [5, 6, 12], extra), (6, [6, 12], [one for one in extra if one != 5])):
        checked = detection(tmp_path, 0, enabled=True, interval=6, micro_batch=micro_batch)
        checked._first_step = first
        assert [step for step in range(1, 17) if checked.is_audit(step)] == audited
        assert [step for step in audited if checked._is_extra(step)] == by_extra
