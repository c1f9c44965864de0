"""Cost of the preset `protect`: the training program with `standard` against itself with `off`.

Both are whole runs in processes of their own, with all that a run has - saves, snapshots, health, evaluation -, and
take turns in blocks of steps. Ranks start here without PyTorch, which the training imports itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import MegasdcError, error_of_rank
from megasdc.config.sections import OFF, STANDARD
from megasdc.sdc.cost import Cadence, TimeShares
from tools.bench.detection.options import SMOKE, ProtectOptions
from tools.bench.rank import Messages, Progress, scratch_folder
from tools.bench.result import Comparison, ComparisonResult, Report
from tools.bench.statistics import Cost, ratios

BARS = {SMOKE: 1.03}
"""Largest ratio by model; of others that of ``BAR``."""
BAR = 1.015


def bar_of(options: ProtectOptions) -> float:
    """Largest ratio that passes."""
    return BARS.get(options.model, BAR)


@dataclass(frozen=True)
class ProtectComparison(Comparison):
    """`standard` against `off`.

    Args:
        audits: share of all steps that audits take, which blocks are without, and which is added to the ratio.
        step_s: median seconds of a step of each.
        counted: number of audited steps in the blocks, and the mean seconds of one; it is no part of the verdict.
        told: what the run says at the end that its checks take, as shares of a step.
    """

    audits: float
    step_s: tuple[float, float]
    counted: tuple[int, float]
    cadence: Cadence
    told: TimeShares
    budget: float


@dataclass(frozen=True)
class ProtectResult(ComparisonResult):
    """The comparison of one model."""

    comparisons: list[ProtectComparison]

    def report(self) -> Report:
        """The ratio, and what the protected run says itself."""
        options = self.options
        yield (
            f"{options.work}; {options.ranks} ranks of one thread; blocks of {options.steps_per_block} steps after "
            f"{options.warmup_steps}"
        )
        for one in self.comparisons:
            yield one.ratio_table(f"protect standard against off, {options.model}")
            ours, other = (1e3 * seconds for seconds in one.step_s)
            number, seconds = one.counted
            took = f"; {number} in the blocks took {1e3 * seconds:.1f} ms in the mean" if number else ""
            yield (
                f"a step {ours:.1f} : {other:.1f} ms (medians, without audits); in the ratio audits count with "
                f"{one.audits:.2%} of all steps, as the run has measured them{took}"
            )
            told, cadence = one.told, one.cadence
            looks = (told.look * cadence.micro_batches + told.slice) / cadence.every
            compared = told.fixed * cadence.compare_rate
            yield (
                f"the run itself says: {cadence.share(told):.2%} of a step, budget {one.budget:.2%}: {told.audits:.2%} "
                f"audits, {looks:.2%} looks at {cadence.micro_batches} micro-batches every {cadence.every} steps, "
                f"{compared:.2%} comparisons over ranks every {cadence.apart} steps"
            )


def bench_protect(options: ProtectOptions, on_progress: Progress) -> ProtectResult:
    """Measure one model, with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed.
    """
    from tools.bench.machine import describe_machine
    from tools.bench.small.gpt import prepare_library
    from tools.bench.training.steps import run_in_turns

    machine = describe_machine()
    with scratch_folder() as folder:
        data = prepare_library(folder / "data", options.vocab, "[a-d]*.py")
        arguments = {}
        for word in (STANDARD, OFF):
            config = folder / f"{word}.json"
            config.write_text(json.dumps(config_of(options, word, folder, data)), encoding="utf-8")
            arguments[word] = {"config": config, "options": options}
        turns = options.blocks + 2  # one to warm up, and one to end
        sides = run_in_turns(run_side, arguments, turns, options, f"standard, {options.model}", folder, on_progress)
    return ProtectResult(machine, options, [judge(options, *sides)])


def config_of(options: ProtectOptions, word: str, folder: Path, data: Path) -> dict[str, Any]:
    """The configuration of one side; but for `protect` those of both are equal."""
    raw: dict[str, Any] = json.loads(Path("configs/smoke.json").read_text(encoding="utf-8"))
    own = raw["megasdc"]
    own["protect"] = word
    own["data"] = {"path": str(data), "sequence_length": own["data"]["sequence_length"]}
    own["parallel"] = {"threads": 1}
    own["training"]["steps"] = options.total_steps
    own["logging"]["run_dir"] = str(folder / f"run_{word}")
    if options.hidden:
        own["model"] = {
            "num_layers": options.layers,
            "hidden_size": options.hidden,
            "num_attention_heads": options.hidden // 64,
        }
        own["data"]["sequence_length"] = options.sequence
        own["training"]["eval_interval"] = 0
        own["checkpoint"] = {"interval": 0}
        raw |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": options.accumulation}
        raw.pop("train_batch_size")
    else:
        raw["train_batch_size"] = 8 * options.ranks
    return raw


def judge(options: ProtectOptions, ours: dict[str, Any], other: dict[str, Any]) -> ProtectComparison:
    """The comparison, from what rank 0 of each side reports."""
    told: TimeShares = ours["told"]["shares"]
    audits = told.audits
    pairs = [
        (_cost(one, options.steps_per_block, audits), _cost(two, options.steps_per_block, 0.0))
        for one, two in zip(ours["blocks"], other["blocks"], strict=True)
    ]
    count = sum(one["audits"] for one in ours["blocks"])
    spent = sum(one["audited"].wall_s for one in ours["blocks"])
    walls = sorted(one.wall_s / (1 + audits) for one, _ in pairs), sorted(two.wall_s for _, two in pairs)
    middle = len(pairs) // 2
    return ProtectComparison(
        bar=bar_of(options),
        ratios=ratios(pairs),
        difference=None,
        costs=pairs,
        audits=audits,
        step_s=(walls[0][middle] / options.steps_per_block, walls[1][middle] / options.steps_per_block),
        counted=(count, spent / count if count else 0.0),
        cadence=ours["told"]["cadence"],
        told=told,
        budget=ours["told"]["budget"],
    )


def _cost(block: dict[str, Any], steps: int, audits: float) -> Cost:
    """Cost of a block, with that of audits spread over all steps instead of that in this block."""
    whole, audited, plain = block["whole"], block["audited"], steps - block["audits"]
    factor = steps / plain * (1 + audits)
    return Cost((whole.wall_s - audited.wall_s) * factor, (whole.cpu_s - audited.cpu_s) * factor)


def run_side(messages: Messages, config: Path, options: ProtectOptions) -> None:
    """Train as one rank of a run, in blocks, each when it is its turn; rank 0 reports what they took.

    Raises:
        MegasdcError: the training failed.

    Collective: all ranks of the world.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the entry script of the launcher
    from megasdc.train.main import pretrain

    def leave(code: int, error: BaseException | None) -> None:
        raise MegasdcError(f"{config}: ended with exit code {code}: {error}")

    def features() -> Any:
        from tools.bench.detection.protected_rank import with_turns

        return with_turns(messages, options)

    code, error = pretrain(str(config), [], (), leave, features=features)
    if code:
        raise error_of_rank(code)(f"{config}: {error}")
