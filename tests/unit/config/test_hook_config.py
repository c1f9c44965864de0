"""Hooks that cannot do what they say are refused with the entry, the value and the remedy; schedules mean one thing."""

from __future__ import annotations

import copy
import math

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.hooks import theta_at
from megasdc.config.load import parse_config

BASE = {"megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 100}, "logging": {"run_dir": "r"}}}
ABSOLUTE = {"hook": "absolute", "theta": 1e-3}
SPIKE = {"hook": "spike_aware", "theta": 1000.0}


def build(*hooks, deepspeed=None, **sections):
    raw = {**copy.deepcopy(BASE), **(deepspeed or {})}
    raw["megasdc"].update(sections, optimizer_hooks=list(hooks))
    return parse_config(raw)


FP16 = {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("hook", "deepspeed", "parts"),
    [
        ({**ABSOLUTE, "theta": 0.0}, None, ["optimizer_hooks.0.theta: got 0", "above 1.17549e-38"]),
        ({**ABSOLUTE, "theta": -1e-3}, None, ["theta: got -0.001"]),
        ({**SPIKE, "theta": 1.0}, None, ["theta: got 1;", "above 1", "freeze"]),
        ({**SPIKE, "theta": [[1, "inf"], [50, 0.5]]}, None, ["theta: got 0.5"]),
        ({**SPIKE, "theta": [[5, 10.0], [5, 20.0]]}, None, ["steps [5.0, 5.0]", "larger than the one before"]),
        ({**SPIKE, "theta": [[0, 10.0]]}, None, ["steps [0.0]", "from 1 on"]),
        ({"hook": "absolute"}, None, ["optimizer_hooks.0.theta: missing", "absolute needs it"]),
        ({**ABSOLUTE, "grace_steps": 3}, None, ["grace_steps", "only spike_aware"]),
        ({**ABSOLUTE, "parameters": ["*.mlp.linear_fc3.*"]}, None, ["'*.mlp.linear_fc3.*'", "matches no parameter"]),
        ({**SPIKE, "where": "local"}, None, ['got "local"', "use absolute"]),
        ({**ABSOLUTE, "non_finite": "zero"}, FP16, ["dynamic loss scale"]),
        ({**ABSOLUTE, "non_finite": "halt"}, FP16, ["dynamic loss scale"]),
        (ABSOLUTE, {"zero_optimization": {"round_robin_gradients": True}}, ["round_robin_gradients: got true"]),
        (
            ABSOLUTE,
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ["offload_optimizer", "no hook reads"],
        ),
        ({**ABSOLUTE, "theta": 1e-46}, None, ["theta: got 1e-46"]),
        ({**SPIKE, "grace_steps": 100}, None, ["never bound anything"]),
        ({"hook": "momentum_reset", "interval": 9, "warmup_steps": 9}, None, ["never reach its schedule"]),
        ({**ABSOLUTE, "parameters": ["3.output.weight"]}, None, ["matches no parameter"]),
        ({**ABSOLUTE, "where": "after_norm", "non_finite": "halt"}, None, ["finite already"]),
        ({**ABSOLUTE, "where": "after_norm", "theta": 2.0}, None, ["after the norm was clipped to 1"]),
        ({"hook": "file", "path": "absent.py", "name": "X"}, None, ["'absent.py', which is not a file"]),
        ({"hook": "momentum_reset", "theta": 1.0}, None, ["theta", "momentum_reset does not read it"]),
    ],
)
def test_what_cannot_work_is_refused(hook, deepspeed, parts):
    """Each mistake is one problem that names the entry, the value and the remedy."""
    with pytest.raises(ConfigError) as caught:
        build(hook, deepspeed=deepspeed)
    (text,) = caught.value.problems
    assert all(part in text for part in parts), text


def test_an_entry_that_comes_too_late_is_refused():
    """Behind an entry of the same hook and place that fits all its parameters it would never act."""
    late = {**ABSOLUTE, "theta": 1.0, "parameters": ["2.*"]}
    with pytest.raises(ConfigError, match="put this entry before them"):
        build(ABSOLUTE, late)
    build(late, ABSOLUTE)


def test_one_clip_of_the_norm_and_one_reset():
    """A second clip of the norm beside DeepSpeed's, and a second reset, are refused."""
    clips = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}
    with pytest.raises(ConfigError, match="set gradient_clipping"):
        build(ABSOLUTE, deepspeed=clips)
    with pytest.raises(ConfigError, match="second momentum_reset"):
        build({"hook": "momentum_reset"}, {"hook": "momentum_reset", "interval": 7})


def test_other_backends_have_no_names():
    """With Transformer Engine's modules there is nothing that patterns could fit."""
    with pytest.raises(ConfigError, match="no full names"):
        build(ABSOLUTE, model={"backend": "transformer_engine"})


def test_good_hooks_pass():
    """Whole numbers, "inf", schedules and patterns of one layer are taken."""
    config = build({**SPIKE, "theta": 1000}, {**ABSOLUTE, "theta": [[1, "inf"], [50, 1]], "parameters": ["2.*"]})
    assert config.megasdc.optimizer_hooks[0].theta == 1000


@pytest.mark.parametrize(
    ("theta", "values"),
    [
        (5.0, {1: 5.0, 100: 5.0}),
        ("inf", {1: math.inf}),
        ([[10.0, 1.0], [20.0, 3.0]], {1: 1.0, 10: 1.0, 15: 2.0, 20: 3.0, 99: 3.0}),
        ([[1.0, "inf"], [20.0, 3.0]], {1: math.inf, 19: math.inf, 20: 3.0}),
        ([[1.0, 3.0], [20.0, "inf"]], {19: 3.0, 20: math.inf}),
    ],
)
def test_schedules(theta, values):
    """Straight lines between points, the ends hold beyond them, and "inf" is reached in one step."""
    assert {step: theta_at(theta, step) for step in values} == values
