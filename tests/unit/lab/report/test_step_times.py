"""Are the step times of a run read as they were written, and what is wrong with its files told by place?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from recorded_run import append, file_of, layout_line, step_line, write_run

from megasdc.common.errors import DataError
from megasdc.dropcompute.threshold import micro_batch_times
from megasdc.lab.report.step_times import load_step_times


def latencies(replicas: int = 2, steps: int = 3, micro_batches: int = 4, stages: int = 2, seed: int = 1) -> np.ndarray:
    return 0.1 + np.random.default_rng(seed).gamma(2, 0.1, (replicas, steps, micro_batches, stages))


def test_arrays_hold_what_was_written(tmp_path: Path) -> None:
    """Every number stands at its replica, stage, step and micro-batch."""
    work = latencies()
    told = []
    times = load_step_times(write_run(tmp_path, work, 0.25), on_progress=lambda *done: told.append(done[1:]))
    for step in range(3):
        starts, ends = micro_batch_times(work[:, step], 1 / 3, finish=False)
        for stage in (0, 1):
            assert np.array_equal(times.start_s[:, stage, step], starts)
            assert np.array_equal(times.end_s[:, stage, step], ends)
            assert np.array_equal(times.busy_s[:, stage, step], work[:, step, :, stage])
            assert np.array_equal(times.compute_s[:, stage, step], ends[:, -1])
        assert (times.step_s[:, :, step] == ends[:, -1].max() + 0.25).all()
    assert times.steps.tolist() == [1, 2, 3] and times.planned.tolist() == [4, 4, 4]
    assert times.hosts == (("node0", "node0"), ("node1", "node1")) and times.notes == ()
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert load_step_times(tmp_path, 2, 2).steps.tolist() == [2]


def test_micro_batches_that_were_left_out(tmp_path: Path) -> None:
    """They are NaN at the end of a step, and are counted."""
    write_run(tmp_path, latencies(stages=1), 0.1)
    for rank, done in ((0, 4), (1, 2)):
        ends = np.arange(1.0, done + 1)
        append(file_of(tmp_path, rank), step_line(4, ends - 1, ends, ends, planned=4))
    times = load_step_times(tmp_path)
    assert times.completed.tolist() == [[4, 4, 4, 4], [4, 4, 4, 2]]
    assert np.isnan(times.end_s[1, 0, 3]).tolist() == [False, False, True, True]


def test_backward_passes_that_were_ended(tmp_path: Path) -> None:
    """They are told apart by replica and step, and their times are not those of micro-batches."""
    write_run(tmp_path, latencies(stages=1, steps=2), 0.1, of_layers=6)
    ends = np.arange(1.0, 4.0)
    line = step_line(3, ends - 1, ends, ends, planned=4) | {"forward_end_s": (ends - 0.5).tolist()}
    append(file_of(tmp_path, 0), line)
    append(file_of(tmp_path, 1), line | {"layers": 6})
    times = load_step_times(tmp_path)
    assert times.of_layers == 6 and times.ended.tolist() == [[False] * 3, [False, False, True]]
    assert times.is_whole.tolist() == [[True, True, False]] * 2
    assert np.array_equal(times.forward_end_s[1, 0, 2], [0.5, 1.5, 2.5, np.nan], equal_nan=True)
    assert np.array_equal(times.busy_of_whole_s[:, 0, 2, :3], [[1, 2, 3], [1, 2, np.nan]], equal_nan=True)
    assert np.array_equal(times.busy_of_whole_s[:, :, :2], times.busy_s[:, :, :2])
    assert np.isnan(load_step_times(write_run(tmp_path / "whole", latencies(), 0.1)).forward_end_s).all()


def test_a_run_that_went_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Later lines take the place of those of the same and later steps; the layout line between them changes nothing."""
    first, second = latencies(steps=5, seed=1), latencies(steps=2, seed=2)
    write_run(tmp_path, first, 0.1)
    write_run(tmp_path, second, 0.1, first_step=3)
    times = load_step_times(tmp_path)
    assert times.steps.tolist() == [1, 2, 3, 4]
    assert np.array_equal(times.busy_s[:, 0, :2], first[:, :2, :, 0])
    assert np.array_equal(times.busy_s[:, 0, 2:], second[:, :, :, 0])


def test_another_layout(tmp_path: Path) -> None:
    """What was recorded before the last start in another layout is left out, and said to be."""
    write_run(tmp_path, latencies(replicas=3, stages=1), 0.1)
    last = latencies(replicas=2, stages=1, steps=2)
    write_run(tmp_path, last, 0.1, first_step=4)
    times = load_step_times(tmp_path)
    assert times.steps.tolist() == [4, 5] and np.array_equal(times.busy_s[:, 0], last[..., 0])
    assert len(times.notes) == 3
    assert "3 steps of an earlier layout" in times.notes[0] and "rank_00002.jsonl" in times.notes[2]


def test_torn_lines(tmp_path: Path) -> None:
    """A torn last line, to which the next start appends, is noted, and nothing else is lost."""
    write_run(tmp_path, latencies(steps=3), 0.1)
    path = file_of(tmp_path, 2)
    path.write_text(path.read_text()[:-40])
    times = load_step_times(tmp_path)
    assert times.steps.tolist() == [1, 2]
    assert times.notes[0] == "rank_00002.jsonl:4 is torn and was skipped"
    assert "1 steps, from 3 to 3, are not in the files of all ranks" in times.notes[1]
    again = latencies(steps=1, seed=2)
    write_run(tmp_path, again, 0.1, first_step=3)
    times = load_step_times(tmp_path)
    assert times.steps.tolist() == [1, 2, 3] and np.array_equal(times.busy_s[:, 0, 2], again[:, 0, :, 0])
    assert times.notes == ("rank_00002.jsonl:4 is torn and was skipped",)
    path.write_text('{"kind": "layout", "ra' + path.read_text())
    assert load_step_times(tmp_path).notes[0] == "rank_00002.jsonl:1 is torn and was skipped"


GOOD = step_line(1, np.array([0.0, 1.0]), np.array([1.0, 2.0]), np.array([1.0, 1.0]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD | {"step": 0}, "step is 0, needed a whole number above 0"),
        (GOOD | {"planned": None}, "planned is None"),
        (GOOD | {"end_s": [1.0]}, r"end_s is \[1.0\], needed a list as long as start_s"),
        (GOOD | {"busy_s": [1.0, "x"]}, "busy_s holds 'x', needed finite seconds >= 0"),
        (GOOD | {"compute_s": -1.0}, "compute_s holds -1.0"),
        (GOOD | {"compute_s": 10**400}, "compute_s holds 1000"),
        (GOOD | {"planned": 1}, "2 micro-batches were completed, of 1 planned"),
        (GOOD | {"start_s": [1.0, 0.5]}, r"start_s is \[1.0, 0.5\], needed rising"),
        (GOOD | {"start_s": [0.0, 3.0]}, "ended before it started"),
        (GOOD | {"forward_end_s": [0.5]}, r"forward_end_s is \[0.5\], needed a time within each micro-batch"),
        (GOOD | {"forward_end_s": [0.5, 2.5]}, r"forward_end_s is \[0.5, 2.5\]"),
        (GOOD | {"forward_end_s": [0.5, None]}, r"forward_end_s is \[0.5, None\]"),
        (GOOD | {"layers": -1}, "layers is -1, needed a whole number of transformer layers"),
        ({key: value for key, value in GOOD.items() if key != "gc_s"}, "gc_s holds None"),
        ({"kind": "layout", "rank": -1}, "rank is -1"),
        (layout_line(0, 0, 1, 1, 2) | {"of_layers": "4"}, "of_layers is '4', needed a whole number"),
        (layout_line(0, 0, 1, 1, 2) | {"dp_rank": 1}, "replica 1 of 1"),
    ],
)
def test_a_damaged_line(tmp_path: Path, line: dict, message: str) -> None:
    """The message names file, line, value and need."""
    path = file_of(tmp_path, 0)
    append(path, layout_line(0, 0, 1, 1, 2), line)
    with pytest.raises(DataError, match=rf"rank_00000.jsonl:2.*{message}"):
        load_step_times(tmp_path)


def test_files_that_are_not_there_or_not_right(tmp_path: Path) -> None:
    """No folder, no JSON, no layout, a missing or doubled rank, no common step, other counts: each is told apart."""
    with pytest.raises(DataError, match=r"record them with megasdc.drop_compute.enabled"):
        load_step_times(tmp_path)
    path = file_of(tmp_path, 0)
    for text, message in (
        ("{x\n", "rank_00000.jsonl:1 is no JSON"),
        ("[" * 100_000 + "\n", "rank_00000.jsonl:1 is no JSON"),
        ("", "no line of kind layout"),
        ("3\n", "object"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            load_step_times(tmp_path)
    path.write_text(json.dumps(GOOD) + "\n")
    with pytest.raises(DataError, match="before any line of kind layout"):
        load_step_times(tmp_path)
    path.write_text("")
    append(path, layout_line(0, 0, 2, 1, 2), GOOD)
    with pytest.raises(DataError, match="lacks the file of replica 1, stage 0, 1 of 2 in all"):
        load_step_times(tmp_path)
    other = file_of(tmp_path, 1)
    append(other, layout_line(0, 0, 2, 1, 2))
    with pytest.raises(DataError, match=r"rank_00001.jsonl and rank_00000.jsonl are both of replica, stage \(0, 0\)"):
        load_step_times(tmp_path)
    other.unlink()
    append(other, layout_line(1, 0, 2, 1, 2), GOOD | {"step": 2})
    with pytest.raises(DataError, match="of 2 steps in the range none is in the files of all ranks"):
        load_step_times(tmp_path)
    append(path, GOOD | {"step": 2, "planned": 3})
    with pytest.raises(DataError, match=r"rank_00001.jsonl, step 2: 2 of 2 micro-batches; .* has 2, and 3 are planned"):
        load_step_times(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"lacks rank_00000\.jsonl"):
        load_step_times(tmp_path)
