"""Tensor functions compiled one by one with PyTorch's Inductor, once for each shape, layout, type and device.

``torch.compile`` checks its guards at each call, which takes longer on a CPU than some of these functions; here the
arguments' shapes select the code, so that nothing is compiled twice and no recompilation limit applies. Compiled code
is kept in Inductor's cache folder (``code_cache``), and reused by later starts and other ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megasdc.common.errors import LaunchError
from megasdc.model.code_cache import remove_unloadable, use_cache

_OFF = "; install one (Debian: apt install g++ python3-dev), or set megasdc.model.fuse to false"
_OFF_GPU = "; use a GPU and a CUDA build of torch that Triton supports, or set megasdc.model.fuse to false"

Kind = tuple[Any, ...]


class Compiled:
    """A function of tensors without gradients, compiled at the first call with each kind of arguments.

    ``function`` takes tensors or None and returns tensors; its control flow must not depend on values of tensors.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], name: str) -> None:
        self.function = function
        self.name = name
        self.kinds: dict[Kind, Callable[..., Sequence[Tensor]]] = {}

    def __call__(self, *args: Tensor | None) -> Sequence[Tensor]:
        """Compute; in-place changes of arguments take effect. LaunchError if the code cannot be compiled."""
        kind = (torch.get_num_threads(), *((a.shape, a.stride(), a.dtype, a.device) for a in args if a is not None))
        key = (*kind, *(a is None for a in args))
        run = self.kinds.get(key)
        if run is None:
            run = self.kinds[key] = self._compile(args)
        return run(*(a for a in args if a is not None))

    def _compile(self, args: tuple[Tensor | None, ...]) -> Callable[..., Sequence[Tensor]]:
        device = next(a.device for a in args if a is not None)
        require_compiler(device.type)
        from torch.fx.experimental.proxy_tensor import make_fx

        def present(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            return list(self.function(*(None if a is None else next(rest) for a in args)))

        with torch.inference_mode(False), torch.no_grad():
            examples = [
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) for a in args if a is not None
            ]
            return self._generate(make_fx(present, tracing_mode="fake")(*examples), examples)

    def _generate(self, graph: Any, examples: list[Tensor], again: bool = False) -> Callable[..., Sequence[Tensor]]:
        """Generate code and load it; once more if a library of the folder of compiled code was damaged."""
        from torch._inductor import compile as compile_graph
        from torch._inductor.exc import (
            CppCompileError,
            GPUTooOldForTriton,
            InductorError,
            InvalidCxxCompiler,
            TritonMissing,
        )

        folder, began = use_cache(), time.time()
        try:
            return compile_graph(graph, examples, options=_options())  # type: ignore[arg-type, return-value]
        except (GPUTooOldForTriton, TritonMissing) as error:
            raise LaunchError(f"megasdc.model.fuse: {self.name} was not compiled: {error}{_OFF_GPU}") from error
        except (CppCompileError, InductorError, InvalidCxxCompiler) as error:
            remedy = _OFF
            if remove_unloadable(error, folder, began):
                if not again:
                    return self._generate(graph, examples, again=True)
                remedy = f"; delete the folder {folder} and start again, or set megasdc.model.fuse to false"
            raise LaunchError(f"megasdc.model.fuse: {self.name} was not compiled: {error}{remedy}") from error


def _options() -> dict[str, Any]:
    """Inductor's settings: no choice by measurement, which could differ in the next start."""
    return {
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "max_autotune_gemm": False,
        "coordinate_descent_tuning": False,
        "deterministic": True,
        "cpp.threads": torch.get_num_threads(),
    }


def require_compiler(device: str) -> None:
    """Check before a run starts that fused modules can be compiled for a type of device.

    Raises:
        LaunchError: there is no compiler, or on a GPU no Triton; with the remedy.
        StorageError: compiled code cannot be kept.
    """
    use_cache()
    if device == "cuda":
        find_triton()
    find_compiler(device)


FUSED_VERSION = 2
"""Raised with every change of a fused function that changes bits: golden traces of another are not comparable."""


def code_generator() -> str:
    """Compiler of fused modules on this host, with its version, which affects the bits of results.

    Raises:
        LaunchError: there is no compiler, or on a GPU no Triton.
    """
    return find_triton() if torch.cuda.is_available() else find_compiler("cpu")


def find_triton() -> str:
    """Triton with its own version: its distribution has other names in some images. LaunchError without Triton."""
    try:
        import triton
    except ImportError as error:
        remedy = "; install a CUDA build of torch, which has it, or set megasdc.model.fuse to false"
        raise LaunchError(
            f"megasdc.model.fuse: got true on a GPU, but Triton cannot be imported: {error}{remedy}"
        ) from error
    return f"triton {triton.__version__}"


@cache
def find_compiler(device: str) -> str:
    """First line of the version of Inductor's compiler: for kernels on a CPU, for their launch code on a GPU.

    LaunchError if there is no compiler, or it does not run.
    """
    names = [os.environ.get("CXX") or "g++"] if device == "cpu" else [os.environ.get("CC") or "", "gcc", "clang"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        wanted = " or ".join(name for name in names if name)
        raise LaunchError(f"megasdc.model.fuse: got true, but there is no compiler: {wanted} is not on PATH{_OFF}")
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, errors="replace", check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"megasdc.model.fuse: got true, but the compiler {path} does not run: {error}{_OFF}"
        ) from error
    return answer.stdout.partition("\n")[0]
