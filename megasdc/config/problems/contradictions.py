"""Contradictions between fields of a configuration that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megasdc.common.credentials import find_credentials
from megasdc.config.network import split_address
from megasdc.config.problems.deepspeed import deepspeed_problems
from megasdc.config.problems.detection import detection_problems
from megasdc.config.problems.drop_compute import drop_problems
from megasdc.config.problems.faults import fault_problems
from megasdc.config.problems.model import model_problems
from megasdc.config.problems.optimizer_hooks import hook_problems, user_hook_problems
from megasdc.config.problems.problem import Problem
from megasdc.config.problems.study import study_problems
from megasdc.config.read import shown
from megasdc.config.sections.data import data_problems
from megasdc.config.sections.delay import delay_problems
from megasdc.config.sections.megasdc import MegasdcSection


def find_problems(deepspeed: dict[str, Any], given: dict[str, Any], file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks.

    Args:
        deepspeed: DeepSpeed's keys with defaults filled in.
        given: DeepSpeed's keys as the user gave them.
    """
    yield from model_problems(file)
    yield from data_problems(file.data)
    yield from _training_problems(file)
    yield from _determinism_problems(file)
    yield from _trace_problems(file)
    yield from detection_problems(file, deepspeed)
    yield from hook_problems(file, deepspeed)
    yield from user_hook_problems(file)
    yield from drop_problems(file)
    yield from deepspeed_problems(deepspeed, given)
    yield from fault_problems(file, deepspeed)
    yield from delay_problems(file.delay)
    yield from study_problems(file)
    yield from _address_problems(file)
    if file.checkpoint.require_verified == "always" and not file.audit.enabled:
        yield Problem(
            ("megasdc.checkpoint.require_verified", "megasdc.audit.enabled"),
            'got "always", but without audits no checkpoint is ever verified and the run could never be resumed; set '
            'megasdc.audit.enabled true, or "auto".',
        )
    if file.checkpoint.writing == "async" and any(fault.phase == "checkpoint" for fault in file.faults):
        yield Problem(
            ("megasdc.checkpoint.writing", "megasdc.faults"),
            'got "async", but faults of phase checkpoint are injected right after the step, when the checkpoint is not '
            'written yet; set "sync".',
        )
    local = file.checkpoint.storage == "node_local"
    if local and file.supervise.min_hosts is not None:
        yield Problem(
            ("megasdc.supervise.min_hosts", "megasdc.checkpoint.storage"),
            f'got {file.supervise.min_hosts} with "node_local", where a checkpoint of more hosts is lost with one of '
            'them; set null, or "shared".',
        )
    if local and file.checkpoint.other_layout == "convert":
        yield Problem(
            ("megasdc.checkpoint.other_layout", "megasdc.checkpoint.storage"),
            'got "convert" with "node_local", where no rank sees the files of all ranks; set "refuse", or "shared".',
        )
    if deepspeed["checkpoint"]["use_node_local_storage"] is not local:
        yield Problem(
            ("checkpoint.use_node_local_storage", "megasdc.checkpoint.storage"),
            f'got {str(not local).lower()}, but megasdc.checkpoint.storage is "{file.checkpoint.storage}"; remove the '
            "first.",
        )


def _address_problems(file: MegasdcSection) -> Iterator[Problem]:
    if file.logging.prometheus is not None:
        try:
            split_address(file.logging.prometheus)
        except ValueError as error:
            yield Problem(("megasdc.logging.prometheus",), f"{error}.")
    yield from _archive_problems(file)


def _archive_problems(file: MegasdcSection) -> Iterator[Problem]:
    archive, path = file.checkpoint.archive, "megasdc.checkpoint.archive"
    if archive.address is None:
        return
    if problem := find_credentials(archive.address):
        yield Problem((f"{path}.address",), f"is refused and not shown here: {problem}.")
    if file.study.replicas is not None:
        yield Problem(
            (f"{path}.address", "megasdc.study.replicas"),
            f"got {shown(archive.address)} with megasdc.study.replicas {file.study.replicas}; replicas share the id of "
            "one launch: archive their checkpoints afterwards with `megasdc archive push`.",
        )


DETERMINISTIC_MEGATRON_FIELDS = {"deterministic_mode": True, "tp_comm_overlap": False}
"""Values that deterministic mode needs of fields that `model.megatron` may set.

Source: Megatron-core, docs/user-guide/deterministic-training.md: overlapped tensor-parallel sums are not deterministic.
"""

_M = "megasdc.model"
_P = "megasdc.parallel"


def _training_problems(file: MegasdcSection) -> Iterator[Problem]:
    if not file.logging.run_dir.strip():
        yield Problem(("megasdc.logging.run_dir",), 'got ""; needed: a folder for the run.')
    if file.training.eval_interval > 0 and file.data.split[1] == 0:
        yield Problem(
            ("megasdc.training.eval_interval", "megasdc.data.split"),
            f"got {file.training.eval_interval}, but megasdc.data.split {file.data.split} leaves nothing for "
            "validation; set 0 or give the second share.",
        )


def _determinism_problems(file: MegasdcSection) -> Iterator[Problem]:
    path = "megasdc.determinism.enabled"
    if not file.determinism.enabled:
        return
    if file.parallel.threads == 0:
        yield Problem(
            (f"{_P}.threads", path),
            f"got 0, which leaves the number of threads to each machine, with {path} true; sums depend on that "
            "number: give one.",
        )
    for field, wanted in DETERMINISTIC_MEGATRON_FIELDS.items():
        if file.model.megatron.get(field, wanted) != wanted:
            name = f"{_M}.megatron.{field}"
            yield Problem(
                (name, path),
                f"got {str(not wanted).lower()} with {path} true, which needs {str(wanted).lower()}; remove it.",
            )


def _trace_problems(file: MegasdcSection) -> Iterator[Problem]:
    last = file.model.num_layers + 3  # before the transformer layers: words, positions; after: norm, output
    beyond = [layer for layer in file.trace.layers or () if layer > last]
    if beyond:
        yield Problem(
            ("megasdc.trace.layers", f"{_M}.num_layers"),
            f"got {beyond[0]}, but with {_M}.num_layers {file.model.num_layers} the last place in the pipeline is "
            f"{last}, the output; the transformer layers are 2 to {last - 2}.",
        )
    if file.trace.enabled and file.model.backend != "torch":
        yield Problem(
            ("megasdc.trace.enabled", f"{_M}.backend"),
            f'got true with {_M}.backend "{file.model.backend}", whose submodules cannot be observed; set it to '
            '"torch", or trace.enabled false.',
        )
