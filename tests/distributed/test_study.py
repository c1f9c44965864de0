"""Do studies find exactly what is harmed, nothing where nothing is, and leave the trusted replica as it was?"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from whole_runs import events_of, leave_with_the_code, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.lab.studies.tables import MismatchRow, StudySummary, summarize_study
from megasdc.ops.run_folder.study_log import WHOLE, read_study

pytestmark = pytest.mark.distributed
STEPS = 3


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def _config(tmp_path: Path, data: Path, name: str, mode: str | None = None, replicas: int = 2, **changes: Any) -> Path:
    """A run of few steps with one checkpoint, as a study or alone."""
    options: dict[str, Any] = {"determinism__enabled": True, "training__steps": STEPS, "checkpoint__interval": 0}
    if mode is not None:
        options |= {"study__mode": mode, "study__replicas": replicas}
    return write_config(tmp_path / f"{name}.json", data, tmp_path / name, **options | changes)


def _train(config: Path, ranks: int, *overrides: str) -> None:
    results = train_run(config, ranks, *overrides)
    assert [code for code, _ in results if code] == [], results


def _state(run_dir: Path, step: int = STEPS) -> dict[str, str]:
    return state_of(run_dir / "checkpoints" / f"step_{step:08d}")


def _rows(summary: StudySummary) -> dict[tuple[Any, ...], MismatchRow]:
    """The rows of mismatches that have any."""
    return {(row.replica, row.rank, row.name, row.phase): row for row in summary.mismatches if row.mismatches}


LAYOUTS = [(1, 1), (2, 1), (1, 2)]
MODES = ["computation_sync", "parameter_sync", "free_run"]
SAMPLE = {(2, 1, "computation_sync"), (1, 2, "parameter_sync"), (1, 1, "free_run")}
HEALTHY = [
    pytest.param(tensor, pipeline, mode, steps, marks=[] if steps < 100 else [pytest.mark.full])
    for tensor, pipeline in LAYOUTS
    for mode in MODES
    for steps in (STEPS, 100)
    if steps == 100 or (tensor, pipeline, mode) in SAMPLE
]


@pytest.mark.parametrize(("tensor", "pipeline", "mode", "steps"), HEALTHY)
def test_a_healthy_pair_is_exactly_equal(
    tmp_path: Path, data: Path, tensor: int, pipeline: int, mode: str, steps: int
) -> None:
    """Every number is exactly zero, much was compared, and both replicas end with the same bits."""
    options: dict[str, Any] = {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "training__steps": steps}
    if mode != "parameter_sync":
        options["study__interval"] = 2
    config = _config(tmp_path, data, "run", mode, **options)
    _train(config, 2 * tensor * pipeline)
    summary = summarize_study(tmp_path / "run")
    assert _rows(summary) == {}
    assert list(read_study(tmp_path / "run", "mismatch")) == []
    compared = sum(row.elements for row in summary.mismatches)
    assert (compared > 100_000 * steps) == (mode == "computation_sync")
    distances = {row.quantity: row for row in summary.distances if row.fqn == WHOLE}
    expected = {"parameter_sync": {"gradient": steps}, "free_run": {"parameters": math.ceil(steps / 2)}}
    assert {name: row.comparisons for name, row in distances.items()} == expected.get(mode, {})
    lines = list(read_study(tmp_path / "run", "gradient", "parameters"))
    assert all(line["difference_norm"] == line["ratio"] == 0.0 < line["trusted_norm"] for line in lines)
    losses = list(read_study(tmp_path / "run", "loss"))
    assert len(losses) == 2 * steps and all(line["loss"] == line["trusted_loss"] for line in losses)
    assert [one["disagreeing"] for one in summary.evaluations] == [0, 0] * (mode == "free_run")
    assert _state(tmp_path / "run" / "replica_0", steps) == _state(tmp_path / "run" / "replica_1", steps)


PLANTED = [
    {
        "submodule": "*.self_attention.linear_qkv",
        "phase": "backward",
        "tensor_rank": 1,
        "replica": 1,
        "kind": "scale",
        "factor": 1.0625,
        "element_probability": 0.02,
    },
    {"submodule": "*.mlp.linear_fc2", "replica": 2, "bits": [30], "element_probability": 0.01, "steps": [2, None]},
]


def test_each_fault_is_found_in_its_place_and_goes_no_further(tmp_path: Path, data: Path) -> None:
    """One healthy and two unhealthy replicas of two tensor ranks: backward attention of one tensor rank and forward
    FFN are wrong as often and as much as planted, told element by element, and nowhere else; all replicas end as the
    run without a study does.
    """
    layout = {"parallel__tensor": 2, "training__eval_interval": 0}
    _train(_config(tmp_path, data, "study", "computation_sync", 3, faults=PLANTED, **layout), 6)
    _train(_config(tmp_path, data, "plain", **layout), 2)
    rows = _rows(summarize_study(tmp_path / "study", "rank"))
    assert sorted(rows) == [(1, 3, "attention", "backward"), (2, 4, "ffn", "forward"), (2, 5, "ffn", "forward")]
    injected = {
        replica: events_of(tmp_path / "study" / f"replica_{replica}", "fault", "injected") for replica in (1, 2)
    }
    for key, row in rows.items():
        told = [event["changed"] for event in injected[key[0]] if event["rank"] == row.rank % 2]
        assert row.mismatches == sum(told)
    attention = rows[1, 3, "attention", "backward"]
    share = PLANTED[0]["element_probability"]
    error = 5 * math.sqrt(share / attention.elements)
    assert abs(attention.frequency - share) < error
    assert attention.severity_mean == pytest.approx(0.0625, rel=1e-5)
    lines = list(read_study(tmp_path / "study", "mismatch"))
    assert {line["step"] for line in lines if line["replica"] == 2} == {2, 3}
    assert all(line["flips"] == {"30": line["mismatches"]} for line in lines if line["replica"] == 2)
    plain = _state(tmp_path / "plain")
    assert all(_state(tmp_path / "study" / f"replica_{replica}") == plain for replica in range(3))
    assert metrics_of(tmp_path / "study" / "replica_0") == metrics_of(tmp_path / "plain")


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"deepspeed__bf16": {"enabled": True}},
    "dropout": {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1},
    "recompute": {"deepspeed__pipeline": {"activation_checkpoint_interval": 1}},
    "pipeline": {"parallel__pipeline": 2},
    "data": {},
}
RANKS = {"pipeline": 2, "data": 2}
"""Of a replica, where it is not one."""


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=[] if name in ("bf16", "pipeline") else pytest.mark.full) for name in SETTINGS]
)
def test_other_settings_are_compared_too(tmp_path: Path, data: Path, setting: str) -> None:
    """A healthy replica differs nowhere, a harmed one where it is harmed alone, and all end as without a study."""
    fault = {"submodule": "*.mlp.linear_fc2", "replica": 2, "kind": "scale", "factor": 2.0, "elements": 5}
    options = {**SETTINGS[setting], "training__eval_interval": 0}
    ranks = RANKS.get(setting, 1)
    faults = [{**fault, "phase": "forward"}]
    _train(_config(tmp_path, data, "study", "computation_sync", 3, faults=faults, **options), 3 * ranks)
    _train(_config(tmp_path, data, "plain", **options), ranks)
    rows = _rows(summarize_study(tmp_path / "study"))
    assert {key[:1] + key[2:] for key in rows} == {(2, "ffn", "forward")}
    (row,) = rows.values()
    assert row.mismatches == 5 * 2 * 4 * STEPS and row.severity_mean == 1.0
    plain = _state(tmp_path / "plain")
    assert all(_state(tmp_path / "study" / f"replica_{replica}") == plain for replica in range(3))


RATES = {
    ("2.layer.self_attention.linear_proj", "forward"): (1e-2, 1e-6),
    ("3.layer.self_attention.linear_proj", "forward"): (1e-2, 1e-3),
    ("2.layer.mlp.linear_fc2", "forward"): (1e-3, 1.0),
    ("3.layer.mlp.linear_fc2", "forward"): (1e-3, 1e3),
    ("2.layer.self_attention.linear_qkv", "backward"): (2e-4, 1e6),
    ("3.layer.self_attention.linear_qkv", "backward"): (2e-4, 1e9),
    ("2.layer.mlp.linear_fc1", "backward"): (2e-4, 1e12),
}
"""Frequency and severity by submodule and phase; fp32 holds a factor of 1 + 1e-6 within 6 %."""


@pytest.mark.full
def test_rates_and_severities_are_recovered_from_a_run(tmp_path: Path, data: Path) -> None:
    """Frequencies within five standard errors and severities from 1e-6 to 1e12, each where it was planted."""
    faults = [
        {
            "submodule": submodule,
            "phase": phase,
            "slot": "output" if phase == "forward" else "input",
            "kind": "scale",
            "factor": 1.0 + severity,
            "element_probability": frequency,
            "replica": 1,
        }
        for (submodule, phase), (frequency, severity) in RATES.items()
    ]
    _train(_config(tmp_path, data, "study", "computation_sync", faults=faults, training__steps=40), 2)
    rows = _rows(summarize_study(tmp_path / "study", "submodule"))
    assert {(name, phase) for _, _, name, phase in rows} == set(RATES)
    for (_, _, name, phase), row in rows.items():
        frequency, severity = RATES[name, phase]
        assert frequency * row.elements > 20
        assert abs(row.frequency - frequency) < 5 * math.sqrt(frequency / row.elements)
        assert row.severity_mean == pytest.approx(severity, rel=0.07 if severity < 1e-5 else 1e-3)


def test_what_happens_between_the_passes_is_found_too(tmp_path: Path, data: Path) -> None:
    """Weight gradients, reduced gradients, optimizer states and gathered parameters are put right in place, by any
    trusted replica.
    """
    faults = [
        {"phase": phase, "submodule": f"{layer}.layer.mlp.linear_fc1", "slot": slot, "replica": 0, "bits": [20]}
        for layer, phase, slot in (
            (2, "weight_grad", "weight"),
            (3, "reduced_grad", "bias"),
            (2, "optimizer_state", "weight.exp_avg"),
            (3, "parameter", "weight"),
        )
    ]
    _train(_config(tmp_path, data, "study", "computation_sync", faults=faults, study__trusted=1), 2)
    rows = _rows(summarize_study(tmp_path / "study", "submodule"))
    assert {replica for replica, *_ in rows} == {0}
    phases = {(name, phase) for _, _, name, phase in rows}
    assert ("2.layer.mlp.linear_fc1", "weight_grad") in phases
    assert ("2.layer.mlp.linear_fc1", "update") in phases  # the moment that was harmed
    assert {("3.layer.mlp.linear_fc1", "reduced_grad"), ("3.layer.mlp.linear_fc1", "parameter")} <= phases
    assert len(phases) == 4
    assert _state(tmp_path / "study" / "replica_0") == _state(tmp_path / "study" / "replica_1")


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.full)])
def test_noise_in_gradients(tmp_path: Path, data: Path, shards: int) -> None:
    """A submodule's reduced gradient times 1.5 is half its norm away, others are not; the trusted norm is the one that
    DeepSpeed reports, with tied embeddings on two stages and data parallel shards; and the state is taken over.
    """
    fault = {
        "phase": "reduced_grad",
        "submodule": "3.layer.mlp.linear_fc1",
        "kind": "scale",
        "factor": 1.5,
        "element_probability": 1.0,
        "replica": 1,
        "steps": [2, 2],
    }
    options = {"parallel__pipeline": 2, "training__eval_interval": 0}
    _train(_config(tmp_path, data, "study", "parameter_sync", faults=[fault], **options), 4 * shards)
    _train(_config(tmp_path, data, "plain", **options), 2 * shards)
    lines = {(line["step"], line["fqn"]): line for line in read_study(tmp_path / "study", "gradient")}
    harmed = lines[2, "3.layer.mlp.linear_fc1"]
    assert harmed["ratio"] == pytest.approx(0.5, rel=1e-6)
    whole = lines[2, WHOLE]
    assert whole["ratio"] == pytest.approx(0.5 * harmed["trusted_norm"] / whole["trusted_norm"], rel=1e-6)
    assert {key for key, line in lines.items() if line["ratio"]} == {(2, "3.layer.mlp.linear_fc1"), (2, WHOLE)}
    norms = {row["step"]: row["train/grad_norm"] for row in metrics_of(tmp_path / "plain") if "train/grad_norm" in row}
    for step, norm in norms.items():
        assert lines[step, WHOLE]["trusted_norm"] == pytest.approx(norm, rel=1e-5)
    plain = _state(tmp_path / "plain")
    assert _state(tmp_path / "study" / "replica_0") == _state(tmp_path / "study" / "replica_1") == plain


def _lines(run_dir: Path) -> list[str]:
    """Everything a study says, without its starts."""
    return [json.dumps(line) for line in read_study(run_dir) if line["kind"] != "start"]


@pytest.mark.parametrize("mode", ["free_run", pytest.param("computation_sync", marks=pytest.mark.full)])
def test_a_killed_study_goes_on(tmp_path: Path, data: Path, mode: str) -> None:
    """SIGKILL to a harmed replica, and the newest checkpoint of the other lost: both go on from the last that both
    have, no line is doubled, and the end is that of a study that was never killed; another trusted replica is refused.
    """
    fault = {"submodule": "*.linear_fc2", "kind": "scale", "factor": 3.0, "replica": 1, "elements": 4}
    options = {"training__steps": 6, "checkpoint__interval": 2, "study__interval": 3, "faults": [fault]}
    whole = _config(tmp_path, data, "whole", mode, **options)
    kill = {"process_faults": [{"kind": "sigkill", "replica": 1, "steps": [6, 6]}], "parallel__timeout_s": 20.0}
    killed = _config(tmp_path, data, "killed", mode, **options, **kill)
    _train(whole, 2)
    run_distributed(leave_with_the_code, 2, str(killed), init=False, expect_exit={1: -9})
    shutil.rmtree(tmp_path / "killed" / "replica_0" / "checkpoints" / "step_00000004")
    _train(killed, 2)
    starts = [(line["replica"], line["step"]) for line in read_study(tmp_path / "killed", "start")]
    assert starts == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert _lines(tmp_path / "killed") == _lines(tmp_path / "whole")
    summary = summarize_study(tmp_path / "whole")
    if mode == "free_run":
        (distance,) = [row for row in summary.distances if row.fqn == WHOLE]
        assert distance.comparisons == 2 and distance.last is not None and distance.last > 1e-3
        assert summary.losses[1].largest_difference and not summary.losses[0].largest_difference
    else:
        assert [row.mismatches for row in _rows(summary).values()] == [4 * 2 * 4 * 6]
    for replica in (0, 1):
        states = [_state(tmp_path / name / f"replica_{replica}", 6) for name in ("whole", "killed")]
        assert states[0] == states[1]
    for code, message in train_run(killed, 2, "megasdc.study.trusted=1"):
        assert code == 72
        assert "megasdc.study.trusted: saved with 0, now 1" in str(message)


def _stop_one(config: str) -> int:
    """Body of a rank: train; the last replica is sent SIGTERM when it has taken a step."""
    from megasdc.pretrain import pretrain

    metrics = Path(json.loads(Path(config).read_text())["megasdc"]["logging"]["run_dir"]) / "replica_1/metrics.jsonl"

    def watch() -> None:
        while not metrics.exists() or not metrics.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "1":
        threading.Thread(target=watch, daemon=True).start()
    return pretrain(config, [])[0]


def test_replicas_stop_together(tmp_path: Path, data: Path) -> None:
    """A signal to one replica ends all after the same step, each with its checkpoint."""
    config = _config(tmp_path, data, "run", "parameter_sync", training__steps=4000, training__eval_interval=0)
    assert run_distributed(_stop_one, 2, str(config), init=False) == [0, 0]
    saved = [sorted(path.name for path in (tmp_path / "run").glob(f"replica_{k}/checkpoints/step_*")) for k in (0, 1)]
    assert len(saved[0]) == 1 and saved[0] == saved[1] != ["step_00004000"]
    (told,) = events_of(tmp_path / "run" / "replica_0", "stop", "requested")
    assert told["reason"] == "signal SIGTERM, of replica 1 of the study", "which is not asked for by the configuration"


def _top_of_shards(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What a tensor rank finds as the most likely tokens."""
    import torch.distributed as dist

    from megasdc.lab.studies.hook import top_tokens
    from megasdc.model.loss import TokenLoss
    from megasdc.parallel.groups import init_model_parallel

    init_model_parallel(2, 1, 60.0)
    loss = TokenLoss(vocab_size, logits.shape[-1], dist.get_rank(), 2)
    return top_tokens(logits.chunk(2, dim=-1)[dist.get_rank()], loss)


def test_predictions_over_a_divided_vocabulary() -> None:
    """Both tensor ranks find the argmax over the real columns of the whole."""
    logits = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1))
    logits[..., 40:] += 5  # padding
    expected = logits[..., :40].argmax(-1)
    assert all(torch.equal(found, expected) for found in run_distributed(_top_of_shards, 2, logits, 40))
