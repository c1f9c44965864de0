"""Does the benchmark of gradient bounds measure what it says, and fail when it should?"""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from megasdc.common.errors import ConfigError
from megasdc.tensors import bound
from megasdc.tensors.bound import COMPILED
from tools.bench.bounds import cost, cost_others
from tools.bench.bounds.cost import BAR, MILLION, Shard, bench_bounds
from tools.bench.bounds.cost_others import LIMITS, others
from tools.bench.bounds.options import BoundsBenchOptions
from tools.bench.statistics import SLACK, estimate_median
from tools.trainings.numerics import cpu_threads

ADAM = "compiled elsewhere"


@pytest.fixture(scope="module")
def result():
    """Without DeepSpeed's Adam, which takes a minute to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_others, "_build_cpu_adam", lambda: ADAM)
        return bench_bounds(BoundsBenchOptions(blocks=2, sizes_million=(1,)))


def rendered(result):
    out = io.StringIO()
    result.render(Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.slow
def test_every_comparison_is_made(result):
    """Both ways to read once have the bar, the others none; one case has a share of 1e-4 of elements to bound."""
    host = [one for one in result.comparisons if one.device == "cpu"]
    loop, sums = "compiled loop that reads g and V", "g.sum() and V.sum()"
    assert [(one.against, one.bar) for one in host if not one.bounded] == [
        (loop, BAR),
        (sums, BAR),
        ("compiled loop that compares g^2 with V", None),
        ("torch AdamW step, fused", None),
        ("torch AdamW step, foreach", None),
        ("the formula in torch's operations", None),
    ]
    (some,) = [one for one in host if one.bounded]
    assert (some.against, some.bar) == (loop, None) and some.bounded == pytest.approx(1e-4 * MILLION, rel=0.02)
    for one in host:
        assert set(one.ratios) == {"wall", "cpu"} and len(one.costs) == 2 and min(one.pass_s) > 0
        assert one.difference is None and one.size_million == 1


@pytest.fixture
def loops(monkeypatch):
    """The compiled loops by what they do."""
    monkeypatch.setattr(cost_others, "_build_cpu_adam", lambda: ADAM)
    return {one.name.split()[3]: one for one in others("cpu")[0] if one.name.startswith("compiled loop that")}


def test_the_compiled_loop_reads_everything_once(loops):
    """It gives the sum of both arrays, also of lengths that fill no vector."""
    loop = loops["reads"]
    for count in (0, 1, 63, 64, 1000):
        first, second = torch.arange(count, dtype=torch.float32), torch.full((count,), 0.5)
        assert loop.build(first, second)() == first.sum() + second.sum()


def test_the_comparing_loop_finds_every_element_above_the_limit(loops):
    """One element whose g^2 / V is above the limit shows wherever it is, and none below it."""
    loop = loops["compares"]
    for count in (1, 63, 64, 200):
        gradient, second_moment = torch.full((count,), 1.0), torch.full((count,), 1.001 / LIMITS.spike)
        assert loop.build(gradient, second_moment)() == 0
        for place in {0, count // 2, count - 1}:
            gradient[place] = -1.01
            assert loop.build(gradient, second_moment)() == 1
            gradient[place] = 1.0


def test_the_shard_has_what_is_to_bound():
    """Outliers are bound and come back; without them nothing is, and sums that say otherwise are a difference."""
    shard = Shard(10_000, torch.device("cpu"))
    for wanted in (True, False, True):
        shard.set_outliers(wanted)
        shard.bound()
        assert shard.difference(len(shard.places) if wanted else 0) is None
    shard.set_outliers(True)
    shard.bound()
    shard.bound()  # found nothing: the first one has bound them
    assert "not 1 in each" in shard.difference(1)
    assert (shard.gradient.abs() <= LIMITS.absolute).all()


def test_the_result_is_json_and_text(result):
    """Every number survives JSON; the text says which implementation ran and what did not."""
    loaded = json.loads(json.dumps(result.as_dict()))
    assert loaded["implementations"]["cpu"] == COMPILED and len(loaded["comparisons"]) == len(result.comparisons)
    text = rendered(result)
    assert f"gradient bounds on cpu: {COMPILED}" in text and "torch AdamW step, fused" in text
    assert f"NOT RUN: DeepSpeedCPUAdam: {ADAM}" in text
    if not torch.cuda.is_available():
        assert "NOT RUN: speed of the kernel on a GPU: there is no CUDA device" in text


def test_without_a_compiler_the_bench_says_so(monkeypatch, tmp_path):
    """The formula runs and is named, and the loop that could not be compiled is among what was not run."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost_others, "_build_cpu_adam", lambda: ADAM)
    monkeypatch.setattr(cost, "MILLION", 1000)
    bound.implementation.cache_clear()
    bound.fused_library.cache_clear()
    try:
        text = rendered(bench_bounds(BoundsBenchOptions(blocks=1, sizes_million=(1,))))
    finally:
        bound.implementation.cache_clear()
        bound.fused_library.cache_clear()
    assert "gradient bounds on cpu: formula in torch's operations" in text
    assert "NOT RUN: time of the compiled loop" in text and "no-such-compiler" in text


def test_verdicts_follow_the_bars(result):
    """A slow pass and one that bounds wrongly each fail the result; what has no bar fails nothing."""

    def with_time(ratio, bar, difference=None):
        one = dataclasses.replace(
            result.comparisons[0],
            ratios={"wall": estimate_median([ratio] * 8)},
            bar=bar,
            difference=difference,
        )
        return dataclasses.replace(result, comparisons=[one])

    assert with_time(BAR, BAR).passed and not with_time(BAR + 2 * SLACK, BAR).passed
    assert "FAIL" in rendered(with_time(2.0, BAR)) and with_time(2.0, None).passed
    wrong = with_time(1.0, None, "3 bounded in 1 passes, not 0 in each")
    assert not wrong.passed and "3 bounded in 1 passes" in rendered(wrong)


def test_threads_are_given_back():
    """The process has as many threads after a measurement as before, also after one that fails."""
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), cpu_threads(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_bad_options_are_refused_together():
    """All problems are in one message, each with its option and value."""
    with pytest.raises(ConfigError, match=r"(?s)--blocks: 0 .* 1.*--sizes: 0 .*--threads: 0"):
        BoundsBenchOptions(blocks=0, threads=0, sizes_million=(4, 0))
