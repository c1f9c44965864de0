"""Predicted beside measured memory: what passes, and what is said where nothing is predicted."""

from __future__ import annotations

from typing import Any

import pytest

from megasdc.bench import memory
from megasdc.bench.memory import CASES, FOUR, MemoryCase, MemoryResult, bench_memory, default_cases
from megasdc.config import check_layout
from megasdc.train.memory_step import predict_step_memory

TWO_STAGES = MemoryCase(2, deepspeed=FOUR, parallel={"pipeline": 2})


def _bench(monkeypatch: pytest.MonkeyPatch, case: MemoryCase, peaks: list[tuple[int, float]]) -> MemoryResult:
    def answer(module: str, request: dict[str, Any], ranks: int, threads: int, folder: Any, on_message: Any) -> None:
        assert (module, ranks, request["vocab"]) == ("megasdc.bench.memory_rank", case.ranks, case.vocab)
        on_message({"peaks": peaks})

    monkeypatch.setattr(memory, "run_ranks", answer)
    return bench_memory({"case": (case.config(), case.ranks, case.vocab)})


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.09, True), (1.12, False), (0.88, False)])
def test_each_stage_is_held_to_a_tenth(monkeypatch: pytest.MonkeyPatch, factor: float, passed: bool) -> None:
    """The largest peak of a stage's ranks counts; one stage that is off fails all."""
    config = TWO_STAGES.config()
    first, last = (one.total for one in predict_step_memory(config, check_layout(config, 2), TWO_STAGES.vocab))
    result = _bench(monkeypatch, TWO_STAGES, [(1, last * factor), (0, first * 0.5), (0, first), (1, 0.0)])
    assert [stage.measured for stage in result.stages] == [first, last * factor]
    assert result.passed is result.as_dict()["passed"] is passed
    assert result.as_dict()["stages"][1]["error"] == pytest.approx(1 / factor - 1)
    assert ("pass" in result.render()) is passed


def test_what_is_not_predicted_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is named, and a bench that predicted nothing does not pass."""
    result = _bench(monkeypatch, MemoryCase(1, {"hidden_dropout": 0.1}), [(0, 2.0**20)])
    assert (result.stages[0].predicted, result.stages[0].error, result.passed) == (None, None, False)
    assert "not predicted: megasdc.model.hidden_dropout" in result.render()


def test_all_built_in_configurations_are_predicted() -> None:
    """Eight without fused modules and some with; none is passed over."""
    cases = default_cases()
    for name, (config, ranks, vocab) in cases.items():
        assert predict_step_memory(config, check_layout(config, ranks), vocab), name
        assert memory.unpredicted_because(config) is None
    assert sum(not CASES[name].model.get("fuse", False) for name in cases) >= 8
