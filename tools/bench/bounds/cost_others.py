"""Operations that the pass of gradient bounds is compared with: reading once, optimizers' steps, the formula."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.common.errors import LaunchError
from megasdc.parallel.local_ranks import base_environment, default_extensions_dir
from megasdc.tensors.bound import bound_formula_, load_library
from megasdc.tensors.bound_limits import SUMS, ElementLimits

READ_BOTH = Path(__file__).with_name("read_both.c")
LIMITS = ElementLimits(absolute=1.0, spike=5000.0)
"""Limits of every pass that is measured."""
_BUILD_S = 900

Build = Callable[[Tensor, Tensor], Callable[[], Any]]


@dataclass(frozen=True)
class Other:
    """An operation that the pass is compared with.

    ``build`` makes of gradient and second moment, [n] fp32 each, a call that does it once; ``reads_once``: it does no
    more than read both once.
    """

    name: str
    build: Build
    reads_once: bool = False


def others(device: str) -> tuple[list[Other], list[str]]:
    """Operations that the pass is compared with on a device, and what cannot be measured here, and why."""
    problems = []
    found = [Other("g.sum() and V.sum()", _both_sums, reads_once=True)]
    if device == "cpu":
        try:
            read, compare = _loops()
            found.insert(0, Other("compiled loop that reads g and V", read, reads_once=True))
            found.append(Other("compiled loop that compares g^2 with V", compare))
        except LaunchError as error:
            problems.append(f"time of the compiled loops over g and V: {error}")
    found += [Other("torch AdamW step, fused", _adamw("fused")), Other("torch AdamW step, foreach", _adamw("foreach"))]
    if device == "cpu":
        problem = _build_cpu_adam()
        if problem is None:
            found.append(Other("DeepSpeedCPUAdam step", _cpu_adam))
        else:
            problems.append(f"DeepSpeedCPUAdam: {problem}")
    return [*found, Other("the formula in torch's operations", _formula)], problems


def _loops() -> tuple[Build, Build]:
    """Reading both and adding up; reading both and comparing, the least that any pass has to do."""
    library, pointer = load_library(READ_BOTH), ctypes.c_void_p
    library.megasdc_read_both.argtypes = (pointer, pointer, ctypes.c_int64)
    library.megasdc_read_both.restype = ctypes.c_double
    library.megasdc_compare_both.argtypes = (pointer, pointer, ctypes.c_int64, ctypes.c_float)
    library.megasdc_compare_both.restype = ctypes.c_int64

    def read(gradient: Tensor, second_moment: Tensor) -> Callable[[], Any]:
        return lambda: library.megasdc_read_both(gradient.data_ptr(), second_moment.data_ptr(), gradient.numel())

    def compare(gradient: Tensor, second_moment: Tensor) -> Callable[[], Any]:
        sizes = gradient.data_ptr(), second_moment.data_ptr(), gradient.numel()
        return lambda: library.megasdc_compare_both(*sizes, LIMITS.spike)

    return read, compare


def _both_sums(gradient: Tensor, second_moment: Tensor) -> Callable[[], Any]:
    return lambda: (gradient.sum(), second_moment.sum())


def _adamw(kind: str) -> Build:
    def build(gradient: Tensor, second_moment: Tensor) -> Callable[[], Any]:
        return torch.optim.AdamW([_parameter(gradient)], **{kind: True}).step  # type: ignore[arg-type]

    return build


def _cpu_adam(gradient: Tensor, second_moment: Tensor) -> Callable[[], Any]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([_parameter(gradient)]).step


def _formula(gradient: Tensor, second_moment: Tensor) -> Callable[[], Any]:
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=gradient.device)
    return lambda: bound_formula_(gradient, second_moment, LIMITS, sums)


def _parameter(gradient: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _build_cpu_adam() -> str | None:
    """Compile DeepSpeed's operator, in a process of its own, so that a stale lock does not hang; why it failed."""
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    folder = os.environ.setdefault("TORCH_EXTENSIONS_DIR", default_extensions_dir())
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=base_environment(0),
            capture_output=True,
            text=True,
            check=False,
            timeout=_BUILD_S,
        )
    except subprocess.TimeoutExpired:
        return f"its operator was not compiled after {_BUILD_S} s; is there a stale lock in {folder}?"
    return None if done.returncode == 0 else f"its operator cannot be compiled: {done.stderr.strip()[-300:]}"
