"""Hooks of the user's own in real runs: called, saved, resumed, named where they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.common.errors import ConfigError
from megasdc.config.load import load_config
from megasdc.features import ORDER

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
FILE = str(Path(__file__).with_name("user_hooks.py"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def write(folder: Path, data: Path, name: str, *hooks: Any, **changes: Any) -> Path:
    """Config of a run of four steps with hooks, saved as it is."""
    return write_config(folder / f"{name}.json", data, folder / name, training__steps=4, hooks=list(hooks), **changes)


def test_hooks_see_the_run_and_change_nothing(tmp_path: Path, data: Path) -> None:
    """Losses over a resume, norms of the replicas, a stop that one rank wishes; the bits are those without hooks."""
    assert train_run(write(tmp_path, data, "plain"), 2) == [(0, None)] * 2
    log = {"hook": f"{FILE}:LossLog", "options": {"name": "losses.json"}}
    stop = {"hook": f"{FILE}:StopAtWish", "options": {"step": 2, "rank": 1}}
    hooks = [log, f"{FILE}:ReplicaNorms", stop]
    config = write(tmp_path, data, "hooked", *hooks)
    assert train_run(config, 2) == [(0, None)] * 2
    assert [(one["step"], one["reason"]) for one in events_of(tmp_path / "hooked", "end", "run")] == [
        (2, "a rank wished it")
    ]
    norms = json.loads((tmp_path / "hooked" / "norms.json").read_text())
    assert len(norms) == 2 and all(len(row) == 2 and row[0] != row[1] and min(row) > 0 for row in norms)
    assert train_run(config, 2) == [(0, None)] * 2
    run = tmp_path / "hooked"
    rows = {str(row["step"]): row["train/loss"] for row in metrics_of(run) if "train/loss" in row}
    assert json.loads((run / "losses.json").read_text()) == rows and len(rows) == 4, "steps 1 and 2 from the checkpoint"
    name = "checkpoints/step_00000004"
    ours, theirs = state_of(run / name), state_of(tmp_path / "plain" / name)
    assert ours == theirs


def test_a_hook_that_fails_is_named(tmp_path: Path, data: Path) -> None:
    """Entry, class, method and error, with exit code 70; the other rank ends as a consequence."""
    fails = {"hook": f"{FILE}:Fails", "options": {"method": "after_step"}}
    results = train_run(write(tmp_path, data, "fails", fails), 2)
    text = f"megasdc.hooks.0: {FILE}:Fails failed in after_step: ZeroDivisionError: as asked"
    assert results[1][0] == 70 and text in str(results[1][1]) and results[0][0] in (79, 75)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (f"{FILE}:Absent", "has no subclass of megasdc.engine.hooks.Hook named 'Absent'"),
        (
            {"hook": f"{FILE}:Fails", "options": {"method": "__init__"}},
            "Fails cannot be created: RuntimeError: as asked",
        ),
        ({"hook": f"{FILE}:Fails", "options": {"methods": 1}}, "Fails cannot be created: TypeError"),
        (f"{FILE}:NoSlot", "has the slot 'somewhere'; the slots are presence, times"),
        (f"{FILE}:Taken", 'has the name "SkipWatch", which is that of SkipWatch; give it another saved_as'),
    ],
)
def test_hooks_that_cannot_be_used_are_refused(tmp_path: Path, data: Path, entry: Any, text: str) -> None:
    """On all ranks, with exit code 70 and the entry."""
    results = train_run(write(tmp_path, data, "refused", entry), 2)
    assert [code for code, _ in results] == [70, 70]
    assert all("megasdc.hooks" in str(message) and text in str(message) for _, message in results)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("absent.py:A", "'absent.py:A', whose file is not found"),
        ("no_such_package.hooks:A", "'no_such_package.hooks:A', whose module is not found"),
        ("no_class.py", "hooks.0"),
        ({"options": {}}, "hooks.0"),
    ],
)
def test_a_configuration_names_hooks_that_are_not_there(tmp_path: Path, data: Path, entry: Any, text: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError) as caught:
        load_config(str(write(tmp_path, data, "absent", entry)))
    assert text in str(caught.value)


ORDERS = json.loads(Path(__file__).with_name("hook_orders.json").read_text())
CONFIGS = sorted(path.stem for path in Path("configs").glob("*.json") if path.stem != "local_sgd")
"""All but the one whose run needs other launches."""
OWN = ("model", "data", "parallel", "logging", "training", "supervise")
"""Sections that are tiny here, or of no hook."""


def test_every_configuration_has_its_order() -> None:
    """None is missing."""
    assert sorted(ORDERS) == CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_hooks_run_in_the_order_that_they_always_had(tmp_path: Path, data: Path, name: str) -> None:
    """The features that each example configuration names, around a tiny model: the same hooks in the same order."""
    order = order_of(name, "off", tmp_path, data)
    assert [one for one in order if one != "Order"] == ORDERS[name]
    assert order[order.index("Order") - 1] == "StartReport", "the last of its slot"
    assert {line.hook for line in ORDER if line.always} <= set(order)


def test_protection_adds_hooks_and_moves_none(tmp_path: Path, data: Path) -> None:
    """With the default of a new run: the hooks of one without, in their order, and those that check and keep."""
    order = order_of("smoke", "standard", tmp_path, data)
    left = list(order)
    for one in ORDERS["smoke"]:
        left.remove(one)
    assert [one for one in order if one not in left] == ORDERS["smoke"]
    assert {"StepChecker", "Chain", "MemoryCheckpoints"} <= set(left), order


def order_of(name: str, word: str, folder: Path, data: Path) -> list[str]:
    """Names of hooks of a run of two steps with a word `protect`, as they are called."""
    config, ranks = tiny_version(name, folder, data)
    results = train_run(config, ranks, f"megasdc.protect={word}")
    assert [code for code, _ in results] == [0] * ranks, results
    order: list[str] = json.loads(next(folder.rglob("order.json")).read_text())
    return order


def tiny_version(name: str, folder: Path, data: Path) -> tuple[Path, int]:
    """A run of two steps with what an example configuration asks for besides its model; and its ranks."""
    example = json.loads(Path(f"configs/{name}.json").read_text())
    sections = {key: value for key, value in example["megasdc"].items() if key not in OWN}
    ranks = sections.get("study", {}).get("replicas", 2 if name != "audited" else 3)
    steps = 2 if name != "bounded" else 22  # its bounds begin after 20
    training = {"steps": steps, "eval_interval": example["megasdc"]["training"].get("eval_interval", 0) and 1}
    own = write_config(folder / "own.json", data, folder / "run")
    config = json.loads(own.read_text())
    config["megasdc"] |= sections | {"training": training, "hooks": [f"{FILE}:Order"]}
    config |= {"train_batch_size": 2 * (1 if "study" in sections else ranks)}
    own.write_text(json.dumps(config))
    return own, ranks
