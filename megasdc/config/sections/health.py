"""Section `health`: what ranks are doing, how a run that is stuck ends, and which ranks are slow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megasdc.config.fields import NO_MATTER, NonNegativeInt, PositiveFloat, Section, asks, setting, tunes
from megasdc.config.sections.detection import CHECKS


class HealthSection(Section):
    """Progress records of every rank, an agent on each host, hangs that are named and ended, and stragglers."""

    at_resume = "applied"
    needs = tunes("health.enabled=null or health.enabled=true")

    enabled: bool | None = setting(
        None,
        "Record what each rank is doing, watch it with an agent on each host, and end the run when it is stuck; null: "
        "in runs that a launcher starts, but in no study and no run of a sweep.",
    )
    hang_floor_s: PositiveFloat = setting(
        60.0, "Least seconds without any progress after which a run is stuck; `parallel.timeout_s` still holds."
    )
    slow_floor_s: PositiveFloat = setting(
        900.0, "The same for starts, first steps, evaluations, saves, and phases that were seldom timed yet."
    )
    hang_factor: PositiveFloat = setting(
        10.0, "A phase may last this many times the 99th percentile of its durations in this run."
    )
    slow_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = setting(
        1.05,
        "A rank whose micro-batches take so many times as long as those of its peers of the same stage is a straggler, "
        "if noise does not explain it; above 1. Healthy devices of one kind differ by less.",
    )
    ping_interval: NonNegativeInt = setting(
        200, "Steps between measurements of the links between hosts, of a few milliseconds; 0: never."
    )
    alert_command: list[str] = setting(
        [],
        "Program and arguments, run without a shell for at most 10 s with each incident as JSON on standard input: a "
        "run that is stuck (with `enabled`), a finding of corruption. Empty: none.",
        NO_MATTER,
        asks(f"health.enabled=null or health.enabled=true or {CHECKS}"),
    )

    def is_on(self, *, launched: bool, studied: bool) -> bool:
        """Whether a run is watched.

        Args:
            launched: whether its ranks are processes that a launcher has started, which an agent can end.
            studied: whether it is part of a study.
        """
        return launched and not studied if self.enabled is None else self.enabled
