"""Are two runs compared rightly, and how many ranks does a check take?"""

import pytest

from megasdc.bench.repeat import Difference, RepeatReport, compare_two_runs, smallest_layout
from megasdc.config import parse_config
from megasdc.config.repeatability import Cause
from megasdc.errors import ConfigError

A = [("step 1, forward, loss", "a"), ("step 1, parameter, w", "b"), ("step 2, forward, loss", "c")]


def test_equal_runs():
    """Equal addresses with equal checksums are no difference."""
    assert compare_two_runs(A, list(A)) is None
    assert compare_two_runs([], []) is None


def test_the_first_difference_in_execution_order_is_named():
    """Of several, the one that was observed first is named, with both checksums and the count."""
    other = [A[0], (A[1][0], "x"), (A[2][0], "y")]
    assert compare_two_runs(A, other) == Difference("step 1, parameter, w", "b", "x", 2, 3)


@pytest.mark.parametrize(("first", "second"), [(A, A[:2]), (A[:2], A)])
def test_an_observation_of_one_run_alone_is_a_difference(first, second):
    """A run that ends early, or goes on alone, differs from the other."""
    found = compare_two_runs(first, second)
    assert (found.address, found.different, found.observations) == (A[2][0], 1, 3)
    assert {found.first, found.second} == {None, "c"}


def _config(train, micro, accumulation, tensor=1, pipeline=1):
    return parse_config(
        {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "megasdc": {
                "data": {"path": "x"},
                "parallel": {"tensor": tensor, "pipeline": pipeline},
                "training": {"steps": 1},
                "logging": {"run_dir": "r"},
            },
        }
    )


@pytest.mark.parametrize(("sizes", "world"), [((8, 4, 2), 1), ((16, 4, 2), 2), ((24, 4, 2, 2, 2), 12)])
def test_the_fewest_ranks_that_fit(sizes, world):
    """The number of replicas is what the batch sizes demand, times tensor and pipeline ranks."""
    assert smallest_layout(_config(*sizes)).world_size == world


def test_batch_sizes_that_never_fit_are_refused():
    """The message is that of one replica, with all three sizes."""
    with pytest.raises(ConfigError, match="got 9"):
        smallest_layout(_config(9, 4, 2))


def test_exit_codes_and_text():
    """1 when runs differ, 3 for causes alone, 0 for neither; the text names the difference."""
    cause = Cause("A", "b", "c", "runs")
    difference = Difference("step 1, parameter, w", "b", "x", 2, 3)
    layout = smallest_layout(_config(8, 4, 2))
    assert RepeatReport([]).exit_code == 0
    assert RepeatReport([cause]).exit_code == 3
    both = RepeatReport([cause], layout, 3, "d", 3, difference)
    assert both.exit_code == 1 and both.as_dict()["exit_code"] == 1
    assert "found: A: b" in both.render() and "first at step 1, parameter, w: b and x; 2 of 3" in both.render()
