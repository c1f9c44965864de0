"""Are the sums that collectives are compared with exact, whatever the order they are added in?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasdc.ops.stress.collectives import DTYPES, LARGEST_SUM, MOVED, StressCollective, contribution, expected_result

RANKS = range(2, 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_are_exact_in_any_order(dtype: str, ranks: int) -> None:
    """Added one by one in the type itself, in several orders, the contributions give the known result bit for bit."""
    exchange = StressCollective("all_reduce", dtype, 4000, ranks, 7)
    given = [contribution(exchange, rank) for rank in range(ranks)]
    assert all(one.dtype == DTYPES[dtype] for one in given)
    exact = np.sum([one.to(torch.int64).numpy() for one in given], axis=0)
    assert abs(exact).max() > LARGEST_SUM[dtype] / 3  # numbers that leave bits unused would hide faults in them
    known = expected_result(exchange, 0)
    assert np.array_equal(known.to(torch.int64).numpy(), exact)
    random = np.random.default_rng(ranks)
    for _ in range(5):
        total = torch.zeros(4000, dtype=DTYPES[dtype])
        for rank in random.permutation(ranks):
            total = total + given[rank]
        assert torch.equal(total, known)


def test_every_number_up_to_the_largest_is_representable() -> None:
    """The largest sums are those up to which each type holds all whole numbers; the next odd one is lost."""
    for dtype in ("bf16", "fp16", "fp32"):
        edge = LARGEST_SUM[dtype]
        low = torch.arange(edge - 2000 if edge > 2000 else 0, edge + 1)
        assert torch.equal(low.to(DTYPES[dtype]).to(torch.int64), low)
        assert int(torch.tensor(edge + 1).to(DTYPES[dtype])) != edge + 1


@pytest.mark.parametrize("operation", ["reduce_scatter", *MOVED])
def test_results_are_the_right_pieces(operation: str) -> None:
    """What a rank gets, against NumPy: its piece of the sum, all contributions, the root's, its piece of each."""
    ranks, n = 3, 5
    exchange = StressCollective(operation, "int32", n, ranks, 11)
    given = np.stack([contribution(exchange, rank).numpy() for rank in range(ranks)])
    for rank in range(ranks):
        pieces = given.reshape(ranks, -1, n)
        want = {
            "reduce_scatter": pieces[:, rank].sum(0) if operation in ("reduce_scatter", "all_to_all") else None,
            "all_gather": given.ravel(),
            "broadcast": given[11 % ranks],
            "all_to_all": pieces[:, rank % pieces.shape[1]].ravel(),
        }[operation]
        assert np.array_equal(expected_result(exchange, rank).numpy(), want)


def test_what_is_moved_has_random_bits() -> None:
    """Each bit of each type is set in about half of the elements, NaN payloads included."""
    for name, dtype in DTYPES.items():
        bits = contribution(StressCollective("all_gather", name, 4096, 2, 3), 0).view(torch.uint8).numpy()
        lanes = np.unpackbits(bits.reshape(4096, dtype.itemsize), axis=1).mean(0)
        assert (abs(lanes - 0.5) < 5 * 0.5 / 64).all()


def test_ranks_and_seeds_differ() -> None:
    """No two ranks and no two rounds give the same, else a stale or swapped buffer would go unseen."""
    one = StressCollective("all_reduce", "fp32", 100, 4, 1)
    given = {
        contribution(exchange, rank).numpy().tobytes()
        for exchange in (one, StressCollective(*("all_reduce", "fp32", 100, 4, 2)))
        for rank in range(4)
    }
    assert len(given) == 8


def test_too_many_ranks_for_a_type_are_refused() -> None:
    """bf16 holds no exact sum of more than 256 ranks; it says so instead of rounding."""
    with pytest.raises(ValueError, match="300 ranks have no exact sum in bf16"):
        contribution(StressCollective("all_reduce", "bf16", 1, 300, 1), 0)
