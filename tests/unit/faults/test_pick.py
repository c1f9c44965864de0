"""Are the stated elements chosen, each once, inside the tensor?"""

import numpy as np
import pytest
import torch

from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import pick_elements


def pick(result, seed=0, **fields):
    draws = np.random.Generator(np.random.PCG64(seed))
    return pick_elements(result, FaultSpec.model_validate(fields), draws).tolist()


RESULT = torch.arange(60.0).view(5, 12) - 30


def test_random_elements_are_uniform():
    """Each element is chosen equally often, and never twice in one firing."""
    counts = np.zeros(60)
    for seed in range(3000):
        found = pick(RESULT, seed, elements=4)
        assert len(set(found)) == 4
        counts[found] += 1
    expected = 3000 * 4 / 60
    assert ((counts - expected) ** 2 / expected).sum() < 112  # chi-squared, 59 degrees, p = 3e-5


def test_element_probability():
    """The number of elements is binomial."""
    result = torch.zeros(100_000)
    counts = [len(pick(result, seed, element_probability=0.002)) for seed in range(200)]
    assert abs(np.mean(counts) - 200) < 4 * (200 / 200) ** 0.5
    assert 0.7 < np.var(counts) / 200 < 1.4


@pytest.mark.parametrize("seed", range(50))
def test_runs(seed):
    """Adjacent is one run; periodic has runs of `run` elements one period apart; both stay inside."""
    adjacent = pick(RESULT, seed, pattern="adjacent", elements=7)
    assert adjacent == list(range(adjacent[0], adjacent[0] + 7)) and adjacent[-1] < 60
    periodic = pick(RESULT, seed, pattern="periodic", elements=6, period=10, run=2)
    assert periodic == [periodic[0] + offset for offset in (0, 1, 10, 11, 20, 21)] and periodic[-1] < 60


def test_columns_and_indices():
    """Column takes every row of a column of the last dimension; indices outside the tensor are left out."""
    columns = pick(RESULT, 3, pattern="column", elements=2)
    assert len(columns) == 10 and len({place % 12 for place in columns}) == 2
    assert pick(RESULT, pattern="indices", indices=[59, 3, 60, 3]) == [3, 59]
    assert pick(torch.zeros(()), pattern="column") == [0]


def test_more_than_there_is():
    """No pattern leaves a tensor that is smaller than it."""
    small = torch.zeros(3)
    assert pick(small, elements=9) == [0, 1, 2]
    assert pick(small, pattern="adjacent", elements=9) == [0, 1, 2]
    assert pick(small, pattern="periodic", elements=9, period=2) == [0, 2]
    assert pick(small, pattern="periodic", elements=2**53, period=2**53, run=2**53) == [0, 1, 2]
    assert pick(small, pattern="periodic", elements=2**53, period=2, run=1) == [0, 2]
    assert pick(torch.zeros(0, 4), elements=2) == pick(torch.zeros(0, 4), pattern="adjacent") == []


def test_ranges_of_values():
    """Only elements whose magnitude is in range: random picks among them, other patterns leave the rest out."""
    in_range = [place for place in range(60) if 5 <= abs(place - 30) <= 7]
    assert pick(RESULT, elements=60, only_above=5, only_below=7) == in_range
    assert pick(RESULT, pattern="indices", indices=[0, 25, 30, 36], only_above=5, only_below=7) == [25, 36]
    assert pick(RESULT, elements=4, only_above=100) == []
    assert pick(RESULT.T, elements=60, only_above=30) == [0]
