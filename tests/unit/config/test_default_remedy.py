"""What the remedy of a refused value says of leaving the field out is what happens then."""

from __future__ import annotations

import copy
import re

import pytest
from field_values import context_of, fields, put

from megasdc.config.fields import ABSENT
from megasdc.config.load import WholeFile, parse_config
from megasdc.config.model import PRESETS
from megasdc.config.read import dotted, shown
from megasdc.config.schema import remove_key, type_problems, value_at

WRONG = {"no": ["value"]}
REMEDY = re.compile(r"; leave it out for (.+?)(?:; on the command line .*)?\.$")
DEEPSPEED = [path for path, _ in fields() if path[0] != "megasdc" and "bfloat16" not in path]


@pytest.mark.parametrize("path", DEEPSPEED, ids=dotted)
def test_a_remedy_names_what_a_field_is_without_a_value(path: tuple[str | int, ...]) -> None:
    """Of all of DeepSpeed's keys, many of which have other defaults here; one that depends on others is described."""
    raw = copy.deepcopy(context_of(path))
    put(raw, path, WRONG)
    (problem,) = [one.text for one in type_problems(raw, WholeFile).values()]
    told = REMEDY.search(problem)
    remove_key(raw, path)
    left = parse_config(raw).deepspeed
    try:
        value = value_at(left, path)
    except KeyError:  # DeepSpeed's own default
        return
    assert told is not None or ABSENT in problem or isinstance(value, (dict, list)), problem
    assert told is None or told[1] == shown(value), problem


def test_a_remedy_for_a_size_is_that_of_the_preset() -> None:
    """Not the default of a model without one; what the preset does not set is that."""
    for key, value in {"num_layers": PRESETS["gpt2-124m"]["num_layers"], "init_std": 0.02}.items():
        raw = copy.deepcopy(context_of(("megasdc",)))
        raw["megasdc"]["model"] = {**PRESETS["gpt2-124m"], "preset": "gpt2-124m", key: "x"}
        (problem,) = [one.text for one in type_problems(raw, WholeFile).values()]
        told = REMEDY.search(problem)
        assert told is not None and told[1] == shown(value)


@pytest.mark.parametrize("preset", [["gpt2-124m"], {}, 5])
def test_a_preset_that_is_no_name_is_told_as_any_other_wrong_value(preset: object) -> None:
    """With the sizes that are wrong too."""
    raw = copy.deepcopy(context_of(("megasdc",)))
    raw["megasdc"]["model"] = {**PRESETS["gpt2-124m"], "preset": preset, "num_layers": "x"}
    assert {path[-1] for path in type_problems(raw, WholeFile)} >= {"preset", "num_layers"}
