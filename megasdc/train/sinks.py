"""The sinks of a run's metrics, from the configuration.

DeepSpeed's keys ``tensorboard``, ``csv_monitor``, ``wandb`` and ``comet``, and ``megasdc.logging.prometheus`` configure
them; DeepSpeed itself gets none of these keys but ``comet``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import megasdc
from megasdc.config.load import RunConfig
from megasdc.config.sections.deepspeed import Wandb
from megasdc.engine.hooks import Run
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
from megasdc.metrics.writer import MetricsWriter

logger = logging.getLogger(__name__)

FILE_SINKS: dict[str, Callable[[Path, int], Sink]] = {"tensorboard": TensorBoardSink, "csv_monitor": CsvSink}
"""Sinks that write to a folder of their key, and the class of each."""


def build_writer(config: RunConfig, run: Run) -> MetricsWriter | None:
    """The writer of a run's metrics with its sinks, at the step from which the run goes on; None on other ranks than 0.

    A sink that cannot be opened, or fails later, is a warning and the event ``metrics/sink_failed``.
    """
    if run.dims.rank:
        return None
    on_failure = partial(_tell_failure, run)
    sinks = open_sinks(_openers(config, run), on_failure)
    return MetricsWriter(run.folder, sinks, on_failure, run.events.origin.attempt)


def sink_folder(deepspeed: dict[str, Any], key: str) -> Path | None:
    """Folder of a sink that writes files; None: it is not enabled."""
    section = deepspeed.get(key, {})
    if not section.get("enabled"):
        return None
    return Path(section.get("output_path", ""), section.get("job_name", "DeepSpeedJobName"))


def _openers(config: RunConfig, run: Run) -> dict[str, Callable[[], Sink]]:
    """How to open each sink that the configuration enables, by name."""
    openers: dict[str, Callable[[], Sink]] = {}
    for key, kind in FILE_SINKS.items():
        if (folder := sink_folder(config.deepspeed, key)) is not None:
            openers[key] = partial(kind, folder, run.step)
    wandb = Wandb.model_validate(config.deepspeed.get("wandb", {}))
    if wandb.enabled:
        openers["wandb"] = partial(WandbSink, _wandb_run(config, wandb, run), run.folder)
    if config.deepspeed.get("comet", {}).get("enabled"):
        openers["comet"] = partial(DeepSpeedMonitorSink, run.engine.monitor)
    if (address := config.megasdc.logging.prometheus) is not None:
        openers["prometheus"] = partial(_open_prometheus, run, address)
    return openers


def _wandb_run(config: RunConfig, section: Wandb, run: Run) -> WandbRun:
    origin = run.events.origin
    return WandbRun(
        folder=run.folder,
        run=str(origin.run),
        name=f"{origin.attempt}",
        project=section.project,
        team=section.team,
        group=section.group,
        config=shown_config(config.resolved()),
        tags=(
            f"tp{run.dims.tensor}",
            f"pp{run.dims.pipeline}",
            f"dp{run.dims.data}",
            config.precision,
            f"megasdc {megasdc.__version__}",
        ),
    )


def _open_prometheus(run: Run, address: str) -> Sink:
    origin = run.events.origin
    sink = PrometheusSink(str(origin.run), origin.attempt or 0, address)
    logger.info("metrics are served at http://%s/metrics", address)
    return sink


def _tell_failure(run: Run, name: str, problem: str) -> None:
    logger.warning(
        "metrics are not shown in %s: %s; metrics.jsonl has them all, see `megasdc export-metrics`", name, problem
    )
    run.events.emit("metrics", "sink_failed", step=run.step, sink=name, problem=problem)
