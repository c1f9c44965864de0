"""Does a guard say of a finding what was done, and what has become of the step?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megasdc.attached import attach
from megasdc.attached.attach import CorruptionExit, Guard
from megasdc.attached.settings import load_settings
from megasdc.common.addresses import REDUCED_GRAD, UPDATE, Address
from megasdc.events import read_events
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding, Suspects
from megasdc.sdc.incident import StepFate
from megasdc.sdc.slice_checks import KEPT_STATE, MEAN, OWN_COPY, SUMS
from megasdc.sdc.verdict import INCONCLUSIVE, NOT_REPRODUCED, RankVerdict


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    """A guard of which only messages are asked; its reports are not written."""
    monkeypatch.setattr(attach, "report_finding", lambda *_: "page.html")
    made = object.__new__(Guard)
    made.dims = ParallelDims(1, 1, 1)
    made._training = SimpleNamespace(  # type: ignore[assignment]
        settings=load_settings({"logging": {"run_dir": "run"}}),
        suspects=Suspects(),
        events=SimpleNamespace(emit_on_rank_0=lambda *_, **__: None),
    )
    made._lifetime = SimpleNamespace(findings=0, fail=lambda *_: None)  # type: ignore[assignment]
    made._budget = Mock()
    return made


def test_state_that_is_put_right_is_said_to_be(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    """And is not called an update; the next steps look at everything."""
    address = Address(21, None, UPDATE, "fc1", "weight.exp_avg")
    found = Finding(KEPT_STATE, None, (RankVerdict(1, NOT_REPRODUCED, OWN_COPY, address),))
    assert guard._act(21, found, "check", trained_on=True, fate="taken") == "repair"
    (told,) = caplog.messages
    assert "rank 1 at step 21, state of fc1 (weight.exp_avg): not_reproduced, own copy." in told
    assert told.endswith("page.html; it is put right, and training goes on")
    guard._budget.checks.watch.assert_called_once_with()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fate", "end"),
    [
        ("not taken", "the step is not taken"),
        ("taken", "the step was taken: go on from a checkpoint before it"),
        ("skipped", "has skipped the step, which has changed no parameter: go on from a checkpoint before it"),
    ],
)
def test_the_end_of_a_training_says_what_became_of_its_step(
    guard: Guard, caplog: pytest.LogCaptureFixture, fate: StepFate, end: str
) -> None:
    """Of a finding that halts."""
    ruling = RankVerdict(None, INCONCLUSIVE, MEAN, Address(21, None, REDUCED_GRAD, "norm", "weight"), suspects=(0, 1))
    with pytest.raises(CorruptionExit):
        guard._act(21, Finding(SUMS, None, (ruling,)), "check", trained_on=True, fate=fate)
    assert caplog.messages[0].endswith(end)


_ALONE = """
import sys, weakref
from types import SimpleNamespace
from megasdc.attached.lifetime import Lifetime
from megasdc.events import EventLog

class Guard:
    pass

audit = SimpleNamespace(interval=5)
training = SimpleNamespace(
    events=EventLog(sys.argv[1], 0), folder=sys.argv[1], dims=SimpleNamespace(rank=0), step=1, watched=(),
    settings=SimpleNamespace(audit=audit),
)
guard, lifetime = Guard(), Lifetime(training, ["audits every 5 steps"])
weakref.finalize(guard, lifetime.end)
lifetime.took_step(1, 1, 1)
if len(sys.argv) > 2:
    raise RuntimeError("token=hf_abcdefghijklmnopqrstuvwxyz")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_guard_says_its_begin_and_its_end_without_a_logger(fails: bool, tmp_path: Path) -> None:
    """On standard error, also where nobody closes it; an error that ends the program is its end."""
    command = [sys.executable, "-c", _ALONE, str(tmp_path), *(["raise"] if fails else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "megasdc guard: attached after step 0 to " in done.stderr and "audits every 5 steps" in done.stderr
    (end,) = [one for one in read_events(tmp_path) if one.name in ("closed", "failed")]
    if fails:
        assert (end.kind, end.name, end.step) == ("end", "failed", 1) and "closed after" not in done.stderr
        assert end.fields["message"].startswith("RuntimeError: ") and "abcdefghij" not in end.fields["message"]
    else:
        assert (end.kind, end.name) == ("guard", "closed") and end.fields["agreed"] == 1
        assert "closed after step 1: 1 step, 1 audit agreed, 0 findings; megasdc summary" in done.stderr
