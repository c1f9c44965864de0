"""Cost of DropCompute as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megasdc.dropcompute.gate import MESSAGE_BYTES
from tools.bench.drops.cost import LEAST_MICRO_BATCH_S, DropCostResult, LayoutCost


def render_drop_cost(result: DropCostResult, console: Console) -> None:
    """Print the result."""
    machine, options = result.machine, result.options
    console.print(
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before"
    )
    console.print(
        f"{options.gpt}; each stage sleeps {options.delay_s:g} s before a micro-batch; {options.steps} steps; nothing "
        "left out"
    )
    table = Table(title="DropCompute, % of the step inside its calls")
    for number, column in enumerate(("part", *(_name(one) for one in result.layouts))):
        table.add_column(column, justify="right" if number else "left")
    for part in result.layouts[0].parts:
        table.add_row(part, *(f"{100 * one.parts[part]:.4f}" for one in result.layouts))
    table.add_section()
    table.add_row("all (interval of the median)", *(_share(one) for one in result.layouts))
    table.add_row("bar", *(_verdict(one) for one in result.layouts))
    table.add_row("seconds of a step", *(f"{one.step_s:.3f}" for one in result.layouts))
    table.add_row("seconds of a micro-batch, stage 0", *(f"{one.micro_batch_s:.3f}" for one in result.layouts))
    table.add_row("messages a replica and micro-batch", *(f"{one.messages:g}" for one in result.layouts))
    table.add_row("their bytes", *(f"{one.messages * MESSAGE_BYTES:g}" for one in result.layouts))
    table.add_row("bytes summed over ranks a step", *(f"{one.layout[2] * MESSAGE_BYTES}" for one in result.layouts))
    console.print(table)
    console.print(
        "of the rank on which it is most, medians over steps; hear: from when a decision was sent until the rank that "
        "waits for it goes on, its wake-up included; waiting before that is waiting for the stage or tensor rank "
        "before, whose activation comes no earlier; the first micro-batch of a step is not asked for",
        soft_wrap=True,
    )


def _name(one: LayoutCost) -> str:
    tensor, pipeline, data = one.layout
    return f"TP{tensor} PP{pipeline} DP{data}"


def _share(one: LayoutCost) -> str:
    own = one.own
    return f"{100 * own.median:.4f} ({100 * own.low:.4f} to {100 * own.high:.4f})"


def _verdict(one: LayoutCost) -> str:
    if one.bar is None:
        return f"none below {LEAST_MICRO_BATCH_S} s a micro-batch"
    return f"{100 * one.bar:g} {'pass' if one.passed else 'FAIL'}"
