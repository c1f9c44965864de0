"""Predicted beside measured memory: what passes, and what is said where nothing is predicted."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from typer.testing import CliRunner

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout
from megasdc.parallel import groups, local_ranks
from megasdc.train.memory import predict_step_memory
from tools.bench.commands import app
from tools.bench.rank import Messages
from tools.bench.training import memory
from tools.bench.training.memory import MemoryResult, bench_memory, default_cases
from tools.trainings.step_memory import CASES, FOUR, MemoryCase, trains_on_gpu

TWO_STAGES = MemoryCase(2, deepspeed=FOUR, parallel={"pipeline": 2})


def _bench(monkeypatch: pytest.MonkeyPatch, case: MemoryCase, peaks: list[tuple[int, float]]) -> MemoryResult:
    def answer(function: Any, arguments: dict[str, Any], ranks: int, folder: Any) -> list[dict[str, Any]]:
        assert (function, ranks, arguments["vocab"]) == (memory.measure_rank, case.ranks, case.vocab)
        return [{"peaks": peaks, "on_gpu": False}]

    monkeypatch.setattr(memory, "run_in_ranks", answer)
    return bench_memory({"case": (case.config(), case.ranks, case.vocab)})


def _rendered(result: MemoryResult) -> str:
    out = io.StringIO()
    result.render(Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.09, True), (1.12, False), (0.88, False)])
def test_each_stage_is_held_to_a_tenth(monkeypatch: pytest.MonkeyPatch, factor: float, passed: bool) -> None:
    """The largest peak of a stage's ranks counts; one stage that is off fails all."""
    config = TWO_STAGES.config()
    first, last = (one.total for one in predict_step_memory(config, check_layout(config, 2), TWO_STAGES.vocab))
    result = _bench(monkeypatch, TWO_STAGES, [(1, last * factor), (0, first * 0.5), (0, first), (1, 0.0)])
    assert [stage.measured for stage in result.stages] == [first, last * factor]
    assert result.passed is result.as_dict()["passed"] is passed
    assert result.as_dict()["stages"][1]["error"] == pytest.approx(1 / factor - 1)
    assert (_rendered(result).splitlines()[-1] == "pass") is passed


def test_what_is_not_predicted_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is named, and a bench that predicted nothing does not pass."""
    result = _bench(monkeypatch, MemoryCase(1, {"hidden_dropout": 0.1}), [(0, 2.0**20)])
    assert (result.stages[0].predicted, result.stages[0].error, result.passed) == (None, None, False)
    assert "not predicted: megasdc.model.hidden_dropout" in _rendered(result)


def test_all_built_in_configurations_are_predicted() -> None:
    """Eight without fused modules and some with; none is passed over."""
    cases = default_cases()
    for name, (config, ranks, vocab) in cases.items():
        assert predict_step_memory(config, check_layout(config, ranks), vocab), name
        assert memory.unpredicted_because(config) is None
    assert sum(not CASES[name].model.get("fuse", False) for name in cases) >= 8


ROOT = Path(__file__).parents[3]


def test_the_guide_has_a_row_for_each_built_in_configuration() -> None:
    """Under the name that the bench prints, in its order."""
    page = (ROOT / "docs" / "guides" / "memory.md").read_text()
    table = page.partition("| configuration | of | predicted MiB |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", table, re.M) == list(CASES)


class Reached(Exception):
    """The process group would be made now."""


@pytest.mark.parametrize("devices", [0, 1, 2, 8])
def test_ranks_share_the_gpus_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """A built-in configuration asks for it, and its ranks' process group is made so."""
    asked = {}

    def stop(timeout_s: float, **options: Any) -> None:
        asked.update(options)
        raise Reached

    monkeypatch.setattr(groups, "init_process_group", stop)
    monkeypatch.setattr(memory, "prepare_cpu", lambda threads: None)  # it would change this process
    for config, ranks, vocab in default_cases(devices).values():
        with pytest.raises(Reached):
            memory.measure_rank(Messages(None), config.resolved(), config.source, vocab)
        assert asked == {"share_devices": 0 < devices < ranks}


def test_the_peak_is_of_the_device_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of DeepSpeed's accelerator, also on a host with a GPU where DS_ACCELERATOR chooses the processor."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(get_accelerator(), "device_name", lambda index=None, name=name: name)
        assert trains_on_gpu() is (name == "cuda")


def test_the_command_takes_vocabulary_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """--vocab-size as check-config has it, for a vocabulary that a tokenizer decides; built-in cases know the GPUs."""
    taken: list[dict[str, Any]] = []

    def stop(cases: dict[str, Any], on_progress: Any) -> None:
        taken.append(cases)
        raise Reached

    monkeypatch.setattr(memory, "bench_memory", stop)
    monkeypatch.setattr(local_ranks, "count_accelerators", lambda: 1)
    smoke = str(ROOT / "configs" / "smoke.json")
    own: list[str] = ["--config", smoke]
    for arguments in (own, [*own, "--ranks", "2", "--vocab-size", "50257"], []):
        assert isinstance(CliRunner().invoke(app, ["memory", *arguments]).exception, Reached)
    (first, second, built_in) = taken
    assert [size for _, *sizes in first.values() for size in sizes] == [1, 4096]  # of the file
    assert [size for _, *sizes in second.values() for size in sizes] == [2, 50257]
    assert built_in["2 x 2 x 2"][0].megasdc.parallel.share_devices
    refused = CliRunner().invoke(app, ["memory", "--ranks", "2", "--vocab-size", "50257"]).exception
    assert isinstance(refused, ConfigError) and len(refused.problems) == 2
