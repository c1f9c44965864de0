"""Does the probe show what a module takes in, forward and backward, and leave nothing behind?"""

import torch
from torch import nn

from megasdc.common.addresses import BACKWARD, FORWARD
from megasdc.model.kinds import ACTIVATION, FC1, FC2
from megasdc.model.submodules import InputProbe, Submodule


def test_inputs_and_output_gradients_are_shown():
    """Forward every tensor argument, also inside tuples; backward the gradient of the output; nothing after close."""

    class Sum(nn.Module):
        def forward(self, pair, other, number):
            return pair[0] + other * number

    first, second = nn.Linear(3, 4), Sum()
    parts = [
        Submodule("0.a", FC1, first, {}),
        Submodule("0.b", FC2, second, {}),
        Submodule("0.c", ACTIVATION, None, {}),
    ]
    shown = []
    value, weight = torch.randn(2, 3), torch.randn(2, 4)
    with InputProbe(parts, lambda phase, fqn, tensors: shown.append((phase, fqn, [one.clone() for one in tensors]))):
        result = second((first(value), None), torch.ones(2, 4), 2.0)
        (result * weight).sum().backward()
    assert [(phase, fqn) for phase, fqn, _ in shown] == [
        (FORWARD, "0.a"),
        (FORWARD, "0.b"),
        (BACKWARD, "0.b"),
        (BACKWARD, "0.a"),
    ]
    torch.testing.assert_close(shown[0][2], [value])
    torch.testing.assert_close(shown[1][2], [first(value).detach(), torch.ones(2, 4)])
    torch.testing.assert_close(shown[2][2], [weight])
    torch.testing.assert_close(shown[3][2], [weight])
    first(value).sum().backward()
    assert len(shown) == 4
    assert not first._forward_hooks
    assert not first._forward_pre_hooks
