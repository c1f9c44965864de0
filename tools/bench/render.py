"""Results of benchmarks as text for a terminal: tables, and one line a verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench.detection.checksum import BAR as CHECKSUM_BAR
from tools.bench.detection.checksum import ChecksumBenchResult, SpeedComparison
from tools.bench.detection.checksum_trials import BLIND_TO, DTYPES, FAULTS
from tools.bench.result import SLACK
from tools.bench.statistics import Estimate
from tools.bench.training.data import DataBenchResult
from tools.bench.training.steps import TrainBenchResult, TrainComparison

NAMES = {
    "plain": "plain PipelineEngine loop",
    "hf": "HF Llama + DeepSpeed ZeRO-1",
    "hf-compiled": "HF Llama under torch.compile + DeepSpeed ZeRO-1",
    "determinism": "itself without deterministic mode",
    "bounds": "itself without gradient bounds",
}
PHASES = {
    "launcher": "command until the rank's process starts",
    "imports": "Python, PyTorch, DeepSpeed, Megatron-core; configuration",
    "checks": "layout, prepared data, run folder",
    "groups": "process groups",
    "model": "model",
    "engine": "engine and optimizer",
    "data": "data index and loaders",
    "resume": "looking for a checkpoint",
    "first_step": "hooks and first step",
}


def render(result: TrainBenchResult, console: Console) -> None:
    """Print a result.

    Args:
        result: what was measured.
        console: where.
    """
    options = result.options
    render_machine(result.machine, console)
    console.print(
        f"{options.ranks} gloo ranks x {options.threads} thread(s), DP{options.ranks}, ZeRO-1, {options.precision}; "
        f"Llama-like H={options.hidden} L={options.layers} S={options.sequence} vocabulary {options.vocab}; "
        f"{options.tokens_per_step:,} tokens a step = {options.ranks} x {options.accumulation} micro-batches of "
        f"{options.micro_batch}; blocks of {options.steps_per_block} steps"
    )
    for comparison in result.comparisons:
        _render_comparison(comparison, console)
    for command, launch in (result.launch or {}).items():
        _render_launch(command, launch, console)


def render_data(result: DataBenchResult, console: Console) -> None:
    """Print a result of ``python -m tools.bench data``.

    Args:
        result: what was measured.
        console: where.
    """
    options = result.options
    render_machine(result.machine, console)
    console.print(
        f"{result.num_documents:,} documents, {result.num_characters:,} characters of the standard library as JSONL; "
        f"{options.workers} worker process(es); vocabulary {options.vocab}"
    )
    for comparison in result.comparisons:
        title = f"megasdc prepare-data against Megatron's preprocess_data, {comparison.tokenizer}"
        _render_ratios(title, comparison.ratios, comparison.bar, SLACK, console)
        ours, theirs = (rate / 1e6 for rate in comparison.characters_per_s)
        console.print(f"million characters/s {ours:.2f} : {theirs:.2f} (medians); {comparison.num_tokens:,} tokens")
        equal = "equal" if comparison.difference is None else f"FAIL, {comparison.difference} differs"
        console.print(f"bytes of .bin and .idx: {equal}")


def render_checksum(result: ChecksumBenchResult, console: Console) -> None:
    """Print a result of ``python -m tools.bench checksum``.

    Args:
        result: what was measured.
        console: where.
    """
    options = result.options
    render_machine(result.machine, console)
    console.print(
        f"GPU: {result.machine.get('gpu', 'none')}; on the host XXH3 in 1 thread, tensor.sum() in {options.threads}; "
        f"a rate of at least {1 / CHECKSUM_BAR:.2f} of the other's is a time of at most {CHECKSUM_BAR} of its"
    )
    for comparison in result.comparisons:
        _render_speed(comparison, console)
    _render_trials(result, console)
    for reason in result.not_run:
        console.print(f"NOT RUN: {reason}")


def _render_speed(comparison: SpeedComparison, console: Console) -> None:
    title = (
        f"{comparison.algorithm} against {comparison.against}, {comparison.device}, {comparison.dtype}, "
        f"{comparison.size_mib} MiB"
    )
    _render_ratios(title, comparison.ratios, comparison.bar, SLACK, console)
    ours, theirs = (rate / 1e9 for rate in comparison.bytes_per_s)
    console.print(f"GB/s {ours:.1f} : {theirs:.1f} (medians)")


def _render_trials(result: ChecksumBenchResult, console: Console) -> None:
    table = Table(title=f"faults missed, of {result.options.trials:,} of each kind: " + ", ".join(DTYPES))
    misses = {(one.algorithm, one.fault, one.dtype): one for one in result.trials}
    algorithms = list(dict.fromkeys(one.algorithm for one in result.trials))
    table.add_column("fault")
    for algorithm in algorithms:
        table.add_column(algorithm + (" (for comparison)" if algorithm in BLIND_TO else ""))
    for fault in FAULTS:
        cells = []
        for algorithm in algorithms:
            found = [misses[algorithm, fault, dtype] for dtype in DTYPES]
            cells.append(", ".join(f"{one.misses:,}" + ("" if one.passed else " FAIL") for one in found))
        table.add_row(fault, *cells)
    console.print(table)


def render_machine(machine: dict[str, Any], console: Console) -> None:
    """Print where and with what something was measured.

    Args:
        machine: from `describe_machine`.
        console: where.
    """
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(
        f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before"
    )
    console.print(f"Python {machine['python']}, {versions}")


def _render_ratios(title: str, ratios: dict[str, Estimate], bar: float | None, slack: float, console: Console) -> None:
    table = Table(title=title)
    for column in ("time, ours / theirs", "median", "interval of the median", "coverage", "pairs", "bar", "verdict"):
        table.add_column(column)
    for name, ratio in ratios.items():
        table.add_row(
            name,
            f"{ratio.median:.4f}",
            f"{ratio.low:.4f} - {ratio.high:.4f}",
            f"{100 * ratio.coverage:.1f} %",
            str(ratio.count),
            "none" if bar is None else f"median <= {bar}, upper end <= {bar + slack:.2f}",
            "-" if bar is None else "pass" if ratio.passes(bar, slack) else "FAIL",
        )
    console.print(table)


def _render_comparison(comparison: TrainComparison, console: Console) -> None:
    title = f"megasdc against {NAMES[comparison.against]}, {comparison.parameters:,} parameters"
    _render_ratios(title, comparison.ratios, comparison.bar, SLACK, console)
    (ours, theirs), (our_step, their_step) = comparison.tokens_per_s, comparison.step_s
    console.print(f"tokens/s {ours:,.0f} : {theirs:,.0f}; step {our_step:.4f} s : {their_step:.4f} s (medians)")
    ours, theirs = comparison.library_shares
    console.print(
        f"matrix products and attention, the library's on both sides: {ours:.1%} : {theirs:.1%} of a step; "
        f"time outside them {comparison.outside_library:.3f} of the other's"
    )
    losses = " -> ".join(f"{a:.4f} : {b:.4f}" for a, b in (comparison.first_losses, comparison.last_losses))
    console.print(f"loss {losses}")
    if comparison.against == "plain":
        bits = "equal" if comparison.difference is None else f"FAIL, first difference: {comparison.difference}"
        console.print(f"bits of all losses, parameters and optimizer states: {bits}")


def _render_launch(command: str, launch: dict[str, Any], console: Console) -> None:
    total: Estimate = launch["total"]
    table = Table(title=f"seconds from the command `{command}` to the first step, slowest rank")
    for column in ("part", "what", "median", "interval of the median", "share"):
        table.add_column(column)
    for name, value in launch["phases"].items():
        share = f"{100 * value.median / total.median:.1f} %"
        table.add_row(name, PHASES.get(name, ""), f"{value.median:.2f}", f"{value.low:.2f} - {value.high:.2f}", share)
    table.add_row("total", "", f"{total.median:.2f}", f"{total.low:.2f} - {total.high:.2f}", "", style="bold")
    console.print(table)
    console.print(
        f"{total.count} launches, interval of the median with coverage {100 * total.coverage:.0f} %; one before them, "
        f"not counted: {launch['first_launch_s']:.2f} s. What dominates: {launch['dominates']}"
    )
