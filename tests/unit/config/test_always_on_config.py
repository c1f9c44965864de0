"""Are contradictions between the checks of a run found before it starts, and do the defaults stay cheap?"""

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config import parse_config

BASE = {"data": {"path": "x"}, "training": {"steps": 100}, "logging": {"run_dir": "r"}}


def _parse(always_on, deepspeed=None, deterministic=True):
    sections = {**BASE, "determinism": {"enabled": deterministic}, "sdc": {"always_on": {"enabled": True, **always_on}}}
    return parse_config({**(deepspeed or {}), "megasdc": sections})


def test_finite_is_on_and_toleranced_is_off_unless_asked_for():
    """With the checks of every step enabled, NaN and Inf are looked for, and nothing is toleranced."""
    found = _parse({}).megasdc.sdc.always_on
    assert (found.finite, found.toleranced, found.coverage) == (True, False, "auto")


@pytest.mark.parametrize("kept", ["parameters", "finite", "toleranced"])
def test_one_check_is_enough(kept):
    """Any one of the checks alone is a sensible configuration."""
    off = {"parameters": False, "finite": False, "toleranced": False, "tokens": False}
    assert getattr(_parse({**off, kept: True}).megasdc.sdc.always_on, kept)


@pytest.mark.parametrize(
    ("always_on", "deepspeed", "parts"),
    [
        ({"parameters": False, "finite": False, "tokens": False}, {}, ["sdc.always_on.enabled", "nothing is checked"]),
        (
            {"toleranced": True},
            {"optimizer": {"params": {"torch_adam": False}}},
            ["sdc.always_on.toleranced", "optimizer.params.torch_adam false"],
        ),
    ],
)
def test_contradictions_are_named(always_on, deepspeed, parts):
    """A tier that checks nothing, and an update whose formula is not known, are refused with both fields."""
    with pytest.raises(ConfigError) as caught:
        _parse(always_on, deepspeed)
    assert any(all(part in text for part in parts) for text in caught.value.problems), caught.value.problems
