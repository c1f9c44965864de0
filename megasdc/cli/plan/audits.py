"""Predicted detection latency and coverage of checks: `megasdc plan-audit` and `coverage`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from megasdc.cli.app import ConfigOption, Json, Out, Overrides, app, print_result
from megasdc.cli.options import option
from megasdc.common.program import echo

if TYPE_CHECKING:
    from megasdc.lab.planning.audits import AuditPlan, CheckShares


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``megasdc plan-audit``."""

    replicas: int = option(8, "Replicas N.", min=1)
    micro_batches: int = option(16, "Micro-batches M of a step.", min=1)
    interval: int | None = option(None, "Steps K between audits; default: 50.", min=1)
    latency: float | None = option(
        None,
        "Instead of --interval: largest K whose audits find a bad rank in at most so many steps on average.",
        min=1,
    )
    at_rate: float = option(0.01, "The rate for which --latency is wanted.")
    rates: str = option("1,1e-1,1e-2,1e-3,1e-4,1e-5,1e-6", "Probabilities that a micro-batch of the bad rank is wrong.")
    visible: float = option(
        0.5,
        "Share of wrong micro-batches found by comparing forward with recompute: half of the arithmetic if errors do "
        "not repeat, none of those that repeat.",
        min=0,
        max=1,
    )
    audit_share: float | None = option(None, "Checksums of all results of a micro-batch over its time.", min=0)
    always_on_share: float | None = option(None, "Checksums of forward and recomputed results over its time.", min=0)
    permuted: float = option(
        0.0,
        "Permuted replay of an audit over the time of a micro-batch, at least 1; 0: `audit.permuted` is off.",
        min=0,
    )
    extra: bool = option(False, "Audits compute an extra micro-batch, as with `audit.micro_batch` extra.", "--extra")
    budget: float | None = option(
        None, "`sdc.budget`: checks of a step over its time; default: 0.01, with one replica 0.02.", min=0, max=1
    )
    fixed_share: float | None = option(None, "Checksums of the parameters over the time of a step.", min=0)
    row_share: float | None = option(None, "Sums of rows of one product over the time of a micro-batch.", min=0)
    slice_share: float | None = option(None, "Checks of one slice over the time of a step.", min=0)
    products: int = option(96, "Products of a rank's linear layers: 12 a layer; rows of one are summed a time.", min=1)
    slices: int = option(1000, "Slices of a rank's shard of the optimizer: its parameters / slice_elements.", min=1)
    hidden: int = option(
        8192, "Width for shares not given: cost model and accelerator of `bench trace`, with recompute.", min=128
    )
    trials: int = option(1000, "Bad ranks to simulate; 0: formulas only.", min=0)
    seed: int = option(1, "Seed of all draws.", min=0)


@app.command("plan-audit", epilog="Example: megasdc plan-audit --replicas 64 --micro-batches 16 --latency 1000")
def plan_audit(options: PlanOptions, out: Out = None, as_json: Json = False) -> None:
    """Predict detection latency of a bad rank in steps, by rate and tier, and the cost of the checks.

    A rate is the probability that the bad rank computes at least one wrong result in one micro-batch. Audits see one
    micro-batch of every K-th step on all replicas, the check of every step one of each step, or all, or as many as a
    budget leaves room for. Sums of rows and slices of the optimizer look as often as that.
    """
    rates = [_rate(text, "--rates") for text in options.rates.split(",")]
    interval = _interval(options)

    from megasdc.common.program import progress_bars
    from megasdc.config.detection import SdcSection
    from megasdc.lab.planning.audits import plan_audits
    from megasdc.lab.report.plan_page import plan_page
    from megasdc.output.page import printer

    plan, shares = _plan(options, interval)
    budget = SdcSection().budget_of(options.replicas) if options.budget is None else options.budget
    plan = plan.within(budget, shares.fixed)
    with progress_bars(quiet=as_json) as on_progress:
        result = plan_audits(plan, rates, options.trials, options.seed, on_progress)
    print_result(result, printer(plan_page), out=out, as_json=as_json)


@app.command("coverage", epilog="Example: megasdc coverage --config configs/audited.json --world-size 3")
def coverage(
    config: ConfigOption,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Ranks of the run.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table of markdown.")] = False,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Show which faults a run of this configuration would detect, in which phase of a step, when, and which not.

    A row for each phase of a step, with what it is compared with; -: nothing.
    1 of 2: micro-batches, or blocks of the optimizer; some: the budget decides.
    The last columns: how long a fault that stays is unseen, most / mean.
    """
    from megasdc.config.checks import check_layout
    from megasdc.config.load import load_config
    from megasdc.sdc.coverage import Shape, coverage_notes, coverage_rows, render_coverage

    loaded = load_config(config, overrides)
    layout = check_layout(loaded, world_size)
    chosen = {"one": 1, "all": layout.accumulation_steps, "auto": None}[loaded.megasdc.sdc.always_on.coverage]
    whole = loaded.precision == "bf16" and loaded.deepspeed["data_types"]["grad_accum_dtype"] == "fp32"
    shape = Shape(
        replicas=layout.data,
        tensor=layout.tensor,
        micro_batches=layout.accumulation_steps,
        covered=chosen,
        pipeline=layout.pipeline,
        recomputes=bool(loaded.recompute_interval),
        offloads=loaded.offloads_optimizer,
        equal_norms=whole or layout.tensor * layout.pipeline <= 2,  # as on GPUs: see norms_have_equal_bits
    )
    if as_json:
        rows = coverage_rows(loaded.megasdc, shape)
        echo(json.dumps({"phases": [asdict(row) for row in rows], "notes": coverage_notes(rows)}, indent=2))
        return
    for line in render_coverage(loaded.megasdc, shape, markdown=markdown):
        echo(line)


def _rate(text: str, option: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate <= 1:
        raise typer.BadParameter(f"{option}: got {text.strip()!r}, needed a probability above 0 and up to 1")
    return rate


def _interval(options: PlanOptions) -> int:
    """Steps between audits, as given or as chosen by --latency."""
    latency = options.latency
    if latency is None:
        return options.interval or 50
    if options.interval is not None:
        raise typer.BadParameter("give either --interval or --latency, which chooses the interval")

    from megasdc.lab.planning.audits import largest_interval

    rate = _rate(str(options.at_rate), "--at-rate")
    interval = largest_interval(latency, rate)
    if interval is None:
        raise typer.BadParameter(
            f"--latency: got {latency:g}, but at rate {rate:g} even audits of every step take {1 / rate:g} on average; "
            f"ask for at least as many steps, or see what the check of every step finds"
        )
    return interval


def _plan(options: PlanOptions, interval: int) -> tuple[AuditPlan, CheckShares]:
    """The plan before its cadence is chosen; shares that are not given are predicted."""
    from megasdc.config.detection import AlwaysOnSection, AuditSection
    from megasdc.lab.planning.audits import AuditPlan, check_shares
    from megasdc.sdc.cost import Accelerator

    machine = Accelerator()
    predicted = check_shares(
        replace(machine.work(options.hidden), recompute=True),
        AuditSection.model_validate({}).granularity,
        AlwaysOnSection.model_validate({}).granularity,
        bytes_per_s=machine.bytes_per_s,
        flop_per_s=machine.flop_per_s,
        call_s=machine.call_s,
    )
    given = {
        "audit": options.audit_share,
        "forward": options.always_on_share,
        "row": options.row_share,
        "fixed": options.fixed_share,
        "slice": options.slice_share,
    }
    shares = replace(predicted, **{name: share for name, share in given.items() if share is not None})
    plan = AuditPlan(
        options.replicas,
        interval,
        options.micro_batches,
        options.visible,
        shares.audit,
        shares.forward,
        options.permuted,
        products=options.products,
        slices=options.slices,
        row_share=shares.row,
        slice_share=shares.slice,
        extra=options.extra,
    )
    return plan, shares
