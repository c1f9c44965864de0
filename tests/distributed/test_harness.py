"""Does the helper for distributed tests tell the truth about success, failure, death and hangs?"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import pytest
from fused_switch import VARIABLE
from harness import PRELOAD, run_distributed
from tiny import GPT, relative_distance

from megasdc.config.load import parse_config
from megasdc.model.gpt import FusedLayerNorm
from megasdc.parallel import processes

pytestmark = pytest.mark.distributed


def _sum_of_ranks(offset: int) -> float:
    import torch

    value = torch.tensor([float(torch.distributed.get_rank() + offset)])
    torch.distributed.all_reduce(value)
    return value.item()


def _fused(model: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a configuration that is parsed here says ``fuse``, and whether a model that is built here has it."""
    from tiny import make_engine

    data = {"path": "x", "sequence_length": 64}
    sections = {"model": model, "data": data, "protect": "off", "training": {"steps": 1}, "logging": {"run_dir": "x"}}
    config = parse_config({"megasdc": sections})
    modules = make_engine(model, 1, 1).module.modules()
    return config.megasdc.model.fuse, any(isinstance(module, FusedLayerNorm) for module in modules)


def _fail_on(rank: int) -> None:
    import torch

    if torch.distributed.get_rank() == rank:
        raise RuntimeError("the first cause")
    torch.distributed.barrier()


def _kill_self(rank: int) -> str:
    import torch

    torch.distributed.barrier()
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def _count_frozen() -> int:
    import gc

    return gc.get_freeze_count()


def _hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        _wait_for_ever()


def _wait_for_ever() -> None:
    while True:
        time.sleep(0.1)


def test_what_was_preloaded_is_frozen() -> None:
    """What cannot be imported is passed over without a word, so the last must have been imported; for sweeps too."""
    assert PRELOAD[-1] == processes.PRELOAD[-1]
    assert run_distributed(_count_frozen, 1, init=False)[0] > 100_000


def test_returns_the_result_of_each_rank() -> None:
    """Results come back in rank order from a working group."""
    assert run_distributed(_sum_of_ranks, 3, offset=1) == [6.0, 6.0, 6.0]


def test_reports_the_first_cause() -> None:
    """The traceback shown is of the rank that failed first, not of a peer that lost its connection."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 failed first.*the first cause"):
        run_distributed(_fail_on, 2, 1)


def test_a_killed_rank_is_a_failure_unless_expected() -> None:
    """SIGKILL of a rank fails the run with its exit code; announced, it passes and the peers' results are kept."""
    with pytest.raises(AssertionError, match="exit code -9"):
        run_distributed(_kill_self, 2, 0)
    assert run_distributed(_kill_self, 2, 0, expect_exit={0: -9}) == [None, "survived"]


def test_a_hang_shows_the_stacks() -> None:
    """A rank that never returns fails the run with the place where it waits."""
    with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] hang.*_wait_for_ever"):
        run_distributed(_hang_on, 2, 1, timeout_s=6.0)


@pytest.mark.parametrize(("switch", "says"), [("0", {}), ("1", {}), ("1", {"fuse": False})])
def test_the_switch_of_fused_modules_takes_effect(switch: str, says: dict[str, bool]) -> None:
    """MEGASDC_TESTS_FUSE=1 fuses the models of ranks whose test says nothing of ``fuse``, and no others."""
    (found,) = run_distributed(_fused, 1, {**GPT, **says}, env={VARIABLE: switch})
    assert found == (switch == "1" and not says,) * 2


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_no_agreement(place: int) -> None:
    """Wherever it is, no tolerance holds; without it the largest difference counts."""
    found, expected = [1.0, 2.0, 3.0], [1.0, 2.5, 3.0]
    assert relative_distance(found, expected) == 0.2
    found[place] = math.nan
    assert not relative_distance(found, expected) < 1e9
