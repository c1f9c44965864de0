"""What does the chain from the gradient to the parameters take for right, and what for wrong?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.budget import CheckBudget, CheckPlan
from megasdc.sdc.cost import Cadence
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.chain import LARGEST_SUMMED_NORM, Chain, ChainFindings, is_norm_of

ROUNDING = 20 * 2.0**-24


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e17, 1e18, 1e19, 1e20, 1e37])
def test_what_fp32_makes_of_squares_is_right_however_large_they_are(scale: float) -> None:
    """A finite gradient whose squares exceed fp32: parts of ranks, groups and the whole are infinite in turn."""
    gradient = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).double() * scale
    gradient[0] /= 100  # one rank's part stays finite longest
    parts = torch.linalg.vector_norm(gradient, dim=1).square().float()
    for part, squares in zip(parts.tolist(), gradient.square().sum(1).tolist(), strict=True):
        assert is_norm_of(math.sqrt(part), squares, ROUNDING)
    exact = float(gradient.square().sum())
    for norm in (float(parts.sum().sqrt()), float(torch.linalg.vector_norm(parts.sqrt()))):
        assert is_norm_of(norm, exact, ROUNDING)
        assert is_norm_of(norm if math.isfinite(norm) else -1.0, exact, ROUNDING)
        assert not is_norm_of(1.02 * math.sqrt(exact), exact, ROUNDING), "another finite norm is wrong at any size"
    if exact < LARGEST_SUMMED_NORM**2:
        assert not any(is_norm_of(norm, exact, ROUNDING) for norm in (math.inf, math.nan, -1.0))


@pytest.mark.parametrize("squares", [math.inf, math.nan, -1.0])
def test_no_finite_norm_is_one_of_what_is_no_sum_of_squares(squares: float) -> None:
    """An element that is not finite, or a sum that cannot be one: only a norm that is not finite is right."""
    assert is_norm_of(math.inf, squares, ROUNDING) and is_norm_of(-1.0, squares, ROUNDING)
    assert not any(is_norm_of(norm, squares, ROUNDING) for norm in (0.0, 1.0, LARGEST_SUMMED_NORM, 3e38))


def test_both_are_right_only_where_rounding_decides() -> None:
    """Closer to the limit than rounding; below no infinite norm is right, not even of no gradient at all."""
    for near in (1 - ROUNDING / 2, 1 + ROUNDING / 2):
        squares = (near * LARGEST_SUMMED_NORM) ** 2
        assert is_norm_of(near * LARGEST_SUMMED_NORM, squares, ROUNDING) and is_norm_of(math.inf, squares, ROUNDING)
    assert not is_norm_of(math.inf, ((1 - 2 * ROUNDING) * LARGEST_SUMMED_NORM) ** 2, ROUNDING)
    assert not is_norm_of(math.inf, 0.0, ROUNDING)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Any]:
    """Of a rank alone with two groups of parameters, one of which each of the next steps looks at."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    masters = [torch.ones(6), torch.ones(4)]
    parameters = [one.bfloat16() for one in masters]
    of_groups = [[torch.nn.Parameter(one)] for one in parameters]
    for (parameter,) in of_groups:
        parameter._hp_mapping = None  # type: ignore[attr-defined]

    def gather() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)

    optimizer = SimpleNamespace(
        bit16_groups=of_groups,
        single_partition_of_fp32_groups=masters,
        parallel_partitioned_bit16_groups=[[one] for one in parameters],
        real_dp_process_group=[None, None],
        averaged_gradients={},
        params_in_partition=[[], []],
        optimizer=SimpleNamespace(state={}),
        update_lp_params=gather,
        cpu_offload=True,
    )
    stage = SimpleNamespace(forward_funcs=[], loss_fn=None, _local_start=0, named_parameters=list)
    engine: Any = SimpleNamespace(
        optimizer=optimizer,
        module=stage,
        dims=ParallelDims(1, 1, 1),
        device=torch.device("cpu"),
        step_number=1,
        most_micro_batches=2,
        step_control=SimpleNamespace(record=lambda: None),
    )
    run: Any = SimpleNamespace(engine=engine, dims=engine.dims, host_group=None)
    budget = CheckBudget(CheckPlan(Cadence(1), ()), engine)
    made = Chain(run, default_algorithm(engine.device), lambda *_: False, budget)
    made.on_start(run)  # step 1 looks at the second group
    yield SimpleNamespace(chain=made, engine=engine, masters=masters, parameters=parameters)
    dist.destroy_process_group()


def _settle(of: Any) -> Any:
    """What the running step finds of its parameters, and rules on it."""
    of.chain.compare_copy()
    links = of.chain.pop_findings()
    return None if links.copy is None else of.chain.of_copy(links, ())


@pytest.mark.parametrize("micro_batches", [2, 1])
def test_a_changed_master_is_never_gathered_as_a_wrong_copy(chain: Any, micro_batches: int) -> None:
    """Nor where the cadence changes between two steps, so that blocks are due of which no digest was kept."""
    chain.engine.most_micro_batches = micro_batches  # 1: both groups are due in each step
    chain.masters[0][2] += 0.5
    assert _settle(chain) is None, "not kept: whether copy or master is wrong is not known"
    chain.masters[1][2] += 0.5
    found = _settle(chain)
    assert (found.tier, [one.basis for one in found.rulings]) == ("state", ["own digest"])
    assert float(chain.parameters[1][2]) == 1.0, "nothing was gathered"


def test_a_changed_master_is_found_behind_a_wrong_copy(chain: Any) -> None:
    """Of two blocks that differ, the second has a changed master: neither is gathered; alone the first is."""
    chain.engine.most_micro_batches = 1
    chain.chain.on_start(SimpleNamespace(engine=chain.engine))  # both are kept
    chain.parameters[0][3] = 7.0
    found = _settle(chain)
    assert (found.tier, found.rulings[0].verdict, found.rulings[0].basis) == ("copy", "not_reproduced", "master shard")
    assert float(chain.parameters[0][3]) == 1.0
    chain.parameters[0][3] = 7.0
    chain.masters[1][0] = 9.0
    found = _settle(chain)
    assert (found.tier, [one.basis for one in found.rulings]) == ("state", ["own digest"])
    assert float(chain.parameters[1][0]) == 1.0


@pytest.mark.parametrize("part", [-4.0, math.nan, math.inf])
def test_a_part_that_is_no_sum_of_squares_names_its_rank(chain: Any, part: float) -> None:
    """Whatever its sign: a root of it is none."""
    links = ChainFindings(5, math.inf, parts=(part, 1.0), sum=5.0, own=5.0, norm_is_wrong=True)
    (ruling,) = chain.chain._of_norm(links, ()).rulings
    assert (ruling.rank, ruling.basis) == (0, "parts of the norm")


@pytest.mark.parametrize(
    ("replica_alone", "wrong", "named"),
    [(False, None, [3, 4, 5]), (True, None, []), (True, 1, [1]), (True, 4, [4])],
    ids=["of_the_world", "another_order", "in_a_replica", "in_another_order"],
)
def test_a_replica_that_adds_in_another_order_is_not_wrong(
    chain: Any, replica_alone: bool, wrong: int | None, named: list[int]
) -> None:
    """Where that can be, only ranks of one replica are compared; a part is wrong elsewhere, in this run of 9 ranks."""
    of = chain.chain
    of._dims, of._compares_bits = ParallelDims(3, 1, 3), not replica_alone
    norms = [1.0] * 3 + [1.0 + 2.0**-24] * 3 + [1.0] * 3
    every = [ChainFindings(5, norm, parts=(1 / 3,), sum=3.0, own=1 / 3) for norm in norms]
    if wrong is not None:
        every[wrong] = replace(every[wrong], norm=1.5, norm_is_wrong=True)
    rulings = of._without_blocks(every, 5, ())
    assert [one.rank for one in rulings if one.rank is not None] == named
