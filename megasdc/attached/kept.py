"""Micro-batches of the step that runs: references to what the model was given, and a look at what came of it.

No value is copied. What the training changes in place afterwards is told by the tensor's version, and not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.attached.probe import Batch, Sent
from megasdc.attached.record import ROOT, slot_of
from megasdc.common.addresses import BACKWARD, FORWARD, Address
from megasdc.determinism import capture_rng
from megasdc.sdc.finite import FiniteRecorder
from megasdc.tensors.nested import map_in, tensors_in


@dataclass(frozen=True)
class Kept:
    """A micro-batch.

    Args:
        batch: its tensors are those that the model was given; None: too many bytes.
        state: of random generators when the model began.
        versions: of the tensors then; None: it has none.
    """

    batch: Batch | None
    state: dict[str, Any]
    versions: tuple[tuple[Tensor, int | None], ...]

    @property
    def lacks(self) -> str | None:
        """Why it cannot be computed again; None: it can."""
        if self.batch is None:
            return "more bytes than nonfinite.keep_mib"
        if any(_version(tensor) != version for tensor, version in self.versions):
            return "the training has changed what the model was given in place"
        return None


class MicroBatches:
    """Keeps the micro-batches of a step, until the next one begins or ``clear``.

    Args:
        step: returns the number of the step that runs.
        most_bytes: of tensors that are kept.

    Attributes:
        kept: by micro-batch.
        finite: has looked at numbers that the model returned, such as the loss, and at gradients that it was given.
        losses: slots of the last results of one number from which gradients come, as a ``Probe`` numbers them.
        seen_losses: the same, numbered as ``finite`` numbers all results.
    """

    def __init__(self, model: nn.Module, device: torch.device, step: Callable[[], int], most_bytes: int) -> None:
        self._model, self._device, self._step, self._most_bytes = model, device, step, most_bytes
        self.kept: list[Kept] = []
        self.finite = FiniteRecorder()
        self.losses: frozenset[str] = frozenset()
        self.seen_losses: frozenset[str] = frozenset()
        self._of_step, self._bytes = 0, 0
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]

    def close(self) -> None:
        """Look at no further forward pass."""
        self.clear()
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Keep nothing of what was."""
        self.kept, self._bytes, self.finite = [], 0, FiniteRecorder()

    def _trains(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._trains():
            return
        if self._of_step != (step := self._step()):
            self._of_step = step
            self.clear()
        tensors: list[Tensor] = []

        def reference(tensor: Tensor) -> Sent:
            tensors.append(tensor.detach())
            return Sent(tensors[-1], tensor.requires_grad, tensor.device.type == "cpu")

        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        batch = Batch(map_in(Tensor, args, reference), map_in(Tensor, options, reference), autocast, {})
        size = sum(one.numel() * one.element_size() for one in tensors)
        if self._bytes + size > self._most_bytes:
            self.kept.append(Kept(None, {}, ()))
            return
        self._bytes += size
        self.kept.append(Kept(batch, capture_rng(), tuple((one, _version(one)) for one in tensors)))

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._trains():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        found = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
        self.losses = _losses([one for one in found if one.requires_grad])
        self.seen_losses = _losses(found)
        for number, tensor in enumerate(found):
            place = partial(Address, self._of_step, len(self.kept) - 1, fqn=ROOT, slot=slot_of("output", number))
            if tensor.numel() == 1:
                self.finite(place(phase=FORWARD), tensor)
            elif tensor.requires_grad:
                tensor.register_hook(partial(self._look, self.finite, place(phase=BACKWARD)))

    @staticmethod
    def _look(finite: FiniteRecorder, address: Address, gradient: Tensor) -> None:
        finite(address, gradient)


def _losses(results: Sequence[Tensor]) -> frozenset[str]:
    places = [number for number, one in enumerate(results) if one.numel() == 1 and one.requires_grad]
    return frozenset(slot_of("output", number) for number in places)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
