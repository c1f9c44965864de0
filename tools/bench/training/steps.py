"""Speed of our training loop against others, ``python -m tools.bench train``: comparisons, bars and a verdict.

``plain``: our engine and loop with everything a default run has around them, against DeepSpeed's ``PipelineEngine`` in
a bare loop over the same modules; both must also end with the same bits. ``hf``: against ``LlamaForCausalLM`` under
DeepSpeed ZeRO-1, in processes of its own, where DeepSpeed, PyTorch and the allocator have their defaults.
``hf-compiled``: against the same model under ``torch.compile``, with a bar for fused modules only.
``determinism``: our loop with deterministic mode against without; its cost is reported and has no bar. On
GPUs the environment variables of that mode act on whole processes and so on both sides: set or unset them for both.
``bounds``: our loop with gradient bounds against without; the bar is for 8 or more micro-batches a step.
``launch``: seconds from the launcher's command to the first step, with ``fuse`` by what is compiled; it has no bar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megasdc.common.errors import MegasdcError
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Comparison, ComparisonResult, Report
from tools.bench.statistics import in_turn, median_walls, ratios
from tools.bench.training.launch_time import COMMANDS, FUSED_COMMANDS, measure_launches, report_launch
from tools.bench.training.options import TrainBenchOptions
from tools.bench.training.steps_rank import OURS, compare, run_apart

AGAINST = ("plain", "hf", "hf-compiled", "determinism", "bounds", "launch")
APART = ("hf", "hf-compiled")
"""Those that run in ranks of their own, as their users run them: what ours sets in its process is not theirs."""
NAMES = {
    "plain": "plain PipelineEngine loop",
    "hf": "HF Llama + DeepSpeed ZeRO-1",
    "hf-compiled": "HF Llama under torch.compile + DeepSpeed ZeRO-1",
    "determinism": "itself without deterministic mode",
    "bounds": "itself without gradient bounds",
}
BARS = {"plain": 1.01, "hf": 1.0, "bounds": 1.01}
"""Largest median of our time over the other loop's; without one, no time is too long."""
FUSED_BARS = {**BARS, "hf": 0.9, "hf-compiled": 1.0}
"""The same with fused modules."""
LEAST_MICRO_BATCHES = {"bounds": 8}
"""Micro-batches of a step below which a bar does not hold."""


@dataclass(frozen=True)
class TrainComparison(Comparison):
    """Our loop against another one; each pair is ours and the other's.

    ``tokens_per_s`` is the median over blocks, all ranks; ``step_s`` the median; ``library_shares`` are parts of a
    profiled step in matrix products and attention; losses are in nats.
    """

    against: str
    tokens_per_s: tuple[float, float]
    step_s: tuple[float, float]
    library_shares: tuple[float, float]
    parameters: int
    first_losses: tuple[float, float]
    last_losses: tuple[float, float]

    @property
    def outside_library(self) -> float:
        """Our seconds of a step outside matrix products and attention over the other's."""
        ours, other = (step * (1 - share) for step, share in zip(self.step_s, self.library_shares, strict=True))
        return ours / other

    def report(self) -> Report:
        """Ratios, rates, where the time goes, losses and bits."""
        yield self.ratio_table(f"megasdc against {NAMES[self.against]}, {self.parameters:,} parameters")
        (ours, theirs), (our_step, their_step) = self.tokens_per_s, self.step_s
        yield f"tokens/s {ours:,.0f} : {theirs:,.0f}; step {our_step:.4f} s : {their_step:.4f} s (medians)"
        ours, theirs = self.library_shares
        yield (
            f"matrix products and attention, the library's on both sides: {ours:.1%} : {theirs:.1%} of a step; "
            f"time outside them {self.outside_library:.3f} of the other's"
        )
        losses = " -> ".join(f"{a:.4f} : {b:.4f}" for a, b in (self.first_losses, self.last_losses))
        yield f"loss {losses}"
        if self.against == "plain":
            bits = "equal" if self.difference is None else f"FAIL, first difference: {self.difference}"
            yield f"bits of all losses, parameters and optimizer states: {bits}"


@dataclass(frozen=True)
class TrainBenchResult(ComparisonResult):
    """Comparisons of loops, and seconds to the first step by command, None if not asked for."""

    comparisons: list[TrainComparison]
    launch: dict[str, Any] | None

    def report(self) -> Report:
        """Each comparison, and the parts of the time to the first step."""
        options = self.options
        yield (
            f"{options.ranks} gloo ranks x {options.threads} thread(s), DP{options.ranks}, ZeRO-1, "
            f"{options.precision}; {options.work} on each rank, {options.tokens_per_step:,} tokens a step; blocks of "
            f"{options.steps_per_block} steps"
        )
        for comparison in self.comparisons:
            yield from comparison.report()
        for command, launch in (self.launch or {}).items():
            yield from report_launch(command, launch)


def bench_train(
    options: TrainBenchOptions,
    against: tuple[str, ...] = AGAINST,
    launches: int = 5,
    on_progress: Progress = ignore_progress,
) -> TrainBenchResult:
    """Measure, with all ranks on this machine.

    Args:
        against: some of ``AGAINST``.
        launches: launches that count, of each command.

    Raises:
        MegasdcError: a rank or a launch failed, or the models do not have the same number of parameters.
    """
    machine = describe_machine()
    comparisons = []
    launch = None
    commands = FUSED_COMMANDS if options.fuse else COMMANDS
    num_launches = (launches + 1) * len(commands)
    for what in against:
        with scratch_folder() as folder:
            if what == "launch":
                on_progress("launch", 0, num_launches)
                launch = measure_launches(
                    commands,
                    launches,
                    options.ranks,
                    options.threads,
                    folder,
                    lambda done: on_progress("launch", done, num_launches),
                )
            else:
                comparisons.append(_compare(options, what, folder, on_progress))
    return TrainBenchResult(machine, options, comparisons, launch)


def bar_of(against: str, options: TrainBenchOptions) -> float | None:
    """The bar of a comparison, one of ``AGAINST``, at these sizes; None: there is none."""
    bars = FUSED_BARS if options.fuse else BARS
    return bars.get(against) if options.accumulation >= LEAST_MICRO_BATCHES.get(against, 1) else None


def _compare(options: TrainBenchOptions, against: str, folder: Path, on_progress: Progress) -> TrainComparison:
    """Run one comparison in ranks of its own."""
    run = _run_apart if against in APART else _run_together
    (ours, other), difference = run(options, against, folder, on_progress)
    if ours["parameters"] != other["parameters"]:
        raise MegasdcError(
            f"the compared models have {ours['parameters']:,} and {other['parameters']:,} parameters; "
            "they must be equal"
        )
    costs = list(zip(ours["costs"], other["costs"], strict=True))
    walls = median_walls(costs)
    tokens = options.steps_per_block * options.tokens_per_step
    return TrainComparison(
        against=against,
        bar=bar_of(against, options),
        ratios=ratios(costs),
        tokens_per_s=(tokens / walls[0], tokens / walls[1]),
        step_s=(walls[0] / options.steps_per_block, walls[1] / options.steps_per_block),
        library_shares=(ours["library_share"], other["library_share"]),
        parameters=ours["parameters"],
        first_losses=(ours["first_loss"], other["first_loss"]),
        last_losses=(ours["last_loss"], other["last_loss"]),
        difference=difference,
        costs=costs,
    )


Sides = tuple[list[dict[str, Any]], str | None]
"""Reports of rank 0 on our loop and the other, and the first thing whose bits differ."""


def _run_together(options: TrainBenchOptions, against: str, folder: Path, on_progress: Progress) -> Sides:
    """Run both loops in the same ranks."""
    arguments = {"options": options, "against": against, "folder": folder}
    (found,) = run_in_ranks(
        compare, arguments, options.ranks, folder, on_progress=on_progress, threads=options.threads, fresh=True
    )
    return found["sides"], found["difference"]


class _Turns:
    """Turns of two sides, each with so many blocks, the order changing from pair to pair."""

    def __init__(self, pairs: int, on_progress: Callable[[int], None]) -> None:
        self._order = [side for pair in range(pairs) for side in in_turn((0, 1), pair)]
        self._done = 0
        self._running: int | None = None
        self._failed = False
        self._changed = threading.Condition()
        self._on_progress = on_progress

    def acquire(self, side: int) -> None:
        """Wait until it is a side's turn, which ends its turn before; MegasdcError if the other side failed."""
        self.release(side)
        with self._changed:
            self._changed.wait_for(lambda: self._failed or (self._running is None and self._order[self._done] == side))
            if self._failed:
                raise MegasdcError("the other loop failed")
            self._running = side

    def release(self, side: int) -> None:
        """End a side's turn, if it has one."""
        with self._changed:
            if self._running == side:
                self._running = None
                self._done += 1
                self._on_progress(self._done // 2)
                self._changed.notify_all()

    def fail(self) -> None:
        """End what waits."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


def _run_apart(options: TrainBenchOptions, against: str, folder: Path, on_progress: Progress) -> Sides:
    """Run either loop in ranks of its own."""
    arguments: dict[str, dict[str, Any]] = {}
    for name in (OURS, against):
        arguments[name] = {"options": options, "name": name, "folder": folder / name}
        (folder / name).mkdir()
    turns = options.blocks + 1  # one more is profiled

    def on_turn(what: str, done: int, total: int) -> None:
        on_progress(what, min(done, options.blocks), options.blocks)

    return run_in_turns(run_apart, arguments, turns, options, f"against {against}", folder, on_turn), None


class RankOptions(Protocol):
    """Options of the ranks of either side."""

    @property
    def ranks(self) -> int: ...  # noqa: D102

    @property
    def threads(self) -> int: ...  # noqa: D102


def run_in_turns(
    function: Callable[..., None],
    arguments: dict[str, dict[str, Any]],
    turns: int,
    options: RankOptions,
    what: str,
    folder: Path,
    on_progress: Progress,
) -> list[dict[str, Any]]:
    """Run two sides in ranks of their own, which are idle while the other's block runs.

    Args:
        function: called on each rank; ``send_and_wait`` of its messages ends a turn and waits for the next, until rank
            0 sends what it reports as ``side``.
        arguments: of either side, by its name.
        turns: number of turns of each side.
        what: name of what is measured.
        folder: gets the ranks' output.

    Returns:
        What rank 0 of each side reports.

    Raises:
        MegasdcError: a rank failed.
    """
    order = _Turns(turns, lambda done: on_progress(what, done, turns))

    def run(side: int, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def on_message(message: dict[str, Any]) -> None:
            if "side" not in message:
                order.acquire(side)
            else:
                order.release(side)
                found.update(message["side"])

        place = folder / f"{name}_ranks"
        place.mkdir()
        try:
            run_in_ranks(
                function, arguments[name], options.ranks, place, on_message, threads=options.threads, fresh=True
            )
        except BaseException:
            order.fail()
            raise
        return found

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, side, name) for side, name in enumerate(arguments)]
        try:
            for one in as_completed(runs):
                one.result()  # of a failed side before that of the side which waits for it
        except BaseException:
            order.fail()
            raise
        return [one.result() for one in runs]
