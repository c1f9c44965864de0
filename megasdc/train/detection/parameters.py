"""Checksums of this rank's parameters, in the order of the stage."""

from __future__ import annotations

from torch import Tensor

from megasdc.common.addresses import PARAMETER, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.model.submodules import list_submodules
from megasdc.sdc.trace import Trace
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back


class ParameterReader:
    """Computes checksums of the parameters of a stage, in the same order on all replicas."""

    def __init__(self, engine: TrainingEngine, algorithm: ChecksumAlgorithm) -> None:
        self._engine = engine
        self._algorithm = algorithm
        self._parameters = [
            (one.fqn, slot, value) for one in list_submodules(engine.module) for slot, value in one.parameters.items()
        ]
        self._copied = [not getattr(value, "tensor_model_parallel", False) for _, _, value in self._parameters]
        self._values: list[int | Tensor] = []

    def start(self) -> None:
        """Start the checksums; on a GPU without a sync."""
        self._values = [self._algorithm.start(value.data) for _, _, value in self._parameters]

    def take(self) -> Trace:
        """Checksums since the last ``start``; empty without one. Waits for the device."""
        values, self._values = read_back(self._values), []
        if not values:
            return Trace()
        step = self._engine.step_number
        return Trace([Address(step, None, PARAMETER, fqn, slot) for fqn, slot, _ in self._parameters], values)

    def copies(self, trace: Trace) -> Trace:
        """The part of ``take``'s trace for parameters of which every tensor rank has a whole copy."""
        places = [place for place, copied in enumerate(self._copied[: len(trace)]) if copied]
        return Trace([trace.addresses[place] for place in places], [trace.checksums[place] for place in places])
