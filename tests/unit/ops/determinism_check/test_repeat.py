"""Are two runs compared rightly, and how many ranks does a check take?"""

import pytest

from megasdc.common.addresses import Address
from megasdc.common.errors import ConfigError
from megasdc.config.load import parse_config
from megasdc.config.repeatability import DifferenceCause
from megasdc.ops.determinism_check.check import FirstDifference, _outcome, compare_two_runs, smallest_layout
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace

LAYOUT = ParallelDims(1, 1, 1)
ADDRESSES = [
    Address(1, 0, "forward", "loss", "output"),
    Address(1, None, "parameter", "2.w", "weight"),
    Address(2, 0, "forward", "loss", "output"),
]


def _trace(*values):
    return {0: Trace(ADDRESSES[: len(values)], list(values))}


def test_equal_runs():
    """Equal addresses with equal checksums are no difference."""
    assert compare_two_runs(_trace(1, 2, 3), _trace(1, 2, 3), LAYOUT) is None
    assert compare_two_runs(_trace(), _trace(), LAYOUT) is None


def test_the_first_difference_in_execution_order_is_named():
    """Of several, the one that was computed first is named, with both checksums, the rank and the count."""
    found = compare_two_runs(_trace(1, 2, 3), _trace(1, 4, 5), LAYOUT)
    address = "step 1, parameter of 2.w (weight), rank 0 (dp 0, pp 0, tp 0)"
    assert found == FirstDifference(address, f"{2:016x}", f"{4:016x}", 2, 3)


@pytest.mark.parametrize(("first", "second"), [((1, 2, 3), (1, 2)), ((1, 2), (1, 2, 3))])
def test_a_result_of_one_run_alone_is_a_difference(first, second):
    """A run that ends early, or goes on alone, differs from the other."""
    found = compare_two_runs(_trace(*first), _trace(*second), LAYOUT)
    assert found.address.startswith("step 2, ") and (found.different, found.observations) == (1, 3)
    assert {found.first, found.second} == {None, f"{3:016x}"}


def _config(train, micro, accumulation, tensor=1, pipeline=1):
    return parse_config(
        {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "megasdc": {
                "data": {"path": "x"},
                "parallel": {"tensor": tensor, "pipeline": pipeline},
                "protect": "off",
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


def _text(outcome):
    return "\n".join([outcome.page.verdict, *outcome.page.sentences])


def test_exit_codes_and_text():
    """1 when runs differ, 3 for causes alone, 0 for neither; the text names the difference."""
    cause = DifferenceCause("A", "b", "c", "runs")
    difference = FirstDifference("step 1, parameter, w", "b", "x", 2, 3)
    layout = smallest_layout(_config(8, 4, 2))
    assert _outcome([]).exit_code == 0
    assert _outcome([cause]).exit_code == 3
    both = _outcome([cause], layout, 3, "d", 3, difference=difference)
    hidden = _text(_outcome([], layout, 3, "d", 3, observed=False))
    assert "submodules were not compared" in hidden and "all submodules" in _text(_outcome([], layout, 3, "d", 3))
    assert both.exit_code == 1 and both.as_dict()["exit_code"] == 1
    assert "found: A: b" in _text(both) and "first at step 1, parameter, w: b and x; 2 of 3" in _text(both)
