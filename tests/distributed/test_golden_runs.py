"""Is a golden trace asked while a run trains, does it see what replicas have in common, and what follows?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import events_of, metrics_of, prepare_text, pretrain_rank, state_of, train_run, write_config

from megasdc.config.load import load_config
from megasdc.ops.golden.record import record_golden_trace
from megasdc.sdc.golden import Golden, GoldenAnswer, load_golden, save_golden
from megasdc.sdc.incident import Incident, incident_from_json
from megasdc.train.detection.golden import GoldenCheck

pytestmark = pytest.mark.distributed

FAULT = {"submodule": "2.layer.*.linear_qkv", "kind": "scale", "factor": 1.5, "pattern": "indices", "indices": [0]}
"""The same wrong value on every rank that has it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text, and a golden trace of a smaller model with dropout."""
    path = tmp_path_factory.mktemp("golden_runs")
    data = prepare_text(path)
    golden = {"vocab_size": 256, "micro_batches": 1, "steps": 1}
    options = {"golden": golden, "model__hidden_dropout": 0.1, "model__num_layers": 1}
    record_golden_trace(
        load_config(write_config(path / "trusted.json", data, path / "trusted", **options)), path / "good", repeats=1
    )
    return path


def _write(folder: Path, name: str, replicas: int, sdc: dict[str, Any], **changes: Any) -> Path:
    options = {
        "determinism": {"enabled": True},
        "deepspeed__train_batch_size": 2 * replicas,
        "model__hidden_dropout": 0.1,
        "audit": {"enabled": True, "interval": 2},
        "sdc": {"golden": str(folder / "good"), **sdc},
    }
    return write_config(folder / f"{name}.json", folder / "data", folder / name, **{**options, **changes})


def _verdicts(run_dir: Path) -> list[tuple[Any, ...]]:
    found = events_of(run_dir, "sdc", "verdict")
    return [(one["step"], one["tier"], one["rank"], one["verdict"], one["basis"], one["action"]) for one in found]


def _incident(run_dir: Path) -> Incident:
    (path,) = (run_dir / "reports").glob("incident_*.json")
    return incident_from_json(path.read_text())


def test_a_fault_common_to_all_replicas_is_seen_before_the_first_step(folder: Path) -> None:
    """Replicas agree, and the golden trace names them all: nothing is trained, every rank exits with 73."""
    results = train_run(_write(folder, "common", 2, {}, faults=[FAULT]), 2)
    assert [code for code, _ in results] == [73, 73], results
    assert _verdicts(folder / "common") == [
        (1, "golden", rank, "persistent", "golden trace", "halt") for rank in (0, 1)
    ]
    assert not (folder / "common" / "metrics.jsonl").read_text()
    found = _incident(folder / "common")
    first, second = found.flagged
    assert (first.got, first.expected) == (second.got, second.expected) and first.got != first.expected
    assert (first.first.fqn, first.repeats, first.wrong_repeats) == ("2.layer.self_attention.linear_qkv", 5, 5)
    assert set(found.evidence.differing["forward"][first.first.fqn]) == {0, 1}


def test_a_fault_that_comes_later_is_seen_at_the_next_check(folder: Path) -> None:
    """With an interval the check comes before every so many steps; one that does not come back lets the run go on."""
    later = _write(
        folder, "later", 2, {"golden_at_start": False, "golden_interval": 2}, faults=[{**FAULT, "steps": [3, 4]}]
    )
    results = train_run(later, 2)
    assert [code for code, _ in results] == [73, 73], results
    assert [one["step"] for one in events_of(folder / "later", "sdc", "golden")] == [2, 4]
    assert {one[:4] for one in _verdicts(folder / "later")} == {(4, "golden", rank, "persistent") for rank in (0, 1)}
    once = _write(
        folder, "once", 2, {"golden_interval": 2}, faults=[{**FAULT, "steps": [4, 4], "rank": 1, "once": True}]
    )
    results = train_run(once, 2)
    assert [code for code, _ in results] == [0, 0], results
    assert _verdicts(folder / "once") == [(4, "golden", 1, "not_reproduced", "golden trace", "repair")]


def test_a_check_changes_no_bit_of_the_run(folder: Path) -> None:
    """Checks at the start and before every second step leave losses and states as they are without them.

    They are off where the trace is of other hardware, which the table of what is covered says then.
    """
    layout = {"parallel__tensor": 1, "parallel__pipeline": 1}
    contents = load_golden(folder / "good")
    save_golden(folder / "other", Golden(**{**vars(contents), "key": {**contents.key, "threads": 7}}))
    off = _write(folder, "off", 2, {"golden": str(folder / "other")}, **layout)
    on = _write(folder, "on", 2, {"golden_interval": 2}, **layout)
    for config in (off, on):
        results = train_run(config, 2)
        assert [code for code, _ in results] == [0, 0], results
    asked = [(one["step"], one["wrong"]) for one in events_of(folder / "on", "sdc", "golden")]
    assert asked == [(1, []), (2, []), (4, []), (6, [])] and not events_of(folder / "off", "sdc", "golden")
    assert not events_of(folder / "on", "sdc", "coverage")
    (told,) = events_of(folder / "off", "sdc", "coverage")
    assert told["within"] == {"golden trace": "-"} and "golden trace: does not fit" in told["table"][0]
    assert metrics_of(folder / "on") == metrics_of(folder / "off")
    states = [state_of(folder / name / "checkpoints" / "step_00000006") for name in ("on", "off")]
    assert states[0] == states[1]


def test_a_majority_that_fails_the_golden_trace_is_named_itself(folder: Path) -> None:
    """Two of three are wrong alike: the finding against the third is taken back, the report shows who is wrong."""
    faults = [{**FAULT, "rank": rank, "steps": [2, None]} for rank in (0, 2)]
    results = train_run(_write(folder, "overruled", 3, {}, faults=faults), 3)
    assert [code for code, _ in results] == [73, 73, 73], results
    run = folder / "overruled"
    assert _verdicts(run) == [(2, "audit", rank, "persistent", "golden trace", "halt") for rank in (0, 2)]
    assert [(one["rank"], one["basis"]) for one in events_of(run, "sdc", "finding")] == [
        (1, "relative to the majority")
    ]
    assert [(one["rank"], one["basis"]) for one in events_of(run, "sdc", "overruled")] == [(1, "golden trace")]
    found = _incident(run)
    assert [one.rank for one in found.flagged] == [0, 2]
    (values,) = {(one.expected, one.got) for one in found.flagged}
    assert values[0] is not None and values[1] is not None and values[0] != values[1]
    assert found.evidence.differing["forward"][found.flagged[0].first.fqn] == {0: 1, 2: 1}


def test_nobody_is_named_where_the_golden_workload_does_not_show_the_fault(folder: Path) -> None:
    """Two of three are wrong alike in a layer that the golden model lacks: all pass, and no majority is believed.

    Where rounding may explain all values, that is; where it does not, the referee names the two.
    """
    fault = {**FAULT, "submodule": "3.layer.*.linear_qkv", "steps": [2, None]}
    results = train_run(_write(folder, "seen", 3, {}, faults=[{**fault, "rank": rank} for rank in (0, 2)]), 3)
    assert [code for code, _ in results] == [73, 73, 73], results
    assert _verdicts(folder / "seen") == [(2, "audit", rank, "persistent", "referee", "halt") for rank in (0, 2)]
    faults = [{**fault, "factor": 1.000001, "rank": rank} for rank in (0, 2)]
    results = train_run(_write(folder, "silent", 3, {}, faults=faults), 3)
    assert [code for code, _ in results] == [73, 73, 73], results
    assert _verdicts(folder / "silent") == [(2, "audit", None, "inconclusive", "replay", "halt")]
    found = _incident(folder / "silent")
    assert not found.flagged and [one.rank for one in found.disputed] == [1, 0, 2]
    assert [one.got for one in found.disputed].count(found.disputed[1].got) == 2


def _without_the_file(config: str, when: str) -> tuple[int, str | None]:
    """A rank; the second one leaves the folder in which the file is, before the start or before the first check."""
    ask = GoldenCheck.run

    def asked(self: GoldenCheck, step: int, repeats: int = 0) -> GoldenAnswer:
        _leave_the_folder()
        return ask(self, step, repeats)

    os.chdir(Path(config).parent)
    if when == "later":
        GoldenCheck.run = asked  # type: ignore[method-assign]
    else:
        _leave_the_folder()
    return pretrain_rank(config, [])


def _leave_the_folder() -> None:
    if os.environ["RANK"] == "1":
        os.chdir("/")


@pytest.mark.parametrize("when", ["start", "later"])
def test_a_file_that_one_rank_cannot_read_ends_all(folder: Path, when: str) -> None:
    """With node-local files one may be missing: every rank ends with 80 and which rank cannot read it; none hangs."""
    sdc = {"golden": "good", "golden_at_start": False, "golden_interval": 2}
    results = run_distributed(_without_the_file, 2, str(_write(folder, f"missing_{when}", 2, sdc)), when, init=False)
    assert [code for code, _ in results] == [80, 80], results
    assert all("rank 1 on " in text and "good does not exist" in text and "1 of 2 ranks" in text for _, text in results)
