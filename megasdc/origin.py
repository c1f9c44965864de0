"""Origin of what a process of a run writes: which run, which start of it, which device."""

from __future__ import annotations

from dataclasses import dataclass


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
