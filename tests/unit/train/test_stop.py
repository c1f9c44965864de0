"""Does a run that has taken none of its last steps end with an error, and a loss scale that adapts end none?"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hand_made import write_checkpoint

from megasdc.common.errors import NonFiniteError, as_known_error
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import RunEnd, RunProgress
from megasdc.train.signals import StopSignals
from megasdc.train.stop import LAST_SKIPPED, SkipWatch, StopWatch


def _ended(
    folder: Path,
    skipped: list[float | None],
    *,
    fp16: bool = False,
    dynamic: bool = True,
    steps: int = 1000,
    stop: str | None = None,
) -> Exception | None:
    """The error that a run ends with; ``skipped``: losses of its steps that were skipped, None: it was taken."""
    engine = SimpleNamespace(fp16_enabled=lambda: fp16, dynamic_loss_scale=lambda: dynamic)
    events = SimpleNamespace(emit=lambda *_, **__: None)
    run: Any = SimpleNamespace(
        engine=engine, events=events, dims=SimpleNamespace(rank=0), stream_end=0, step=len(skipped), steps=steps
    )
    run.progress, run.end, run.host_group = RunProgress(steps, len(skipped)), RunEnd(stop), None
    watch = SkipWatch(100, folder)
    for step, loss in enumerate(skipped, 1):
        reason = None if loss is None else "gradient norm is not finite"
        watch.after_step(run, StepResult(step, 1.0 if loss is None else loss, 1, math.inf, 1e-3, reason, 1.0, 1))
    again = SkipWatch(100, folder)
    again.load_state_dict(watch.state_dict())
    again.on_end(run)
    return run.end.error  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    monkeypatch.setattr("megasdc.train.stop.gather_objects", lambda value, group: [value])


def test_a_run_that_took_none_of_its_last_steps_names_where_to_go_on(tmp_path: Path) -> None:
    """Also where a resume lies between; one step fewer, or one that was taken, is none."""
    nan = [math.nan] * LAST_SKIPPED
    error = _ended(tmp_path, [None, *nan])
    assert isinstance(error, NonFiniteError) and "there is no checkpoint to go back to" in str(error)
    for step in (4, 8):
        write_checkpoint(tmp_path, step, finite_step=step, not_finite=[])
    assert f"go back to {tmp_path / 'step_00000004'}" in str(_ended(tmp_path, nan))
    assert _ended(tmp_path, nan[1:]) is None and _ended(tmp_path, [*nan, None]) is None


def test_a_loss_scale_that_adapts_ends_no_run(tmp_path: Path) -> None:
    """However long, as losses are finite; with NaN in the loss, or a fixed scale, it is not the scale."""
    scaling = [2.0] * (2 * LAST_SKIPPED)
    assert _ended(tmp_path, scaling, fp16=True) is None
    assert _ended(tmp_path, [math.nan] * LAST_SKIPPED + [2.0], fp16=True) is None
    assert _ended(tmp_path, scaling + [math.nan] * LAST_SKIPPED, fp16=True) is not None
    assert _ended(tmp_path, scaling, fp16=True, dynamic=False) is not None
    assert _ended(tmp_path, scaling) is not None
    lowest = Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
    assert isinstance(as_known_error(lowest), NonFiniteError)


def test_a_short_run_that_took_no_step_ends_with_an_error(tmp_path: Path) -> None:
    """It has fewer steps than the last ones that are looked at; one step that was taken makes it a run."""
    assert isinstance(_ended(tmp_path, [math.nan] * 3, steps=3), NonFiniteError)
    assert _ended(tmp_path, [None, math.nan, math.nan], steps=3) is None


def test_a_run_that_is_asked_to_stop_is_not_over(tmp_path: Path) -> None:
    """The start that goes on counts on; a stop that is asked for at the last step ends with the error all the same."""
    nan = [math.nan] * LAST_SKIPPED
    assert _ended(tmp_path, nan, stop="signal SIGTERM") is None
    assert isinstance(_ended(tmp_path, nan), NonFiniteError)
    assert isinstance(_ended(tmp_path, nan, steps=LAST_SKIPPED, stop="signal SIGTERM"), NonFiniteError)


@pytest.mark.parametrize(("step", "said"), [(4, None), (5, "training.stop_step 5"), (7, "stop_step 5, which the run")])
def test_a_run_that_has_passed_its_stop_step_stops_and_says_so(step: int, said: str | None) -> None:
    """A resume beyond it trained to the end; before it a run goes on."""
    signals, told = StopSignals(None), list[str]()
    try:
        run: Any = SimpleNamespace(step=step, end=RunEnd(), host_group=None)
        run.events = SimpleNamespace(emit=lambda *_, reason, **__: told.append(reason))
        StopWatch(signals, None, 0.0, 5)._decide(run, 0, time_is_up=False)
    finally:
        signals.close()
    assert (run.end.reason is None) is (said is None)
    assert said is None or said in told[0]
