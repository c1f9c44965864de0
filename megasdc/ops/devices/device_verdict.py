"""Verdicts on a device or a host, and the reasons for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class DeviceVerdict(IntEnum):
    """Whether a device can be trained on; the largest of several counts."""

    FIT = 0
    DEGRADED = 1
    """It works, and is slower, has less room, or needs service soon."""
    UNFIT = 2
    """It is lost or has to be reset, rebooted or replaced first."""

    @property
    def label(self) -> str:
        """As people and files have it."""
        return self.name.lower()


@dataclass(frozen=True)
class VerdictReason:
    """Why a verdict is not ``fit``.

    Args:
        value: name of the value that a rule is about.
        text: what was read, and what it means.
        remedy: what to do.
        source: of the rule.
    """

    verdict: DeviceVerdict
    value: str
    text: str
    remedy: str
    source: str

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "verdict": self.verdict.label,
            "value": self.value,
            "text": self.text,
            "remedy": self.remedy,
            "source": self.source,
        }


def worst(reasons: Iterable[VerdictReason]) -> DeviceVerdict:
    """The verdict of these reasons; fit without any."""
    return max((one.verdict for one in reasons), default=DeviceVerdict.FIT)
