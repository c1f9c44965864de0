"""Does `megasdc drill` say whether a run notices a wrong computation, and leave the run alone?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import run_command
from whole_runs import prepare_text, write_config

from megasdc.config.load import load_config
from megasdc.events import read_events
from megasdc.lab.triage.drill import drill_outcome, plan_drill
from megasdc.sdc.incident import load_incidents

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(400)]


def _config(folder: Path, **changes: Any) -> Path:
    data = prepare_text(folder)
    options = {"deepspeed__train_batch_size": 8, "checkpoint__interval": 2, "training__steps": 20, **changes}
    return write_config(folder / "own.json", data, folder / "run", **options)


def test_a_fault_is_found_named_and_repaired(tmp_path: Path) -> None:
    """With PP 2 too: rank, step and submodule in one sentence, the incident's page, all bits equal; and of each part
    that does not come true, however the run ended, the verdict says so.
    """
    config = _config(tmp_path, parallel__pipeline=2, deepspeed__bf16={"enabled": True})
    done = run_command("drill", "--config", str(config), "--json", "--step", "3")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [result[name] for name in ("injected", "found", "named", "repaired", "equal")] == [True] * 5
    (rank,) = result["wrong_ranks"]
    assert result["named_ranks"] == [rank] and result["ranks"] == 4 and result["compared"] > 20
    for text in (f"In step 3 rank {rank} on ", "the backward of ", ".mlp.linear_fc1", f"rank {rank} named", "equal"):
        assert text in result["sentence"]
    assert Path(result["incident"]).is_file()
    assert "Faults were injected on purpose" in Path(result["incident"]).read_text()
    console = (tmp_path / "run_drill" / "with_fault.log").read_text()
    assert "FAULTS ARE ARMED" in console and "ARMED" not in done.stderr
    assert "protect standard, covered: " in console and "coverage of silent data corruption" not in console
    assert not (tmp_path / "run").exists() and Path(result["folder"]) == tmp_path / "run_drill"

    loaded = load_config(config, ["megasdc.protect=standard"])
    plan = plan_drill(loaded, 3, None, None, None)
    faulty = plan.folder / "with_fault"
    injected = [one for one in read_events(faulty, kind="fault", name="injected") if one.fields["changed"]]
    ((page, incident),) = load_incidents(faulty / "reports", [])
    equal = {"equal": True, "count": 9, "different": 0}
    cases = [
        ([], [], equal, "not injected, not found, not named, not repaired", "nothing in step 3"),
        (injected, [], equal, "not found, not named, not repaired", "Nothing was found"),
        (injected, [(page, incident)], None, "not equal", "computed again"),
        (injected, [(page, replace(incident, done="halted"))], None, "not repaired, not equal", "halted before"),
        (injected, [(page, incident)], {**equal, "equal": False, "different": 2}, "not equal", "2 of 9 tensors"),
        ([replace(injected[0], rank=9)], [(page, incident)], equal, "not named", "rank 9"),
    ]
    for fired, incidents, compared, verdict, sentence in cases:
        found = drill_outcome(plan, fired, incidents, compared, [])
        assert found.exit_code == 1 and found.page.verdict == f"Drill failed: {verdict}"
        assert sentence in found.contents["sentence"]
    assert drill_outcome(plan, injected, [(page, incident)], equal, []).exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--num-ranks", "2", "--set", "megasdc.parallel.pipeline=2"), "start at least 4 ranks"),
        (("--step", "20"), "a fault in step 20 with a step after it needs 21"),
        (("--set", "megasdc.determinism.enabled=false"), "a drill needs audits, and this run has none"),
    ],
)
def test_what_allows_no_drill_is_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    """One replica, a fault after the end, no determinism: exit code 70, the reason, and nothing is started."""
    done = run_command("drill", "--config", str(_config(tmp_path)), *options)
    assert done.returncode == 70 and said in done.stderr, done.stderr
    assert not (tmp_path / "run_drill" / "with_fault").exists()
