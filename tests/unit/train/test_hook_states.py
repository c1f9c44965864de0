"""Is what a checkpoint holds of a hook taken up by it, or told?"""

from __future__ import annotations

import importlib
import json
import logging
import math
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

import megasdc.faults
import megasdc.train
from megasdc.engine.hooks import Hook, RunProgress
from megasdc.events import EventLog, read_events
from megasdc.train.build import _load_hooks
from megasdc.train.report import Reporter, _mean_loss


class Counting(Hook):
    """Keeps what it is given."""

    saved_as = "Counting"
    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.fixture
def run(tmp_path: Any) -> Any:
    return SimpleNamespace(
        hooks=[Counting(), Hook()], dims=SimpleNamespace(rank=0), step=7, events=EventLog(tmp_path, 0)
    )


def test_states_that_no_hook_takes_up_are_told(run: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A warning and an event name them; hooks without a state are not missed."""
    logging.getLogger("megasdc").propagate = True
    _load_hooks(run, {"Counting": {"a": 1}, "Removed": {"b": 2}, "Reporter": {}})
    assert run.hooks[0].loaded == {"a": 1}
    assert "states of Removed, which this run does not have" in caplog.text
    (event,) = read_events(tmp_path, kind="resume", name="hook_states_unused")
    assert (event.step, event.fields["hooks"]) == (7, ["Removed"])


def test_a_hook_with_another_name_begins_anew_and_is_told(
    run: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its state is under its old name: both are named; one whose state was empty has lost nothing."""
    logging.getLogger("megasdc").propagate = True
    _load_hooks(run, {"Counted": {"a": 1}})
    assert run.hooks[0].loaded is None
    assert "no states of Counting, which start as in a new run" in caplog.text
    (missing,) = read_events(tmp_path, kind="resume", name="hook_states_missing")
    (unused,) = read_events(tmp_path, kind="resume", name="hook_states_unused")
    assert (missing.step, missing.fields["hooks"], unused.fields["hooks"]) == (7, ["Counting"], ["Counted"])
    caplog.clear()
    _load_hooks(run, {"Counting": {}})
    assert not caplog.text


def test_nothing_is_told_where_all_is_taken_up(run: Any, tmp_path: Any) -> None:
    """Also at step 0."""
    _load_hooks(run, {"Counting": {"a": 1}})
    _load_hooks(run, {})
    assert not list(read_events(tmp_path, kind="resume"))


def test_names_under_which_states_are_kept() -> None:
    """They are in every checkpoint, and stay."""
    for package in (megasdc.train, megasdc.faults):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    todo, names = [Hook], []
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__.startswith("megasdc."):
            names += [kind.saved_as] if kind.saved_as else []
    assert sorted(names) == [
        "Detection",
        "DropCompute",
        "FaultDrill",
        "GradientBounds",
        "LocalSgd",
        "Reporter",
        "SkipWatch",
        "SliceChecks",
    ]


def test_a_state_without_a_name_is_refused() -> None:
    """Else it would be lost at a resume with nothing said; so is a name without a state."""
    with pytest.raises(TypeError, match="Nameless: a hook needs both state_dict and a name in saved_as, or neither"):
        type("Nameless", (Hook,), {"state_dict": lambda self: {"a": 1}})
    with pytest.raises(TypeError, match="Stateless"):
        type("Stateless", (Hook,), {"saved_as": "Stateless"})


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(2.0, 10, None), (NAN, 10, "NaN"), (5.0, 20, None)], 4.0),
        ([(INF, 10, "Inf"), (3.0, 10, "gradient is Inf")], 3.0),
        ([(NAN, 10, "NaN")], NAN),
        ([(NAN, 10, None), (1.0, 10, None)], NAN),
    ],
)
@pytest.mark.parametrize("cut", [0, 1])
def test_a_skipped_step_without_a_loss_leaves_the_interval_its_loss(
    steps: list[tuple[float, int, str | None]], expected: float, cut: int
) -> None:
    """The mean is over the steps that have one, also after a resume; NaN where none has, or where a step was taken."""

    def reporter() -> Reporter:
        parts = {"split": None, "collections": None, "writer": None, "peak": None, "progress": False}
        return Reporter(interval=100, flops_per_token=1.0, **parts)  # type: ignore[arg-type]

    run: Any = SimpleNamespace(step=1, is_last_step=False, progress=RunProgress(1))
    used = reporter()
    for index, (loss, tokens, skipped) in enumerate(steps):
        if index == cut:
            state, used = json.loads(json.dumps(used.state_dict())), reporter()
            used.load_state_dict(state)
        result: Any = SimpleNamespace(loss=loss, tokens=tokens, skipped=skipped)
        used.after_step(run, result)
    assert _mean_loss(used.state_dict()["losses"]) == pytest.approx(expected, nan_ok=True)
