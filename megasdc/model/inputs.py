"""What does a submodule take in, forward and backward? Every tensor, shown before the submodule computes with it.

For searches alone: results are seen by ``Attachment``; inputs are read as well only to tell a submodule that made a
value from one that received it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from megasdc.addresses import BACKWARD, FORWARD
from megasdc.model.submodules import Submodule

OnInputs = Callable[[str, str, list[Tensor]], None]
"""Called with (phase, fqn, tensors); phase is forward, also in recomputation, or backward."""


class InputProbe:
    """Hooks that show what every submodule takes in; ``close`` takes all of them away.

    Forward these are its arguments, backward the gradient of its output. Submodules that are no modules, activation
    and loss, show nothing: they take in the result of the submodule before them as it is.

    Args:
        submodules: from ``list_submodules``.
        show: told of the tensors.
    """

    def __init__(self, submodules: Iterable[Submodule], show: OnInputs) -> None:
        self._undo = ExitStack()
        self._show = show
        for submodule in submodules:
            if submodule.module is not None:
                self._attach(submodule.fqn, submodule.module)

    def close(self) -> None:
        """Leave the stage as it was found; idempotent."""
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
