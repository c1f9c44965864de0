"""Which parameters are split over tensor ranks: the same ones as for DeepSpeed, which sums norms of them."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.utils import is_model_parallel_parameter

from megasdc.optim.zero1 import counts_here, is_copied


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel", "another"])
@pytest.mark.parametrize("value", [True, False])
def test_marks_are_those_of_deepspeed(mark: str, value: bool) -> None:
    """Megatron-core sets the first, older Megatron and its users the second."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    setattr(parameter, mark, value)
    split = is_model_parallel_parameter(parameter)
    assert is_copied(parameter) is not split
    assert counts_here(parameter, 0) and counts_here(parameter, 1) is split
