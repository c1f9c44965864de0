"""Settings of a run that decide which samples its steps take, as they were in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megasdc.common.errors import DataError
from megasdc.config.checks import check_layout
from megasdc.config.detection import TRAINING, AuditSection
from megasdc.config.drop_compute import DISCARD, RESAMPLE, DropComputeSection
from megasdc.config.load import RunConfig, parse_config
from megasdc.data.position import StepWork
from megasdc.dropcompute.gate import StepDecisions
from megasdc.lab.triage.history import RunStart

_USED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "megasdc.audit.",
    "megasdc.data.skip",
    "megasdc.drop_compute.",
)
"""Fields, or beginnings of their paths, that decide which samples a step takes and may change at a resume."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of the steps after ``start``; ``save_interval``: steps, 0 for no checkpoints."""

    start: int
    data: int
    micro_batch_size: int
    micro_batches: int
    audit: AuditSection
    save_interval: int
    drops: DropComputeSection
    skip: tuple[range, ...]

    @property
    def are_plain(self) -> bool:
        """Whether all replicas take the same number of samples in every step."""
        return not (self.audit.enabled or self.drops.enabled)

    def work(self, step: int, decided: StepDecisions | None, *, requested: bool) -> StepWork:
        """What a step takes.

        Args:
            decided: micro-batches that it started; None: all.
            requested: whether it was audited on request.
        """
        planned = self.micro_batches if decided is None else decided.planned
        shares = self.audit.micro_batch == TRAINING  # an extra one moves no position, as that of a start's first step
        audited = shares and (requested or self.audit.is_due(step, self.save_interval))
        return StepWork(
            size=self.micro_batch_size,
            planned=planned,
            completed=(planned,) * self.data if decided is None else decided.completed,
            source=self.audit.source(step, self.data) if audited else None,
            given_up=self.drops.samples == DISCARD,
            again=self.drops.compensation == RESAMPLE,
            skip=self.skip,
        )


def settings_of_starts(config: RunConfig, starts: Sequence[RunStart]) -> list[StepSettings]:
    """The settings of each start, in their order.

    Args:
        config: of the last start.
        starts: each with the values that it changed, so that those of the start before are known.

    Raises:
        ConfigError: the layout does not fit.
        DataError: replicas took different numbers of micro-batches.
    """
    configs = configs_of_starts(config, starts, _USED)
    return [_settings(own, start) for own, start in zip(configs, starts, strict=True)]


def configs_of_starts(
    config: RunConfig, starts: Sequence[RunStart], fields: str | tuple[str, ...] = ""
) -> list[RunConfig]:
    """The configuration of each start, in their order; arguments and errors as of ``settings_of_starts``.

    Args:
        fields: beginnings of the paths that are put back to what they were; others stay as in the last start.
    """
    raw, found = config.resolved(), [config]
    for start in reversed(starts[1:]):
        for path, old in start.changed.items():
            if path.startswith(fields):
                _set(raw, path, old)
        found.append(parse_config(raw, source=config.source, stored=True))
    return found[::-1]


def _settings(config: RunConfig, start: RunStart) -> StepSettings:
    sections = config.megasdc
    layout = check_layout(config, start.data * sections.parallel.tensor * sections.parallel.pipeline)
    if layout.is_uneven:
        raise DataError(
            f"from step {start.step + 1} on {layout.data} replicas took different numbers of micro-batches "
            f"(train_batch_size {layout.train_batch_size}); only steps in which all take as many can be shown"
        )
    return StepSettings(
        start.step,
        start.data,
        layout.micro_batch_size,
        layout.accumulation_steps,
        sections.audit,
        sections.checkpoint.interval,
        sections.drop_compute,
        tuple(range(first, end) for first, end in sections.data.skip),
    )


def _set(raw: dict[str, Any], path: str, value: Any) -> None:
    keys: list[Any] = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place: Any = raw
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
