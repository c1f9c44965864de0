"""Causes of differences between two runs of one configuration: settings, environment variables and modules.

Only known causes are listed. Examined, without effect on bits: ``zero_optimization.
overlap_comm`` (DeepSpeed 0.19's pipeline engine turns it off), ``contiguous_gradients``, ``round_robin_gradients`` and
bucket sizes (gradients are reduced after the last backward pass, in the order of the parameters), fp16's dynamic loss
scale (a function of the gradients), activation recompute and dropout (masks are functions of seed, step, sample and
layer, see ``megasdc.model.randomness``), the order of samples (a function of ``data.seed``), huge pages, apex
(not used). Other kinds of CPUs or GPUs and other package versions give other bits whatever is set here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasdc.config.drop_compute import INFINITE
from megasdc.config.environment import CPU_KERNEL_VARIABLES, VARIABLES
from megasdc.config.load import RunConfig
from megasdc.config.read import shown

COMMIT = re.compile(r"[0-9a-f]{40}")
STARTUP_MODULES = ("sitecustomize", "usercustomize")
"""Modules that Python imports before anything else, if they exist."""


@dataclass(frozen=True)
class DifferenceCause:
    """One thing that could make two runs differ.

    Attributes:
        place: dotted path of a setting, name of an environment variable, or name of a module.
        text: sentence on the difference.
        remedy: remedy against it.
        between: runs that can differ: two ``runs`` on one machine, or only runs on two ``machines``.
    """

    place: str
    text: str
    remedy: str
    between: Literal["runs", "machines"]

    def render(self) -> str:
        """One line of text."""
        what = "two runs" if self.between == "runs" else "runs on two machines"
        return f"{self.place}: {self.text}; {what} can differ. Remedy: {self.remedy}."


def find_causes(
    config: RunConfig, environ: Mapping[str, str], startup_modules: Mapping[str, str], cuda: bool
) -> list[DifferenceCause]:
    """List everything known that could make two runs of a configuration differ.

    Args:
        environ: environment of the ranks.
        startup_modules: from ``find_startup_modules``.
        cuda: whether it trains on GPUs.
    """
    causes = [
        *(_gpu_causes(config, environ) if cuda else _cpu_causes(config, environ)),
        *_setting_causes(config, cuda),
        *_drop_causes(config),
        *_data_causes(config),
    ]
    for name, path in startup_modules.items():
        text = f"{path} runs at the start of every process and can change whatever is imported later"
        causes.append(DifferenceCause(f"module {name}", text, "take its folder out of PYTHONPATH, or read it", "runs"))
    return causes


def find_startup_modules() -> dict[str, str]:
    """Files of modules that Python imports at its start, by name, without those of Python and of the system."""
    own = {Path(folder).resolve() for folder in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())}
    found = {}
    for name in STARTUP_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        path = Path(spec.origin)
        if not own & set(path.resolve().parents) and not os.fspath(path).startswith(("/usr/lib/", "/etc/")):
            found[name] = os.fspath(path)
    return found


def _gpu_causes(config: RunConfig, environ: Mapping[str, str]) -> Iterator[DifferenceCause]:
    switch = "megasdc.determinism.enabled"
    enabled = config.megasdc.determinism.enabled
    if not enabled:
        text = (
            "got false: kernels of PyTorch that add with atomic operations may be taken (embedding, attention backward)"
        )
        yield DifferenceCause(switch, text, "set true", "runs")
    for variable in VARIABLES:
        transformer_engine = config.megasdc.model.backend == "transformer_engine"
        if variable.name.startswith("NVTE_") and not transformer_engine:
            continue
        value = environ.get(variable.name)
        if value and not variable.is_fixed(environ):
            text = f"got {value!r}: {variable.reason}"
            yield DifferenceCause(
                variable.name, text, f"unset it, with {switch} true, or set {variable.accepted[0]}", "runs"
            )
        elif not value and not enabled:
            yield DifferenceCause(
                variable.name, f"not set: {variable.reason}", f"set {variable.value}, or {switch} true", "runs"
            )
    if enabled:
        return
    if config.precision != "fp32":
        place = f"torch.backends.cuda.matmul.allow_{config.precision}_reduced_precision_reduction"
        text = f"true by default: whether sums are rounded to {config.precision} on the way is up to cuBLAS and the GPU"
        yield DifferenceCause(place, text, f"set {switch} true", "machines")
    if environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1":
        text = "fp32 products are computed in TF32 on GPUs that have it"
        yield DifferenceCause("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", text, f"unset it, or set {switch} true", "machines")


def _cpu_causes(config: RunConfig, environ: Mapping[str, str]) -> Iterator[DifferenceCause]:
    threads = config.megasdc.parallel.threads
    if threads == 0:
        number = environ.get("OMP_NUM_THREADS") or "the number of cores"
        text = f"got 0: the number of threads is {number} here, and sums depend on it"
        yield DifferenceCause("megasdc.parallel.threads", text, "give a number", "machines")
    if threads != 1 and environ.get("OMP_DYNAMIC", "").lower() == "true":
        text = "got true: fewer threads are used when the machine is busy, and sums depend on their number"
        yield DifferenceCause("OMP_DYNAMIC", text, "unset it", "runs")
    for name in CPU_KERNEL_VARIABLES:
        if value := environ.get(name):
            text = f"got {value!r}: other kernels are taken than where it is not set"
            yield DifferenceCause(name, text, "unset it, or set it alike on every machine", "machines")


def _setting_causes(config: RunConfig, cuda: bool) -> Iterator[DifferenceCause]:
    if config.megasdc.model.megatron.get("tp_comm_overlap"):
        text = "got true: the overlapped sums over tensor ranks are added in no fixed order"
        yield DifferenceCause("megasdc.model.megatron.tp_comm_overlap", text, "remove it", "runs")
    on_host = not cuda or config.offloads_optimizer
    if on_host and not config.deepspeed["optimizer"]["params"]["torch_adam"]:
        text = "got false: DeepSpeed's Adam is compiled for the processor it is built on, and rounds as that does"
        yield DifferenceCause("optimizer.params.torch_adam", text, "set true, or use equal processors", "machines")


def _drop_causes(config: RunConfig) -> Iterator[DifferenceCause]:
    drop = config.megasdc.drop_compute
    if drop.enabled and drop.threshold != INFINITE and drop.replay_decisions is None:
        text = "got true: which micro-batches are dropped depends on the time that they take"
        remedy = "name the decisions.jsonl of the first run in megasdc.drop_compute.replay_decisions"
        yield DifferenceCause("megasdc.drop_compute.enabled", text, remedy, "runs")


def _data_causes(config: RunConfig) -> Iterator[DifferenceCause]:
    data = config.megasdc.data
    for index, source in enumerate(data.sources):
        if source.kind == "hub" and not COMMIT.fullmatch(source.revision or ""):
            text = f"got {shown(source.revision)}, which names another state of the dataset once it is changed"
            remedy = "give a commit, or copy the prepared data instead of preparing them anew"
            yield DifferenceCause(f"megasdc.data.sources.{index}.revision", text, remedy, "machines")
    path = data.tokenizer.path
    if data.tokenizer.kind == "huggingface" and path and not Path(path).exists():
        text = f"got the hub name {path!r}, whose newest state is taken"
        remedy = "name a folder, or copy the prepared data instead of preparing them anew"
        yield DifferenceCause("megasdc.data.tokenizer.path", text, remedy, "machines")
