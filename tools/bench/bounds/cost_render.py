"""Cost of gradient bounds as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.bench.bounds.cost import BAR, BoundsBenchResult, BoundsComparison
from tools.bench.render import render_machine
from tools.bench.result import SLACK


def render_bounds(result: BoundsBenchResult, console: Console) -> None:
    """Print a result.

    Args:
        result: what was measured.
        console: where.
    """
    options = result.options
    render_machine(result.machine, console)
    console.print(
        f"GPU: {result.machine.get('gpu', 'none')}; g and V in fp32; torch's operations in {options.threads} "
        f"thread(s), the pass on the host in 1; bar: median <= {BAR}, upper end <= {BAR + SLACK:.2f}, wall and CPU time"
    )
    for device, name in result.implementations.items():
        console.print(f"gradient bounds on {device}: {name}")
    for device, size in dict.fromkeys((one.device, one.size_million) for one in result.comparisons):
        found = [one for one in result.comparisons if (one.device, one.size_million) == (device, size)]
        console.print(_table(f"bound + norm, {device}, {size} M elements, {options.blocks} pairs of blocks", found))
    for one in result.comparisons:
        if one.difference is not None:
            console.print(f"FAIL: {one.device}, {one.size_million} M, against {one.against}: {one.difference}")
    for reason in result.not_run:
        console.print(f"NOT RUN: {reason}")


def _table(title: str, comparisons: list[BoundsComparison]) -> Table:
    table = Table(title=title)
    for column in ("pass / other", "to bound", "wall", "CPU", "ms", "verdict"):
        table.add_column(column)
    for one in comparisons:
        ratios = [
            f"{ratio.median:.3f} ({ratio.low:.3f} - {ratio.high:.3f})" if ratio is not None else "-"
            for ratio in (one.ratios.get("wall"), one.ratios.get("cpu"))
        ]
        ours, theirs = (1e3 * seconds for seconds in one.pass_s)
        verdict = "-" if one.bar is None and one.passed else "pass" if one.passed else "FAIL"
        table.add_row(one.against, f"{one.bounded:,}", *ratios, f"{ours:.3f} : {theirs:.3f}", verdict)
    return table
