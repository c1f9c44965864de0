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
    late = [name for name in ("hang_floor_s", "slow_floor_s") if getattr(health, name) >= timeout_s]
    if not late:
        return
    hangs = {"hang_floor_s": f"hangs outside of {_SLOW} end", "slow_floor_s": f"hangs in {_SLOW} end"}
    which = hangs[late[0]] if len(late) == 1 else "every hang ends"
    values = ", and slow_floor_s ".join(f"{getattr(health, name):g}" for name in late)
    yield (
        f"megasdc.health.{late[0]}: {values}, but megasdc.parallel.timeout_s is {timeout_s:g}: {which} by the timeout, "
        f"without a named cause; set a lower {' and '.join(late)}, or a higher timeout_s."
    )
