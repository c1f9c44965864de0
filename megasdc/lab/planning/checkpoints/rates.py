"""Published failure rates, and the shares of failures by what a restart from them needs, and by cause.

Rates are scaled linearly with the number of devices: a job ends with the first device that fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HOURS_PER_DAY = 24


@dataclass(frozen=True)
class FailureShares:
    """Shares of failures; those of the rest end ranks while all hosts survive.

    Args:
        host: that lose a host, so that what its memory held is gone.
        older: that are found late, so that the newest checkpoints are not to be trusted: silent data corruption.
    """

    host: float
    older: float

    def __post_init__(self) -> None:
        if not (self.host >= 0 and self.older >= 0 and self.host + self.older <= 1):
            raise ValueError(
                f"the shares of failures that lose a host, {self.host:g}, and that need an older checkpoint, "
                f"{self.older:g}: needed at least 0 each and at most 1 together"
            )


@dataclass(frozen=True)
class Preset:
    """A published failure rate.

    Args:
        source: where it was published, with the year.
        note: how the numbers were read.
        causes: shares by cause, of ``CAUSES``.
        failures: counted failures; None: of so many devices and days nothing was published.
        days: in which they were counted.
        devices: on which they were counted.
    """

    source: str
    note: str
    shares: FailureShares
    causes: Mapping[str, float]
    failures: float | None = None
    days: float = 0
    devices: int = 0

    @property
    def per_device_hour(self) -> float | None:
        """Failures of a device in an hour; None where the source has no rate."""
        return None if self.failures is None else self.failures / (self.days * HOURS_PER_DAY * self.devices)


LLAMA3_CAUSES = {
    "ranks": {"software bug": 54, "network switch or cable": 35, "NCCL watchdog timeout": 7, "dependency": 2},
    "host": {
        "faulty GPU": 148,
        "GPU HBM3 memory": 72,
        "host maintenance": 32,
        "GPU SRAM memory": 19,
        "GPU system processor": 17,
        "NIC": 7,
        "GPU thermal interface and sensor": 6,
        "SSD": 3,
        "power supply": 3,
        "server chassis": 2,
        "IO expansion board": 2,
        "CPU": 2,
        "system memory": 2,
    },
    "older": {"silent data corruption": 6},
}
"""Unexpected interruptions of Llama 3 405B by what a restart needs and published cause (its Table 5)."""
_COUNTS = {kind: sum(causes.values()) for kind, causes in LLAMA3_CAUSES.items()}
_LLAMA3_TOTAL = sum(_COUNTS.values())
_LLAMA3 = FailureShares(host=_COUNTS["host"] / _LLAMA3_TOTAL, older=_COUNTS["older"] / _LLAMA3_TOTAL)

CAUSES = HOST, NETWORK, SOFTWARE, HANG, STORAGE, CORRUPTION = (
    "host",
    "network",
    "software",
    "hang",
    "storage",
    "corruption",
)
"""Causes of failures: a host or a device of it, the network, software, ranks that are stuck, a disk, wrong results."""
_CAUSE_OF = {
    "network switch or cable": NETWORK,
    "software bug": SOFTWARE,
    "dependency": SOFTWARE,
    "NCCL watchdog timeout": HANG,
    "SSD": STORAGE,
    "silent data corruption": CORRUPTION,
}
"""Of what Llama 3 was interrupted by; all the rest is ``HOST``."""


def _llama3_causes() -> dict[str, float]:
    found = dict.fromkeys(CAUSES, 0.0)
    for causes in LLAMA3_CAUSES.values():
        for name, count in causes.items():
            found[_CAUSE_OF.get(name, HOST)] += count / _LLAMA3_TOTAL
    return found


_BY_CAUSE = _llama3_causes()
_EXPLICIT, _IMPLICIT = 43_264, 5_948
_LLAMA3_SHARES = "shares of kinds are those of llama3"

PRESETS = {
    "llama3": Preset(
        source="Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783, Table 5",
        note="419 unexpected interruptions in 54 days on 16,384 H100; a faulty device loses its host, corruption needs "
        "an older checkpoint, software and network end ranks alone",
        shares=_LLAMA3,
        causes=_BY_CAUSE,
        failures=_LLAMA3_TOTAL,
        days=54,
        devices=16_384,
    ),
    "opt-175b": Preset(
        source="Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022, arXiv 2205.01068, section 2.5",
        note="at least 35 manual and an estimated 70 automatic restarts in 2 months, taken as 60 days, on 992 A100: a "
        f"lower limit, hardware alone; {_LLAMA3_SHARES}",
        shares=_LLAMA3,
        causes=_BY_CAUSE,
        failures=105,
        days=60,
        devices=992,
    ),
    "rsc-1": Preset(
        source="Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2025, arXiv "
        "2410.21680",
        note=f"6.50 failures in 1,000 days of a node with 8 A100; {_LLAMA3_SHARES}",
        shares=_LLAMA3,
        causes=_BY_CAUSE,
        failures=6.5,
        days=1,
        devices=8_000,
    ),
    "byterobust": Preset(
        source="Wan et al., Robust LLM Training Infrastructure at ByteDance, 2025, arXiv 2509.16293",
        note="shares only, no rate: 43,264 explicit and 5,948 implicit failures in 778,135 jobs; all implicit ones "
        "(hangs, NaN, slow jobs) are taken to need an older checkpoint, an upper limit, or by cause for hangs; "
        "explicit ones are split as those of llama3 are",
        shares=FailureShares(
            host=_EXPLICIT / (_EXPLICIT + _IMPLICIT) * _COUNTS["host"] / (_COUNTS["host"] + _COUNTS["ranks"]),
            older=_IMPLICIT / (_EXPLICIT + _IMPLICIT),
        ),
        causes={
            name: _IMPLICIT / (_EXPLICIT + _IMPLICIT)
            if name == HANG
            else share / (1 - _BY_CAUSE[HANG]) * _EXPLICIT / (_EXPLICIT + _IMPLICIT)
            for name, share in _BY_CAUSE.items()
        },
    ),
}
