"""Is a mistake in a guard's file found before there is an engine, and is what cannot be guarded told with what can?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from torch import nn
from typer.testing import CliRunner

import megasdc
from megasdc.attached.engine import check_engine
from megasdc.attached.settings import TRIAL_VARIABLE, golden_problems, load_settings
from megasdc.cli import app
from megasdc.common.errors import ConfigError
from megasdc.config.fields import field_text, model_in
from megasdc.config.guard import RUNS_ONLY, GuardSettings
from megasdc.config.load import load_config
from megasdc.config.sections import MegasdcSection


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of rank 0 of an ordinary training, on a host with a GPU or without."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("RANK", TRIAL_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def _written(folder: Path, **content: Any) -> Path:
    path = folder / "guard.json"
    path.write_text(json.dumps({"logging": {"run_dir": str(folder / "run")}, **content}))
    return path


def test_a_typo_is_found_without_an_engine(tmp_path: Path) -> None:
    """By a call before the model, and by a command; what is returned is what attach takes."""
    wrong = _written(tmp_path, audit={"intervall": 3})
    with pytest.raises(ConfigError, match=r"intervall: unknown key .* did you mean audit.interval"):
        megasdc.check_settings(wrong)
    found = CliRunner().invoke(app, ["check-config", "--guard", str(wrong)])
    assert isinstance(found.exception, ConfigError) and "did you mean audit.interval" in str(found.exception)
    right = _written(tmp_path, audit={"interval": 3})
    assert megasdc.check_settings(right).audit.interval == 3
    assert not (tmp_path / "run").exists(), "nothing is made before there is an engine"
    found = CliRunner().invoke(app, ["check-config", "--guard", str(right), "--set", "audit.interval=4", "--json"])
    told = json.loads(found.stdout)
    assert found.exit_code == 0 and told["ok"] and told["resolved"]["audit"]["interval"] == 4


@pytest.mark.parametrize(
    ("sdc", "told"),
    [
        ({"budget": 5}, "sdc.budget: got 5; allowed: number > 0 and <= 1 or null "),
        ({"always_on": True}, 'sdc.always_on: got true; allowed: object, such as {"enabled": true}.'),
        (
            {"always_on": {"chain": True}},
            "sdc.always_on.chain: got true, and is of megasdc's own runs alone: it needs the numbers by which",
        ),
        (
            {"always_on": {"rowz": True}},
            "sdc.always_on.rowz: unknown key (value true); did you mean sdc.always_on.rows",
        ),
    ],
)
def test_a_wrong_setting_is_told_with_what_is_right(tmp_path: Path, sdc: dict[str, Any], told: str) -> None:
    """The range, an example, and whether a key is of another file or of none."""
    with pytest.raises(ConfigError) as caught:
        megasdc.check_settings(_written(tmp_path, sdc=sdc))
    assert told in str(caught.value)


def test_options_of_a_run_are_not_ignored(tmp_path: Path) -> None:
    """A guard's file says nothing of ranks and memory."""
    found = CliRunner().invoke(app, ["check-config", "--guard", str(_written(tmp_path)), "--world-size", "2"])
    assert found.exit_code == 2 and "--world-size" in found.output


def test_a_golden_file_that_is_not_there_is_found_first(tmp_path: Path) -> None:
    """So is one that is there where it is to be recorded; on another host it may be otherwise."""
    golden = tmp_path / "trusted.golden"
    verifies = {"golden": {"path": str(golden)}}
    with pytest.raises(ConfigError, match=f"sdc.golden: there is no file {golden}"):
        megasdc.check_settings(_written(tmp_path, **verifies))
    found = CliRunner().invoke(app, ["check-config", "--guard", str(_written(tmp_path, **verifies))])
    assert found.exit_code == 0 and f"there is no file {golden}" in found.output
    golden.write_text("")
    megasdc.check_settings(_written(tmp_path, **verifies))
    with pytest.raises(ConfigError, match=r"golden\.record: got true"):
        megasdc.check_settings(_written(tmp_path, golden={"path": str(golden), "record": True}))


def test_what_is_refused_first_is_what_attach_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial records and verifies nothing; only rank 0 records; settings that were checked can be checked again."""
    golden = tmp_path / "trusted.golden"
    records = _written(tmp_path, golden={"path": str(golden), "record": True})
    checked = megasdc.check_settings(records)
    golden.write_text("")
    monkeypatch.setenv("RANK", "3")
    assert megasdc.check_settings(records) == checked == megasdc.check_settings(checked)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"golden\.record: got true"):
        megasdc.check_settings(checked)
    monkeypatch.setenv(TRIAL_VARIABLE, json.dumps({"folder": str(tmp_path / "trial"), "steps": 2}))
    found = megasdc.check_settings(records)
    assert found.sdc.golden is None and found.logging.run_dir == str(tmp_path / "trial")


def test_a_golden_path_that_cannot_be_used_is_a_problem_in_words(tmp_path: Path) -> None:
    """One that cannot be looked at, and one below a file; a folder that is not there is made when it is recorded."""
    (tmp_path / "file").write_text("")
    for record in (False, True):
        with pytest.raises(ConfigError, match=r"cannot be looked at on this host: File name too long; choose"):
            megasdc.check_settings(_written(tmp_path, golden={"path": str(tmp_path / ("x" * 300)), "record": record}))
    below = {"path": str(tmp_path / "file" / "sub" / "trusted.golden"), "record": True}
    with pytest.raises(ConfigError, match=f"cannot be written: {tmp_path / 'file'} is no folder"):
        megasdc.check_settings(_written(tmp_path, golden=below))
    made = megasdc.check_settings(_written(tmp_path, golden={**below, "path": str(tmp_path / "new" / "a.golden")}))
    assert golden_problems(made, writes=True) == []


def test_a_file_of_the_other_kind_is_one_problem(tmp_path: Path) -> None:
    """Not one for each key that the other kind has."""
    with pytest.raises(ConfigError, match="megasdc check-config --guard") as caught:
        load_config(_written(tmp_path, audit={"interval": 3}))
    assert len(caught.value.problems) == 1
    other = tmp_path / "other.json"
    for content in ({"megasdc": {}}, {"train_batch_size": 8, "zero_optimization": {"stage": 1}}):
        other.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="needed: the file of a guard") as caught:
            megasdc.check_settings(other)
        assert len(caught.value.problems) == 1


def test_a_plain_model_is_refused_with_what_can_be_guarded() -> None:
    """That it cannot be yet, and what of megasdc helps it nevertheless; another object is no model."""
    with pytest.raises(ConfigError) as caught:
        check_engine(nn.Linear(2, 2))
    parts = "got torch.nn.modules.linear.Linear", "FSDP, cannot be guarded yet", "ZeRO 0", "`megasdc run`"
    assert all(part in str(caught.value) for part in parts)
    with pytest.raises(ConfigError, match=r"got builtins.tuple; needed: what deepspeed.initialize returns first"):
        check_engine((1, 2))


def _fields(root: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """JSON values that each field allows, in words, by path."""
    found: dict[str, str] = {}
    for name, field in root.model_fields.items():
        inner = model_in(field.annotation)
        found |= {prefix + name: field_text(field)} if inner is None else _fields(inner, f"{prefix}{name}.")
    return found


OWN, GUARDS = _fields(MegasdcSection), _fields(GuardSettings)
GUARD_ONLY = {"audit.submodules", "audit.seed", "sdc.referee", "golden.record", "golden.seed"}
"""Keys that no run's configuration has, besides the section `nonfinite`."""
OTHER_VALUES = {"health.enabled", "health.slow_ratio", "sdc.golden_interval"}
"""Keys of both where one of them also allows null."""


def test_a_key_of_both_files_allows_the_same_values() -> None:
    """One vocabulary: what a guard's file has is what a run's configuration has, by name."""
    assert {path for path in GUARDS if path not in OWN and not path.startswith("nonfinite.")} == GUARD_ONLY
    assert {path for path in GUARDS if path in OWN and GUARDS[path] != OWN[path]} == OTHER_VALUES


@pytest.mark.parametrize("path", [path for path in OWN if path not in GUARDS])
def test_what_only_a_run_can_do_is_refused_with_the_reason(path: str) -> None:
    """By its own name or its section's."""
    names = path.split(".")
    (refused,) = [one for one in RUNS_ONLY if path == one or path.startswith(f"{one}.")]
    raw: dict[str, Any] = {"logging": {"run_dir": "r"}}
    inner = raw
    for name in names[:-1]:
        inner = inner.setdefault(name, {})
    inner[names[-1]] = 1
    with pytest.raises(ConfigError) as caught:
        load_settings(raw)
    assert [one.startswith(f"{refused}: got ") and RUNS_ONLY[refused] in one for one in caught.value.problems] == [True]


def test_policies_that_only_a_run_has_are_refused_with_the_reason() -> None:
    """A step cannot be computed again, nor do the others go on without a replica."""
    policy = {"persistent": "isolate", "inconclusive": "repair"}
    with pytest.raises(ConfigError) as caught:
        load_settings({"logging": {"run_dir": "r"}, "sdc": {"policy": policy}})
    persistent, inconclusive = caught.value.problems
    assert persistent.startswith('sdc.policy.persistent: got "isolate"; allowed: "halt" or "warn", since the program')
    assert inconclusive.startswith('sdc.policy.inconclusive: got "repair"; allowed: "halt" or "warn", since the step')


def test_keys_of_earlier_versions_are_read() -> None:
    """With their values of then; an override by either name is stronger, and a file with both names is refused."""
    earlier = {"logging": {"run_dir": "r"}, "golden": {"path": "g", "interval": 7}, "health": {"hang_after_s": 5.0}}
    found = load_settings(earlier)
    assert (found.sdc.golden, found.sdc.golden_interval, found.health.slow_floor_s) == ("g", 7, 5.0)
    assert earlier["golden"] == {"path": "g", "interval": 7}, "what is passed is left as it is"
    assert not load_settings({**earlier, "health": {"hang_after_s": 0}}).health.enabled
    for name in ("sdc.golden", "golden.path"):
        assert load_settings(earlier, [f"{name}=other"]).sdc.golden == "other"
        assert load_settings({**earlier, "golden": {}, "sdc": {"golden": "g"}}, [f"{name}=other"]).sdc.golden == "other"
    with pytest.raises(ConfigError, match=r"golden\.path: unknown key"):
        load_settings({**earlier, "sdc": {"golden": "other"}})
