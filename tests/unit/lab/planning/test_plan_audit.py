"""Do formula and simulation, which know nothing of each other, agree, and is the chosen interval the largest?"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.addresses import MICRO_BATCH_PHASES
from megasdc.config.model import ModelSection
from megasdc.lab.planning.audits import (
    ALL,
    AUDIT,
    AUTO,
    ONE,
    ROWS,
    SLICES,
    TIERS,
    AuditPlan,
    check_shares,
    expected_latency,
    largest_interval,
    plan_audits,
    simulate_latency,
)
from megasdc.sdc.cost import Cadence, RankWork, Reads, predicted_share, reads_of_step, total

PLAN = AuditPlan(
    replicas=4,
    interval=7,
    micro_batches=5,
    visible=0.5,
    audit_share=0.3,
    forward_share=0.1,
    cadence=Cadence(2, 3),
    products=4,
    slices=6,
    row_share=0.02,
    slice_share=0.03,
)


@pytest.mark.parametrize("rate", [1.0, 0.6, 0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("tier", TIERS)
def test_formula_is_the_mean_of_the_simulation(tier: str, rate: float) -> None:
    """The mean of 4,000 bad ranks is within 4.5 standard errors of the formula."""
    steps = simulate_latency(PLAN, tier, rate, 4000, seed=3)
    error = steps.std(ddof=1) / math.sqrt(len(steps))
    assert abs(steps.mean() - expected_latency(PLAN, tier, rate)) <= 4.5 * error
    assert error < 0.05 * steps.mean()


def test_latencies_that_need_no_simulation() -> None:
    """A rank that is always wrong is found by the first audit, at once or up to K steps later; hand-computed values."""
    steps = simulate_latency(PLAN, AUDIT, 1.0, 7000, seed=1)
    counts = np.bincount(steps, minlength=8)[1:]
    assert len(counts) == 7 and np.all(np.abs(counts - 1000) < 4.5 * math.sqrt(1000))
    assert expected_latency(PLAN, AUDIT, 1.0) == 4
    assert expected_latency(PLAN, AUDIT, 0.5) == 11
    assert expected_latency(PLAN, ONE, 0.5) == 4
    certain = AuditPlan(4, 7, 5, 1.0, 0, 0)
    assert expected_latency(PLAN, AUTO, 1.0) == pytest.approx(3 * (4 / 3 - 0.5) + 0.5), "q = 1 - 1/4"
    assert expected_latency(PLAN, ROWS, 0.5) == 3 * 7.5 + 0.5
    assert expected_latency(PLAN, SLICES, 0.5) == 3 * 11.5 + 0.5
    assert expected_latency(certain, ALL, 1.0) == 1 and set(simulate_latency(certain, ALL, 1.0, 50, 1)) == {1}


def test_audits_see_one_micro_batch_of_one_step() -> None:
    """More micro-batches do not help an audit, and K = 1 finds a rank after 1 / p steps."""
    for micro_batches in (1, 64):
        every = AuditPlan(4, 1, micro_batches, 0.5, 0, 0)
        assert expected_latency(every, AUDIT, 0.02) == pytest.approx(50)


def test_what_is_never_seen() -> None:
    """One replica has nobody to be audited with; what repeats is not seen by a recomputation; neither is simulated."""
    alone = AuditPlan(1, 7, 5, 0.0, 0, 0)
    result = plan_audits(alone, [0.1], 10, 1, lambda *_: None)
    never = [one for one in result.latencies if one.tier in (AUDIT, ONE, ALL, AUTO)]
    assert [one.expected for one in never] == [math.inf] * 4
    assert {one.simulated for one in never} == {None}
    elsewhere = plan_audits(AuditPlan(1, 7, 5, 0.0, 0, 0, permuted=1.2), [0.1], 2000, 1, lambda *_: None).latencies[0]
    assert elsewhere.expected == pytest.approx(7 * 9.5 + 0.5)
    assert elsewhere.simulated is not None and elsewhere.error is not None
    assert abs(elsewhere.simulated - elsewhere.expected) < 5 * elsewhere.error
    told = json.loads(json.dumps(result.as_dict()))["latencies"]
    assert [one["tier"] for one in told if one["expected"] is not None] == [ROWS, SLICES]


@pytest.mark.parametrize("rate", [1.0, 0.07, 1e-2, 1e-6])
def test_the_largest_interval(rate: float) -> None:
    """The chosen K reaches the wanted latency and K + 1 does not, also where it is reached exactly."""

    def of(interval: int) -> float:
        return expected_latency(AuditPlan(4, interval, 5, 0.5, 0, 0), AUDIT, rate)

    for exact in (1, 2, 5, 47, 999):
        assert largest_interval(of(exact), rate) == exact
        between = (of(exact) + of(exact + 1)) / 2
        assert largest_interval(between, rate) == exact
    assert largest_interval(0.99 / rate, rate) is None


def test_costs() -> None:
    """An audit costs its share once in M K micro-batches and the samples that N - 1 replicas repeat."""
    assert PLAN.overhead(AUDIT) == pytest.approx(0.3 / 35)
    extra = replace(PLAN, extra=True)
    assert extra.overhead(AUDIT) == pytest.approx((0.3 + 1) / 35) and extra.samples_lost(AUDIT) == 0
    assert replace(PLAN, permuted=1.5).overhead(AUDIT) == pytest.approx((0.3 + 1.5 + 0.3) / 35)
    assert PLAN.overhead(ONE) == pytest.approx(0.1 / 5) and PLAN.overhead(ALL) == 0.1
    assert PLAN.overhead(AUTO) == pytest.approx(0.1 * 2 / (5 * 3))
    assert PLAN.overhead(ROWS) == pytest.approx(0.02 / 15) and PLAN.overhead(SLICES) == pytest.approx(0.01)
    assert PLAN.samples_lost(AUDIT) == pytest.approx(3 / 4 / 35)
    assert PLAN.samples_lost(ONE) == PLAN.samples_lost(ALL) == 0
    assert AuditPlan(1, 7, 5, 0.5, 0, 0).samples_lost(AUDIT) == 0


def test_the_cadence_is_within_the_budget() -> None:
    """One micro-batch more, or a step that looks sooner, would be more than the budget."""
    for budget in (0.001, 0.012, 0.03, 0.05, 0.2):
        chosen = PLAN.within(budget, 0.002)
        spent = 0.002 + sum(chosen.overhead(tier) for tier in (AUDIT, AUTO, ROWS, SLICES))
        cadence = chosen.cadence
        assert spent <= budget or cadence == Cadence(1, 50)
        if cadence.every > 1:
            sooner = replace(chosen, cadence=Cadence(1, cadence.every - 1))
            assert 0.002 + sum(sooner.overhead(tier) for tier in (AUDIT, AUTO, ROWS, SLICES)) > budget
        elif cadence.micro_batches < 5:
            assert spent + 0.1 / 5 > budget


def test_shares_are_those_of_the_cost_model() -> None:
    """Of all phases of a micro-batch, and of forward and recompute alone, whatever the number of micro-batches."""
    model = ModelSection(num_layers=2, hidden_size=1024, num_attention_heads=16)
    work = RankWork(model, vocab=8192, sequence=512, micro_batch=1, accumulation=8, recompute=True)
    one = RankWork(model, vocab=8192, sequence=512, micro_batch=1, accumulation=1, recompute=True)
    shares = check_shares(work, "gemm", "layer", bytes_per_s=1e9, flop_per_s=1e11, call_s=1e-6)
    audit, forward = shares.audit, shares.forward
    parameters = reads_of_step(one, "gemm")["parameter"]
    assert shares.fixed == pytest.approx((parameters.bytes / 1e9 + parameters.count * 1e-6) / (work.flops / 1e11))
    # 512 tokens, h = 1024: qkv 3 h, projection h, fc1 4 h, fc2 h out of 4 h; each factor and the result twice
    elements = [512 * (1024 + out) + 1024 * out for out in (3072, 1024, 4096)] + [512 * (4096 + 1024) + 4096 * 1024]
    of_row = 2 * 4 * sum(elements) / 4 / 1e9 + 10 * 1e-6
    assert shares.row == pytest.approx(of_row / (one.flops / 1e11))
    phases = reads_of_step(one, "gemm")
    other = total({name: phases[name] for name in phases if name not in MICRO_BATCH_PHASES})
    other_share = (other.bytes / 1e9 + other.count * 1e-6) / (one.flops / 1e11)
    whole = predicted_share(one, "gemm", bytes_per_s=1e9, flop_per_s=1e11, call_s=1e-6)
    assert audit == pytest.approx(whole - other_share)
    layer = reads_of_step(one, "layer")
    reads: Reads = layer["forward"] + layer["recompute"]
    assert forward == pytest.approx((reads.bytes / 1e9 + reads.count * 1e-6) / (one.flops / 1e11))


def run(*arguments: object):
    return CliRunner().invoke(app, ["plan-audit", *map(str, arguments)])


def test_command_as_json(tmp_path) -> None:
    """--json and --out hold the plan, both costs, and every tier at every rate, the same in each run."""
    arguments = ["--rates", "1,0.05", "--interval", 9, "--micro-batches", 3, "--trials", 30, "--json"]
    first = run(*arguments, "--out", tmp_path / "plan.json")
    found = json.loads(first.stdout)
    assert found == json.loads((tmp_path / "plan.json").read_text()) == json.loads(run(*arguments).stdout)
    assert found["plan"]["interval"] == 9 and found["plan"]["micro_batches"] == 3 and found["trials"] == 30
    assert [(one["tier"], one["rate"]) for one in found["latencies"]] == [(t, r) for t in TIERS for r in (1, 0.05)]
    assert found["latencies"][1]["expected"] == pytest.approx(9 * 19.5 + 0.5)
    assert found["tiers"][AUDIT]["samples_lost"] == pytest.approx(7 / 8 / 27)
    assert 0 < found["tiers"][AUDIT]["overhead"] < found["tiers"][ALL]["overhead"]


def test_command_picks_an_interval() -> None:
    """--latency takes the place of --interval, for the rate of --at-rate; shares given are taken as they are."""
    shares = ["--audit-share", 0.27, "--always-on-share", 0.05]
    found = json.loads(run("--latency", 1000, "--at-rate", 0.1, "--trials", 0, "--json", *shares).stdout)
    assert found["plan"]["interval"] == largest_interval(1000, 0.1) == 105
    assert found["plan"]["audit_share"] == 0.27 and found["plan"]["forward_share"] == 0.05
    assert {one["simulated"] for one in found["latencies"]} == {None}


def test_command_for_people() -> None:
    """The tables name rates, tiers and costs, and say what too few replicas mean."""
    text = run("--replicas", 2, "--rates", "0.1", "--trials", 20, "--interval", 5).stdout
    assert "two replicas" in text and "20 bad ranks" in text and "48.0" in text.replace(",", "")
    assert "never" in run("--replicas", 1, "--rates", "0.1", "--trials", 0).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "0.1,0"], "'0'"),
        (["--rates", "0.1,x"], "'x'"),
        (["--latency", 10, "--at-rate", 2], "--at-rate"),
        (["--latency", 99, "--at-rate", 0.01], "100"),
        (["--latency", 99, "--interval", 5], "either"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: list, message: str) -> None:
    """Exit code 2, and what is wrong with them."""
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr
