"""Does the workload of a golden trace refuse what it cannot verify, and leave the engine as it was?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from tiny import GPT, SEQUENCE, VOCAB

from megasdc.common.addresses import WEIGHT_GRAD, Address
from megasdc.common.errors import ConfigError
from megasdc.config.load import RunConfig, parse_config
from megasdc.engine.hooks import Hook
from megasdc.parallel import groups
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.golden import Workload, workload_cases, workload_config

pytestmark = pytest.mark.distributed


def _config(folder: Path, pipeline: int, **more: Any) -> RunConfig:
    """A workload of a tiny model."""
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **more,
        "megasdc": {
            "model": GPT,
            "data": {"path": "unused", "sequence_length": SEQUENCE},
            "parallel": {"pipeline": pipeline},
            "protect": "off",
            "training": {"steps": 2},
            "golden": {"vocab_size": VOCAB},
            "logging": {"run_dir": str(folder)},
        },
    }
    return workload_config(parse_config(raw))


def _not_finite(address: Address, result: torch.Tensor) -> torch.Tensor | None:
    return torch.full_like(result, torch.inf) if address.phase == WEIGHT_GRAD and address.step == 2 else None


def _skip_a_step(folder: str) -> tuple[str, list[bool]]:
    config = _config(Path(folder), 1, bf16={"enabled": True})
    workload = Workload(config, groups.init_model_parallel(1, 1, 60))
    case, name = workload_cases(config)[0], default_algorithm(workload.engine.device).name
    whole, skipped = workload.trace(case, name, all_steps=True), workload.trace(case, name, [_not_finite])
    assert len(whole) > len(skipped) > 0  # as a verification, which a fault may make skip, it is no error
    before = list(workload.engine.hooks)
    with pytest.raises(ConfigError) as error:
        workload.trace(case, name, [_not_finite], all_steps=True)
    kept = [workload.engine.hooks == before]
    workload.submodules = None  # an observer that cannot be made
    with pytest.raises(TypeError):
        workload.run(case, [], [Hook()])
    return str(error.value), [*kept, workload.engine.hooks == before]


def test_a_skipped_step_is_not_recorded(tmp_path: Path) -> None:
    """A step without an update is refused, with its number, and no hook is left after this or any other failure."""
    text, clean = run_distributed(_skip_a_step, 1, str(tmp_path))[0]
    assert "skips step 2" in text and "not finite" in text
    assert clean == [True, True]


def _beside_another(folder: str) -> list[tuple[int, int, bool]]:
    """For each of three workloads beside a first one: groups before and after, and whether the first still computes."""
    config = _config(Path(folder), 2)
    dims = groups.init_model_parallel(1, 2, 60)
    first = Workload(config, dims)
    case, name = workload_cases(config)[0], default_algorithm(first.engine.device).name
    expected = first.trace(case, name)
    found = []
    for _ in range(3):
        before = groups.set_all_timeouts(60)
        second = Workload(config, dims)
        assert groups.set_all_timeouts(60) > before and second.trace(case, name).checksums == expected.checksums
        second.release()
        found.append((before, groups.set_all_timeouts(60), first.trace(case, name).checksums == expected.checksums))
    return found


def test_a_workload_gives_its_process_groups_back(tmp_path: Path) -> None:
    """However often one is built beside a model, with tied weights on two stages; the model goes on as before."""
    for found in run_distributed(_beside_another, 2, str(tmp_path)):
        assert all(before == after and same for before, after, same in found), found
