"""Is what the model is given compared with the file, on every rank that reads data, and put right or told?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, verdicts_of, write_config

from megasdc.sdc.incidents.incident import incident_from_json

pytestmark = pytest.mark.distributed

CHECKED: dict[str, Any] = {
    "determinism": {"enabled": True},
    "sdc": {"always_on": {"enabled": True, "coverage": "all", "parameters": False, "finite": False}},
}
WRONG: dict[str, Any] = {"phase": "tokens", "rank": 1, "micro_batches": [1], "bits": [0]}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _write(tmp_path: Path, data: Path, name: str, **changes: Any) -> Path:
    return write_config(tmp_path / f"{name}.json", data, tmp_path / name, **{**CHECKED, **changes})


@pytest.mark.parametrize(
    ("layout", "slot"),
    [({"parallel__tensor": 2}, "tokens"), ({"parallel__pipeline": 2}, "labels")],
    ids=["tp2_tokens", "pp2_labels"],
)
def test_another_token_between_file_and_model_is_read_again(
    tmp_path: Path, data: Path, layout: dict[str, Any], slot: str
) -> None:
    """The rank is named, the step is computed again from what is read anew, and the run ends with the right bits."""
    fault = {**WRONG, "slot": slot, "steps": [4, 4], "once": True}
    for name, faults in {"clean": [], "harmed": [fault]}.items():
        results = train_run(_write(tmp_path, data, name, **layout, faults=faults), 2)
        assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "clean") == []
    assert verdicts_of(tmp_path / "harmed") == [(4, "tokens", 1, "not_reproduced", "file of the data", "repair")]
    (found,) = events_of(tmp_path / "harmed", "sdc", "finding")
    assert f"1 of 32 {slot} differ from the file" in found["reason"]
    states = [state_of(tmp_path / name / "checkpoints" / "step_00000006") for name in ("clean", "harmed")]
    assert states[0] == states[1]
    assert metrics_of(tmp_path / "clean") == metrics_of(tmp_path / "harmed")


def test_a_token_that_is_wrong_each_time_halts_the_run(tmp_path: Path, data: Path) -> None:
    """Nothing of the step is committed; the incident names rank, tensor and both checksums."""
    fault = {**WRONG, "steps": [4, None], "same_elements": True}
    results = train_run(_write(tmp_path, data, "run", faults=[fault]), 2)
    assert [code for code, _ in results] == [73, 73], results
    assert verdicts_of(tmp_path / "run") == [(4, "tokens", 1, "persistent", "file of the data", "halt")]
    incident = incident_from_json((tmp_path / "run" / "reports" / "incident_step_00000004.json").read_text())
    (named,) = incident.flagged
    assert (named.rank, named.first.fqn, named.first.micro_batch) == (1, "batch", 1)
    assert named.expected is not None and named.expected != named.got
    assert (tmp_path / "run" / "reports" / "incident_step_00000004.html").exists()
