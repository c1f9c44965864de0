"""Origin of what a process of a run writes: which run, which start of it, which launch, which device."""

from __future__ import annotations

import os
from dataclasses import dataclass

LAUNCH_ID_VARIABLE = "MEGASDC_LAUNCH_ID"


@dataclass(frozen=True)
class Origin:
    """Origin of an event; a field is None where it is not known or there is none.

    Args:
        run: id of the run, the same over all its starts.
        attempt: number of this start of the run, the first is 1.
        device: UUID of the rank's device, as ``nvidia-smi -L`` shows it; None on a CPU.
    """

    run: str | None = None
    attempt: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Launch:
    """A launch of a run, as what belongs to it is found: by its id, never by the clocks of its hosts.

    Args:
        id: that all its processes write.
        planned_at: seconds since the epoch, by the clock of the host that planned it.
        monotonic: when that was on the monotonic clock of that host; None: not known.
        boot: id of its kernel since it was booted; None: likewise.
    """

    id: str
    planned_at: float
    monotonic: float | None = None
    boot: str | None = None

    def wrote(self, launch: str | None, time: float) -> bool:
        """Whether something was written by this launch.

        Args:
            launch: id that it has; None: it is of a version that wrote none, so that only its time can tell.
            time: that it has, seconds since the epoch.
        """
        return time >= self.planned_at if launch is None else launch == self.id


def this_launch() -> str | None:
    """Id of the launch that this process belongs to; None: it was started without ``megasdc launch``."""
    return os.environ.get(LAUNCH_ID_VARIABLE) or None
