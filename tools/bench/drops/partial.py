"""Partial backward passes against whole micro-batches, ``python -m tools.bench drop-partial``: small runs in turn.

With each number M of micro-batches a step the same small GPT is trained three times: with nothing dropped, with whole
micro-batches, and with backward passes that end at the same threshold. Delays are drawn as for ``drop-training``; of a
micro-batch the forward pass takes a third, and each transformer layer as long as the others. Apart from that, gradients
are averaged over steps at the first weights, on the same samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megasdc.config.drop_compute import BACKWARD_PASS, COMPUTED, DISCARD, MICRO_BATCH
from megasdc.distributions import BoundedLogNormal
from megasdc.dropcompute.threshold import micro_batch_times
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.lab.planning.environment import DelayEnvironment
from megasdc.metrics.writer import read_metrics
from megasdc.optim.zero1 import owned_fragments
from tools.bench.campaign import Campaign, CampaignLog
from tools.bench.drops.options import GRADIENTS, NONE, REPLICAS, DropPartialOptions
from tools.bench.drops.options import PARTIAL_KINDS as KINDS
from tools.bench.drops.training_setup import COMMUNICATION_S, LATENCY_S, MEAN_DELAY_S
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, join_ranks, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, table
from tools.bench.small.gpt import prepare_library, small_config
from tools.bench.small.runs import build_run, train_in_turn

FORWARD_SHARE = 1 / 3
"""Share of a micro-batch's time that its forward pass takes."""
PATTERN = "[bcg]*.py"
"""Modules of the standard library that are trained on."""
AT_REST = 1e-12
"""Learning rate that changes no weight."""


@dataclass(frozen=True)
class Decided:
    """What each replica of the simulated job completes in each step, and the duration of the steps.

    Args:
        completed: micro-batches, [step, replica].
        layers: transformer layers done in the last one's backward pass, likewise; -1: it is whole.
        lost: share of the work of transformer layers that is not done.
        step_s: mean seconds of a step.
    """

    completed: NDArray[np.int64]
    layers: NDArray[np.int64]
    lost: float
    step_s: float

    def write(self, path: Path, micro_batches: int, of_layers: int) -> None:
        """Write it as the log of a run of the replicas that train."""
        lines: list[dict[str, Any]] = [{"start": {"step": 0, "data": REPLICAS, "micro_batches": micro_batches}}]
        pairs = zip(self.completed[:, :REPLICAS].tolist(), self.layers[:, :REPLICAS].tolist(), strict=True)
        for step, (completed, layers) in enumerate(pairs, 1):
            lines.append({"step": step, "planned": micro_batches, "completed": completed})
            if max(layers) >= 0:
                ended = [None if one < 0 else one for one in layers]
                lines[-1] |= {"layers": ended, "of_layers": of_layers}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def decide(options: DropPartialOptions, micro_batches: int, seed: int, kind: str) -> Decided:
    """Simulate a job; its threshold is passed in the share ``late`` of all replicas' steps."""
    environment = DelayEnvironment(LATENCY_S, (BoundedLogNormal(MEAN_DELAY_S),), seed)
    steps, layers = max(options.steps, options.gradient_steps), options.gpt.layers
    drawn = [
        micro_batch_times(environment.draw(step, 0, options.replicas, micro_batches, 1), 0.0, True)
        for step in range(1, steps + 1)
    ]
    starts, ends = (np.stack(one) for one in zip(*drawn, strict=True))
    tau_s = np.inf if kind == NONE else float(np.quantile(ends[..., -1], 1 - options.late))
    completed = 1 + (starts[..., 1:] < tau_s).sum(axis=-1)
    start, end = (np.take_along_axis(one, completed[..., None] - 1, axis=-1)[..., 0] for one in (starts, ends))
    done = np.full(completed.shape, -1)
    if kind == BACKWARD_PASS:
        share = FORWARD_SHARE + (1 - FORWARD_SHARE) * np.arange(layers + 1) / layers
        between = start[..., None] + (end - start)[..., None] * share
        through = (between < tau_s).sum(axis=-1)
        done = np.where(through <= layers, through, -1)
        at = np.take_along_axis(between, np.minimum(through, layers)[..., None], axis=-1)[..., 0]
        end = np.where(done < 0, end, at)
    left_out = np.where(done < 0, 0.0, 1 - done / layers)
    lost = 1 - float((completed - left_out).mean()) / micro_batches
    return Decided(completed, done, lost, float(end.max(axis=-1).mean()) + COMMUNICATION_S)


@dataclass(frozen=True)
class LayerGradient:
    """Mean gradient of a layer against that with nothing dropped.

    Args:
        layer: embedding, layer N, or final norm.
        size: its part along the other, over the other's norm; 1: as large.
        error: norm of the difference of both, over the other's norm.
    """

    layer: str
    size: float
    error: float


@dataclass(frozen=True)
class PartialRun:
    """One run, or the gradients of runs at rest.

    Args:
        kind: what is dropped, or ``gradients``.
        loss: final validation loss in nats; None of gradients.
        gradients: of the layers, by what is dropped; empty of a run.
    """

    micro_batches: int
    seed: int
    kind: str
    loss: float | None
    gradients: dict[str, list[LayerGradient]]


@dataclass(frozen=True)
class Row:
    """Means over seeds of one number of micro-batches and one kind of drops."""

    micro_batches: int
    kind: str
    lost: float
    time: float
    loss: float
    over_none: tuple[float, ...]


@dataclass(frozen=True)
class DropPartialResult(Result):
    """All runs of a campaign."""

    also = ("rows",)

    runs: Sequence[PartialRun] = field(repr=False)

    @property
    def rows(self) -> list[Row]:
        """A row for each number of micro-batches and kind."""
        options, found = self.options, []
        losses = {(one.micro_batches, one.kind, one.seed): one.loss for one in self.runs if one.loss is not None}
        seeds = range(1, options.seeds + 1)
        for count in options.counts:
            none = [decide(options, count, seed, NONE).step_s for seed in seeds]
            for kind in KINDS:
                drawn = [decide(options, count, seed, kind) for seed in seeds]
                own = [losses[count, kind, seed] for seed in seeds]
                found.append(
                    Row(
                        count,
                        kind,
                        fmean(one.lost for one in drawn),
                        fmean(one.step_s / plain for one, plain in zip(drawn, none, strict=True)),
                        fmean(own),
                        tuple(loss / losses[count, NONE, seed] - 1 for loss, seed in zip(own, seeds, strict=True)),
                    )
                )
        return found

    def report(self) -> Report:
        """What is lost, times and losses; then the gradients of layers."""
        options = self.options
        yield (
            f"{options.gpt.layers} layers, width {options.gpt.hidden}, DP{REPLICAS}, fp32, {options.steps} steps, "
            f"{options.seeds} seeds; drops and times of {options.replicas} simulated replicas, of whose steps "
            f"{100 * options.late:g} % are not done at the threshold"
        )
        yield table(
            "final validation loss",
            ("M", "ends", "lost, %", "time of a step, %", "loss", "over none, % (min to max)"),
            [_told(one) for one in self.rows],
        )
        yield table(
            f"mean gradient over {options.gradient_steps} steps against that with nothing dropped: size (error)",
            ("M", "layer", *KINDS[1:]),
            [row for one in self.runs if one.kind == GRADIENTS for row in _gradient_rows(one)],
        )
        yield (
            "lost: of the work of transformer layers; size: part of the mean gradient along the full one, over the "
            "full one's norm; error: norm of their difference, likewise"
        )


def _told(one: Row) -> list[str]:
    low, high = 100 * min(one.over_none), 100 * max(one.over_none)
    over = "-" if one.kind == NONE else f"{100 * fmean(one.over_none):+.2f} ({low:+.2f} to {high:+.2f})"
    return [
        str(one.micro_batches),
        one.kind.replace("_", " "),
        f"{100 * one.lost:.2f}",
        f"{100 * one.time:.1f}",
        f"{one.loss:.4f}",
        over,
    ]


def _gradient_rows(one: PartialRun) -> list[list[str]]:
    columns = [one.gradients.get(kind, []) for kind in KINDS[1:]]
    return [
        [str(one.micro_batches), parts[0].layer, *(f"{part.size:.3f} ({part.error:.3f})" for part in parts)]
        for parts in zip(*columns, strict=True)
    ]


def bench_drop_partial(
    options: DropPartialOptions, log: Path | None = None, on_progress: Progress = ignore_progress
) -> DropPartialResult:
    """Make the runs of a campaign that are not in its log yet, with both ranks on this machine.

    Args:
        log: file that keeps finished runs; None: none does.

    Raises:
        MegasdcError: the log cannot be used, or a rank failed.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, PartialRun)
    campaign = Campaign("runs", options.cases, partial(_run, options), kept)
    return DropPartialResult(machine, options, campaign.finish(on_progress))


Case = tuple[int, int, str]


def _run(options: DropPartialOptions, left: Sequence[tuple[int, Case]], keep: Callable[[PartialRun], None]) -> None:
    waiting = iter(left)

    def receive(message: dict[str, Any]) -> None:
        _, case = next(waiting)
        keep(PartialRun(*case, **message))

    with scratch_folder() as folder:
        data = prepare_library(folder / "data", options.gpt.vocab, PATTERN)
        cases = [_configs(options, folder / f"case_{number}", data, case) for number, case in left]
        run_in_ranks(run_all, {"cases": cases}, REPLICAS, folder, receive)


def _configs(options: DropPartialOptions, folder: Path, data: Path, case: Case) -> list[dict[str, Any]]:
    """The configuration of the run of a case, or of those at rest, in the order of ``KINDS``."""
    folder.mkdir()
    count, seed, what = case
    gpt, steps, rate = replace(options.gpt, micro_batches=count), options.steps, options.learning_rate
    training = {"seed": seed, "eval_interval": steps, "eval_samples": options.eval_samples}
    if what == GRADIENTS:
        steps, rate, training = options.gradient_steps, AT_REST, {"seed": seed, "eval_interval": 0}
    found = []
    for kind in KINDS if what == GRADIENTS else (what,):
        sections: dict[str, Any] = {}
        if kind == BACKWARD_PASS or (kind == MICRO_BATCH and count > 1):  # of one micro-batch none is dropped whole
            decisions = folder / f"{kind}.jsonl"
            decide(options, count, seed, kind).write(decisions, count, gpt.layers)
            sections["drop_compute"] = {
                "enabled": True,
                "replay_decisions": str(decisions),
                "granularity": kind,
                "gradients": COMPUTED,
                "samples": DISCARD,
                "record_times": False,
            }
        found.append(
            small_config(gpt, folder / kind, steps, sections, training=training, learning_rate=rate, data=data)
        )
    return found


class MeanGradient(Hook):
    """Sums the reduced gradients of this rank's shard over steps, in fp64."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], Tensor] = {}

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Add this step's."""
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        for one in owned_fragments(engine.optimizer):
            assert one.gradient is not None, "reduced"
            place = names[id(one.parameter)], one.offset
            self.sums[place] = self.sums.get(place, 0.0) + one.gradient.double()


def run_all(messages: Messages, cases: list[list[dict[str, Any]]]) -> None:
    """Make the runs of each case, and report loss or gradients."""
    dims = join_ranks()
    for configs in cases:
        runs = [build_run(config, dims)[0] for config in configs]
        means = [MeanGradient() for _ in runs]
        if len(runs) == 1:
            train_in_turn(runs)
            rows = read_metrics(runs[0].folder) if dims.rank == 0 else []
            losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
            messages.send(loss=losses[-1] if losses else None, gradients={})
            continue
        for run, mean in zip(runs, means, strict=True):
            run.engine.hooks.append(mean)
        train_in_turn(runs)
        others = zip(KINDS[1:], means[1:], strict=True)
        messages.send(loss=None, gradients={kind: _against(means[0], mean) for kind, mean in others})


def _against(full: MeanGradient, other: MeanGradient) -> list[LayerGradient]:
    """Mean gradients of each layer against those with nothing dropped.

    Collective: all ranks of the world.
    """
    layers = sorted({_layer(name) for name, _ in full.sums})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, layers)
    layers = sorted({layer for one in every for layer in one})
    dots = torch.zeros(len(layers), 3, dtype=torch.float64)
    for (name, offset), mean in full.sums.items():
        got = other.sums[name, offset]
        parts = [(got * mean).sum(), (mean * mean).sum(), ((got - mean) ** 2).sum()]
        dots[layers.index(_layer(name))] += torch.stack(parts)
    dist.all_reduce(dots)
    return [
        LayerGradient(label, along / square, (apart / square) ** 0.5)
        for (_, label), (along, square, apart) in zip(layers, dots.tolist(), strict=True)
    ]


def _layer(name: str) -> tuple[int, str]:
    """Place and label of the layer of a parameter, by its name in the pipeline."""
    first, _, rest = name.partition(".")
    if not first.isdecimal() or int(first) < 2:
        return 0, "embedding"
    return (int(first), f"layer {int(first) - 1}") if rest.startswith("layer.") else (int(first), "final norm")
