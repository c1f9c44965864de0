"""Settings of `drop_compute` that contradict others are refused with both paths, the value and the remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, find_warnings
from megasdc.config.load import parse_config

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 100}, "logging": {"run_dir": "r"}},
}
LOSING = {"samples": "discard", "compensation": "extra_steps"}
ENDING = {"granularity": "backward", "gradients": "computed"}
BLEND = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]


def build(drop: dict[str, Any], **sections: Any) -> Any:
    raw = copy.deepcopy(BASE)
    raw["megasdc"] |= {"drop_compute": {"enabled": True, **drop}, **sections}
    return parse_config(raw)


def problem(drop: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(drop, **sections)
    (text,) = caught.value.problems
    return text


@pytest.mark.parametrize(
    ("drop", "sections", "parts"),
    [
        (
            {"compensation": "extra_steps"},
            {},
            ["compensation: got", '"extra_steps" with samples "defer"', 'set samples "discard", or compensation null'],
        ),
        (
            {**LOSING, "threshold": "inf"},
            {},
            ["compensation: got", '"extra_steps" with threshold "inf"', "give another"],
        ),
        (
            {"samples": "discard", "compensation": "resample"},
            {"data": {"path": "a", "blend": BLEND}},
            ["compensation: got", '"resample" with megasdc.data.blend', 'set samples "defer"'],
        ),
        ({"sigmas": 2.0}, {}, ["sigmas: got 2", 'rule "elapsed"', 'rule to "predictive"']),
        (
            {"threshold": 1.5, "retune_interval": 500},
            {},
            ["retune_interval: got 500", 'threshold to "auto", or remove it'],
        ),
        (
            ENDING,
            {"parallel": {"tensor": 2}},
            ["granularity: got", '"backward" with 2 tensor ranks', "set tensor 1", 'granularity "micro_batch"'],
        ),
        (ENDING, {"parallel": {"pipeline": 2}}, ["granularity: got", '"backward" with 2 stages', "set pipeline 1"]),
        (
            {"granularity": "backward"},
            {},
            ["granularity: got", '"backward" with gradients "planned"', 'set "computed"'],
        ),
        (
            {**ENDING, **LOSING, "compensation": "larger_batch"},
            {},
            ["granularity: got", '"backward" with "larger_batch"', 'set "extra_steps"'],
        ),
        ({"retune_interval": 45}, {}, ["retune_interval: got 45", "more than window_steps 45"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "",
)
def test_what_contradicts_itself(drop: dict[str, Any], sections: dict[str, Any], parts: list[str]) -> None:
    """One message names the field by its dotted path, what it got, and what to set instead."""
    text = problem(drop, **sections)
    assert text.startswith(f"megasdc.drop_compute.{parts[0]}"), text
    assert all(part in text for part in parts[1:]), text


@pytest.mark.parametrize(
    ("drop", "parts"),
    [
        ({"threshold": -0.5}, ["threshold"]),
        ({"threshold": "fast"}, ["threshold", "fast"]),
        ({"rule": "guess"}, ["rule", "guess", "predictive"]),
        ({"min_micro_batches": 0}, ["min_micro_batches", "0"]),
        ({"max_drop_rate": 1.5}, ["max_drop_rate", "1.5"]),
        ({"window_steps": 0}, ["window_steps", "0"]),
        ({"samples": "keep"}, ["samples", "keep", "defer"]),
        ({"granularity": "layer"}, ["granularity", "layer", "backward"]),
        ({"gradients": "mean"}, ["gradients", "mean", "computed"]),
        ({"compensation": "more"}, ["compensation", "more", "larger_batch"]),
        ({"replay_decisions": ""}, ["replay_decisions"]),
        ({"tau": 1.0}, ["tau"]),
    ],
)
def test_values_outside_their_range(drop: dict[str, Any], parts: list[str]) -> None:
    """The field, what it got and what is allowed are told."""
    with pytest.raises(ConfigError) as caught:
        build(drop)
    text = "\n".join(caught.value.problems)
    assert f"megasdc.drop_compute.{parts[0]}" in text and all(part in text for part in parts), text


@pytest.mark.parametrize(
    "drop",
    [
        {},
        {"threshold": 0},
        {**LOSING, "threshold": "inf", "replay_decisions": "d.jsonl"},
        {"samples": "discard", "compensation": "resample"},
        {"rule": "predictive", "sigmas": 0.0},
        {"retune_interval": 46},
        ENDING,
        {**ENDING, **LOSING},
        {"sigmas": 1.0, "max_drop_rate": 0.0},
    ],
    ids=str,
)
def test_what_fits_together_passes(drop: dict[str, Any]) -> None:
    """The limits of what is refused are accepted, and survive the round trip."""
    config = build(drop)
    assert parse_config(config.resolved()) == config


def test_problems_are_told_together() -> None:
    """Several at once are several sentences."""
    with pytest.raises(ConfigError) as caught:
        build({"compensation": "resample", "sigmas": 3.0, "retune_interval": 5, "threshold": 1.0})
    told = [text.split(":")[0].removeprefix("megasdc.drop_compute.") for text in caught.value.problems]
    assert sorted(set(told)) == ["compensation", "retune_interval", "sigmas"]


def test_the_smallest_number_of_micro_batches_must_leave_some_over() -> None:
    """More than a replica's step has, or as many with a threshold, is refused where the number of ranks is known."""
    check_layout(build({"min_micro_batches": 3}), 2)
    with pytest.raises(ConfigError, match=r"drop_compute.min_micro_batches: got 5, but a replica's step has 4"):
        check_layout(build({"min_micro_batches": 5}), 2)
    with pytest.raises(ConfigError, match=r"drop_compute.enabled: got true, but .* 4 micro-batches .* raise .*\"inf\""):
        check_layout(build({"min_micro_batches": 4}), 2)
    check_layout(build({"min_micro_batches": 4, "threshold": "inf"}), 2)
    check_layout(build({"min_micro_batches": 5, "enabled": False}), 2)


def test_a_run_that_ends_before_its_threshold_is_chosen() -> None:
    """It passes, with a warning; also where `larger_batch` has to measure a threshold that is given."""
    told = "drop_compute.window_steps: 60 after 40 of warm-up, the run has 100 steps"
    measuring = {"warmup_steps": 40, "window_steps": 60}
    larger = {**measuring, "threshold": 1.0, "samples": "discard", "compensation": "larger_batch"}
    for drop, warns in (
        (measuring, True),
        (larger, True),
        ({**measuring, "window_steps": 59}, False),
        ({**measuring, "threshold": 1.0}, False),
        ({**measuring, "replay_decisions": "d.jsonl"}, False),
        ({**measuring, "enabled": False}, False),
    ):
        assert any(told in text for text in find_warnings(build(drop))) is warns, drop


def test_one_micro_batch_a_step_may_end_in_its_backward_pass() -> None:
    """With seconds, a threshold that is chosen, or decisions to replay."""
    for drop in ({}, {"threshold": 1.0}, {"replay_decisions": "d.jsonl"}, {"min_micro_batches": 3}):
        check_layout(build({**ENDING, **drop}), 2 if "min_micro_batches" in drop else 8)
