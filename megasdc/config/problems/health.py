"""Settings of health that are allowed but probably unintended."""

from __future__ import annotations

from collections.abc import Iterator

from megasdc.config.sections.megasdc import MegasdcSection

_SLOW = "starts, first steps, evaluations, saves, what comes between steps, and phases that were seldom timed yet"


def health_warnings(file: MegasdcSection) -> Iterator[str]:
    """Yield which hangs end by the timeout of collectives before health can name their cause."""
    health, timeout_s = file.health, file.parallel.timeout_s
    if not health.is_on(launched=True, studied=file.study.replicas is not None):
        return
    floors = {"hang_floor_s": health.hang_floor_s, "slow_floor_s": health.slow_floor_s}
    late = [name for name, floor_s in floors.items() if floor_s >= timeout_s]
    if not late:
        return
    which = {"hang_floor_s": "hangs in other phases than " + _SLOW, "slow_floor_s": "hangs in " + _SLOW}
    what = "no hang is named: all" if len(late) == 2 else which[late[0]]
    values = " and ".join(f"{name} {floors[name]:g}" for name in late)
    yield (
        f"megasdc.health.{late[0]}: {values}, but megasdc.parallel.timeout_s is {timeout_s:g}: {what} end by the "
        f"timeout, without the cause; set a lower {' and '.join(late)}, or a higher timeout_s."
    )
