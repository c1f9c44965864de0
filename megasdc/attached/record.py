"""Recording of what the submodules of any model compute: checksums of outputs, gradients of inputs and of parameters.

Hooks are on the model while something is recorded, and at no other time.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.config.guard import GuardSettings
from megasdc.config.hooks import covered_problems
from megasdc.model.submodules import tap_gradient
from megasdc.sdc.trace import Trace
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back
from megasdc.tensors.nested import map_in, tensors_in

ROOT = "model"
"""Name of the whole model in addresses; no submodule has it."""


@dataclass(frozen=True)
class Watched:
    """A submodule whose results are recorded."""

    fqn: str
    module: nn.Module


def choose_watched(model: nn.Module, patterns: Sequence[str] | None) -> list[Watched]:
    """The submodules of a model that are recorded, in the order of its definition.

    Args:
        patterns: patterns of names; None: submodules that hold no others, and those of attention, whose products no
            submodule of their own computes.
    """
    named = [Watched(fqn, module) for fqn, module in model.named_modules() if fqn]
    if patterns is None:
        return [one for one in named if not any(one.module.children()) or "Attention" in type(one.module).__name__]
    return [one for one in named if any(fnmatch.fnmatchcase(one.fqn, pattern) for pattern in patterns)]


def computing_names(model: nn.Module) -> list[str]:
    """Names of the submodules that compute something; a ``ModuleList`` does not."""
    found = ((fqn, one) for fqn, one in model.named_modules() if fqn)
    return [fqn for fqn, one in found if "forward" in vars(one) or type(one).forward is not nn.Module.forward]


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are trained."""
    return [name for name, one in model.named_parameters() if one.requires_grad]


def pattern_problems(settings: GuardSettings, submodules: Collection[str], parameters: Collection[str]) -> list[str]:
    """Problems of patterns in the settings that match no name in the model, on all stages; a sentence each.

    Args:
        submodules: names of the submodules that compute something.
        parameters: names of the parameters that are trained.
    """
    problems = _unmatched(
        *("audit.submodules", "submodule that computes something"), settings.audit.submodules or (), submodules
    )
    for place, spec in enumerate(settings.optimizer_hooks):
        path = f"optimizer_hooks.{place}.parameters"
        problems += _unmatched(path, "parameter that is trained", spec.parameters, parameters)
    return problems + [one.text for one in covered_problems(settings.optimizer_hooks, "optimizer_hooks", parameters)]


def _unmatched(path: str, what: str, patterns: Sequence[str], names: Collection[str]) -> list[str]:
    ordered, problems = sorted(names), []
    for place, pattern in enumerate(patterns):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in ordered):
            near = closest_names(pattern, ordered)
            hint = (
                f"nearest: {', '.join(near)}"
                if near
                else f"there are {', '.join(ordered[:5])}{' ...' * (len(ordered) > 5)}"
            )
            problems.append(f"{path}.{place}: got {pattern!r}, which matches no {what}; {hint}.")
    return problems


def closest_names(pattern: str, names: Sequence[str]) -> list[str]:
    """At most three names with consecutive parts that are most like those of a pattern."""
    parts = [part for part in pattern.split(".") if part.strip("*?[]!")]
    found: dict[str, str] = {}
    for name in names:
        own = name.split(".")
        for start in range(len(own) - len(parts) + 1):
            found.setdefault(".".join(own[start : start + len(parts)]).lower(), name)
    wanted = re.sub(r"[*?\[\]!]", "", ".".join(parts)).lower()
    return list(dict.fromkeys(found[one] for one in difflib.get_close_matches(wanted, found, n=3))) if parts else []


class ResultRecorder:
    """Records the results of submodules as a trace, while it is attached; it changes no bit of them.

    Args:
        watched: submodules whose results are recorded, with a number if computed several times in a micro-batch.
        algorithm: algorithm of checksums.

    Attributes:
        listener: called with the address and the tensor of each result; None: not called.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Sequence[Watched],
        algorithm: ChecksumAlgorithm,
    ) -> None:
        self._model, self._watched, self._algorithm = model, watched, algorithm
        self._addresses: list[Address] = []
        self._values: list[int | Tensor] = []
        self._times: Counter[tuple[Any, ...]] = Counter()
        self._step = 0
        self._micro_batch: int | None = None
        """Micro-batch of the running or last forward pass; None: nothing is recorded."""
        self._in_forward, self._backward = False, 0
        self._undo = ExitStack()
        self.listener: Callable[[Address, Tensor], None] | None = None

    def attach(self, step: int) -> None:
        """Begin a trace of a step of training, whose micro-batches are counted by the model's forward passes."""
        self._begin(step)
        count = iter(range(1 << 30))

        def begin(*_: Any) -> None:
            trains = self._model.training and torch.is_grad_enabled()
            self._micro_batch, self._in_forward = next(count) if trains else None, True

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            self._in_forward = False
            if self._micro_batch is not None:
                self.add_outputs(list(tensors_in(output)))

        self._register(self._model.register_forward_pre_hook(begin))
        self._register(self._model.register_forward_hook(end))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._register(parameter.register_hook(partial(self._add_gradient, name)))

    def detach(self) -> None:
        """Remove every hook; the recorded trace stays until ``pop_trace``."""
        self._undo.close()

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Context in which one forward pass is recorded, as micro-batch 0 of a step."""
        self._begin(step)
        self._micro_batch, self._in_forward = 0, True
        try:
            yield
        finally:
            self.detach()

    def end_forward(self, outputs: Sequence[Tensor]) -> None:
        """Record the results of the whole model; a forward pass from now on is a recomputation."""
        self._in_forward = False
        self.add_outputs(outputs)

    def add_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Record the gradients of parameters, by name; None: the parameter has no gradient."""
        for name, gradient in gradients.items():
            if gradient is not None:
                self._add_gradient(name, gradient)

    def add_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Record the results of the whole model, and see when the backward pass of them begins."""
        micro_batch = self._micro_batch
        for number, tensor in enumerate(outputs):
            self._add(FORWARD, ROOT, slot_of("output", number), tensor, micro_batch)
            if tensor.requires_grad:
                self._register(tensor.register_hook(lambda _: self._begin_backward(micro_batch)))

    def pop_trace(self) -> Trace:
        """The trace of results since the recorder was attached.

        Sync: waits for the device once.
        """
        trace = Trace(self._addresses, read_back(self._values))
        self._addresses, self._values = [], []
        return trace

    def _begin(self, step: int) -> None:
        self.detach()
        self._addresses, self._values, self._step = [], [], step
        self._micro_batch, self._in_forward, self._backward = None, False, 0
        self._times.clear()
        for one in self._watched:
            self._register(one.module.register_forward_pre_hook(self._tapped(one), with_kwargs=True))
            self._register(one.module.register_forward_hook(self._output_hook(one)))

    def _register(self, handle: Any) -> None:
        self._undo.callback(handle.remove)

    def _begin_backward(self, micro_batch: int | None) -> None:
        self._backward = micro_batch or 0

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        fqn, _, slot = name.rpartition(".")
        self._add(WEIGHT_GRAD, fqn or ROOT, slot, gradient, self._backward)

    def _output_hook(self, one: Watched) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            phase = FORWARD if self._in_forward else RECOMPUTE
            micro_batch = self._micro_batch if self._in_forward else self._backward
            for number, tensor in enumerate(tensors_in(output)):
                self._add(phase, one.fqn, slot_of("output", number), tensor, micro_batch)

        return hook

    def _tapped(self, one: Watched) -> Any:
        """Hook that records gradients of a submodule's inputs, unless it writes into its inputs."""
        in_place = getattr(one.module, "inplace", False)

        def hook(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if in_place or self._micro_batch is None or not torch.is_grad_enabled():
                return None
            micro_batch = self._micro_batch if self._in_forward else self._backward
            count = iter(range(1 << 30))

            def tap(tensor: Tensor) -> Tensor:
                slot = slot_of("input", next(count))
                if not (tensor.requires_grad and tensor.is_floating_point()):
                    return tensor
                return tap_gradient(tensor, lambda gradient: self._add(BACKWARD, one.fqn, slot, gradient, micro_batch))

            return map_in(Tensor, args, tap), map_in(Tensor, options, tap)

        return hook

    def _add(self, phase: str, fqn: str, slot: str, value: Tensor, micro_batch: int | None) -> None:
        if micro_batch is None:
            return
        self._times[micro_batch, phase, fqn, slot] += 1
        if (times := self._times[micro_batch, phase, fqn, slot]) > 1:
            slot = f"{slot}#{times}"
        value = value.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        address = Address(self._step, micro_batch, phase, fqn, slot)
        self._addresses.append(address)
        self._values.append(self._algorithm.start(value))
        if self.listener is not None:
            self.listener(address, value)


def slot_of(name: str, number: int) -> str:
    """Slot of the tensor of a number among several: the name, with the number from 1 on."""
    return name if number == 0 else f"{name}.{number}"
