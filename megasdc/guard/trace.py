"""Traces of a guarded training: what its submodules compute, step by step, in files for ``compare_traces.py``."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megasdc.addresses import MICRO_BATCH_PHASES, PARAMETER
from megasdc.checkpoint.manifest import installed_versions
from megasdc.guard.copies import read_copies
from megasdc.guard.engine import precision_of
from megasdc.guard.record import Recorder, Watched
from megasdc.guard.settings import FOLDER
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.device import device_name
from megasdc.sdc.trace import Trace
from megasdc.sdc.trace_file import TraceWriter, set_aside, trace_path
from megasdc.tensors.checksum import ChecksumAlgorithm


class GuardTrace:
    """Records every ``interval``-th step of training from its first forward pass to its end.

    Args:
        folder: of the run; the files are in ``trace`` there.
        patterns: by which submodules were chosen; None: the default.
        tell: writes an event on rank 0, from its kind, name and fields.
    """

    def __init__(
        self,
        engine: Any,
        watched: Sequence[Watched],
        algorithm: ChecksumAlgorithm,
        dims: ParallelDims,
        folder: Path,
        interval: int,
        patterns: Sequence[str] | None,
        tell: Callable[..., None],
    ) -> None:
        self._engine, self._algorithm, self._dims = engine, algorithm, dims
        self._tell = tell
        self._folder, self._interval = folder / FOLDER, interval
        self._recorder = Recorder(engine.module, watched, algorithm)
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
            "interval": interval,
            "micro_batches": None,
            "layers": None,
        }

    def begin(self, step: int) -> None:
        """Record a step from now on, if it is due."""
        if (step - 1) % self._interval == 0:
            self._step = step
            self._recorder.attach(step)

    def pause(self, step: int) -> None:
        """Record nothing that is computed before the optimizer's step.

        Args:
            step: that is about to be taken; what was recorded as another, before a checkpoint was loaded, is left out.
        """
        self._recorder.detach()
        if self._step not in (None, step):
            self._tell("trace", "left_out", step=step, recorded_as=self._step)
            self._recorder.take()
            self._step = None

    def end(self) -> None:
        """Write what was recorded, with the parameters after the step."""
        if self._step is None:
            return
        trace, after = self._recorder.take(), read_copies(self._engine, self._algorithm, self._step)
        kept = [place for place, address in enumerate(after.addresses) if address.phase == PARAMETER]
        trace.extend(Trace([after.addresses[one] for one in kept], [after.checksums[one] for one in kept]))
        if self._writer is None:
            set_aside(self._folder, self._dims.rank, self._dims.world_size, self._step)
            path = trace_path(self._folder, self._dims.rank, self._step)
            self._writer = TraceWriter(path, {**self._header, "first_step": self._step})
        self._writer.append(trace)
        self._step = None

    def close(self) -> None:
        """Remove every hook, and close the file."""
        self._recorder.detach()
        if self._writer is not None:
            self._writer.close()
