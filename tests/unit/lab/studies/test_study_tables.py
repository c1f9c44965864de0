"""Do the tables say what the lines say, and are broken files told?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError
from megasdc.lab.report.study_tables import summary_page
from megasdc.lab.studies.tables import (
    burst_rows,
    describe_study,
    distance_rows,
    loss_rows,
    loss_spikes,
    mismatch_rows,
    summarize_study,
)
from megasdc.ops.run_folder.study_log import StudyLog, read_study
from megasdc.output.page import print_page


def _mismatch(
    step: int, fqn: str, mismatches: int, *, replica: int = 1, rank: int = 1, **fields: Any
) -> dict[str, Any]:
    counts = {"severity_count": mismatches, "severity_sum": 0.5 * mismatches, "severity_max": 0.75}
    rest = {"from_zero": 0, "non_finite": 0, "phase": "forward", "micro_batch": 0}
    where = {"kind": "mismatch", "step": step, "replica": replica, "rank": rank, "fqn": fqn}
    return {**where, "mismatches": mismatches, **counts, **rest, **fields}


def _compared(step: int, fqn: str, elements: int, *, replica: int = 1, rank: int = 1) -> dict[str, Any]:
    where = {"kind": "compared", "step": step, "steps": 1, "replica": replica, "rank": rank}
    return {**where, "fqn": fqn, "phase": "forward", "slot": "output", "results": 2, "elements": elements}


LINES = [
    _compared(1, "2.layer.self_attention.linear_proj", 600),
    _compared(1, "3.layer.self_attention.linear_proj", 400),
    _compared(1, "2.layer.mlp.linear_fc2", 1000),
    _mismatch(1, "2.layer.self_attention.linear_proj", 3),
    _mismatch(2, "3.layer.self_attention.linear_proj", 1, severity_max=2.0, severity_sum=2.0, rank=2),
]


def test_frequency_and_severity_by_part() -> None:
    """Elements and mismatches of all layers are added up before they are divided, as severities are."""
    attention, ffn = mismatch_rows(LINES)
    assert (attention.name, attention.frequency, attention.wrong_results) == ("attention", 4 / 1000, 2)
    assert attention.severity_mean == (3 * 0.5 + 2.0) / 4 and attention.severity_max == 2.0
    assert (ffn.name, ffn.frequency, ffn.severity_mean, ffn.severity_max) == ("ffn", 0.0, None, None)


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("kind", {"projection", "fc2"}),
        ("submodule", {line["fqn"] for line in LINES}),
        ("rank", {"attention", "ffn"}),
    ],
)
def test_rows_by_other_groups(by: Any, names: set[str]) -> None:
    """Kinds, submodules, and the parts of each rank."""
    rows = mismatch_rows(LINES, by)
    assert {row.name for row in rows} == names
    assert {row.rank for row in rows} == ({1, 2} if by == "rank" else {None})
    assert sum(row.mismatches for row in rows) == 4


def test_bursts() -> None:
    """Runs of steps with a mismatch, by replica."""
    steps = {1: [4, 5, 5, 6, 9], 2: [1]}
    lines = [_mismatch(step, "loss", 1, replica=replica) for replica in steps for step in steps[replica]]
    first, second = burst_rows(lines)
    assert (first.first_step, first.wrong_steps, first.bursts, first.longest_burst) == (4, 4, 2, 3)
    assert (second.replica, second.wrong_steps, second.longest_burst) == (2, 1, 1)


def test_worst_distance_over_steps() -> None:
    """The earliest of the largest ratios counts; a ratio that is not finite is counted apart."""
    ratios = [0.1, 0.3, None, 0.3, 0.2]
    lines = [
        {"kind": "gradient", "step": step, "replica": 1, "fqn": "*", "ratio": ratio}
        for step, ratio in enumerate(ratios, 1)
    ]
    (row,) = distance_rows(lines)
    assert (row.worst, row.worst_step, row.last, row.comparisons, row.not_finite) == (0.3, 2, 0.2, 5, 1)
    (lost,) = distance_rows([lines[2]])
    assert (lost.worst, lost.worst_step, lost.last) == (None, None, None)


def test_losses() -> None:
    """The largest difference by size with its step, and losses that are not finite."""
    pairs = [(5.0, 5.0), (4.0, 4.5), (None, 4.0), (4.1, 4.0)]
    lines = [
        {"step": step, "replica": 1, "loss": loss, "trusted_loss": trusted}
        for step, (loss, trusted) in enumerate(pairs, 1)
    ]
    (row,) = loss_rows(lines)
    assert (row.largest_difference, row.largest_step, row.not_finite, row.spikes) == (-0.5, 2, 1, [3])
    assert row.last_difference == pytest.approx(0.1)


def test_spikes() -> None:
    """A loss far above the median of those before it, in units of their deviation, and one that is not finite."""
    calm = [3.0 + 0.01 * (-1) ** place for place in range(30)]
    assert loss_spikes(calm) == []
    assert loss_spikes([*calm, 3.2, 3.0, None, 2.0]) == [30, 32]
    assert loss_spikes([3.0] * 30 + [3.017]) == []  # 0.1 % of the median is the least deviation
    assert loss_spikes([3.0] * 30 + [3.019]) == [30]
    assert loss_spikes([1.0] * 19 + [9.0]) == []  # too few before it


def _written(folder: Path) -> Path:
    log = StudyLog(folder, 1, 1, 0)
    place = {"replica_rank": 0, "dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "host": "a"}
    log.write("start", 0, mode="free_run", replicas=2, trusted=0, **place)
    for step in (1, 2, 3):
        log.write("loss", step, loss=float("nan") if step == 2 else 4.0, trusted_loss=4.0)
        log.write("parameters", step, fqn="*", difference_norm=1.0, trusted_norm=2.0, ratio=0.5 * step)
    log.write("evaluation", 3, loss=4.0, trusted_loss=4.0, tokens=8, disagreeing=2, correct=4, trusted_correct=4)
    log.close()
    return folder


def test_a_file_is_cut_back_and_set_aside(tmp_path: Path) -> None:
    """Going on after step 1 drops later lines and a broken last one; a new start keeps the old file by another name."""
    _written(tmp_path)
    path = tmp_path / "study" / "rank_00001.jsonl"
    with open(path, "a") as file:
        file.write('{"kind": "loss", "st')
    StudyLog(tmp_path, 1, 1, 1).close()
    assert [(line["kind"], line["step"]) for line in read_study(tmp_path)] == [
        ("start", 0),
        ("loss", 1),
        ("parameters", 1),
    ]
    StudyLog(tmp_path, 1, 1, 0).close()
    assert path.read_text() == ""
    assert len([one for one in path.parent.iterdir() if one.name.startswith("until_")]) == 1


def test_the_summary_is_shown(tmp_path: Path) -> None:
    """What the lines hold is in the summary, in its JSON, on the terminal and in the closing sentence."""
    summary = summarize_study(_written(tmp_path))
    found = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert (found["mode"], found["steps"], found["distances"][0]["worst"]) == ("free_run", 3, 1.5)
    assert found["losses"][0]["spikes"] == [2] and found["evaluations"][0]["disagreement"] == 0.25
    console = Console(record=True, width=140)
    print_page(summary_page(summary), console)
    text = console.export_text()
    assert "replica 0 is trusted" in text and "1.5" in text and "0.25" in text
    (sentence,) = describe_study(summary)
    assert "parameters at most 1.5 apart (step 3)" in sentence and "25.000% of tokens" in sentence


def test_the_command_prints_json(tmp_path: Path) -> None:
    """`megasdc study RUN --json` is the summary, grouped as asked."""
    _written(tmp_path)
    log = StudyLog(tmp_path, 2, 1, 0)
    for line in (LINES[0], LINES[3]):
        log.write(**{name: value for name, value in line.items() if name not in ("replica", "rank")})
    log.close()
    done = CliRunner().invoke(app, ["study", str(tmp_path), "--by", "submodule", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (row,) = found["mismatches"]
    assert found["trusted"] == 0
    assert (row["name"], row["frequency"]) == ("2.layer.self_attention.linear_proj", 3 / 600)


def test_no_study_and_a_broken_line(tmp_path: Path) -> None:
    """The message names folder or line."""
    with pytest.raises(DataError, match="holds no study"):
        summarize_study(tmp_path)
    path = _written(tmp_path) / "study" / "rank_00001.jsonl"
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(DataError, match=r"rank_00001.jsonl:9 is not a line of a study"):
        summarize_study(tmp_path)
    written = path.read_text()
    with pytest.raises(DataError, match=r"rank_00001.jsonl:9 is not a line of a study"):
        StudyLog(tmp_path, 1, 1, 3)
    assert path.read_text() == written
