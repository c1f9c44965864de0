"""Replicas that take different numbers of micro-batches: the same samples each step, and the losses of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import (
    MODELS,
    events_of,
    leave_with_the_code,
    prepare_text,
    train_run,
    verdicts_of,
    write_config,
)

from megasdc.metrics.writer import read_metrics

pytestmark = pytest.mark.distributed
STEPS = 7
CONVERT = "megasdc.checkpoint.other_layout=convert"
DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
CHECKED: dict[str, Any] = {
    "determinism": {"enabled": True},
    "sdc": {"always_on": {"enabled": True, "coverage": "all", "slice_elements": 1_000_000, "rows": True}},
    "deepspeed__pipeline": {"activation_checkpoint_interval": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _train(folder: Path, data: Path, name: str, ranks: int, **changes: Any) -> Path:
    """Train with 16 samples a step; the run's folder."""
    config = write_config(
        *(folder / f"{name}.json", data, folder / name),
        deepspeed__train_batch_size=16,
        training__steps=STEPS,
        **changes,
    )
    assert train_run(config, ranks) == [(0, None)] * ranks
    return folder / name


def _of_steps(run: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run) if name in row]


def _check_alike(run: Path, alone: Path) -> None:
    for name in ("data/stream_end", "train/tokens"):
        assert _of_steps(run, name) == _of_steps(alone, name), name
    assert _of_steps(run, "data/stream_end") == [16 * (step + 1) for step in range(STEPS)]
    assert _of_steps(run, "train/loss") == pytest.approx(_of_steps(alone, "train/loss"), rel=2e-5)
    assert _of_steps(run, "train/grad_norm") == pytest.approx(_of_steps(alone, "train/grad_norm"), rel=2e-4)


@pytest.mark.parametrize(
    ("layout", "size", "changes"),
    [
        ((1, 1, 3), 1, DROPOUT),
        ((1, 1, 3), 2, {**DROPOUT, "data__mask_end_of_document": True}),
        ((1, 2, 3), 1, {"model": MODELS["llama"]}),
    ],
    ids=["dropout", "pairs_masked", "pp2_llama"],
)
def test_uneven_replicas_train_as_one_rank(
    tmp_path: Path, data: Path, layout: tuple[int, int, int], size: int, changes: dict[str, Any]
) -> None:
    """Sixteen micro-batches, or eight of two samples, on three replicas: samples, tokens, losses and norms of one."""
    tensor, pipeline, replicas = layout
    changes = {**changes, "deepspeed__train_micro_batch_size_per_gpu": size}
    alone = _train(tmp_path, data, "alone", 1, **changes)
    sizes = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    run = _train(tmp_path, data, "uneven", tensor * pipeline * replicas, **changes, **sizes)
    _check_alike(run, alone)


def test_checks_are_silent_and_change_nothing(tmp_path: Path, data: Path) -> None:
    """Recompute, rows, slices and sums of gradients, where one replica takes more than the others."""
    plain = _train(
        tmp_path, data, "plain", 3, determinism={"enabled": True}, deepspeed__pipeline=CHECKED["deepspeed__pipeline"]
    )
    checked = _train(tmp_path, data, "checked", 3, **CHECKED)
    assert verdicts_of(checked) == []
    assert _of_steps(plain, "train/loss") == _of_steps(checked, "train/loss")


def test_a_run_goes_on_with_fewer_replicas_and_with_more(tmp_path: Path, data: Path) -> None:
    """Four replicas, then three, then five: no sample is lost or comes twice, and the losses are those of one rank."""
    alone = _train(tmp_path, data, "alone", 1, **DROPOUT)
    run = tmp_path / "run"
    config = write_config(
        *(tmp_path / "run.json", data, run),
        deepspeed__train_batch_size=16,
        training__steps=STEPS,
        checkpoint={"interval": 1, "keep_last": 0},
        **DROPOUT,
    )
    fault = 'megasdc.process_faults=[{"kind": "exit", "rank": 1, "steps": [%d, %d], "exit_code": 17}]'
    for replicas, step in ((4, 3), (3, 5)):
        run_distributed(
            leave_with_the_code, replicas, str(config), CONVERT, fault % (step, step), init=False, expect_exit={1: 17}
        )
    assert train_run(config, 5, CONVERT) == [(0, None)] * 5
    found = [(one["step"], one["saved_layout"]) for one in events_of(run, "resume", "other_layout")]
    assert found == [(2, "TP1 x PP1 x DP4"), (4, "TP1 x PP1 x DP3")]
    _check_alike(run, alone)
