"""Is the recomputed update that of PyTorch's optimizers?"""

import pytest
import torch

from megasdc.sdc.referee.adam import AdamSettings, AdamSlice, adam_step, roundings

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _slice(optimizer, parameter):
    state = optimizer.state.get(parameter, {})
    zeros = torch.zeros_like(parameter)
    kept = parameter.detach(), state.get("exp_avg", zeros), state.get("exp_avg_sq", zeros)
    return AdamSlice(*(one.clone() for one in kept))


def _steps(kind, dtype, number, **options):
    """Yield (expected, magnitude, actual) of each step of a real optimizer."""
    generator = torch.Generator().manual_seed(4)
    parameter = torch.nn.Parameter(torch.randn(500, generator=generator).to(dtype))
    optimizer = kind([parameter], **SETTINGS, **options)
    settings = AdamSettings(
        SETTINGS["lr"], SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"], kind is torch.optim.AdamW
    )
    for step in range(1, number + 1):
        parameter.grad = (torch.randn(500, generator=generator) * 10.0 ** (-step)).to(dtype)
        before = _slice(optimizer, parameter)
        expected, magnitude = adam_step(before, parameter.grad, float(step), settings)
        optimizer.step()
        yield expected, magnitude, _slice(optimizer, parameter)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_it_is_the_formula_in_float64(kind):
    """In float64 PyTorch's optimizer and the formula agree to its last digits, in every step."""
    for expected, _, actual in _steps(kind, torch.float64, 6):
        for wanted, got in zip(expected.tensors, actual.tensors, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_right_update_is_a_few_roundings_away(options):
    """In fp32 every implementation stays within a few roundings of its terms, also where terms cancel."""
    for expected, magnitude, actual in _steps(torch.optim.AdamW, torch.float32, 6, **options):
        assert float(roundings(expected, magnitude, actual).max()) < 4.0


def test_terms_that_cancel_are_not_held_against_it():
    """Where the old moment and the gradient cancel, what rounding leaves is measured by the terms, not by the rest."""
    gradient = torch.rand(500) + 1.0
    parameter = torch.nn.Parameter(torch.randn(500))
    optimizer = torch.optim.AdamW([parameter], **SETTINGS, fused=True)
    first, second = gradient * (-1 / 9), gradient * gradient
    optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    settings = AdamSettings(SETTINGS["lr"], SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"], True)
    expected, magnitude = adam_step(_slice(optimizer, parameter), gradient, 8.0, settings)
    parameter.grad = gradient
    optimizer.step()
    actual = _slice(optimizer, parameter)
    lost = (actual.exp_avg.double() - expected.exp_avg).abs() / expected.exp_avg.abs()
    assert float(lost.max()) > 0.01, "nothing cancelled"
    assert float(roundings(expected, magnitude, actual).max()) < 4.0


def test_a_wrong_element_is_many_roundings_away():
    """One element wrong by a ten-thousandth of an update is seen, in the tensor where it is."""
    *_, (expected, magnitude, actual) = _steps(torch.optim.AdamW, torch.float32, 3)
    actual.exp_avg_sq[3] *= 1.0001
    assert [value > 100 for value in roundings(expected, magnitude, actual).tolist()] == [False, False, True]
    actual.master[5] += 1e-4
    assert [value > 100 for value in roundings(expected, magnitude, actual).tolist()] == [True, False, True]
