"""Contradictions in the settings of detection, and the cost of audits in samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megasdc.config.problems.problem import Problem
from megasdc.config.sections.detection import TRAINING
from megasdc.config.sections.megasdc import MegasdcSection

MOST_SAMPLES_LOST = 0.005
"""Share of the independent samples taken by audits above which a warning is given."""


def detection_problems(file: MegasdcSection, deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks; ``deepspeed`` has defaults filled in."""
    checks = {"megasdc.audit.enabled": file.audit.enabled, "megasdc.sdc.always_on.enabled": file.sdc.always_on.enabled}
    for name in (name for name, enabled in checks.items() if enabled):
        if not file.determinism.enabled:
            yield Problem(
                (name, "megasdc.determinism.enabled"),
                "got true with megasdc.determinism.enabled false; results that need not repeat cannot be compared bit "
                "by bit, and healthy ranks would be flagged; set megasdc.determinism.enabled true.",
            )
        if file.model.backend != "torch":
            yield Problem(
                (name, "megasdc.model.backend"),
                f'got true with megasdc.model.backend "{file.model.backend}", whose submodules cannot be observed; '
                'set the backend to "torch".',
            )
    yield from _isolation_problems(file)
    recomputes = bool(deepspeed.get("pipeline", {}).get("activation_checkpoint_interval"))
    always_on = file.sdc.always_on
    if always_on.enabled and always_on.recompute and not recomputes:
        yield Problem(
            ("megasdc.sdc.always_on.recompute", "pipeline.activation_checkpoint_interval"),
            "got true, but nothing is recomputed; set pipeline.activation_checkpoint_interval to 1, or recompute to "
            "null.",
        )
    parts = ("parameters", "finite", "slice_elements", "rows", "tokens")
    checked = any(getattr(always_on, one) for one in parts)
    if always_on.enabled and not checked and not (recomputes and always_on.recompute is not False):
        yield Problem(
            ("megasdc.sdc.always_on.enabled",),
            "got true, but nothing is checked: parameters, finite and tokens are false and no "
            "recomputation is compared; set sdc.always_on.parameters true, or enabled false.",
        )
    if file.sdc.budget is not None and always_on.coverage != "auto":
        yield Problem(
            ("megasdc.sdc.cost", "megasdc.sdc.always_on.coverage"),
            f'got {file.sdc.budget} with a fixed coverage "{always_on.coverage}", which follows no budget; set '
            'coverage to "auto", or budget to null.',
        )
    asked = always_on.slice_elements if always_on.enabled else None
    if asked and not deepspeed["optimizer"]["params"]["torch_adam"]:
        yield Problem(
            ("megasdc.sdc.always_on.slice_elements", "optimizer.params.torch_adam"),
            f"got {asked} with optimizer.params.torch_adam false; the update is recomputed as PyTorch's optimizer does "
            "it; set torch_adam true, or slice_elements to null.",
        )


def _isolation_problems(file: MegasdcSection) -> Iterator[Problem]:
    """What the replicas need that go on: the state of the others, from memory, in a layout that is not theirs."""
    memory = file.checkpoint.memory
    needed = {
        "checkpoint.memory.interval": (memory.interval, bool(memory.interval), "1"),
        "checkpoint.memory.partners": (memory.partners, memory.partners, "true"),
        "checkpoint.other_layout": (file.checkpoint.other_layout, file.checkpoint.other_layout == "convert", "convert"),
        "study.replicas": (file.study.replicas, file.study.replicas is None, "null"),
    }
    for name in file.sdc.policy.isolating:
        for field, (got, fits, wanted) in needed.items():
            if not fits:
                yield Problem(
                    (f"megasdc.sdc.policy.{name}", f"megasdc.{field}"),
                    f'got "isolate" with megasdc.{field} {json.dumps(got)}; the replicas that go on take over what the '
                    f"isolated one had in the optimizer from memory; set megasdc.{field} to {wanted}, or the policy to "
                    '"halt".',
                )


def isolation_layout_problems(file: MegasdcSection, replicas: int) -> Iterator[str]:
    """Yield policies that isolate a replica where too few others would be left."""
    needed = file.sdc.isolation.min_replicas + 1
    if replicas < needed:
        for name in file.sdc.policy.isolating:
            yield (
                f'megasdc.sdc.policy.{name}: got "isolate" with {replicas} replicas; {needed} are needed, of which '
                f'megasdc.sdc.isolation.min_replicas go on; start more ranks, or set the policy to "halt".'
            )


def asks_golden(file: MegasdcSection) -> bool:
    """Whether a run computes the golden workload without a dispute: at the start or every ``golden_interval``."""
    asked = file.sdc.golden_at_start or file.sdc.golden_interval is not None
    return file.sdc.golden is not None and file.determinism.enabled and asked


def samples_lost(file: MegasdcSection, micro_batches: int) -> float:
    """Upper bound of the share of independent samples that audits take; 0 without audits of training micro-batches.

    ``micro_batches`` is the number M of a step on each replica.
    """
    takes = file.audit.enabled and file.audit.micro_batch == TRAINING
    return 1 / (micro_batches * file.audit.interval) if takes else 0.0
