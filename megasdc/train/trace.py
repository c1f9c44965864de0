"""Trace of a run: one file for each rank in the run folder, written after each step."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Any

import torch

from megasdc.checkpoint.manifest import installed_versions
from megasdc.config.load import RunConfig
from megasdc.config.sections.megasdc import TraceSection
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.model.submodules import list_submodules
from megasdc.sdc.finding import device_name
from megasdc.sdc.trace_file import TraceWriter, set_traces_aside, trace_path
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.tensors.checksum import algorithm, default_algorithm

TRACE_FOLDER = "trace"


class TraceRecorder(Hook):
    """Writes what the tracer recorded in a step to this rank's file in ``<run_dir>/trace``.

    The file is created after the first step. Earlier files of steps that are rerun are renamed, not lost. ``header``
    comes from ``trace_header``.
    """

    def __init__(self, tracer: Tracer, header: dict[str, Any]) -> None:
        self._tracer = tracer
        self._header = header
        self._writer: TraceWriter | None = None

    def after_step(self, run: Run, result: StepResult) -> None:
        """Append the step's checksums; the first time also if there are none, so that every rank has a file."""
        trace = self._tracer.take()
        begins = self._writer is None
        if self._writer is None:
            self._writer = self._open(run, result.step)
        if trace or begins:
            self._writer.append(trace)

    def _open(self, run: Run, first_step: int) -> TraceWriter:
        folder = run.folder / TRACE_FOLDER
        for path in set_traces_aside(folder, run.dims.rank, run.dims.world_size, first_step):
            run.events.emit("start", "trace_set_aside", step=first_step, path=str(path))
        return TraceWriter(trace_path(folder, run.dims.rank, first_step), {**self._header, "first_step": first_step})

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def build_tracer(section: TraceSection, engine: TrainingEngine) -> Tracer | None:
    """The tracer of this rank; None where the section is not enabled. ConfigError: results cannot be observed."""
    if not section.enabled:
        return None
    chosen = choose_submodules(list_submodules(engine.module), section.granularity, section.layers)
    checksums = default_algorithm(engine.device) if section.algorithm is None else algorithm(section.algorithm)
    return Tracer(checksums, section, [submodule.fqn for submodule in chosen])


def trace_header(config: RunConfig, engine: TrainingEngine, algorithm_name: str) -> dict[str, Any]:
    """Header of a trace: facts about its rank and run, in plain values."""
    sections = config.megasdc
    return {
        "rank": engine.dims.rank,
        "host": socket.gethostname(),
        "layout": engine.dims.layout,
        "sequence_parallel": sections.parallel.sequence_parallel,
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "accumulation_steps": engine.gradient_accumulation_steps(),
        "algorithm": algorithm_name,
        "precision": config.precision,
        "device": device_name(engine.device),
        "threads": None if engine.device.type == "cuda" else torch.get_num_threads(),
        "versions": installed_versions(),
        "seed": sections.training.seed,
        "config_digest": config_digest(config),
        **sections.trace.model_dump(
            mode="json", include={"granularity", "phases", "interval", "micro_batches", "layers"}
        ),
    }


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the settings that affect the computation.

    Excluded are settings that change no result: where a run writes, what it saves, reports and records, and when it
    pauses.
    """
    resolved = config.resolved()
    for section in ("logging", "checkpoint", "trace"):
        resolved["megasdc"].pop(section)
    for field in ("eval_interval", "eval_samples", "time_limit_s", "stop_step"):
        resolved["megasdc"]["training"].pop(field)
    resolved["megasdc"]["parallel"].pop("timeout_s")
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
