"""Fault injection into data that is not observed: tokens, gradients before their sum, optimizer states, saved files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megasdc.addresses import Address
from megasdc.config.sections.faults import CHECKPOINT, COLLECTIVE, OPTIMIZER_STATE, TOKENS
from megasdc.data.loader import MicroBatch
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.faults.injector import Injector
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import accumulated_gradient, owned_fragments


class StateFaults(Hook):
    """Injects faults into accumulated gradients before their sum over replicas, and into optimizer states.

    Args:
        engine: add the hook to its hooks where ``Injector.wants`` returns True.
    """

    def __init__(self, engine: TrainingEngine, injector: Injector) -> None:
        self._injector = injector
        self._parameters = [
            (submodule.fqn, slot, parameter)
            for submodule in list_submodules(engine.module)
            for slot, parameter in submodule.parameters.items()
        ]
        self._names = {id(parameter): (fqn, slot) for fqn, slot, parameter in self._parameters}
        self._collective = injector.wants(COLLECTIVE)
        self._states = injector.wants(OPTIMIZER_STATE)

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Inject into what this rank contributes to the sum over replicas."""
        if not self._collective:
            return
        for fqn, slot, parameter in self._parameters:
            gradient = accumulated_gradient(engine.optimizer, parameter).detach()
            self._injector.harm(Address(engine.step_number, None, COLLECTIVE, fqn, slot), gradient)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Inject into the master weights and moments of this rank."""
        if not self._states:
            return
        for fragment in owned_fragments(engine.optimizer):
            fqn, parameter = self._names[id(fragment.parameter)]
            kept = {"master": fragment.master, **fragment.states(engine.optimizer)}
            for state, value in kept.items():
                address = Address(engine.step_number, None, OPTIMIZER_STATE, fqn, f"{parameter}.{state}")
                self._injector.harm(address, value)


class HarmedBatches:
    """Micro-batches with faults injected into tokens (first stage) and labels (last stage), after the loader's checks.

    An id that would leave the vocabulary is not changed, because a device fails on such an id.

    Args:
        injector: made with ``vocab_size``.
        engine: gives the running step and this rank's stage.
    """

    def __init__(self, batches: Iterator[MicroBatch], injector: Injector, engine: TrainingEngine) -> None:
        self._batches = batches
        self._injector = injector
        self._engine = engine

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch."""
        tokens, (labels, loss_mask) = next(self._batches)
        if self._engine.is_first_stage():
            tokens = self._harmed("tokens", tokens)
        if self._engine.is_last_stage():
            labels = self._harmed("labels", labels)
        return tokens, (labels, loss_mask)

    def _harmed(self, slot: str, ids: torch.Tensor) -> torch.Tensor:
        address = Address(self._engine.step_number, self._engine.next_micro_batch, TOKENS, TOKENS, slot)
        answer = self._injector(address, ids)
        return ids if answer is None else answer


def harm_file(path: Path, step: int, injector: Injector) -> bool:
    """Inject a fault into the bytes of a saved file, in place.

    Args:
        path: the file, not empty.
        step: of its checkpoint.

    Returns:
        Whether some bit changed.
    """
    content = np.memmap(path, np.uint8, "r+")
    changed = injector.harm(Address(step, None, CHECKPOINT, path.name, "bytes"), torch.from_numpy(content))
    content.flush()
    return changed
