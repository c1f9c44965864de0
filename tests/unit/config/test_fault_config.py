"""Faults that cannot be injected as written are refused with place, value and remedy, before anything starts."""

import copy

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout
from megasdc.config.faults import expand_faults, load_profile, profile_names
from megasdc.config.load import parse_config

BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 10}, "logging": {"run_dir": "r"}},
}


def build(faults=(), process_faults=(), **sections):
    raw = copy.deepcopy(BASE)
    raw["megasdc"] |= {"faults": list(faults), "process_faults": list(process_faults), **sections}
    return parse_config(raw)


def problem(*faults, **options):
    with pytest.raises(ConfigError) as caught:
        build(faults, **options)
    (text,) = caught.value.problems
    return text


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ({"submodule": "*.mlp.linear_fc3"}, ["faults.0.submodule", "linear_fc3", "2.layer.mlp.linear_fc1"]),
        ({"submodule": "9.layer.mlp_bda"}, ["faults.0.submodule", "9.layer.mlp_bda", "mlp_bda"]),
        ({"submodule": "0.word_embeddings", "phase": "backward"}, ["faults.0.phase", "no result in phase backward"]),
        ({"submodule": "*.mlp_bda", "phase": "weight_grad"}, ["faults.0.phase", "it has backward, forward"]),
        ({"submodule": "*.linear_fc1", "slot": "weight"}, ["faults.0.slot", "'weight'", "output"]),
        ({"phase": "update", "slot": "weight"}, ["faults.0.slot", "weight.exp_avg"]),
        ({"phase": "recompute"}, ["faults.0.phase", "activation_checkpoint_interval"]),
        ({"phase": "sideways"}, ["faults.0.phase", "sideways", '"weight_grad"']),
        ({"probability": 1.5}, ["faults.0.probability", "1.5", ">= 0 and <= 1"]),
        ({"probability": -0.1}, ["faults.0.probability", "-0.1"]),
        ({"element_probability": 2}, ["faults.0.element_probability", "<= 1"]),
        ({"burst": {"length": 2, "probability": 3.0}}, ["faults.0.burst.probability", "3.0"]),
        ({"burst": {"length": 0, "probability": 0.1}}, ["faults.0.burst.length", "> 0"]),
        ({"kind": "scale", "factor": 2, "bits": [1]}, ["faults.0.bits", "kind bit_flip", "not scale"]),
        ({"kind": "scale"}, ["faults.0.factor", "kind scale needs it"]),
        ({"kind": "value"}, ["faults.0.value", "kind value needs it"]),
        ({"kind": "noise"}, ["faults.0.deviation"]),
        ({"kind": "noise", "deviation": 0.0}, ["faults.0.deviation", "> 0"]),
        ({"value": 3}, ["faults.0.value", "kind value only, not bit_flip"]),
        ({"bits": []}, ["faults.0.bits", "empty"]),
        ({"bits": [64]}, ["faults.0.bits", "64"]),
        ({"bits": "upper"}, ["faults.0.bits", '"mantissa"']),
        ({"bits": [1, 2], "num_bits": 2}, ["faults.0.num_bits", "all bits of a list"]),
        ({"pattern": "periodic"}, ["faults.0.period", "needs it"]),
        ({"pattern": "periodic", "period": 2, "run": 3}, ["faults.0.run", "period of 2"]),
        ({"period": 2}, ["faults.0.period", "pattern periodic only, not random"]),
        ({"pattern": "indices"}, ["faults.0.indices"]),
        ({"elements": 3, "element_probability": 0.1}, ["faults.0.element_probability", "elements 3"]),
        ({"pattern": "column", "element_probability": 0.1}, ["faults.0.element_probability", "pattern random"]),
        ({"only_above": 3.0, "only_below": 1.0}, ["faults.0.only_above", "no value fits"]),
        ({"steps": [5, 2]}, ["faults.0.steps", "2 is before the first 5"]),
        ({"steps": [None, 2]}, ["faults.0.steps", "first step is missing"]),
        ({"steps": [3]}, ["faults.0.steps", "list of 2"]),
        ({"phase": "update", "micro_batches": [0]}, ["faults.0.micro_batches", "not update"]),
        ({"phase": "tokens", "submodule": "loss"}, ["faults.0.submodule", "belongs to no submodule"]),
        ({"phase": "tokens", "bits": "exponent"}, ["faults.0.bits", "no exponent"]),
        ({"phase": "tokens", "kind": "value", "value": "nan"}, ["faults.0.value", "whole numbers"]),
        ({"phase": "tokens", "slot": "output"}, ["faults.0.slot", "tokens, labels"]),
        ({"phase": "norm", "slot": "clip"}, ["faults.0.slot", "part, total, factor"]),
        ({"phase": "norm", "submodule": "loss"}, ["faults.0.submodule", "belongs to no submodule"]),
        ({"phase": "hyperparameter", "slot": "lr"}, ["faults.0.slot", "0.lr", "1.step"]),
        ({"phase": "place", "kind": "noise", "deviation": 1.0}, ["faults.0.kind", "whole numbers"]),
        ({"phase": "copy", "slot": "weight.master"}, ["faults.0.slot", "weight"]),
        ({"phase": "state_at_rest", "slot": "weight"}, ["faults.0.slot", "weight.exp_avg"]),
        ({"phase": "checkpoint", "bits": [8]}, ["faults.0.bits", "0 to 7"]),
        ({"phase": "checkpoint", "pattern": "column"}, ["faults.0.pattern", "no columns"]),
        ({"file": "*.pt"}, ["faults.0.file", "phase checkpoint only"]),
        ({"profile": "node_12"}, ["faults.0.profile", "node_12", "node_10"]),
        ({"profile": "node_10", "kind": "noise"}, ["faults.0.kind", "remove this field or the profile"]),
        ({"profile": "missing.json"}, ["faults.0.profile", "cannot be read"]),
        ({"sub_module": "*"}, ["faults.0.sub_module", "did you mean megasdc.faults.0.submodule"]),
    ],
)
def test_faults_that_cannot_be(fault, parts):
    """One message names the spec, the field and what is allowed."""
    text = problem(fault)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ({"kind": "sleep"}, ["process_faults.0.kind", "sigstop"]),
        ({"kind": "slow"}, ["process_faults.0.factor", "needs it"]),
        ({"kind": "slow", "factor": 0.5}, ["process_faults.0.factor", ">= 1"]),
        ({"kind": "slow", "factor": 2, "phase": "update"}, ["process_faults.0.phase", "forward or backward"]),
        ({"kind": "slow", "factor": 2, "after_restart": True}, ["process_faults.0.after_restart"]),
        ({"kind": "exit", "factor": 2}, ["process_faults.0.factor", "kind slow only"]),
        ({"kind": "sigkill", "exit_code": 9}, ["process_faults.0.exit_code", "kind exit only"]),
        ({"kind": "hang", "phase": "collective", "micro_batches": [1]}, ["process_faults.0.micro_batches"]),
    ],
)
def test_process_faults_that_cannot_be(fault, parts):
    """Likewise for ranks that end, stop or are slow."""
    with pytest.raises(ConfigError) as caught:
        build(process_faults=[fault])
    (text,) = caught.value.problems
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_either_pass_may_be_slow(phase):
    """Both passes are accepted, no other phase is."""
    build(process_faults=[{"kind": "slow", "factor": 2, "phase": phase}])


@pytest.mark.parametrize("kind", ["faults", "process_faults"])
@pytest.mark.parametrize(("field", "limit"), [("rank", 8), ("replica", 2), ("stage", 2), ("tensor_rank", 2)])
def test_places_outside_the_world(kind, field, limit):
    """A rank that the layout does not have is refused where the number of ranks is known; the last one is fine."""
    base = {"kind": "exit"} if kind == "process_faults" else {}
    layout = {"parallel": {"tensor": 2, "pipeline": 2}}
    check_layout(build(**{kind: [{**base, field: limit - 1}]}, **layout), 8)
    config = build(**{kind: [{**base, field: limit}]}, **layout)
    with pytest.raises(ConfigError, match=rf"megasdc.{kind}.0.{field}: got {limit}, but there are {limit}"):
        check_layout(config, 8)


def test_all_problems_are_told_at_once():
    """Every wrong spec is named by its place in the list."""
    with pytest.raises(ConfigError) as caught:
        build([{"submodule": "x"}, {}, {"kind": "value"}])
    assert [text.split(":")[0] for text in caught.value.problems] == [
        "megasdc.faults.0.submodule",
        "megasdc.faults.2.value",
    ]


def test_a_resolved_configuration_with_faults_loads_again():
    """What is written to the run folder is a valid file, equal to the one it came from."""
    config = build([{"profile": "node_10", "rank": 1}, {"bits": [3], "steps": [2, None]}], [{"kind": "sigkill"}])
    assert parse_config(config.resolved()) == config


def test_a_profile_takes_the_place_of_its_entry():
    """Its faults get the entry's ranks, steps and seed; what the entry leaves open stays as the profile says."""
    config = build([{"profile": "node_13", "rank": 1, "seed": 4}, {"profile": "node_1", "steps": [2, 5]}, {}])
    expanded = expand_faults(config.megasdc.faults)
    assert len(expanded) == 4 + 4 + 1
    assert {(one.rank, one.seed, tuple(one.steps)) for one in expanded[:4]} == {(1, 4, (450, None))}
    assert {(one.rank, one.seed, tuple(one.steps)) for one in expanded[4:8]} == {(None, 0, (2, 5))}
    assert all(one.profile is None for one in expanded)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_can_be_injected(name):
    """Each profile that comes with the package passes every check, and says what was assumed."""
    build([{"profile": name}])
    profile = load_profile(name)
    assert profile.source and (profile.assumed or not profile.faults)


def test_an_own_profile(tmp_path):
    """A user's file is read by its path, and what is wrong in it is told with file and field."""
    path = tmp_path / "mine.json"
    text = '{"description": "d", "source": "s", "published": {}, "assumed": [], "faults": [{"probability": %s}]}'
    path.write_text(text % 0.5)
    assert expand_faults(build([{"profile": str(path)}]).megasdc.faults)[0].probability == 0.5
    path.write_text(text % 7)
    assert "faults.0.probability" in problem({"profile": str(path)})
