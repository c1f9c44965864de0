"""Is what the model is given compared with the file, on every rank that reads data, and put right or told?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import (
    checked,
    events_of,
    metrics_of,
    pretrain_rank,
    state_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.sdc.incident import incident_from_json

pytestmark = pytest.mark.distributed

CHECKED = checked(coverage="all", parameters=False, finite=False)
WRONG: dict[str, Any] = {"phase": "tokens", "rank": 1, "micro_batches": [1], "bits": [0]}


def _write(tmp_path: Path, data: Path, name: str, **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **{**CHECKED, **changes})


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


def test_a_wrong_token_that_is_accepted_is_no_finding_of_other_checks(tmp_path: Path, data: Path) -> None:
    """They go on with what the model was given; an audit of the micro-batch is void, and the rank is named once."""
    sdc = {**CHECKED["sdc"], "policy": {"not_reproduced": "warn"}}
    fault = {**WRONG, "micro_batches": [0], "steps": [4, 4], "once": True}
    config = _write(tmp_path, data, "run", sdc=sdc, audit={"enabled": True, "interval": 4}, faults=[fault])
    results = train_run(config, 2)
    assert [code for code, _ in results] == [0, 0], results
    assert verdicts_of(tmp_path / "run") == [(4, "tokens", 1, "not_reproduced", "file of the data", "warn")]
    assert [one["step"] for one in events_of(tmp_path / "run", "sdc", "audit_void")] == [4]


def _damage_while_it_trains(config: str, folder: str) -> tuple[int, str | None]:
    """Body of a rank; rank 0 flips a bit in each block of the file once the samples of step 4 have been read."""
    from megasdc.train.detection.data_checks import TokenCheck

    look = TokenCheck.compare

    def take(self: TokenCheck, engine: Any) -> Any:
        if engine.step_number == 4 and engine.dims.rank == 0:
            with open(Path(folder) / "train.bin", "r+b") as file:
                for start in range(0, file.seek(0, 2), 1 << 16):
                    file.seek(start)
                    bits = file.read(1)[0]
                    file.seek(start)
                    file.write(bytes([bits ^ 1]))
        return look(self, engine)

    TokenCheck.compare = take  # type: ignore[method-assign]
    return pretrain_rank(config, [])


def test_a_block_that_is_damaged_on_the_disk_accuses_no_rank(tmp_path: Path, data: Path) -> None:
    """All ranks end alike, with the file and what to do."""
    shutil.copytree(data, tmp_path / "data")
    config = _write(tmp_path, tmp_path / "data", "run")
    results = run_distributed(_damage_while_it_trains, 2, str(config), str(tmp_path / "data"), init=False)
    assert [code for code, _ in results] == [71, 71], results
    assert all("train.bin is damaged: block " in text and "copy the folder again" in text for _, text in results)
    assert verdicts_of(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoints" / "corruption.json").exists()


def _without_its_file(config: str) -> tuple[int, str | None]:
    """Body of a rank; replica 1 cannot read samples anew."""
    from megasdc.data.loader import StepBatches

    renew = StepBatches.renew

    def fail(self: StepBatches) -> None:
        if self._loader.dp_rank == 1:
            raise OSError(116, "Stale file handle")
        renew(self)

    StepBatches.renew = fail  # type: ignore[method-assign]
    return pretrain_rank(config, [])


def test_a_file_system_that_is_away_when_samples_are_read_anew_ends_all_ranks(tmp_path: Path, data: Path) -> None:
    """The others do not wait for the rank that cannot read."""
    config = _write(tmp_path, data, "run", faults=[{**WRONG, "steps": [4, 4], "once": True}])
    results = run_distributed(_without_its_file, 2, str(config), init=False)
    assert [code for code, _ in results] == [77, 77], results
    assert all("on rank 1 on " in text and "Stale file handle" in text for _, text in results)
    assert verdicts_of(tmp_path / "run") == []
