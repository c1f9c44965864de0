"""Recording of traces, the file into which a training writes them, and the choice of the submodules to record."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasdc.checkpoint.manifest import installed_versions
from megasdc.common.addresses import MICRO_BATCH_PHASES, Address
from megasdc.config.sections import TraceSection
from megasdc.model.kinds import GRANULARITIES
from megasdc.model.submodules import Submodule
from megasdc.sdc.finding import device_name
from megasdc.sdc.trace import TRACE_FOLDER, Trace, TraceWriter, set_traces_aside, trace_path
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back

if TYPE_CHECKING:
    from megasdc.sdc.host import Host


class Tracer:
    """A listener of ``engine.observer.Observer`` that records checksums and changes nothing.

    Args:
        fqns: submodules whose results are recorded, where other listeners observe more; None: all that are observed.
        micro_batches: numbers in addresses of the recorded micro-batches; None: the section's.
    """

    def __init__(
        self,
        algorithm: ChecksumAlgorithm,
        section: TraceSection,
        fqns: Iterable[str] | None = None,
        *,
        micro_batches: Iterable[int] | None = None,
    ) -> None:
        self._algorithm = algorithm
        self.algorithm = algorithm.name
        self.fqns = None if fqns is None else frozenset(fqns)
        self._interval = section.interval
        self._phases = frozenset(section.phases)
        chosen = section.micro_batches if micro_batches is None else micro_batches
        self._micro_batches = None if chosen is None else frozenset(chosen)
        self._addresses: list[Address] = []
        self._values: list[int | Tensor] = []

    def __call__(self, address: Address, result: Tensor) -> None:
        """Record one result.

        Sync: none; on a device the checksum stays there until ``pop_trace``.
        """
        if self._takes(address):
            self._addresses.append(address)
            self._values.append(self._algorithm.start(result))

    def records(self, step: int) -> bool:
        """Whether a step is recorded."""
        return (step - 1) % self._interval == 0

    def _takes(self, address: Address) -> bool:
        if address.phase not in self._phases or not self.records(address.step):
            return False
        if self.fqns is not None and address.fqn not in self.fqns:
            return False
        return (
            self._micro_batches is None
            or address.phase not in MICRO_BATCH_PHASES
            or address.micro_batch in self._micro_batches
        )

    def pop_trace(self) -> Trace:
        """The trace recorded since the last call.

        Sync: waits for the device once.
        """
        trace = Trace(self._addresses, read_back(self._values))
        self._addresses, self._values = [], []
        return trace


class TrainingTrace:
    """This rank's trace of a training in ``<run folder>/trace``; its file begins with the first step that is written.

    Earlier files of steps that are rerun are renamed, not lost.

    Args:
        algorithm: name of the checksums' algorithm.
        recorded: what is recorded, for the header: the other fields of ``megasdc.sdc.trace.RECORDED_ALIKE``.
    """

    def __init__(self, host: Host, algorithm: str, precision: str, recorded: Mapping[str, Any]) -> None:
        engine = host.engine
        self._host = host
        self._writer: TraceWriter | None = None
        self._header = {
            "rank": host.dims.rank,
            "host": socket.gethostname(),
            "layout": host.dims.layout,
            "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
            "accumulation_steps": engine.gradient_accumulation_steps(),
            "algorithm": algorithm,
            "precision": precision,
            "device": device_name(engine.device),
            "threads": None if engine.device.type == "cuda" else torch.get_num_threads(),
            "versions": installed_versions(),
            **recorded,
        }

    @property
    def is_open(self) -> bool:
        """Whether a step was written."""
        return self._writer is not None

    def append(self, step: int, trace: Trace) -> None:
        """Write the trace of a step."""
        if self._writer is None:
            folder, dims, events = self._host.folder / TRACE_FOLDER, self._host.dims, self._host.events
            for path in set_traces_aside(folder, dims.rank, dims.world_size, step):
                events.emit("start", "trace_set_aside", step=step, path=str(path))
            self._writer = TraceWriter(trace_path(folder, dims.rank, step), {**self._header, "first_step": step})
        self._writer.append(trace)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def choose_submodules(
    submodules: Iterable[Submodule], granularity: str, layers: Sequence[int] | None
) -> list[Submodule]:
    """The submodules of a stage that belong to a granularity and a choice of layers.

    Args:
        granularity: a key of ``GRANULARITIES``.
        layers: indices of layers in the whole pipeline, as in names; None: all. The loss belongs to none and is always
            included.
    """
    kinds = GRANULARITIES[granularity]
    return [
        submodule
        for submodule in submodules
        if submodule.kind in kinds and (layers is None or submodule.layer is None or submodule.layer in layers)
    ]
