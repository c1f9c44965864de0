"""Are NaN and Inf seen, told apart, and put into the order in which ranks compute?"""

import pytest
import torch

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.nonfinite import FiniteRecorder, NonFinite, first_non_finite
from megasdc.tensors.bits import INF, NAN, are_finite, non_finite_kind

ONE = ParallelDims(1, 1, 1)


def _address(micro_batch, phase=FORWARD, fqn="2.layer.mlp_bda", slot="output"):
    return Address(1, micro_batch, phase, fqn, slot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, None),
        ({3: float("nan")}, NAN),
        ({3: float("inf")}, INF),
        ({3: float("-inf")}, INF),
        ({0: float("inf"), 499: float("-inf")}, INF),
        ({7: float("inf"), 8: float("nan")}, NAN),
    ],
    ids=["finite", "nan", "inf", "-inf", "both signs", "inf and nan"],
)
def test_kinds_are_told_apart(dtype, values, kind):
    """Any NaN makes it NaN, else any infinity Inf; the largest finite numbers, whose sum overflows, are neither."""
    tensor = torch.full((5, 100), torch.finfo(dtype).max, dtype=dtype)
    tensor[::2] *= -1
    for place, value in values.items():
        tensor.view(-1)[place] = value
    assert non_finite_kind([tensor.t()]) == kind
    recorder = FiniteRecorder()
    recorder(_address(0), tensor)
    found = recorder.pop_first(ONE)
    assert (None if found is None else found.kind) == kind


def test_a_tensor_without_numbers_is_finite():
    """Token ids and empty tensors are passed over."""
    recorder = FiniteRecorder()
    recorder(_address(0), torch.arange(4))
    recorder(_address(0), torch.zeros(0))
    assert recorder.pop_first(ONE) is None
    assert non_finite_kind([torch.arange(4), torch.zeros(0)]) is None


def test_the_first_of_a_rank_is_by_execution():
    """With several micro-batches in flight an earlier micro-batch comes first, whenever it was recorded."""
    recorder = FiniteRecorder()
    good, bad = torch.zeros(3), torch.tensor([0.0, float("nan")])
    recorder(_address(0), good)
    recorder(_address(1), bad)
    recorder(_address(0, BACKWARD, slot="input"), bad)
    recorder(_address(0, BACKWARD, "2.layer.mlp.linear_fc2", "input"), bad)
    assert recorder.pop_first(ONE) == NonFinite(_address(0, BACKWARD, slot="input"), 2, NAN)
    assert recorder.pop_first(ONE) is None, "what was taken is gone"


def test_the_first_of_all_ranks_follows_the_stages():
    """Forward an earlier stage comes first, backward a later one, and forward comes before backward."""
    layout = ParallelDims(1, 2, 1)
    forward = NonFinite(_address(0), 5, NAN)
    later = NonFinite(_address(0), 0, NAN)
    assert first_non_finite([forward, later], layout) == (0, forward)
    backward = NonFinite(_address(0, BACKWARD), 9, INF)
    gradient = NonFinite(_address(0, WEIGHT_GRAD), 20, INF)
    assert first_non_finite([backward, gradient], layout) == (1, gradient)
    assert first_non_finite([NonFinite(_address(0, RECOMPUTE), 9, INF), forward], layout) == (1, forward)
    assert first_non_finite([None, NonFinite(_address(1), 0, NAN)], layout)[0] == 1
    assert first_non_finite([None, None], layout) is None


def test_sums_that_overflow_are_no_inf():
    """Finite elements whose sum is not are finite, in every type; integers and empty tensors say nothing."""
    large = [torch.full((1000,), torch.finfo(dtype).max, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    assert are_finite([*large, torch.arange(3), torch.empty(0)])
    for value in (float("nan"), float("-inf")):
        large[1][7] = value
        assert not are_finite(large)
