"""Fault injection into data that is not observed.

Tokens and the place in the data, gradients before their sum, the chain from the reduced gradient to the parameters,
saved files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasdc.common.addresses import Address
from megasdc.config.faults import (
    CHECKPOINT,
    CLIPPED_GRAD,
    COLLECTIVE,
    COPY,
    FAULT_PHASES,
    HYPERPARAMETER,
    NORM,
    OPTIMIZER_STATE,
    PLACE,
    PLACE_SLOT,
    STATE_AT_REST,
    TOKENS,
)
from megasdc.data.loader import MicroBatch
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.faults.injector import Injector
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import accumulated_gradient, gather_parameters, owned_fragments

COUNT = "step"
"""Name of the optimizer's count of steps in its states, or in its groups."""


class StateFaults(Hook):
    """Injects faults into data that a step stores or passes on besides results.

    Accumulated gradients before their sum over replicas; then the chain to the parameters: numbers of the norm, the
    clipped shard, numbers of the optimizer's groups, its states, the copy that is gathered; and the place in the data.

    Args:
        engine: the training engine, whose hooks must include this object if ``Injector.wants`` returns True.
        injector: the run's injector.
    """

    def __init__(self, engine: TrainingEngine, injector: Injector) -> None:
        self._injector = injector
        self._engine = engine
        self._parameters = [
            (submodule.fqn, slot, parameter)
            for submodule in list_submodules(engine.module)
            for slot, parameter in submodule.parameters.items()
        ]
        self._names = {id(parameter): (fqn, slot) for fqn, slot, parameter in self._parameters}
        self._wanted = {phase for phase in FAULT_PHASES if injector.wants(phase)}
        self._borrowed: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[Any] = []
        inner = engine.optimizer.optimizer
        if CLIPPED_GRAD in self._wanted:
            self._handles.append(inner.register_step_pre_hook(lambda stepped, *_: self._harm_clipped(stepped)))
        if HYPERPARAMETER in self._wanted:
            self._handles.append(inner.register_step_post_hook(lambda stepped, *_: self._restore(stepped.param_groups)))
        if NORM in self._wanted:
            engine.step_control.listen(lambda slot, number: injector(self._address(NORM, NORM, slot), number))

    def close(self) -> None:
        """Remove this object's hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if NORM in self._wanted:
            self._engine.step_control.listen(None)

    def before_step(self, run: Run) -> None:
        """Inject into this rank's position in the data."""
        if PLACE not in self._wanted:
            return
        loader, position = run.loader, run.loader.position
        needed = run.engine.micro_batches * loader.micro_batch_size
        self._injector.limits[PLACE] = (len(loader.dataset) - position.order.start) // loader.dp_size - needed + 1
        consumed = torch.tensor([position.consumed])
        if self._injector.inject_into(self._address(PLACE, PLACE, PLACE_SLOT), consumed):
            loader.position = replace(position, consumed=int(consumed))

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Inject into this rank's gradients before their sum over replicas."""
        if COLLECTIVE not in self._wanted:
            return
        for fqn, slot, parameter in self._parameters:
            gradient = accumulated_gradient(engine.optimizer, parameter).detach()
            self._injector.inject_into(self._address(COLLECTIVE, fqn, slot), gradient)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Inject into masters, moments and numbers of the groups, just before the optimizer reads them."""
        self._harm_states(OPTIMIZER_STATE, engine.step_number)
        if HYPERPARAMETER in self._wanted:
            for number, group in enumerate(engine.optimizer.optimizer.param_groups):
                self._harm_settings(number, group)
                self._harm_count(number, group)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Inject into this rank's copy of updated parameters, which every replica gets.

        Collective: the data group, in the steps of such a fault.
        """
        self._restore(engine.optimizer.optimizer.param_groups)
        if engine.is_skipped or not self._injector.due_on_any_rank(COPY, engine.step_number):
            return
        for fragment in owned_fragments(engine.optimizer) if COPY in self._wanted else ():
            own = fragment.parameter.data.view(-1).narrow(0, fragment.offset, fragment.numel)
            self._injector.inject_into(self._address(COPY, *self._names[id(fragment.parameter)]), own)
        gather_parameters(engine.optimizer)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Inject into masters and moments at rest."""
        self._harm_states(STATE_AT_REST, run.step)

    def _address(self, phase: str, fqn: str, slot: str, step: int | None = None) -> Address:
        return Address(self._engine.step_number if step is None else step, None, phase, fqn, slot)

    def _harm_states(self, phase: str, step: int) -> None:
        if phase not in self._wanted:
            return
        for fragment in owned_fragments(self._engine.optimizer):
            fqn, parameter = self._names[id(fragment.parameter)]
            for state, value in {"master": fragment.master, **fragment.states(self._engine.optimizer)}.items():
                self._injector.inject_into(self._address(phase, fqn, f"{parameter}.{state}", step), value)

    def _harm_clipped(self, inner: Any) -> None:
        stepped = {id(flat) for group in inner.param_groups for flat in group["params"]}
        for fragment in owned_fragments(self._engine.optimizer):
            if id(fragment.flat) in stepped and fragment.flat.grad is not None:
                gradient = fragment.flat.grad.detach().narrow(0, fragment.start, fragment.numel)
                self._injector.inject_into(self._address(CLIPPED_GRAD, *self._names[id(fragment.parameter)]), gradient)

    def _harm_settings(self, number: int, group: dict[str, Any]) -> None:
        """Change numbers of a group until the inner optimizer has stepped."""
        for name, value in list(group.items()):
            several = isinstance(value, (tuple, list))
            numbers = value if several else (value,)
            if name == COUNT or not all(type(one) in (int, float) for one in numbers):
                continue
            names = [f"{name.removesuffix('s')}{i + 1}" for i in range(len(numbers))] if several else [name]
            now = [self._number(f"{number}.{one}", old) for one, old in zip(names, numbers, strict=True)]
            if any(new is not old for new, old in zip(now, numbers, strict=True)):
                self._borrowed.append((group, name, value))
                group[name] = type(value)(now) if several else now[0]

    def _harm_count(self, number: int, group: dict[str, Any]) -> None:
        """Change the count of steps, which stays wrong: of a group in DeepSpeed's FusedAdam, else of its shard."""
        states = [self._engine.optimizer.optimizer.state.get(flat, {}) for flat in group["params"]]
        for kept in (group, *states):
            count = kept.get(COUNT)
            if isinstance(count, torch.Tensor):
                self._injector.inject_into(
                    self._address(HYPERPARAMETER, HYPERPARAMETER, f"{number}.{COUNT}"), count.view(1)
                )
            elif count is not None:
                kept[COUNT] = self._number(f"{number}.{COUNT}", count)

    def _number(self, slot: str, value: float) -> float:
        """The value, or the value that a fault puts in its place."""
        held = torch.tensor([value], dtype=torch.int64 if type(value) is int else torch.float64)
        is_changed = self._injector.inject_into(self._address(HYPERPARAMETER, HYPERPARAMETER, slot), held)
        return held.item() if is_changed else value

    def _restore(self, groups: list[dict[str, Any]]) -> None:
        """Give groups that have stepped their numbers back, before the schedule sets the next learning rate."""
        stepped = {id(group) for group in groups}
        for group, name, value in [one for one in self._borrowed if id(one[0]) in stepped]:
            group[name] = value
        self._borrowed = [one for one in self._borrowed if id(one[0]) not in stepped]


class FaultyBatches:
    """Micro-batches with faults injected into tokens (first stage) and labels (last stage), after the loader's checks.

    An id that would leave the vocabulary is not changed, because a device fails on such an id.

    Args:
        injector: an injector with ``vocab_size``.
        engine: the training engine, with the running step and this rank's stage.
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
            tokens = self._injected("tokens", tokens)
        if self._engine.is_last_stage():
            labels = self._injected("labels", labels)
        return tokens, (labels, loss_mask)

    def _injected(self, slot: str, ids: torch.Tensor) -> torch.Tensor:
        address = Address(self._engine.step_number, self._engine.next_micro_batch, TOKENS, TOKENS, slot)
        answer = self._injector(address, ids)
        return ids if answer is None else answer


def inject_into_file(path: Path, step: int, injector: Injector) -> bool:
    """Inject a fault into the bytes of a saved file, in place.

    Args:
        path: the file, not empty.
        step: optimizer step of its checkpoint.

    Returns:
        Whether some bit changed.
    """
    content = np.memmap(path, np.uint8, "r+")
    changed = injector.inject_into(Address(step, None, CHECKPOINT, path.name, "bytes"), torch.from_numpy(content))
    content.flush()
    return changed
