"""What is kept of calls leaves nothing on the training's parameters, and is of the method that all modules have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megasdc.attached.record import ResultRecorder, choose_watched
from megasdc.sdc.referee.recompute import Call, record_calls
from megasdc.tensors.checksum import default_algorithm


class _Table(nn.Module):
    """Gives its parameter, as embeddings of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2))

    def forward(self, given: Tensor) -> Tensor:
        """The table."""
        return self.table


def test_no_hook_stays_on_a_parameter() -> None:
    """Of one that a submodule returns, or is given: each later backward pass would add to what was kept."""
    table, layer = _Table(), nn.Linear(2, 2)
    with record_calls(table) as calls, record_calls(layer) as after:
        layer(table(torch.ones(1))).sum().backward()
    layer(table(torch.ones(1))).sum().backward()
    assert not table.table._backward_hooks
    assert (len(calls[0].gradients), len(after[0].received), len(after[0].gradients)) == (1, 1, 1)


def test_a_gradient_that_comes_later_is_kept_with_what_is_not_copied() -> None:
    """A backward pass begins when the forward pass has ended."""
    layer = nn.Linear(2, 2)
    calls: list[Call] = []
    with record_calls(layer, calls):
        output = layer(torch.ones(1, 2))
    output.sum().backward()
    assert len(calls[0].gradients) == 1


@pytest.mark.parametrize("attached", [True, False])
def test_no_hook_of_a_recorder_stays_on_a_parameter(attached: bool) -> None:
    """A model, or a stage of a pipeline, may return one."""
    model = _Table()
    recorder = ResultRecorder(model, choose_watched(model, None), default_algorithm(torch.device("cpu")))
    if attached:
        recorder.attach(1)
        model(torch.ones(1)).sum().backward()
        recorder.detach()
    else:
        with recorder.recording(1):
            recorder.end_forward([model.forward(torch.ones(1))])
    assert not model.table._backward_hooks


class _Inner(nn.Linear):
    """With a method as torchvision's models have, of which ``forward`` makes something else."""

    def _forward_impl(self, given: Tensor) -> Tensor:
        return super().forward(given)

    def forward(self, given: Tensor) -> Tensor:
        """Twice."""
        return self._forward_impl(given) * 2


class _Token(nn.Linear):
    """With a method of the name that megasdc's loss has, that is not called."""

    def per_token(self, given: Tensor) -> Tensor:
        """Of one token."""
        return given


@pytest.mark.parametrize("kind", [_Inner, _Token])
def test_methods_of_a_user_are_not_taken_for_those_of_megatron(kind: Callable[[int, int], nn.Module]) -> None:
    """What a submodule returns is what it is judged by."""
    layer, given = kind(2, 2), torch.ones(1, 2)
    with record_calls(layer) as calls:
        output = layer(given)
    assert len(calls) == 1 and calls[0].output is not None and torch.equal(calls[0].output, output)
    assert len(calls[0].args) == 1
