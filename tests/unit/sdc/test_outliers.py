"""Are unusual features found, with the replica and submodule, by robust statistics?"""

import math

import numpy as np
import pytest
import torch

from megasdc.sdc.outliers import LEAST_SCALE, LEAST_SHARE, NEEDED, NORMAL, Outliers


def _features(step, replicas=4, submodules=3, spread=0.1):
    noise = torch.randn(replicas, submodules, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return torch.exp(spread * noise)


def _after(steps, **options):
    outliers = Outliers()
    for step in range(steps):
        outliers.score(_features(step, **options))
    return outliers


def _scale(deviations):
    scale = NORMAL * deviations
    return np.maximum(np.maximum(scale, LEAST_SHARE * np.median(scale, axis=0)), LEAST_SCALE)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_scores_are_medians_and_mads(replicas):
    """Both scores are those of the same formulas in NumPy; of three replicas the median one has no distance."""
    spreads = np.array([0.5, 0.5, 0.02])[:, None]  # the last is steadier than most, and moves in the last step
    steps = [np.log(_features(step, replicas).numpy()) * spreads / 0.1 for step in range(NEEDED + 1)]
    steps[-1][0, 2, 1] += 2.0
    centers = [np.median(one, axis=0) for one in steps]
    distances = [np.sort(abs(one - center), axis=0) for one, center in zip(steps, centers, strict=True)]
    usual = np.median([np.median(one[replicas % 2 :], axis=0) for one in distances[:-1]], axis=0)
    across = abs(steps[-1] - centers[-1]) / _scale(usual)
    past = np.array(centers[:-1])
    middle = np.median(past, axis=0)
    deviation = np.median(abs(past - middle), axis=0)
    common = abs(centers[-1] - middle) / _scale(deviation)
    outliers = Outliers()
    found = [outliers.score(torch.from_numpy(np.exp(one))) for one in steps]
    assert found[:-1] == [None] * NEEDED
    assert math.isclose(found[-1][0].value, across.max(), rel_tol=1e-9)
    assert math.isclose(found[-1][1].value, common.max(), rel_tol=1e-9)
    assert found[-1][0].submodule == 2
    assert found[-1][0].feature == 1


def test_one_replica_apart_is_found_and_not_common():
    """A replica whose feature is ten times the others' stands out, and the replicas' median does not move."""
    outliers, features = _after(20), _features(99)
    features[2, 1, 0] *= 10
    across, past = outliers.score(features)
    assert (across.replica, across.submodule, across.feature) == (2, 1, 0)
    assert across.value > 10 > past.value


def test_a_change_of_all_is_found_against_the_past():
    """What changes on all replicas alike stands out against the past alone."""
    outliers, features = _after(20), _features(99)
    features[:, 0, 1] *= 10
    across, past = outliers.score(features)
    assert (past.replica, past.submodule, past.feature) == (None, 0, 1)
    assert past.value > 10 > across.value


def test_one_replica_alone_has_no_others():
    """With one replica nothing differs across replicas, and the past is its own."""
    outliers, features = _after(20, replicas=1), _features(99, replicas=1)
    features[0, 2, 0] *= 100
    across, past = outliers.score(features)
    assert across.value == 0.0
    assert (past.submodule, past.feature) == (2, 0)


def test_a_gradient_of_zero_is_a_number():
    """A feature that is 0 does not make scores NaN."""
    outliers, features = _after(20), _features(99)
    features[1, 0, 0] = 0.0
    across, past = outliers.score(features)
    assert across.replica == 1
    assert math.isfinite(across.value)
    assert math.isfinite(past.value)


def test_its_state_goes_on():
    """What is restored scores as what was saved."""
    outliers, other = _after(NEEDED + 3), Outliers()
    other.load_state_dict(outliers.state_dict())
    assert other.score(_features(50)) == outliers.score(_features(50))
    assert Outliers().score(_features(0)) is None
