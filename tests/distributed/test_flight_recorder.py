"""Ranks tell which collectives of each group they have joined, whatever transfers came between."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import run_distributed

from megasdc.ops.health.rank_watch import collectives

pytestmark = pytest.mark.distributed


def _talk(wait_s: float) -> dict[str, dict[str, Any]]:
    """Three stages in a chain send to each other; then the last one does not join what the others wait in."""
    import torch
    import torch.distributed as dist

    rank, value = dist.get_rank(), torch.ones(2)
    seldom = dist.new_group([0, 1, 2], backend="gloo")
    dist.all_reduce(value, group=seldom)
    for _ in range(10):
        if rank > 0:
            dist.recv(value, rank - 1)
        if rank < 2:
            dist.send(value, rank + 1)
        dist.all_reduce(value)
    pending = dist.all_reduce(value, async_op=True) if rank < 2 else None
    time.sleep(wait_s)
    found = {name: one for name, one in collectives().items() if one["ranks"] == [0, 1, 2]}
    store = dist.distributed_c10d._get_default_store()
    store.set(f"looked_{rank}", b"")
    store.wait(["looked_0", "looked_1"])  # on a busy machine these may be late
    if pending is None:
        dist.all_reduce(value)
    else:
        pending.wait()
    dist.barrier()
    return {"world": found[dist.group.WORLD.group_name], "seldom": found[seldom.group_name]}  # type: ignore[union-attr]


def test_the_rank_that_has_not_joined_is_behind_by_its_number() -> None:
    """The middle stage has twice as many transfers; what is pending has not ended; a group dropped has joined none."""
    found = run_distributed(_talk, 3, 0.5, env={"TORCH_FR_BUFFER_SIZE": "8"}, timeout_s=60.0)
    numbers = [(one["world"]["joined"], one["world"]["ended"]) for one in found]
    first = numbers[2][0] + 1
    assert numbers == [(first, first - 1), (first, first - 1), (first - 1, first - 1)]
    assert all(one["world"]["recent"][first - 1] == "all_reduce [2] Float" for one in found)
    assert all((one["seldom"]["joined"], one["seldom"]["recent"]) == (0, {}) for one in found)
