"""Probe of every submodule's inputs, forward and backward, before the submodule computes with them.

For searches only: results are observed by ``Attachment``; inputs tell a submodule that produced a value from one that
received it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD

OnInputs = Callable[[str, str, list[Tensor]], None]
"""Called with (phase, fqn, tensors); phase is forward, also in recomputation, or backward."""


class Named(Protocol):
    """A submodule with its full dotted name; ``module`` None: no module computes it."""

    @property
    def fqn(self) -> str:
        """Its name."""

    @property
    def module(self) -> Any:
        """What computes it."""


class InputProbe:
    """Hooks that report every submodule's inputs; ``close`` removes them all.

    Forward inputs are its arguments, the backward input is the gradient of its output. Activation and loss, which are
    not modules, are not reported: their input is the result of the submodule before them.

    Args:
        submodules: such as those of ``list_submodules``.
    """

    def __init__(self, submodules: Iterable[Named], show: OnInputs) -> None:
        self._undo = ExitStack()
        self._show = show
        for submodule in submodules:
            if submodule.module is not None:
                self._attach(submodule.fqn, submodule.module)

    def close(self) -> None:
        """Remove all hooks; idempotent."""
        self._undo.close()

    def __enter__(self) -> InputProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self, fqn: str, module: Any) -> None:
        before = module.register_forward_pre_hook(lambda _m, args: self._show(FORWARD, fqn, list(_tensors(args))))
        self._undo.callback(before.remove)
        self._undo.callback(module.register_forward_hook(lambda _m, _a, out: self._await_gradient(fqn, out)).remove)

    def _await_gradient(self, fqn: str, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._show(BACKWARD, fqn, [gradient]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
