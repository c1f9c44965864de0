"""Delays that cannot be as written are refused with place, value and remedy, before anything starts."""

import copy
import json
from dataclasses import fields

import numpy as np
import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout
from megasdc.config.faults import PARAMETERS_OF, DelaySpec
from megasdc.config.load import parse_config
from megasdc.distributions import KINDS

BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 3,
    "megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 10}, "logging": {"run_dir": "r"}},
}
NEEDED = {
    "mean_s": 0.5,
    "std_s": 0.1,
    "delay_s": 0.2,
    "probability": 0.1,
    "num_steps": 2,
    "period_steps": 5,
    "slow_steps": 1,
    "path": __file__,
    "replica": 0,
}


def build(*delays, **sections):
    raw = copy.deepcopy(BASE)
    raw["megasdc"] |= {"delay": list(delays), **sections}
    return parse_config(raw)


def complete(kind):
    return {"kind": kind} | {name: NEEDED[name] for name in PARAMETERS_OF[kind]}


def problems(*delays):
    with pytest.raises(ConfigError) as caught:
        build(*delays)
    return caught.value.problems


def test_every_kind_has_an_entry_that_states_its_parameters():
    """The kinds of the section are those of the distributions, with the parameters of each by the same names."""
    assert set(DelaySpec.model_fields["kind"].annotation.__args__) == set(PARAMETERS_OF) == set(KINDS)
    for name, kind in KINDS.items():
        assert set(PARAMETERS_OF[name]) == {field.name for field in fields(kind)} - {"stage"}


@pytest.mark.parametrize("kind", PARAMETERS_OF)
def test_a_complete_entry_passes_and_each_parameter_is_needed(kind):
    """With its parameters a kind is accepted and survives the round trip; without one of them it is refused."""
    config = build(complete(kind))
    assert parse_config(config.resolved()) == config
    for name in PARAMETERS_OF[kind]:
        lacking = {key: value for key, value in complete(kind).items() if key != name}
        (text,) = problems({"kind": "exponential", "mean_s": 0.1}, lacking)
        assert text == f"megasdc.delay.1.{name}: missing; kind {kind} needs it."


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"kind": "uniform"}, ["delay.0.kind", "uniform", '"exponential"']),
        ({"mean_s": -0.1}, ["delay.0.mean_s", "-0.1", ">= 0"]),
        ({"std_s": 0.1}, ["delay.0.std_s: got 0.1", "exponential does not read it (only normal, gamma)", "remove it"]),
        ({"path": "x.npy"}, ["delay.0.path", "only trace, resampled"]),
        ({"kind": "gamma", "std_s": 0.0}, ["delay.0.std_s: got 0.0", "more than 0"]),
        (complete("bursts") | {"mean_s": None, "probability": 1.5}, ["delay.0.probability", "1.5"]),
        (complete("slow_periods") | {"mean_s": None, "slow_steps": 6}, ["delay.0.slow_steps: got 6", "period_steps 5"]),
        ({"kind": "trace", "mean_s": None, "path": "absent.npy"}, ["delay.0.path", "'absent.npy'", "not a file"]),
        ({"steps": [5, 2]}, ["delay.0.steps", "2 is before the first 5"]),
        ({"preemptible": True, "stage": 1}, ["delay.0.preemptible", "stage 1", "remove it"]),
        ({"preemptible": True, "tensor_rank": 1}, ["delay.0.preemptible", "tensor_rank 1"]),
        ({"micro_batch_latency_s": 0.0}, ["delay.0.micro_batch_latency_s", "> 0"]),
        ({"mean": 0.5}, ["delay.0.mean", "did you mean megasdc.delay.0.mean_s"]),
    ],
)
def test_delays_that_cannot_be(change, parts):
    """One message names the entry, the field and what is allowed."""
    (text,) = problems({"kind": "exponential", "mean_s": 0.1} | change)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("field", "limit"), [("rank", 8), ("replica", 2), ("stage", 2), ("tensor_rank", 2)])
def test_places_outside_the_world(field, limit):
    """A rank that the layout does not have is refused where the number of ranks is known; the last one is fine."""
    layout = {"parallel": {"tensor": 2, "pipeline": 2}}
    delay = {"kind": "exponential", "mean_s": 0.1}
    check_layout(build(delay | {field: limit - 1}, **layout), 8)
    with pytest.raises(ConfigError, match=rf"megasdc.delay.0.{field}: got {limit}, but there are {limit}"):
        check_layout(build(delay | {field: limit}, **layout), 8)


def test_files_of_delays_are_read_by_check_config(tmp_path):
    """A file that is no array, or too short for the run, is a problem of `path` with exit code 70; others pass."""
    (tmp_path / "text.npy").write_text("no array")
    for name, micro_batches in (("short", 2), ("trace", 1), ("long", 3)):
        np.save(tmp_path / f"{name}.npy", np.ones((2, 4, micro_batches)))

    def check(trace, resampled):
        delays = [{"kind": "trace", "path": str(trace)}, {"kind": "resampled", "path": str(resampled)}]
        config = tmp_path / "c.json"
        config.write_text(json.dumps({**BASE, "megasdc": {**BASE["megasdc"], "delay": delays}}))
        return CliRunner().invoke(app, ["check-config", str(config), "--world-size", "2"])

    wrong = check(tmp_path / "text.npy", tmp_path / "short.npy").exception
    assert isinstance(wrong, ConfigError)
    first, second = wrong.problems
    assert first.startswith(f"megasdc.delay.0.path: {tmp_path}/text.npy cannot be read as an array")
    assert second == f"megasdc.delay.1.path: {tmp_path}/short.npy holds 2 micro-batches of 1 stage(s), needed 3 of 1."
    assert check(tmp_path / "trace.npy", tmp_path / "long.npy").exit_code == 0
