"""The table of what a guard looks at in each phase of a step, the one of our own runs (``megasdc.sdc.coverage``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megasdc.attached.training import Training
from megasdc.config.detection import AlwaysOnSection, AuditSection, SdcSection
from megasdc.config.guard import GuardSettings
from megasdc.config.hooks import HookSpec
from megasdc.config.sections import CheckpointSection, DeterminismSection
from megasdc.sdc.coverage import Shape, render_coverage


def guard_coverage(
    training: Training, slices: int | None, products: int | None, within: Mapping[str, str]
) -> list[str]:
    """The phases of a step and their checks in a training, a line for each row, and the conclusions.

    Args:
        slices: number of slices of the optimizer, on the rank that has most; None: they are not checked.
        products: number of products of linear layers, likewise.
        within: texts on exact checks that are within a tolerance now, by phase.
    """
    dims = training.dims
    shape = Shape(
        replicas=dims.data,
        tensor=dims.tensor,
        micro_batches=int(training.engine.gradient_accumulation_steps()),
        covered=None,
        recomputes=False,
        pipeline=dims.pipeline,
        within=within,
        slices=slices,
        products=products,
        attached=True,
    )
    return render_coverage(_sections_of(training.settings), shape)


@dataclass
class GuardSections:
    """Sections of a run of our own with the checks of a guard: ``sdc.coverage.CheckSections``."""

    audit: AuditSection
    sdc: SdcSection
    determinism: DeterminismSection = field(default_factory=lambda: DeterminismSection(enabled=True))
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    optimizer_hooks: list[HookSpec] = field(default_factory=list)


def _sections_of(settings: GuardSettings) -> GuardSections:
    audit, sdc = settings.audit, settings.sdc
    off = dict.fromkeys(("recompute", "chain", "finite", "tokens"), False)
    always_on = AlwaysOnSection.model_validate({**sdc.always_on.model_dump(), **off})
    return GuardSections(
        AuditSection(
            enabled=audit.enabled,
            interval=audit.interval,
            micro_batch="extra",
            permuted=audit.permuted,
            longest_interval=audit.longest_interval,
        ),
        SdcSection(
            always_on=always_on,
            golden=None if settings.golden.record else sdc.golden,
            golden_interval=sdc.golden_interval,
        ),
    )
