"""Fused functions of tensors with their gradients, compiled by PyTorch's Inductor: norms, activation, rotation, sums.

A function is compiled once for each shape, layout, type and device. ``torch.compile`` checks its guards at each call,
which takes longer on a CPU than some of these functions; here the arguments' shapes select the code, so that nothing is
compiled twice and no recompilation limit applies.

Forward and backward are each one compiled function; the backward recomputes what it needs from the forward's arguments,
so that no intermediate results are kept. Internal computations are in fp32 whatever the type of the arguments.

Compiled code is kept in Inductor's cache folder, and reused by later starts and other ranks. The linker writes a
library there in place, so that a start that is killed meanwhile leaves a part of one, which Inductor would load in
every later start: an error, a bus error, or, in its test of vector instructions, code without them. Such files are
removed.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasdc.common.errors import LaunchError, StorageError
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE, default_extensions_dir

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
_LOCK_TIMEOUT_S = 600.0
"""As Inductor's own: another process compiles meanwhile."""


def use_cache() -> Path:
    """Set up the folder, next to DeepSpeed's operators unless the user set one, and return it; call before compiling.

    A rank compiles in its own process: the functions are few, and a worker pool would take longer to start.
    StorageError if compiled code cannot be kept there.
    """
    default = Path(os.environ.get(EXTENSIONS_VARIABLE, default_extensions_dir())) / "inductor"
    folder = Path(os.environ.setdefault(CACHE_VARIABLE, str(default)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        _remove_cut_libraries(folder)
    except OSError as error:
        remedy = f"set {CACHE_VARIABLE} to a folder that can be written to, or megasdc.model.fuse to false"
        raise StorageError(f"{folder}: code of fused modules cannot be kept there: {error}; {remedy}") from error
    _compile_in_this_process()
    return folder


def _compile_in_this_process() -> None:
    """Set Inductor's number of compiling processes, unless the user did; it reads the variable when it is imported."""
    import torch._inductor.config as inductor

    inductor.compile_threads = int(os.environ.setdefault(THREADS_VARIABLE, "1"))


@cache
def _remove_cut_libraries(folder: Path) -> None:
    """Remove libraries that were not written to their end, once in a process."""
    for path in folder.glob("*/*.so"):
        if _is_cut(path):
            _remove(path, _is_cut)


def remove_unloadable(error: BaseException, folder: Path, began: float) -> bool:
    """Remove the library that an error of loading compiled code names; returns whether it lies in the folder.

    It is compiled again when it is needed. What another process has written since ``began``, when this one began to
    compile, stays.
    """
    cause: BaseException | None = error
    while cause is not None:
        name = cause.path if isinstance(cause, ImportError) else None
        if name and Path(name).is_relative_to(folder):
            _remove(Path(name), lambda path: path.exists() and path.stat().st_mtime < began)
            return True
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    return False


def is_whole(library: Path) -> bool:
    """Whether a library reaches to the end of its table of sections, which a linker writes last.

    FileNotFoundError if it has gone.
    """
    with open(library, "rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (table,) = struct.unpack_from("=Q", header, 0x28)  # of a 64-bit ELF file: offset, then size and number of entries
    entry_bytes, num_entries = struct.unpack_from("=HH", header, 0x3A)
    return 0 < table <= size - entry_bytes * num_entries


def _is_cut(library: Path) -> bool:
    try:
        return not is_whole(library)
    except FileNotFoundError:
        return False  # another process has removed it


def _remove(library: Path, is_bad: Callable[[Path], bool]) -> None:
    """Remove a library that is bad under Inductor's lock of it, so that none is removed while it is written."""
    from filelock import FileLock  # a requirement of PyTorch, which locks by it

    locks = library.parents[1] / "locks"
    locks.mkdir(exist_ok=True)
    key = library.name.partition(".")[0]
    with FileLock(locks / f"{key}.lock", timeout=_LOCK_TIMEOUT_S):
        if is_bad(library):
            library.unlink()


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


class Fused:
    """A function of tensors, with its gradient; it takes tensors or None and returns one tensor or several."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        self.function = function
        self.forward = Compiled(self._forward, function.__name__)
        self._backwards: dict[tuple[bool, ...], Compiled] = {}

    def __call__(self, *args: Tensor | None) -> Any:
        """Apply the function, with gradients."""
        return _Apply.apply(self, *args)

    def backward(self, wanted: tuple[bool, ...]) -> Compiled:
        """The compiled function (gradients of the results, arguments) -> gradients of the arguments ``wanted``."""
        if wanted not in self._backwards:
            self._backwards[wanted] = Compiled(
                partial(self._gradients, wanted), f"the gradient of {self.function.__name__}"
            )
        return self._backwards[wanted]

    def _forward(self, *args: Tensor | None) -> Sequence[Tensor]:
        result = self.function(*args)
        return (result,) if isinstance(result, Tensor) else result

    def _gradients(self, wanted: tuple[bool, ...], *tensors: Any) -> Sequence[Tensor]:
        results, args = tensors[: -len(wanted)], tensors[-len(wanted) :]
        with torch.enable_grad():
            leaves: list[Any] = [
                a if a is None else a.detach().requires_grad_(w) for a, w in zip(args, wanted, strict=True)
            ]
            outputs = self._forward(*leaves)
            inputs = [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]
            return torch.autograd.grad(outputs, inputs, results)


class _Apply(torch.autograd.Function):
    """Runs a ``Fused``."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, *args: Tensor | None) -> Any:
        ctx.fused = fused
        ctx.save_for_backward(*args)
        results = fused.forward(*args)
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        results = [gradient.contiguous() for gradient in gradients]
        found = iter(ctx.fused.backward(wanted)(*results, *ctx.saved_tensors))
        return None, *(next(found) if w else None for w in wanted)


@cache
def rms_norm(eps: float) -> Fused:
    """RMSNorm over the last dimension: (x [..., h], weight [h]) -> [..., h]; ``eps`` is added to the mean square."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    return Fused(rms_norm)


@cache
def layer_norm(eps: float) -> Fused:
    """LayerNorm over the last dimension: (x [..., h], weight [h], bias [h]) -> [..., h]; ``eps``: added to the
    variance.
    """

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return (centred * scale * weight.float() + bias.float()).to(x.dtype)

    return Fused(layer_norm)


@cache
def activation(
    function: Callable[[Tensor], Tensor], gated: bool = False, clamp: float | None = None, offset: float = 0.0
) -> Fused:
    """Activation between the two linear layers of an MLP: (x [..., f] or [..., 2 f], bias or None) -> [..., f].

    If ``gated``, x is [gate, linear] in its last dimension, and the result function(gate) * (linear + ``offset``);
    ``clamp`` bounds linear on both sides and gate from above, None: no bound.
    """

    def activation(x: Tensor, bias: Tensor | None) -> Tensor:
        wide = x.float() if bias is None else x.float() + bias.float()
        if not gated:
            return function(wide).to(x.dtype)
        gate, linear = wide.chunk(2, -1)
        if clamp is not None:
            gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
        return (function(gate) * (linear + offset)).to(x.dtype)

    return Fused(activation)


def _rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, ...]:
    half = cosine.shape[-1] // 2
    return tuple(
        (x.float() * cosine.float() + torch.cat((x[..., half:], x[..., :half]), -1).float() * sine.float()).to(x.dtype)
        for x in (query, key)
    )


def _residual_sum(x: Tensor, bias: Tensor | None, mask: Tensor | None, residual: Tensor) -> Tensor:
    wide = x.float() if bias is None else x.float() + bias.float()
    return (residual.float() + (wide if mask is None else wide * mask.float())).to(residual.dtype)


rotate = Fused(_rotate)
"""Rotary position embedding of queries and keys: ([s, b, n, d], [s, b, g, d], cosine, sine) -> both rotated."""
residual_sum = Fused(_residual_sum)
"""(x, bias or None, dropout mask or None, residual) -> residual + mask (x + bias)."""
