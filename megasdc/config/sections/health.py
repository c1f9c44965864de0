"""Section `health`: what ranks are doing, and how a run that is stuck ends."""

from __future__ import annotations

from megasdc.config.fields import NO_MATTER, PositiveFloat, Section, setting


class HealthSection(Section):
    """Progress records of every rank, an agent on each host, and hangs that are named and ended."""

    at_resume = "applied"

    enabled: bool = setting(
        False, "Record what each rank is doing, watch it with an agent on each host, and end the run when it is stuck."
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
    alert_command: list[str] = setting(
        [],
        "Program and arguments, run without a shell for at most 10 s with each incident as JSON on standard input: a "
        "run that is stuck (with `enabled`), a finding of corruption. Empty: none.",
        NO_MATTER,
    )
