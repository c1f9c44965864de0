"""Are metrics declared, written whole, and cut back where a run goes on?"""

from __future__ import annotations

import json

import pytest

from megasdc.metrics.writer import MetricsWriter, cut_back, read_metrics


def test_only_declared_names_are_written(tmp_path):
    """A name that is not in the list is refused."""
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="train/lost"):
        writer.write(1, {"train/lost": 1.0})
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    assert [(row["step"], row["train/loss"]) for row in read_metrics(tmp_path)] == [(1, 1.0)]


def test_cut_back_keeps_what_came_before(tmp_path):
    """Lines after the step and a broken last line are dropped and counted; the rest stays byte for byte."""
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"train/loss": float(step)})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    first = path.read_text().splitlines(keepends=True)[:3]
    with open(path, "a") as file:
        file.write('{"step": 6, "tra')
    assert cut_back(tmp_path, 3) == 3
    assert path.read_text() == "".join(first)
    assert cut_back(tmp_path, 3) == 0
    assert cut_back(tmp_path / "absent", 3) == 0


def test_what_json_does_not_have_is_null(tmp_path):
    """The file stays valid JSON when a loss is NaN or a norm infinite."""
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    writer.close()
    assert "NaN" not in writer.path.read_text() and "Infinity" not in writer.path.read_text()
    assert read_metrics(tmp_path)[0]["train/grad_norm"] is None


def test_bytes_that_are_no_text_do_not_stop_a_resume(tmp_path):
    """Binary bytes within and at the end, as of a torn block, are dropped and counted; whole lines stay as they are."""
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, {"train/loss": float(step)})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\xff\x00\x80\n" + b"[1]\n" + second + bytes(range(256)) * 3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert cut_back(tmp_path, 2) > 2
    assert path.read_bytes() == first + second


@pytest.mark.parametrize(
    "line",
    [
        {"step": 2, "time": 0.0, "eval/loss": {"a": 1}},
        {"step": 2, "time": 0.0, "eval/loss": "1"},
        {"step": 2, "time": 0.0, "eval/loss": 10**400},
        {"step": 10**400, "time": 0.0},
        {"step": -1, "time": 0.0},
        {"step": 2, "time": None},
        {"step": 2},
    ],
)
def test_a_line_that_no_run_writes_is_damaged(tmp_path, line):
    """Folders may come from others: views would fail at it, or compute with something else."""
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
