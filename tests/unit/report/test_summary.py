"""What does the summary of a run say to people? A summary in, lines out; a folder that has none is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.errors import MegasdcError
from megasdc.report.summary import RunSummary, render, summarize

RUN = RunSummary(
    run_dir="runs/a",
    steps=40,
    planned_steps=60,
    first_loss=7.0,
    last_loss=5.25,
    eval_loss=5.5,
    unigram_entropy=6.0,
    tokens=81_920,
    tokens_per_s=12_345.6,
    skipped_steps=2,
    resumed_from=[10, 20],
    checkpoints=["runs/a/checkpoints/step_00000040"],
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "0.500 nats better than knowing token frequencies alone (6.000)"),
        ({"unigram_entropy": 5.25}, "0.250 nats worse than knowing token frequencies alone (5.250)"),
        ({"eval_loss": None}, "0.750 nats better than knowing token frequencies alone (6.000)"),
        ({"unigram_entropy": None}, None),
    ],
)
def test_a_loss_is_held_against_token_frequencies(changes: dict[str, float | None], line: str | None) -> None:
    """The validation loss, or without one the training loss; nothing is said where frequencies are not known."""
    said = [text for text in render(replace(RUN, **changes)).splitlines() if text.startswith("against frequency")]
    assert said == ([] if line is None else [f"against frequency {line}"])


def test_what_is_not_there_is_said_or_left_out() -> None:
    """Skipped steps, resumes and the validation loss have their place; without checkpoints it says so."""
    whole, bare = (
        render(run) for run in (RUN, replace(RUN, eval_loss=None, skipped_steps=0, resumed_from=[], checkpoints=[]))
    )
    assert "40 of 60 (2 skipped)" in whole and "resumed from step 10, 20" in whole and "5.500" in whole
    assert "skipped" not in bare and "resumed" not in bare and "validation" not in bare
    assert "checkpoints       none" in bare


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """Nothing there, or a study, whose replicas are the runs."""
    with pytest.raises(MegasdcError, match="holds no run that has reported a step"):
        summarize(tmp_path)
    (tmp_path / "study").mkdir()
    with pytest.raises(MegasdcError, match="holds a study; give one of its folders replica_K"):
        summarize(tmp_path)
