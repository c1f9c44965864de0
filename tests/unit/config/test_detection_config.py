"""Detection that could accuse healthy ranks, or that checks nothing, is refused; what audits cost is said."""

from __future__ import annotations

import copy

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, find_warnings, with_replicas
from megasdc.config.load import parse_config

BASE = {
    "megasdc": {
        "data": {"path": "x"},
        "protect": "off",
        "training": {"steps": 100},
        "logging": {"run_dir": "r"},
        "determinism": {"enabled": True},
    }
}


def build(deepspeed=None, **sections):
    raw = {**copy.deepcopy(BASE), **(deepspeed or {})}
    raw["megasdc"].update(sections)
    return parse_config(raw)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"audit": {"enabled": True}, "determinism": {"enabled": False}}, ["megasdc.audit.enabled", "determinism"]),
        (
            {"sdc": {"always_on": {"enabled": True}}, "determinism": {"enabled": False}},
            ["megasdc.sdc.always_on.enabled", "determinism"],
        ),
        ({"sdc": {"always_on": {"enabled": True, "recompute": True}}}, ["activation_checkpoint_interval"]),
        (
            {"sdc": {"always_on": {"enabled": True, "parameters": False, "finite": False, "tokens": False}}},
            ["nothing is checked"],
        ),
        (
            {"sdc": {"golden_interval": 9}},
            ["golden_interval: got 9", "no effect with megasdc.sdc.golden null", "set megasdc.sdc.golden,"],
        ),
        (
            {"sdc": {"golden": "a"}, "determinism": {"enabled": False}},
            ['golden: got "a"', "determinism.enabled true"],
        ),
        (
            {"sdc": {"golden": "a", "golden_at_start": False}},
            ['golden: got "a"', "sdc.golden_at_start true or megasdc.sdc.golden_interval"],
        ),
    ],
)
def test_what_cannot_work_is_refused(sections, parts):
    """Each contradiction is one problem that names the fields and the remedy."""
    with pytest.raises(ConfigError) as caught:
        build(**sections)
    (text,) = caught.value.problems
    assert all(part in text for part in parts)


ISOLATING = {
    "audit": {"enabled": True},
    "sdc": {"policy": {"persistent": "isolate"}},
    "checkpoint": {"memory": {"interval": 1, "partners": True}, "other_layout": "convert"},
}


@pytest.mark.parametrize(
    ("checkpoint", "lacking"),
    [
        ({"memory": {"interval": 0, "partners": True}, "other_layout": "convert"}, "memory.interval to 1"),
        ({"memory": {"interval": 1, "partners": False}, "other_layout": "convert"}, "memory.partners to true"),
        ({"memory": {"interval": 1, "partners": True}}, "other_layout to convert"),
    ],
)
def test_isolation_needs_the_state_of_others(checkpoint, lacking):
    """The fields from which it comes are named, each with what to set; who is not named cannot be isolated."""
    with pytest.raises(ConfigError) as caught:
        build(**{**ISOLATING, "checkpoint": checkpoint})
    assert any(one.startswith("megasdc.sdc.policy.persistent: got") and lacking in one for one in caught.value.problems)
    with pytest.raises(ConfigError, match="inconclusive"):
        build(**{**ISOLATING, "sdc": {"policy": {"inconclusive": "isolate"}}})


def test_isolation_leaves_enough_replicas():
    """One more than go on is needed at the start; a smaller run of the same samples halts instead, and says so."""
    config = build({"train_batch_size": 12, "gradient_accumulation_steps": 4}, **ISOLATING)
    with pytest.raises(ConfigError, match='got "isolate" with 2 replicas; 3 are needed'):
        check_layout(build({"train_batch_size": 12}, **ISOLATING), 2)
    whole = check_layout(config, 3)
    fewer = with_replicas(config, whole, 2)
    assert fewer.megasdc.sdc.policy.persistent == "halt"
    layout = check_layout(fewer, 2, 3)
    assert (layout.train_batch_size, layout.micro_batch_size) == (12, whole.micro_batch_size)
    assert with_replicas(config, check_layout(config, 3), 3) == config
    with pytest.raises(ConfigError, match="min_replicas"):
        build(**{**ISOLATING, "sdc": {"isolation": {"min_replicas": 1}}})


def test_one_replica_has_nothing_to_audit():
    """An audit needs two replicas; how many ranks that takes is said."""
    config = build(audit={"enabled": True}, parallel={"tensor": 2})
    with pytest.raises(ConfigError, match="start at least 4 ranks"):
        check_layout(config, 2)
    assert check_layout(config, 4).data == 2


@pytest.mark.parametrize(("interval", "warned"), [(99, True), (100, False)])
def test_a_dear_audit_is_warned_of(interval, warned):
    """1/(M K) above 0.5 % of the samples is a warning with the interval that would not be."""
    config = build(
        {"gradient_accumulation_steps": 2}, audit={"enabled": True, "interval": interval}, training={"steps": 1000}
    )
    warnings = [one for one in find_warnings(config) if "audit" in one]
    assert bool(warnings) is warned
    assert all("from 100 on" in one for one in warnings)
