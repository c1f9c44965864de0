"""Does a run that one word protects train with the bits of an unprotected one, and find, name and repair a fault?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import (
    end_of,
    events_of,
    metrics_of,
    pretrain_rank,
    sizes_of,
    state_of,
    train_run,
    verdicts_of,
    write_run,
)

from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.verify import list_verified
from megasdc.ops.run_folder.summary import summarize_run

pytestmark = pytest.mark.distributed

STANDARD = {"protect": "standard"}
SEVERAL = {"deepspeed__train_micro_batch_size_per_gpu": 2}
COMMON = {"deepspeed__gradient_clipping": 0.5, "model__hidden_dropout": 0.1}


def _decided(tmp_path: Path) -> dict[str, Any]:
    """Changes for a run of two replicas that drop micro-batches as a log says."""
    lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": 2, "micro_batches": 2}}]
    lines += [{"step": step, "planned": 2, "completed": [2, 1 + step % 2]} for step in range(1, 7)]
    log = tmp_path / "given.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"drop_compute": {"enabled": True, "replay_decisions": str(log)}}


def _write(tmp_path: Path, data: Path, name: str, layout: tuple[int, int, int], **changes: Any) -> Path:
    return write_run(tmp_path, data, name, **{**COMMON, **sizes_of(layout), **changes})


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 2), {"checkpoint__interval": 3, **SEVERAL}),
        ((1, 1, 1), {}),
        ((1, 2, 2), {"deepspeed__bf16": {"enabled": True}}),
        ((2, 1, 1), SEVERAL),
        ((1, 1, 2), {"drop_compute": None}),
    ],
    ids=["dp2", "dp1", "pp2dp2_bf16", "tp2", "dp2_drops"],
)
def test_standard_changes_no_bit_of_the_training(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    """With dropout: losses, norms, and every tensor of the checkpoints are those of the run with `off`, although it
    audits extra micro-batches, looks at every part, and keeps snapshots; three lines say what it covers.
    """
    ranks = layout[0] * layout[1] * layout[2]
    if "drop_compute" in changes:
        changes = _decided(tmp_path)
    often = {"audit": {"interval": 2, "longest_interval": None}, "checkpoint__memory__interval": 2}  # within six steps
    runs = {"off": changes, "standard": {**STANDARD, **often, **changes}}
    for name, fields in runs.items():
        results = train_run(_write(tmp_path, data, name, layout, **fields), ranks)
        assert [code for code, _ in results if code] == [], results
    assert end_of(tmp_path / "off") == end_of(tmp_path / "standard")
    audits = [(one["step"], one["micro_batch_of"]) for one in events_of(tmp_path / "standard", "audit", "agreed")]
    assert {step for step, _ in audits} >= {1, 2, 4, 6} and {which for _, which in audits} == {"extra"}
    assert verdicts_of(tmp_path / "standard") == []
    checkpoints = tmp_path / "standard" / "checkpoints"
    assert list_verified(checkpoints) == list_steps(checkpoints), "the last one by an audit after the last step"
    (start,) = events_of(tmp_path / "standard", "start", "protection")
    assert start["word"] == "standard" and [line.split(": ")[0] for line in start["lines"]] == [
        "protect standard, covered",
        "protect standard, cost",
        "protect standard, not covered",
        "protect standard, set in another way by you",
    ]
    assert ("compared with itself" in start["lines"][2]) == (layout[2] == 1)
    assert events_of(tmp_path / "off", "start", "protection") == []
    resolved = json.loads((tmp_path / "standard" / "resolved.json").read_text())["megasdc"]
    assert resolved["protect"] == "standard" and resolved["sdc"]["always_on"]["rows"] is True


def test_ranks_compare_more_rarely_where_steps_are_tiny(tmp_path: Path, data: Path) -> None:
    """Where comparing in each step costs more than the budget, three replicas compare in some, and look in step 50;
    the run ends with the bits of `off`, and a parameter that one has otherwise in a step between passes. One that it
    has otherwise in each step is found in step 51, and from then on in each.
    """
    steps = {"training__steps": 56, "training__eval_interval": 0}
    scaled = {"kind": "scale", "factor": 1.02, "once": True, "steps": [33, 33]}
    fault = {"phase": "parameter", "slot": "weight", "rank": 1, "submodule": "3.*.linear_proj", **scaled}
    tight = {**STANDARD, "sdc__budget": 1e-6, **steps}
    for name, fields in {"off": steps, "standard": tight, "harmed": {**tight, "faults": [fault]}}.items():
        results = train_run(_write(tmp_path, data, name, (1, 1, 3), **fields), 3)
        assert [code for code, _ in results if code] == [], results
    ends = [
        (state_of(tmp_path / name / "checkpoints" / "step_00000056"), metrics_of(tmp_path / name))
        for name in ("off", "standard", "harmed")
    ]
    assert ends[0] == ends[1] != ends[2]
    for name in ("standard", "harmed"):
        assert [one["apart"] for one in events_of(tmp_path / name, "sdc", "cadence")][-1] == 50
        assert verdicts_of(tmp_path / name) == []
    lasting = {**fault, "once": False, "steps": [50, None]}
    results = train_run(_write(tmp_path, data, "lasting", (1, 1, 3), **tight, faults=[lasting]), 3)
    assert [code for code, _ in results if code] == [], results
    found = [(step, rank, action) for step, _, rank, _, _, action in verdicts_of(tmp_path / "lasting")]
    assert found == [(step, 1, "repair") for step in range(51, 58)]  # before a save, step 56 is compared as the next
    assert state_of(tmp_path / "lasting" / "checkpoints" / "step_00000056") == ends[0][0]


def test_standard_finds_names_and_repairs_and_strict_halts(tmp_path: Path, data: Path) -> None:
    """A parameter that one of three replicas has otherwise is put right, and the run ends with the bits of one without
    a fault, also after a resume; a strict run ends with the corruption code.
    """
    scaled = {"kind": "scale", "factor": 1.02, "once": True}
    fault = {"phase": "parameter", "slot": "weight", "rank": 1, "steps": [2, 2], "submodule": "3.*.linear_proj"}
    for name, fields in {"clean": {}, "harmed": {"faults": [{**fault, **scaled}]}}.items():
        config = _write(tmp_path, data, name, (1, 1, 3), **STANDARD, **fields)
        for stop in (4, 6) if name == "harmed" else (6,):
            results = train_run(config, 3, f"megasdc.training.stop_step={stop}")
            assert [code for code, _ in results if code] == [], results
    ((step, tier, rank, verdict, _, action),) = verdicts_of(tmp_path / "harmed")
    assert (step, tier, rank, verdict, action) == (3, "parameters", 1, "not_reproduced", "repair")
    told = str(summarize_run(tmp_path / "harmed").protection)
    assert told == "standard: 3 audits agreed, 1 finding", "at the start, the resume and the end"
    assert end_of(tmp_path / "clean") == end_of(tmp_path / "harmed")
    forgets = {"checkpoint__memory__interval": 0}  # of a run that has failed they would stay in the memory of the host
    strict = _write(tmp_path, data, "strict", (1, 1, 3), protect="strict", faults=[{**fault, **scaled}], **forgets)
    assert [code for code, _ in train_run(strict, 3)] == [73, 73, 73]


def _with_a_word_of_its_own(config: str) -> tuple[int, str | None]:
    """Body of a rank: rank 1 lacks the folder of the run, which rank 0 has, as on another host."""
    word = ("off", "standard")[int(os.environ["RANK"])]
    return pretrain_rank(config, [f"megasdc.protect={word}"])


def test_ranks_that_know_other_words_start_nothing(tmp_path: Path, data: Path) -> None:
    """Each tells both words, the folder that only one host has, and what to add; with exit code 70."""
    config = _write(tmp_path, data, "torn", (1, 1, 2))
    results = run_distributed(_with_a_word_of_its_own, 2, str(config), init=False)
    assert [code for code, _ in results] == [70, 70]
    for _, message in results:
        assert "megasdc.protect: is off on rank 0, and standard on rank 1" in message, results
        assert f"the run in {tmp_path / 'torn'} goes on" in message and "--set megasdc.protect=off" in message
    assert not (tmp_path / "torn" / "metrics.jsonl").exists()
