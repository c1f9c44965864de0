"""Do all ranks learn the same from one reduction: which positions differ, and which flags were raised?"""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_distributed

pytestmark = pytest.mark.distributed

VALUES = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def _compare(wrong: int | None, value: int, other: int) -> Any:
    import torch.distributed as dist

    from megasdc.parallel.collectives import ANY, STAGE, WORLD, Compared, compare_replicas
    from megasdc.parallel.dims import ParallelDims

    dims = ParallelDims(2, 1, 2, dist.get_rank())
    mine = other if dims.rank == wrong else value + dims.tp_rank
    of_all = other if dims.rank == wrong else value
    values = {"mine": Compared(mine), "same": Compared(7), "stage": Compared(of_all, STAGE)}
    values |= {"all": Compared(of_all, WORLD), "wrong": Compared(dims.rank == wrong, ANY), "never": Compared(0, ANY)}
    return compare_replicas(values, dims, None)


@pytest.mark.parametrize("wrong", [None, 0, 3])
def test_unequal_replicas_are_found_at_their_position(wrong: int | None) -> None:
    """Extreme values too; another value on one tensor rank says which position; flags come from any rank."""
    for value in VALUES[:-1]:
        for other in (set(VALUES) | {5}) - {value, value + 1}:
            found = run_distributed(_compare, 4, wrong, value, other)
            position, anywhere = ((), ()) if wrong is None else (((0, wrong % 2),), ((0, 0),))
            expected = {"mine": position, "same": (), "stage": anywhere, "all": anywhere}
            assert found == [{**expected, "wrong": anywhere, "never": ()}] * 4, (value, other)
            if wrong is None:
                break
