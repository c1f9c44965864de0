"""Traces of a guarded training: what its submodules compute, step by step, in files for ``compare_traces.py``."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch

from megasdc.attached.copies import read_copies
from megasdc.attached.engine import precision_of
from megasdc.attached.record import Recorder
from megasdc.attached.settings import FOLDER
from megasdc.attached.training import Part, Training
from megasdc.checkpoint.manifest import installed_versions
from megasdc.common.addresses import MICRO_BATCH_PHASES, PARAMETER
from megasdc.sdc.device import device_name
from megasdc.sdc.incidents.finding import Finding
from megasdc.sdc.trace import Trace
from megasdc.sdc.trace_file import TraceWriter, set_aside, trace_path


class GuardTrace(Part):
    """Records every ``trace.interval``-th step of training from its first forward pass to its end."""

    def __init__(self, training: Training) -> None:
        engine, dims, algorithm = training.engine, training.dims, training.algorithm
        patterns = training.settings.audit.submodules
        self._training, self._engine, self._algorithm, self._dims = training, engine, algorithm, dims
        self._folder, self._interval = training.folder / FOLDER, training.settings.trace.interval
        self._recorder = Recorder(engine.module, training.watched, algorithm)
        self._writer: TraceWriter | None = None
        self._step: int | None = None
        self._header = {
            "rank": dims.rank,
            "host": socket.gethostname(),
            "layout": dims.layout,
            "sequence_parallel": False,
            "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
            "accumulation_steps": engine.gradient_accumulation_steps(),
            "algorithm": algorithm.name,
            "precision": precision_of(engine),
            "device": device_name(engine.device),
            "threads": None if engine.device.type == "cuda" else torch.get_num_threads(),
            "versions": installed_versions(),
            "granularity": "gemm" if patterns is None else " ".join(patterns),
            "phases": [*MICRO_BATCH_PHASES, PARAMETER],
            "interval": self._interval,
            "micro_batches": None,
            "layers": None,
        }
        self._begin(training.step)

    def _begin(self, step: int) -> None:
        """Record a step from now on, if it is due."""
        if (step - 1) % self._interval == 0:
            self._step = step
            self._recorder.attach(step)

    def before_step(self, step: int) -> Iterable[Finding]:
        """Record nothing from now on; what was recorded as another step, before a checkpoint was loaded, goes."""
        self._recorder.detach()
        if self._step not in (None, step):
            self._training.tell("trace", "left_out", step=step, recorded_as=self._step)
            self._recorder.take()
            self._step = None
        return ()

    def after_step(self, step: int) -> None:
        """Write what was recorded, with the parameters after the step; the next one begins."""
        if self._step is not None:
            self._write(self._step)
        self._begin(self._training.step)

    def _write(self, step: int) -> None:
        trace, after = self._recorder.take(), read_copies(self._engine, self._algorithm, step)
        kept = [place for place, address in enumerate(after.addresses) if address.phase == PARAMETER]
        trace.extend(Trace([after.addresses[one] for one in kept], [after.checksums[one] for one in kept]))
        if self._writer is None:
            set_aside(self._folder, self._dims.rank, self._dims.world_size, step)
            path = trace_path(self._folder, self._dims.rank, step)
            self._writer = TraceWriter(path, {**self._header, "first_step": step})
        self._writer.append(trace)
        self._step = None

    def close(self) -> None:
        """Remove every hook, and close the file."""
        self._recorder.detach()
        if self._writer is not None:
            self._writer.close()
