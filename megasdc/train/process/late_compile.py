"""Lazy ``torch.compile`` during imports: functions that libraries compile on import are compiled at their first call.

Megatron-core (0.16.1, ``core/jit.py``) so decorates every fused function, and DeepSpeed (0.19.8) its Muon, which it
imports when it builds an optimizer of any kind (``zero/utils.py``). The first decoration imports Inductor: a fifth of
the processor time of a rank's imports, even if none of these functions is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Function = Callable[..., Any]
IMPORTED_LATER = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")
"""Modules imported when any optimizer is created: Dynamo by PyTorch, Muon by DeepSpeed."""


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Inside, ``torch.compile`` of a function compiles it, with the same options, at its first call.

    Modules that the optimizer would import later are imported at the end of the block.
    """
    import torch

    compile_now: Function = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        return _later(model, compile_now, options) if inspect.isfunction(model) else compile_now(model, **options)

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
        for name in IMPORTED_LATER:
            with suppress(ImportError):  # as DeepSpeed, which works without it
                importlib.import_module(name)
    finally:
        torch.compile = compile_now  # type: ignore[assignment]


def _later(function: Function, compile_now: Function, options: dict[str, Any]) -> Function:
    compiled = functools.cache(lambda: compile_now(function, **options))

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call
