"""One word protects a training of others: fields that its file does not give, as far as its engine allows them."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import megasdc
from megasdc.attached.engine import audit_obstacle
from megasdc.attached.protect import Conditions, Obstacle, expand, guard_start_lines
from megasdc.attached.settings import RUN_VARIABLE, TRIAL_VARIABLE, RankOfRun, load_settings, with_word
from megasdc.cli import app
from megasdc.common.errors import ConfigError
from megasdc.config.guard import GuardSettings
from megasdc.config.schema import idle_warnings, value_of

WORDS = ("standard", "strict")
TWO, ONE = Conditions(replicas=2, micro_batches=4), Conditions(replicas=1, micro_batches=4)
NOTHING = Conditions(
    replicas=1, slices=Obstacle("ZeRO 0", "stage 1"), rows=Obstacle("no layer", "one"), audits=Obstacle("no X", "X=1")
)
OWN: tuple[dict[str, Any], ...] = (
    {},
    {"audit": {"enabled": False}},
    {"audit": {"interval": 7, "permuted": True, "submodules": ["*.mlp.*"]}},
    {"sdc": {"always_on": {"enabled": False}}},
    {"sdc": {"always_on": {"parameters": False, "rows": False, "slice_elements": None}}},
    {"sdc": {"always_on": {"slice_elements": 5}, "budget": 0.5, "policy": {"persistent": "warn"}}},
    {"audit": {"enabled": False}, "sdc": {"policy": {"inconclusive": "warn"}}},
    {"sdc": {"golden": "g", "golden_interval": 10}, "golden": {"record": True}},
    {"nonfinite": {"enabled": False}, "health": {"enabled": False, "slow_ratio": None}},
    {"optimizer_hooks": [{"hook": "absolute", "theta": 1.0}], "determinism": {"enabled": True}},
)


def build(word: str | None = "standard", overrides: tuple[str, ...] = (), **own: Any) -> GuardSettings:
    """Settings with a word, as they are read."""
    return load_settings({**({} if word is None else {"protect": word}), **own}, overrides, run_dir="r")


def flat(settings: GuardSettings, known: Conditions) -> dict[str, Any]:
    """Fields that the word adds, by path."""

    def walk(value: Any, at: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {name: one for key, inner in value.items() for name, one in walk(inner, f"{at}{key}.").items()}
        return {at[:-1]: value}

    before, after = (walk(one.model_dump(mode="json"), "") for one in (settings, expand(settings, known)))
    return {path: value for path, value in after.items() if before[path] != value}


def test_each_word_adds_what_it_promises_and_off_nothing() -> None:
    """With two replicas, with one, before anything is known, and where an engine forbids much; strict ends always."""
    steps = {f"sdc.always_on.{name}": one for name, one in (("enabled", True), ("rows", True))}
    slices = {"sdc.always_on.slice_elements": 16384, "audit.longest_interval": 1000}
    assert flat(build(), TWO) == {**steps, **slices}
    alone = {"audit.permuted": True, "sdc.always_on.parameters": False}
    assert flat(build(), ONE) == {**steps, **slices, **alone}
    assert flat(build(), Conditions()) == {**steps, **slices, "audit.permuted": None}
    assert flat(build(), NOTHING) == {"audit.enabled": False}
    assert flat(build("strict"), TWO) == {**steps, **slices, "sdc.policy.not_reproduced": "halt"}
    for off in (build("off"), build(None)):
        assert flat(off, TWO) == {} and guard_start_lines(off, TWO) == []


@pytest.mark.parametrize("own", OWN, ids=lambda own: ",".join(own) or "nothing")
def test_what_the_user_sets_wins_and_nothing_is_contradicted(own: dict[str, Any]) -> None:
    """Under all conditions: the values are the user's, no warning comes that does not come with off, lines are told,
    and what is expanded stays as it is.
    """
    for word, known in itertools.product(WORDS, (Conditions(), ONE, TWO, NOTHING)):
        settings = build(word, **own)
        found = expand(settings, known)
        if known is not NOTHING:  # where the user's own policy may have nothing to follow
            assert {*idle_warnings(found, "")} <= _warnings(own)
        for section, fields in own.items():
            for path, value in _leaves(fields, section):
                assert value_of(found, path) == value or isinstance(value, list), path
        assert expand(found, known) == found
        lines = guard_start_lines(found, known)
        assert len(lines) >= 3 and [line.split(": ")[0] for line in lines[:3]] == [
            f"protect {word}, {what}" for what in ("covered", "cost", "not covered")
        ]


def _warnings(own: dict[str, Any]) -> set[str]:
    """What a file without the word is warned of; one that is refused, of nothing."""
    try:
        return {*idle_warnings(build(None, **own), "")}
    except ConfigError:
        return set()


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(path, value)]
    return [one for key, inner in value.items() for one in _leaves(inner, f"{path}.{key}")]


@pytest.mark.parametrize(
    ("known", "own", "text"),
    [
        (NOTHING, {}, "sums over replicas and updates (ZeRO 0; needed: stage 1)"),
        (NOTHING, {}, "sums of rows (no layer; needed: one)"),
        (NOTHING, {}, "results, but for sums of rows (no X; needed: X=1)"),
        (ONE, {}, "audits and parameters against another replica (there is one, which is compared with itself"),
        (TWO, {}, "there is no golden trace; needed: sdc.golden"),
        (TWO, {"audit": {"enabled": False}}, "results, but for sums of rows (audit.enabled is false; needed: true)"),
        (TWO, {"sdc": {"always_on": {"enabled": False}}}, "what happens between audits (sdc.always_on.enabled is fal"),
        (TWO, {"sdc": {"always_on": {"rows": False}}}, "sums of rows (sdc.always_on.rows is false; needed: true)"),
        (TWO, {}, "whether another start has the same bits (neither determinism.enabled nor the program"),
    ],
)
def test_what_is_forbidden_is_named_with_what_it_would_need(known: Conditions, own: dict[str, Any], text: str) -> None:
    """Each in the line of what is not covered."""
    assert text in guard_start_lines(expand(build(**own), known), known)[2]


def test_differences_and_costs_are_told() -> None:
    """Both values of what the user sets otherwise, and the share of audits among all micro-batches."""
    found = expand(build(audit={"interval": 5}, sdc={"budget": 0.1}), TWO)
    _, cost, _, told = guard_start_lines(found, TWO)
    assert told == (
        "protect standard, set in another way by you: audit.interval 5 (preset: 100); sdc.budget 0.1 (preset: null)"
    )
    assert "1 micro-batch more in 5 steps, 5.00% of all; rows and slices at most 10.00%" in cost
    cost = guard_start_lines(expand(build(), ONE), ONE)[1]
    assert "2 micro-batches more in 100 to 1000 steps, 0.05% to 0.50% of all" in cost
    assert "rows and slices, audits included, at most 2.00%" in cost
    known = Conditions(replicas=2, deterministic=True)
    assert "another start" not in guard_start_lines(expand(build(), known), known)[2]


def test_conditions_of_ranks_are_those_of_all() -> None:
    """A stage without linear layers forbids none; one host's environment forbids audits everywhere."""
    other = Conditions(replicas=2, rows=Obstacle("no layer", "one"), audits=Obstacle("no X", "X=1"), deterministic=True)
    found = Conditions.of_ranks([TWO, other])
    assert (found.rows, found.audits, found.deterministic) == (None, other.audits, False)
    assert Conditions.of_ranks([other, other]) == other
    assert audit_obstacle("cpu", {}) is None and audit_obstacle("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) is None
    needed = "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the ranks start"
    assert audit_obstacle("cuda", {}) == ("CUBLAS_WORKSPACE_CONFIG is None", needed)


def test_an_override_turns_the_word_off(caplog: pytest.LogCaptureFixture) -> None:
    """What needed its fields is reset with a warning; a wrong word names the three."""
    own: dict[str, Any] = {"audit": {"enabled": False}, "sdc": {"policy": {"inconclusive": "warn"}}}
    assert build(**own).sdc.policy.inconclusive == "warn"
    with caplog.at_level(logging.WARNING):
        assert build("standard", ("protect=off",), **own).sdc.policy.inconclusive == "halt"
    assert 'sdc.policy.inconclusive: "warn" of the file is not used' in caplog.text
    allowed = 'protect: got "high"; allowed: "off" or "standard" or "strict"'
    for call in (lambda: build("high"), lambda: build("off", ("protect=high",)), lambda: with_word(build(), "high")):
        with pytest.raises(ConfigError) as caught:
            call()
        assert allowed in str(caught.value)


def test_the_command_shows_what_a_file_stands_for(tmp_path: Path) -> None:
    """With all fields, and the lines of a start; a file need not name its folder."""
    path = tmp_path / "guard.json"
    path.write_text('{"protect": "standard", "sdc": {"always_on": {"rows": false}}}')
    found = CliRunner().invoke(app, ["check-config", "--guard", str(path), "--json"])
    told = json.loads(found.stdout)
    always_on = told["resolved"]["sdc"]["always_on"]
    assert (always_on["enabled"], always_on["slice_elements"], always_on["rows"]) == (True, 16384, False)
    assert told["resolved"]["audit"]["permuted"] is None and told["warnings"] == []
    assert told["notes"][0].startswith("protect standard, covered: every result of a micro-batch compared")
    assert "sdc.always_on.rows false (preset: true)" in told["notes"][3] and "logging.run_dir: none" in told["notes"][4]
    shown = CliRunner().invoke(app, ["check-config", "--guard", str(path), "--set", "protect=off", "--show"])
    assert shown.exit_code == 0 and not json.loads(shown.stdout)["sdc"]["always_on"]["enabled"]


def test_one_word_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file, whose folder is named after the script; `megasdc run` has the last word, and a folder."""
    for name in ("RANK", TRIAL_VARIABLE, RUN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["sub/train.py", "--steps", "3"])
    found = megasdc.check_settings(protect="standard")
    assert (found.protect, found.logging.run_dir) == ("standard", "runs/train")
    assert megasdc.check_settings(found, protect="strict").protect == "strict" and megasdc.check_settings().protect == (
        "off"
    )
    with pytest.raises(ConfigError, match="logging: missing"):
        megasdc.check_settings({"audit": {"interval": 3}})
    assert megasdc.check_settings({"protect": "strict"}).logging.run_dir == "runs/train"
    names = [RankOfRun().folder(one) for one in ("", "-c", "pkg/__main__.py", "a/mm.py")]
    assert names == ["runs/guarded", "runs/guarded", "runs/pkg", "runs/mm"]
    monkeypatch.setenv(RUN_VARIABLE, json.dumps({"run_dir": "/runs/other", "protect": "off"}))
    found = megasdc.check_settings(protect="standard")
    assert (found.protect, found.logging.run_dir) == ("off", "/runs/other")
    monkeypatch.setenv(TRIAL_VARIABLE, json.dumps({"folder": "trial", "steps": 2}))
    monkeypatch.setenv(RUN_VARIABLE, json.dumps({"run_dir": "/runs/other", "protect": "strict"}))
    assert megasdc.check_settings().protect == "off", "a trial protects nothing"
