"""Environment variables of deterministic mode, set before torch, CUDA and NCCL read them; no torch here.

cuBLAS reads its variable when its first handle is created, NCCL when a communicator is created, Transformer Engine when
an attention module is built: a training rank sets them after it has read its configuration and before it imports torch.

Not listed, and why: ``NCCL_NVLS_ENABLE`` and ``NCCL_COLLNET_ENABLE``, because only the algorithm Ring may be
chosen; flash-attention and the choice of SDPA's backend, because both follow PyTorch's and Transformer Engine's
switches; ``PYTHONHASHSEED``, because nothing in training depends on the order of a set of strings:
``megasdc check-determinism`` would show it, since its two runs hash differently.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from megasdc.common.errors import ConfigError
from megasdc.config.sections import DeterminismSection


@dataclass(frozen=True)
class Variable:
    """An environment variable that decides whether sums are added in a fixed order.

    Deterministic mode sets ``value`` where it is unset or empty; ``accepted`` are all values, in any letter case, with
    which a run is repeatable; ``reason`` is what differs with others.
    """

    name: str
    value: str
    accepted: tuple[str, ...]
    reason: str

    def is_fixed(self, environ: Mapping[str, str]) -> bool:
        """Whether it has one of the accepted values."""
        return environ.get(self.name, "").lower() in [value.lower() for value in self.accepted]


VARIABLES = (
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        (":4096:8", ":16:8"),
        "cuBLAS may take another kernel when several streams share its workspace",
    ),
    # Tree is refused: it has no all-gather (NVIDIA/nccl issue 317), and its shape over nodes is not fixed.
    Variable("NCCL_ALGO", "Ring", ("Ring",), "NCCL chooses the algorithm, and NVLS adds in no fixed order"),
    # LL128 is refused: forced on a platform that does not support it, it corrupts data.
    Variable("NCCL_PROTO", "Simple", ("Simple", "LL"), "NCCL's choice of protocol moves the borders of its chunks"),
    Variable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "0",
        ("0",),
        "Transformer Engine may take attention kernels, flash-attention's among them, that add with atomic operations",
    ),
)
"""All environment variables that deterministic mode needs.

Sources: cuBLAS documentation, section Results Reproducibility; NCCL user guide, Environment Variables, and
NVIDIA/nccl issue 1497 (NVLS); Megatron-core, docs/user-guide/deterministic-training.md.
"""
CPU_KERNEL_VARIABLES = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Variables that select other CPU kernels; each was observed to change the bits of a layer (torch 2.13, AVX-512)."""


def set_deterministic_environment(section: DeterminismSection, environ: MutableMapping[str, str]) -> None:
    """Set the variables of deterministic mode; nothing is changed where it is off.

    Another value is an error and is not overwritten: it was probably set on purpose, and on several hosts it may be set
    on some of them only.

    Args:
        environ: the process's environment, changed in place.

    Raises:
        ConfigError: a variable has a value with which runs differ; every such variable is named.
    """
    if not section.enabled:
        return
    problems = [
        f"environment variable {variable.name}: got {environ[variable.name]!r} with megasdc.determinism.enabled true; "
        f"allowed: {' or '.join(variable.accepted)} ({variable.reason} otherwise); unset it."
        for variable in VARIABLES
        if environ.get(variable.name) and not variable.is_fixed(environ)
    ]
    if problems:
        raise ConfigError(problems)
    for variable in VARIABLES:
        if not environ.get(variable.name):
            environ[variable.name] = variable.value


def record_collectives(environ: MutableMapping[str, str]) -> None:
    """Turn on PyTorch's flight recorders, whose setting it reads when it is imported."""
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
