"""What is set and off is never accepted in silence: a field is refused or warned of without what it needs."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from field_values import BASE, context_of, put, values_of
from pydantic import BaseModel, ValidationError

from megasdc.attached.settings import load_settings
from megasdc.common.errors import ConfigError
from megasdc.config.checks import find_warnings
from megasdc.config.fields import Needs, alternatives, model_in, relations
from megasdc.config.guard import GuardSettings
from megasdc.config.load import parse_config
from megasdc.config.schema import find_idle
from megasdc.config.sections import MegasdcSection

OWN = {path: (field, needs) for path, field, needs in relations(MegasdcSection, "")}
GUARD = {path: (field, needs) for path, field, needs in relations(GuardSettings, "")}
OF_COMMANDS = {
    f"trace.{name}" for name in ("granularity", "phases", "interval", "micro_batches", "layers", "algorithm")
}
"""Beside a switch that does not concern them: golden traces are recorded with them."""

SWITCHED_ON: dict[str, Any] = {
    **dict.fromkeys(("sdc.golden", "checkpoint.archive.address", "supervise.ledger"), "x"),
    **dict.fromkeys(("checkpoint.interval", "checkpoint.memory.interval", "supervise.returns"), 1),
    **{"local_sgd.replicas": 2},
    **{"study.mode": "free_run"},
}
"""Of switches that are not true or false."""


def other_value(path: str, root: type[MegasdcSection] | type[GuardSettings]) -> Any:
    """A value of the field's type that is not its default; that of a check which is on by default asks for it."""
    field, needs = (OWN if root is MegasdcSection else GUARD)[path]
    if field.default is True:
        return needs.refused
    default = field.get_default(call_default_factory=True, validated_data={})
    names = path.split(".")
    for value in [True, "warn", "one", 1000, 2.5, "x", ["x"], *values_of(field.annotation)]:
        raw: dict[str, Any] = {
            "logging": {"run_dir": "r"},
            "data": {"path": "x"},
            "protect": "off",
            "training": {"steps": 9},
        }
        raw = raw if root is MegasdcSection else {"logging": raw["logging"]}
        put(raw, tuple(names), value)
        if value == default or value is None or value is False:
            continue
        try:
            root.model_validate(raw)
        except ValidationError:
            continue
        return value
    raise AssertionError(path)


def meet(raw: dict[str, Any], needs: Needs, prefix: tuple[str, ...]) -> None:
    """Turn on what a field needs, in place."""
    for one in needs.settings:
        path, wanted = alternatives(one)[0]
        value: Any = json.loads(wanted) if wanted else SWITCHED_ON.get(path, True)
        put(raw, (*prefix, *path.split(".")), value)


def leaves(section: type[BaseModel], prefix: str) -> list[str]:
    """Paths of all fields that are no sections."""
    found = []
    for name, field in section.model_fields.items():
        inner = model_in(field.annotation)
        found += [f"{prefix}{name}"] if inner is None else leaves(inner, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("path", OWN)
def test_a_field_without_what_it_needs(path: str) -> None:
    """One that asks for a check is refused with value, reason and remedy; one that tunes is warned of once."""
    needs, value = OWN[path][1], other_value(path, MegasdcSection)
    raw = copy.deepcopy(BASE)
    if path.startswith("health."):
        put(raw, ("megasdc", "health", "enabled"), False)
    elif path == "checkpoint.when_late":
        put(raw, ("megasdc", "checkpoint", "writing"), "sync")
    elif path == "drop_compute.compensation":
        put(raw, ("megasdc", "drop_compute", "samples"), "discard")
    elif path == "drop_compute.retune_interval":
        put(raw, ("megasdc", "drop_compute", "threshold"), 1.0)
    elif path.startswith("supervise."):
        put(raw, ("megasdc", "supervise"), {"returns": 0, "spare_test_s": 0.0})
    put(raw, ("megasdc", *path.split(".")), value)
    if needs.refused:
        with pytest.raises(ConfigError) as caught:
            parse_config(raw)
        (text,) = (one for one in caught.value.problems if one.startswith(f"megasdc.{path}: got"))
        assert "no effect with megasdc." in text
        assert "; set megasdc." in text
    else:
        (text,) = (one for one in find_warnings(parse_config(raw)) if f"megasdc.{path}" in one)
        assert "no effect with megasdc." in text
    assert all(f"megasdc.{alternatives(one)[0][0]}" in text for one in needs.settings[:1])


@pytest.mark.parametrize("path", OWN)
def test_a_field_with_what_it_needs(path: str) -> None:
    """Nothing is said of it where what it needs is on."""
    raw = context_of(("megasdc", *path.split(".")))
    meet(raw, OWN[path][1], ("megasdc",))
    put(raw, ("megasdc", *path.split(".")), other_value(path, MegasdcSection))
    own = raw["megasdc"]
    assert path not in [one.path for one in find_idle(MegasdcSection.model_validate(own), own)]


@pytest.mark.parametrize("path", GUARD)
def test_a_field_of_a_guard(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same in the file of a guard, whose audits are on unless they are turned off."""
    needs, value = GUARD[path][1], other_value(path, GuardSettings)
    raw: dict[str, Any] = {"logging": {"run_dir": "r"}, "audit": {"enabled": False}, "nonfinite": {"enabled": False}}
    raw |= {"health": {"enabled": False}, "supervise": {"returns": 0, "spare_test_s": 0.0}}
    put(raw, tuple(path.split(".")), value)
    if needs.refused:
        with pytest.raises(ConfigError, match="which has no effect with"):
            load_settings(raw)
    else:
        assert path in [one.path for one in find_idle(load_settings(raw), raw)]
    meet(raw, needs, ())
    with caplog.at_level(logging.WARNING):
        assert path not in [one.path for one in find_idle(load_settings(raw), raw)]
    assert not caplog.records


@pytest.mark.parametrize("root", [MegasdcSection, GuardSettings])
def test_fields_beside_a_switch_say_what_they_need(root: type[MegasdcSection] | type[GuardSettings]) -> None:
    """No field is added to a section that can be off without it being known what becomes of it there."""
    known = {path for path, _, _ in relations(root, "")}
    assert len(known) > 20
    paths = leaves(root, "")
    switched = [path.removesuffix("enabled") for path in paths if path.endswith(".enabled")]
    beside = {path for path in paths for prefix in switched if path.startswith(prefix) and path != f"{prefix}enabled"}
    assert beside - known == (OF_COMMANDS if root is MegasdcSection else {"health.slow_ratio"})
    for path, _, needs in relations(root, ""):
        for one in needs.settings:
            for other, _ in alternatives(one):
                assert other in paths, f"{path} needs {other}, which is no field"


AUDITED: dict[str, Any] = {
    **BASE["megasdc"],
    "determinism": {"enabled": True},
    "checkpoint": {"interval": 1},
    "sdc": {"policy": {"persistent": "warn"}, "always_on": {"rows": True}},
    "audit": {"enabled": True, "permuted": True, "verify_checkpoints": True, "interval": 7},
}


def test_an_override_that_turns_a_section_off() -> None:
    """What the file asks of it is reset and warned of, so that the resolved file is accepted; what the override asks
    is refused.
    """
    with pytest.raises(ConfigError, match=r"always_on\.rows: got true"):
        parse_config({**BASE, "megasdc": AUDITED})
    file = {**BASE, "megasdc": {**AUDITED, "sdc": {"policy": {"persistent": "warn"}}}}
    assert parse_config(file).megasdc.audit.permuted
    config = parse_config(file, ["megasdc.audit.enabled=false"])
    audit = config.megasdc.audit
    assert (audit.permuted, audit.verify_checkpoints, audit.interval) == (False, False, 7)
    assert config.megasdc.sdc.policy.persistent == "halt"
    warnings = find_warnings(config)
    assert sum("megasdc.audit.permuted: true of the file is not used" in one for one in warnings) == 1
    assert sum("megasdc.audit.interval: no effect" in one for one in warnings) == 1
    assert parse_config(config.resolved()) == config
    with pytest.raises(ConfigError, match=r"audit\.permuted: got true"):
        parse_config(file, ["megasdc.audit.enabled=false", "megasdc.audit.permuted=true"])


def test_an_override_that_turns_a_section_on() -> None:
    """The file is judged with it."""
    off = {**BASE, "megasdc": {**AUDITED, "sdc": {}, "audit": {**AUDITED["audit"], "enabled": False}}}
    with pytest.raises(ConfigError, match=r"audit\.permuted: got true"):
        parse_config(off)
    assert parse_config(off, ["megasdc.audit.enabled=true"]).megasdc.audit.permuted


def test_an_override_that_changes_nothing_takes_no_refusal_away() -> None:
    """What the file alone would be refused for is refused with an override that sets what is so already, or that turns
    off one of two things of which the other was off; a warning names the override alone.
    """
    for override in ("megasdc.sdc.always_on.enabled=false", "megasdc.sdc.always_on={}", "megasdc.determinism={}"):
        own = {**BASE["megasdc"], "sdc": {"policy": {"persistent": "warn"}, "golden": "g"}}
        with pytest.raises(ConfigError, match=r"policy\.persistent|sdc\.golden: got"):
            parse_config({**BASE, "megasdc": own}, [override])
    settings = {"logging": {"run_dir": "r"}, "audit": {"enabled": False, "permuted": True}}
    with pytest.raises(ConfigError, match=r"audit\.permuted: got true"):
        load_settings(settings, ["audit.enabled=false"])
    own = {**BASE["megasdc"], "determinism": {"enabled": True}, "audit": {"enabled": True}}
    file = {**BASE, "megasdc": {**own, "sdc": {"policy": {"persistent": "warn"}}}}
    (told,) = parse_config(file, ["megasdc.audit.enabled=false"]).reset
    assert told.endswith("since an override sets megasdc.audit.enabled false.")


def test_what_is_reset_takes_along_what_needs_it_alone() -> None:
    """The resolved file is accepted again, and the sentence names what was overridden."""
    sdc = {"golden": "g", "policy": {"persistent": "warn"}}
    own = {**BASE["megasdc"], "determinism": {"enabled": True}, "sdc": sdc}
    config = parse_config({**BASE, "megasdc": own}, ["megasdc.determinism.enabled=false"])
    assert config.megasdc.sdc.golden is None and config.megasdc.sdc.policy.persistent == "halt"
    assert parse_config(config.resolved()) == config
    assert len(config.reset) == 2
    assert all(one.endswith("since an override sets megasdc.determinism.enabled false.") for one in config.reset)


def test_what_is_reset_turns_off_what_needs_it() -> None:
    """A golden trace that an override has made useless takes its interval with it."""
    own = {**BASE["megasdc"], "determinism": {"enabled": True}, "sdc": {"golden": "g", "golden_interval": 5}}
    config = parse_config({**BASE, "megasdc": own}, ["megasdc.sdc.golden=null"])
    assert config.megasdc.sdc.golden_interval is None
    assert parse_config(config.resolved()) == config


def test_a_check_believed_to_be_on() -> None:
    """A default that is given without the switch is refused too: its author believes in the check."""
    own = {**BASE["megasdc"], "sdc": {"always_on": {"parameters": True}}}
    with pytest.raises(ConfigError, match=r"always_on\.parameters: got true, which has no effect"):
        parse_config({**BASE, "megasdc": own})
    own["sdc"] = {"always_on": {"parameters": True, "enabled": False}}
    assert not parse_config({**BASE, "megasdc": own}).megasdc.sdc.always_on.enabled


def test_a_stored_configuration_of_an_older_version() -> None:
    """What is refused today and stands in a run folder or a checkpoint is reset, so that these can be read."""
    raw = parse_config(BASE).resolved()
    raw["megasdc"]["audit"]["permuted"] = True
    with pytest.raises(ConfigError):
        parse_config(raw)
    config = parse_config(raw, stored=True)
    assert config == parse_config(BASE)
    assert find_warnings(config) == find_warnings(parse_config(BASE))
