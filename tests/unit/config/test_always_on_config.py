"""Are contradictions between the checks of a run found before it starts, and do the defaults stay cheap?"""

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.changes import find_changes, may_change
from megasdc.config.load import parse_config

BASE = {"data": {"path": "x"}, "protect": "off", "training": {"steps": 100}, "logging": {"run_dir": "r"}}


def _parse(always_on, deepspeed=None, deterministic=True):
    sections = {**BASE, "determinism": {"enabled": deterministic}, "sdc": {"always_on": {"enabled": True, **always_on}}}
    return parse_config({**(deepspeed or {}), "megasdc": sections})


def test_finite_is_on_unless_it_is_switched_off():
    """With the checks of every step enabled, NaN and Inf are looked for."""
    found = _parse({}).megasdc.sdc.always_on
    assert (found.finite, found.coverage) == (True, "auto")


@pytest.mark.parametrize("kept", ["parameters", "finite", "tokens"])
def test_one_check_is_enough(kept):
    """Any one of the checks alone is a sensible configuration."""
    off = {"parameters": False, "finite": False, "tokens": False}
    assert getattr(_parse({**off, kept: True}).megasdc.sdc.always_on, kept)


@pytest.mark.parametrize(
    ("always_on", "deepspeed", "parts"),
    [
        ({"parameters": False, "finite": False, "tokens": False}, {}, ["sdc.always_on.enabled", "nothing is checked"]),
        (
            {"slice_elements": 9},
            {"optimizer": {"params": {"torch_adam": False}}},
            ["sdc.always_on.slice_elements", "optimizer.params.torch_adam false", "slice_elements to null"],
        ),
    ],
)
def test_contradictions_are_named(always_on, deepspeed, parts):
    """A tier that checks nothing, and an update whose formula is not known, are refused with both fields."""
    with pytest.raises(ConfigError) as caught:
        _parse(always_on, deepspeed)
    assert any(all(part in text for part in parts) for text in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("value", [True, False])
def test_a_key_that_is_gone_is_refused_with_what_took_its_place(value):
    """Whatever its value, in a file and in an override; a stored configuration loses it, and is read."""
    remedy = (
        f"is gone (value {str(value).lower()}): what it warned of, sdc.always_on proves with slice_elements and rows"
    )
    raw = {"megasdc": {**BASE, "determinism": {"enabled": True}, "sdc": {"always_on": {"enabled": True}}}}
    kept = parse_config(raw)
    override = f"megasdc.sdc.always_on.toleranced={str(value).lower()}"
    for attempt in (lambda: _parse({"toleranced": value}), lambda: parse_config(raw, [override])):
        with pytest.raises(ConfigError) as caught:
            attempt()
        (problem,) = caught.value.problems
        assert problem == f"megasdc.sdc.always_on.toleranced: {remedy}; remove the key."
    stored = kept.resolved()
    stored["megasdc"]["sdc"]["always_on"]["toleranced"] = value
    assert parse_config(stored, stored=True) == kept
    changes = find_changes(stored, kept, 1, 1)
    assert [(one.path, may_change(one, (), False)) for one in changes] == [("megasdc.sdc.always_on.toleranced", True)]
