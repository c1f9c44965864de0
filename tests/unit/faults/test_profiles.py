"""Do the node profiles show, on tensors of real size, the figures that they say were published?"""

from functools import cache

import pytest
import torch

from megasdc.common.addresses import Address
from megasdc.config.faults import FaultSpec, expand_faults, load_profile
from megasdc.faults.injector import Injector
from megasdc.parallel.dims import ParallelDims

SITES = {
    "forward_attention": ("forward", "5.layer.self_attention.linear_proj", "output"),
    "forward_ffn": ("forward", "5.layer.mlp.linear_fc2", "output"),
    "backward_attention": ("backward", "5.layer.self_attention.linear_qkv", "input"),
    "backward_ffn": ("backward", "5.layer.mlp.linear_fc1", "input"),
}


def injector(name):
    specs = expand_faults([FaultSpec.model_validate({"profile": name})])
    return Injector(specs, ParallelDims(1, 1, 1), 2304)


@cache
def activations():
    """One micro-batch of the published model's hidden states, [s, b, h] = [2048, 1, 2304], 4.7 M elements."""
    return torch.randn(2048, 1, 2304, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("name", ["node_1", "node_10", "node_11"])
@pytest.mark.parametrize("site", SITES)
def test_mismatch_frequencies(name, site):
    """Differing over all elements is the published frequency, within 4 standard deviations of its binomial."""
    phase, fqn, slot = SITES[site]
    expected = load_profile(name).published[f"mismatch_frequency_{site}"]
    one, result = injector(name), activations()
    rounds = 1 if expected > 1e-3 else 20
    differing = 0
    for step in range(1, rounds + 1):
        harmed = one(Address(step, 0, phase, fqn, slot), result)
        differing += 0 if harmed is None else int((harmed.view(torch.int16) != result.view(torch.int16)).sum())
    mean = rounds * result.numel() * expected
    assert abs(differing - mean) < 4 * mean**0.5


@pytest.mark.parametrize("name", ["node_4", "node_13"])
def test_frequencies_that_are_not_published_are_those_of_node_1(name):
    """The profile says that they stand in, and they do, in every site."""
    profile, stands_in = load_profile(name), load_profile("node_1")
    assert any("those of node 1 stand in" in text for text in profile.assumed)
    assert not [key for key in profile.published if key.startswith("mismatch_frequency")]
    for ours, theirs in zip(profile.faults, stands_in.faults, strict=True):
        assert ours.model_copy(update={"steps": theirs.steps}) == theirs


def test_published_figures_that_are_not_tested_are_marked_as_quoted():
    """What is published is a mismatch frequency or a first step, both tested here, or is said to be a quotation."""
    for name in ("node_1", "node_4", "node_10", "node_11", "node_13"):
        profile = load_profile(name)
        others = [key for key in profile.published if not key.startswith(("mismatch_frequency", "first_step"))]
        assert bool(others) == any("quoted to compare with" in text for text in profile.assumed)


@pytest.mark.parametrize("name", ["node_1", "node_4", "node_11"])
def test_other_results_are_left_alone(name):
    """No other submodule, slot or phase is harmed."""
    one = injector(name)
    for phase, fqn, slot in (
        ("forward", "5.layer.mlp.linear_fc1", "output"),
        ("recompute", "5.layer.mlp.linear_fc2", "output"),
        ("backward", "5.layer.mlp.linear_fc2", "input"),
        ("weight_grad", "5.layer.mlp.linear_fc2", "weight"),
    ):
        assert one(Address(1, 0, phase, fqn, slot), activations()) is None


def test_node_13_is_silent_until_step_450():
    """Nothing differs before step 450, much after it."""
    one = injector("node_13")
    hits = [
        step
        for step in range(440, 460)
        if one(Address(step, 0, *SITES["backward_attention"]), activations()) is not None
    ]
    assert hits == list(range(450, 460))


def test_aegis():
    """Wrong in one result of 50; then runs of 4 adjacent elements, one in every 64."""
    one = injector("aegis")
    result = torch.ones(2048, 64)
    hits = [one(Address(step, 0, "forward", "2.layer.mlp.linear_fc1", "output"), result) for step in range(1, 3001)]
    wrong = [hit for hit in hits if hit is not None]
    assert abs(len(wrong) - 60) < 4 * 60**0.5
    for hit in wrong:
        places = (hit != result).flatten().nonzero().flatten()
        gaps = places.diff().tolist()
        assert gaps == ([1, 1, 1, 61] * 8)[:-1]


@pytest.mark.slow
def test_gate_level():
    """NaN and Inf are 1 % of the firings, flips of one bit under 40 % of the flips, places periodic."""
    one = injector("gate_level")
    result = torch.ones(64, 64)
    for step in range(1, 1001):
        for layer in range(2, 102):
            one(Address(step, 0, "forward", f"{layer}.layer.mlp.linear_fc1", "output"), result)
    total = len(one.firings)
    assert abs(total - 1000) < 4 * 1000**0.5
    special = sum(firing.kind == "value" for firing in one.firings)
    assert abs(special - 10) < 4 * 10**0.5
    flips = [firing for firing in one.firings if firing.kind == "bit_flip"]
    single = sum((firing.bits_before[0] ^ firing.bits_after[0]).bit_count() == 1 for firing in flips)
    assert abs(single / len(flips) - 0.39 / 0.99) < 4 * (0.24 / len(flips)) ** 0.5
    assert all(b - a == 128 for firing in one.firings for a, b in zip(firing.indices, firing.indices[1:], strict=False))


def test_healthy():
    """The healthy node has no faults."""
    assert injector("healthy").specs == ()
