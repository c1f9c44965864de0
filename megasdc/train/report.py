"""Reports of a run: a line for each log interval, a progress bar on a terminal, evaluations, metrics and their sinks.

DeepSpeed's keys ``tensorboard``, ``csv_monitor``, ``wandb`` and ``comet``, and ``megasdc.logging.prometheus`` configure
the sinks; DeepSpeed itself gets none of these keys but ``comet``.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import megasdc
from megasdc.common.wire import split_address
from megasdc.config.deepspeed import Wandb
from megasdc.config.load import RunConfig
from megasdc.data.loader import EvalLoader
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.step_times import TimeSplit
from megasdc.metrics.sinks import (
    CsvSink,
    DeepSpeedMonitorSink,
    PrometheusSink,
    Sink,
    TensorBoardSink,
    WandbRun,
    WandbSink,
    open_sinks,
    shown_config,
)
from megasdc.metrics.writer import MetricsWriter, reached_step
from megasdc.optim.zero1 import squared_norm
from megasdc.train.logs import lines_above
from megasdc.train.process import CollectionTimer, StartClock

logger = logging.getLogger(__name__)

BAR_INTERVAL_S = 1.0
"""Least seconds between two redraws of the progress bar."""


class Reporter(Hook):
    """Reports every ``interval`` steps.

    Args:
        flops_per_token: FLOPs of a token, forward and backward.
        split: time of a step by part, attached to the engine on rank 0; None elsewhere.
        collections: timer of garbage collections on rank 0; None elsewhere.
        writer: writer of metrics on rank 0; None elsewhere.
        peak: peak TFLOP/s of a device; None: not known, MFU is not reported.
        progress: whether rank 0 shows a bar.
    """

    saved_as = "Reporter"

    def __init__(
        self,
        *,
        interval: int,
        flops_per_token: float,
        split: TimeSplit | None,
        collections: CollectionTimer | None,
        writer: MetricsWriter | None,
        peak: float | None,
        progress: bool,
    ) -> None:
        self.interval = interval
        self.flops_per_token = flops_per_token
        self.split = split
        self.collections = collections
        self.writer = writer
        self.peak = peak
        self.progress = _progress_bar() if progress and writer is not None else None
        self._drawn = ExitStack()
        self._num_loaded = 0
        self._shown_at = 0.0
        self._start_window()

    def _start_window(self, paused_s: float = 0.0) -> None:
        self._window_start = time.perf_counter()
        self._paused_before = paused_s
        self._losses: list[tuple[float | None, int]] = []

    def on_start(self, run: Run) -> None:
        """Show the bar and start the clock."""
        if self.progress is not None:
            self._drawn.enter_context(lines_above(self.progress.console))
            self._drawn.enter_context(self.progress)
            self.progress.add_task("training", total=run.steps, completed=run.step, loss="")
        if self.split is not None:
            self.split.pop_seconds()
        if self.collections is not None:
            self.collections.pop_seconds()
        losses = self._losses  # of the steps since the last line, if loaded from a checkpoint
        self._start_window(run.progress.paused_s)
        self._losses = losses
        self._num_loaded = len(losses)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count the step; report when due."""
        # A skipped step with a non-finite loss is excluded from the interval's mean; skipped steps are counted.
        unusable = result.skipped is not None and not math.isfinite(result.loss)
        self._losses.append((None if unusable else result.loss, result.tokens))
        self._redraw(run, result)
        if run.step % self.interval == 0 or run.is_last_step:
            self._report(run, result)
            self._start_window(run.progress.paused_s)
            self._num_loaded = 0

    def _redraw(self, run: Run, result: StepResult) -> None:
        """Redraw the bar, at most once in ``BAR_INTERVAL_S``: drawing takes time from training."""
        now = time.perf_counter()
        if self.progress is None or (now - self._shown_at < BAR_INTERVAL_S and not run.is_last_step):
            return
        self._shown_at = now
        loss = f"loss {result.loss:.4f}"
        self.progress.update(self.progress.task_ids[0], completed=run.step, total=run.steps, loss=loss, refresh=True)

    def _report(self, run: Run, result: StepResult) -> None:
        seconds = time.perf_counter() - self._window_start - (run.progress.paused_s - self._paused_before)
        timed = self._losses[self._num_loaded :]
        steps, timed_tokens = len(timed), sum(count for _, count in timed)
        square = squared_norm(run.engine.module, run.dims.tp_rank)
        dist.all_reduce(square, group=run.engine.mpu.get_model_parallel_group())
        tflops = self.flops_per_token * timed_tokens / seconds / run.dims.world_size / 1e12
        values: dict[str, float | int] = {
            "train/loss": _mean_loss(self._losses),
            "train/learning_rate": result.learning_rate,
            "train/grad_norm": result.grad_norm,
            "train/param_norm": float(square.sqrt()),
            "train/tokens": run.progress.tokens,
            "train/samples": run.progress.samples,
            "data/stream_end": run.stream_end,
            "train/skipped_steps": run.progress.skipped_steps,
            "speed/step_s": seconds / steps,
            "speed/tokens_per_s": timed_tokens / seconds,
            "speed/tflops_per_device": tflops,
            "memory/host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if run.engine.fp16_enabled():
            values["train/loss_scale"] = result.loss_scale
        if self.peak is not None:
            values["speed/mfu_ratio"] = tflops / self.peak
        if torch.cuda.is_available():
            values["memory/device_peak_bytes"] = torch.cuda.max_memory_allocated()
        if self.split is not None:
            parts = {name: value / steps for name, value in self.split.pop_seconds().items()}
            values |= {f"time/{name}_s": value for name, value in parts.items()}
            values["time/other_s"] = max(0.0, seconds / steps - sum(parts.values()))
        if self.collections is not None:
            values["time/garbage_collection_s"] = self.collections.pop_seconds() / steps
        run.end.results.setdefault("first_loss", next((loss for loss, _ in self._losses if loss is not None), math.nan))
        run.end.results |= {"last_loss": values["train/loss"], "tokens_per_s": values["speed/tokens_per_s"]}
        if self.writer is not None:
            self.writer.write(run.step, values)
            logger.info("%s", _line(run, values))

    def state_dict(self) -> dict[str, Any]:
        """Losses and tokens of the steps since the last line; None for the non-finite loss of a skipped step."""
        return {"losses": self._losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``, so that the next line includes the steps before the checkpoint."""
        self._losses = [(loss, tokens) for loss, tokens in state["losses"]]

    def close(self) -> None:
        """Remove the bar, and stop timing collections."""
        if self.collections is not None:
            self.collections.close()
        self._drawn.close()


def _mean_loss(losses: list[tuple[float | None, int]]) -> float:
    """Mean over tokens of the steps that have a loss; NaN if none has."""
    usable = [(loss, count) for loss, count in losses if loss is not None]
    if not usable:
        return math.nan
    return sum(loss * count for loss, count in usable) / max(sum(count for _, count in usable), 1)


def _line(run: Run, values: dict[str, float | int]) -> str:
    left_s = (run.steps - run.step) * values["speed/step_s"]
    skipped = f" | skipped {run.progress.skipped_steps}" if run.progress.skipped_steps else ""
    return (
        f"step {run.step}/{run.steps} | loss {values['train/loss']:.4f} | lr {values['train/learning_rate']:.3e} | "
        f"grad norm {values['train/grad_norm']:.3f} | {values['speed/tokens_per_s']:,.0f} tokens/s | "
        f"{values['speed/step_s']:.3f} s/step | left {left_s / 60:.1f} min{skipped}"
    )


def _progress_bar() -> Progress | None:
    """A bar if standard error is a terminal, else None."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,  # else a thread would draw while a step runs
    )


class StartReport(Hook):
    """Writes the event ``start/phases`` after the first step of this process, on every rank.

    Its fields are ``process_started_boot_s``, seconds from the machine's boot to the process's start, ``phases``,
    seconds by part in their order, and ``step_s``, seconds of that step. Every part must be marked, except the first
    step.
    """

    def __init__(self, clock: StartClock) -> None:
        self.clock: StartClock | None = clock
        self._step_began = 0.0

    def before_step(self, run: Run) -> None:
        """Note when the first step begins."""
        if self.clock is not None:
            self._step_began = time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Write the event once."""
        if self.clock is None:
            return
        self.clock.mark("first_step")
        run.events.emit(
            "start",
            "phases",
            step=result.step,
            process_started_boot_s=self.clock.process_started_boot_s,
            phases=self.clock.phases,
            step_s=time.monotonic() - self._step_began,
        )
        self.clock = None


class Evaluator(Hook):
    """Evaluates every ``interval`` steps and at the end.

    Args:
        loader: the validation samples.
        writer: writer of metrics on rank 0; None on other ranks.
    """

    def __init__(self, loader: EvalLoader, interval: int, writer: MetricsWriter | None) -> None:
        self.loader = loader
        self.interval = interval
        self.writer = writer

    def after_step(self, run: Run, result: StepResult) -> None:
        """Evaluate when it is due."""
        self.evaluate_when_due(run)

    def evaluate_when_due(self, run: Run) -> None:
        """Evaluate after a step that calls for it, unless its weights are still to be agreed on.

        Collective: all ranks of the world where it is due.
        """
        if (run.step % self.interval and run.step < run.steps) or run.end.waits_for_others:
            return
        run.enter("EVALUATION")
        start = time.perf_counter()
        loss = run.engine.evaluate(iter(self.loader), len(self.loader))
        seconds = time.perf_counter() - start
        run.enter("BETWEEN")
        run.progress.paused_s += seconds
        run.end.results["eval/loss"] = loss
        if self.writer is not None:
            values = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), "time/eval_s": seconds}
            self.writer.write(run.step, values)
            logger.info("step %d | eval loss %.4f | perplexity %.2f", run.step, loss, values["eval/perplexity"])


FILE_SINKS: dict[str, Callable[[Path, int], Sink]] = {"tensorboard": TensorBoardSink, "csv_monitor": CsvSink}
"""Sinks that write to a folder of their key, and the class of each."""


def build_writer(config: RunConfig, run: Run) -> MetricsWriter | None:
    """The writer of a run's metrics with its sinks, at the step from which the run goes on; None on ranks other than 0.

    A sink that cannot be opened, or fails later, is a warning and the event ``metrics/sink_failed``.
    """
    if run.dims.rank:
        return None
    on_failure = partial(_report_failure, run)
    sinks = open_sinks(_openers(config, run), on_failure)
    return MetricsWriter(run.folder, sinks, on_failure, run.events.origin.attempt)


def sink_folder(deepspeed: dict[str, Any], key: str, replica: int | None = None) -> Path | None:
    """Folder of a sink that writes files, for each replica of Local-SGD one in it; None: it is not enabled."""
    section = deepspeed.get(key, {})
    if not section.get("enabled"):
        return None
    folder = Path(section.get("output_path", ""), section.get("job_name", "DeepSpeedJobName"))
    return folder if replica is None else folder / f"replica_{replica}"


def replica_of(config: RunConfig) -> int | None:
    """Number of this replica of Local-SGD; None: there are none."""
    section = config.megasdc.local_sgd
    return None if section.replicas is None else section.replica


def _openers(config: RunConfig, run: Run) -> dict[str, Callable[[], Sink]]:
    """Functions that open each sink that the configuration enables, by name."""
    openers: dict[str, Callable[[], Sink]] = {}
    for key, kind in FILE_SINKS.items():
        if (folder := sink_folder(config.deepspeed, key, replica_of(config))) is not None:
            openers[key] = partial(kind, folder, run.step)
    wandb = Wandb.model_validate(config.deepspeed.get("wandb", {}))
    if wandb.enabled:
        openers["wandb"] = partial(WandbSink, _wandb_run(config, wandb, run), run.folder)
    if config.deepspeed.get("comet", {}).get("enabled"):
        openers["comet"] = partial(DeepSpeedMonitorSink, run.engine.monitor)
    if (address := config.megasdc.logging.prometheus) is not None:
        openers["prometheus"] = partial(_open_prometheus, run, address, replica_of(config))
    return openers


def _wandb_run(config: RunConfig, section: Wandb, run: Run) -> WandbRun:
    """The run of W&B of this start; what began anew in the folder is another one than that of the metrics before."""
    origin = run.events.origin
    anew = len(list(run.folder.glob("metrics.until_*.jsonl")))
    is_one, attempt = config.megasdc.logging.wandb_runs == "one", f"{origin.attempt}"
    replica = replica_of(config)
    names = ([] if replica is None else [f"replica{replica}"]) + ([] if is_one else [attempt])
    names += [f"anew{anew}"] if is_one and anew else []
    return WandbRun(
        folder=run.folder,
        run=str(origin.run),
        name="-".join(names) or None,
        project=section.project,
        team=section.team,
        group=section.group or (None if replica is None else run.folder.resolve().parent.name),
        config=shown_config(config.resolved()),
        tags=(
            f"tp{run.dims.tensor}",
            f"pp{run.dims.pipeline}",
            f"dp{run.dims.data}",
            config.precision,
            f"megasdc {megasdc.__version__}",
        ),
        goes_on=is_one,
        reached=reached_step(run.folder) if is_one else 0,
    )


def _open_prometheus(run: Run, address: str, replica: int | None) -> Sink:
    """Replicas of Local-SGD, several of which may be on a host, each take the next port."""
    origin = run.events.origin
    if replica:
        host, port = split_address(address)
        address = f"{host}:{port + replica}" if ":" not in host else f"[{host}]:{port + replica}"
    sink = PrometheusSink(str(origin.run), origin.attempt or 0, address, replica)
    logger.info("metrics are served at http://%s/metrics", address)
    return sink


def _report_failure(run: Run, name: str, problem: str) -> None:
    logger.warning(
        "metrics are not shown in %s: %s; metrics.jsonl has them all, see `megasdc export-metrics`", name, problem
    )
    run.events.emit("metrics", "sink_failed", step=run.step, sink=name, problem=problem)
