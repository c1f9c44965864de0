"""Are shares, bars and predictions of the overhead benchmark what their definitions say?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.config.load import parse_config
from megasdc.config.model import ffn_width
from megasdc.sdc.cost import Cadence, Rates, TimeShares, median_rates
from tools.bench.detection import protected
from tools.bench.detection.options import OverheadOptions, ProtectOptions
from tools.bench.detection.overhead import Kept, ModelCost, OverheadResult, extrapolate, judge, work_of
from tools.bench.detection.overhead_model import (
    ALWAYS_ON,
    ALWAYS_ON_ALL,
    AMORTISED,
    AUDIT,
    BETWEEN,
    OFF,
    PERMUTED,
    STEPS,
    TOKENS,
    asked_by,
    predict,
)
from tools.bench.detection.overhead_page import overhead_page
from tools.bench.statistics import Cost
from tools.bench.training.options import TrainBenchOptions

SIZES = TrainBenchOptions(
    blocks=6, hidden=128, layers=2, sequence=64, vocab=500, micro_batch=1, accumulation=4, ranks=2
)
RATES = Rates(1e10, 5e9, 1e-6, 2e-6, 1e-4, 2e9)
BARS = {ALWAYS_ON: 0.01, AMORTISED: 0.005}


def judged(always_on_s: float, audit_s: float, between_s: float = 0.001, bars: dict[str, float] = BARS) -> ModelCost:
    """Six steps of each kind of a model whose step without checks takes 10 s and whose other calls take 1 ms."""

    def step(own_s: float) -> dict:
        return {"wall_s": 10 + own_s, "parts": {"results": own_s / 2, "after_micro_batches": own_s / 2}}

    own = {OFF: 0.0, ALWAYS_ON: always_on_s, AUDIT: audit_s, BETWEEN: between_s}
    steps = {name: [step(own.get(name, 0.001))] * 6 for name in STEPS}
    return judge(SIZES, steps, RATES, 50, bars, Kept(Cadence(1, 3), 0.009, 12))


def test_shares_are_of_the_rest_of_the_step() -> None:
    """80 ms of our calls in a step of 10.08 s are 0.8 %, both by our calls and against the step without."""
    tier = judged(always_on_s=0.08, audit_s=1.0).tiers[ALWAYS_ON]
    assert tier.own.median == pytest.approx(0.008)
    assert tier.slower.median == pytest.approx(0.008)
    assert tier.parts == pytest.approx({"results": 0.004, "after_micro_batches": 0.004})


def test_an_audit_is_spread_over_its_interval() -> None:
    """An audited step of 10 % and 49 others of 0.01 % are 0.2098 % of 50 steps."""
    tiers = judged(always_on_s=0.01, audit_s=1.0, between_s=0.001).tiers
    assert tiers[AUDIT].own.median == pytest.approx(0.1)
    assert tiers[AMORTISED].own.median == pytest.approx((0.1 + 49 * 0.0001) / 50)
    assert tiers[AMORTISED].slower.median == pytest.approx((0.1 + 49 * 0.0001) / 50)


@pytest.mark.parametrize(
    ("always_on_s", "audit_s", "passed"), [(0.09, 2.4, True), (0.11, 2.4, False), (0.09, 2.6, False)]
)
def test_bars(always_on_s: float, audit_s: float, passed: bool) -> None:
    """0.9 % and 0.49 % pass; 1.1 % of checks in every step or 0.52 % of audits fail; without a bar all pass."""
    options = OverheadOptions(SIZES)
    limited = judged(always_on_s, audit_s)
    free = judged(1.0, 10.0, bars={})
    result = OverheadResult({}, options, [limited, free], {})
    assert result.passed is passed
    assert result.as_dict()["models"][1]["tiers"][ALWAYS_ON]["passed"] is True


def test_the_page_shows_every_cost_in_percent() -> None:
    """Costs, their intervals, predictions and bars of this machine's models by width, and the accelerator's costs."""
    options = OverheadOptions(SIZES)
    models = [replace(judged(0.08, 1.0), hidden=hidden) for hidden in (256, 128)]
    page = overhead_page(OverheadResult({"cpu": "a processor"}, options, models, extrapolate(options)))
    here, accelerator = ({trace["name"]: trace for trace in figure.traces} for figure in page.figures)
    assert "a processor" in page.figures[0].title and page.sentences[0].startswith("2 gloo ranks")
    measured = here[f"{ALWAYS_ON}, measured"]
    assert (measured["x"], measured["y"]) == ([128, 256], pytest.approx([0.8, 0.8]))
    assert measured["error_y"] == {"array": [0, 0], "arrayminus": [0, 0]}
    assert here[f"{AMORTISED}, bar"]["y"] == [0.5, 0.5]
    assert f"{ALWAYS_ON_ALL}, bar" not in here and f"{ALWAYS_ON_ALL}, predicted" in here
    predicted = accelerator[f"{AMORTISED}, predicted"]
    shares = extrapolate(options)[AMORTISED]
    assert (predicted["x"], predicted["y"]) == (list(shares), pytest.approx([100 * one for one in shares.values()]))
    for figure in page.figures:
        low, high = figure.layout["yaxis"]["range"]
        assert all(low <= math.log10(y) <= high for trace in figure.traces for y in trace["y"])


def test_prediction_counts_what_is_asked_for() -> None:
    """Coverage of one of four micro-batches reads a quarter of the results, and all parameters either way."""
    work = work_of(SIZES)
    one, whole = asked_by(work, ALWAYS_ON), asked_by(work, ALWAYS_ON_ALL)
    assert whole.extremes.bytes == 4 * one.extremes.bytes
    ffn = ffn_width(work.model)
    parameters = 128 * 512 * 2 + 2 * (4 * 128 * 128 + 3 * 128 * ffn + 2 * 128) + 128
    quarter = (whole.checksums.bytes - one.checksums.bytes) / 3
    assert one.checksums.bytes - quarter == pytest.approx(4 * parameters)
    assert (one.exchanges, asked_by(work, AUDIT).exchanges, asked_by(work, OFF).exchanges) == (1, 3, 0)
    with pytest.raises(ValueError, match="has no model"):
        asked_by(work, TOKENS)


def test_every_rate_matters() -> None:
    """Each rate changes the checks of every step; only the reduction is left of a step between audits."""
    work = work_of(SIZES)
    base = predict(work, RATES, 1e11, 50)
    for name in ("checksum_bytes_per_s", "extremes_bytes_per_s"):
        assert predict(work, replace(RATES, **{name: 1e9}), 1e11, 50)[ALWAYS_ON] > base[ALWAYS_ON], name
    for name in ("checksum_s", "extremes_s", "exchange_s"):
        assert predict(work, replace(RATES, **{name: 1e-3}), 1e11, 50)[ALWAYS_ON] > base[ALWAYS_ON], name
    assert base[BETWEEN] == pytest.approx(RATES.exchange_s * 1e11 / work.flops)
    assert base[AMORTISED] == pytest.approx((base[AUDIT] + 49 * base[BETWEEN]) / 50)


def test_a_slow_moment_is_no_rate() -> None:
    """Each rate is the median of its own measurements, in whichever of them it was disturbed."""
    calls, reads = replace(RATES, checksum_s=1.0, exchange_s=9.0), replace(RATES, checksum_bytes_per_s=1.0)
    assert median_rates([calls, RATES, reads]) == RATES


def test_wider_models_pay_less() -> None:
    """Every check is a smaller share of a wider model's step, and half of it where arithmetic is half as fast.

    But for the micro-batch of a permuted replay, which is arithmetic itself.
    """
    options = OverheadOptions(SIZES)
    found = extrapolate(options)
    slow = replace(options, accelerator=replace(options.accelerator, flop_per_s=options.accelerator.flop_per_s / 2))
    for tier, shares in found.items():
        assert list(shares.values()) == sorted(shares.values(), reverse=True), tier
        replay = 1 / options.accelerator.accumulation if tier == PERMUTED else 0.0
        assert extrapolate(slow)[tier][4096] - replay == pytest.approx((shares[4096] - replay) / 2)


def _side(plain_s: float, audited_s: float = 0.0) -> dict:
    """Six blocks of ten steps, of which one has an audited step."""

    def cost(wall_s: float) -> Cost:
        return Cost(wall_s, 2 * wall_s)

    blocks = [{"whole": cost(10 * plain_s), "audited": cost(0.0), "audits": 0} for _ in range(6)]
    if audited_s:
        blocks[2] = {"whole": cost(9 * plain_s + audited_s), "audited": cost(audited_s), "audits": 1}
    told = {"cadence": Cadence(1, 50, 10), "shares": TimeShares(0.02, 0.005, 0.04, 0.01), "budget": 0.01}
    return {"blocks": blocks, "told": told}


def test_audits_count_in_the_ratio_of_a_preset_as_the_run_has_measured_them() -> None:
    """Steps of 1.01 s against 1 s, and half a per cent of audits; the audited step itself changes no block."""
    options = ProtectOptions(blocks=6, steps_per_block=10)
    one = protected.judge(options, _side(1.01, 1.7), _side(1.0))
    assert [one.ratios[name].median for name in ("wall", "cpu")] == pytest.approx([1.01 * 1.005] * 2)
    assert one.bar == 1.03 and one.passed
    assert one.counted == (1, 1.7) and one.step_s == pytest.approx((1.01, 1.0))
    wide = protected.judge(replace(options, hidden=1024), _side(1.02, 1.7), _side(1.0))
    assert wide.bar == 1.015 and not wide.passed


@pytest.mark.parametrize("hidden", [0, 1024])
def test_sides_differ_in_the_word_alone(tmp_path: Path, hidden: int) -> None:
    """And what is expanded trains: fields of the file stay."""
    options = ProtectOptions(hidden=hidden)
    raw = [protected.config_of(options, word, tmp_path, tmp_path) for word in ("standard", "off")]
    own = [one["megasdc"] for one in raw]
    assert [one.pop("protect") for one in own] == ["standard", "off"]
    assert [Path(one["logging"].pop("run_dir")).name for one in own] == ["run_standard", "run_off"]
    assert raw[0] == raw[1]
    config = parse_config(protected.config_of(options, "standard", tmp_path, tmp_path))
    assert config.megasdc.sdc.always_on.rows and config.megasdc.training.steps == options.total_steps
    assert options.total_steps % 10 == 0 and options.warmup_steps % 10 == 5, "blocks end between two snapshots"
