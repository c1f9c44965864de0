"""What telemetry knows of a host: a verdict with its reasons, as JSON and as an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megasdc.common.errors import LaunchError
from megasdc.ops.devices.device_verdict import DeviceVerdict, VerdictReason, worst
from megasdc.ops.devices.reader import ReaderState
from megasdc.ops.devices.rules import OURS


@dataclass(frozen=True)
class Survey:
    """Devices and host at one moment.

    Args:
        nodes: files of ``/dev`` that stand for NVIDIA's devices.
    """

    host: str
    looks: Sequence[ReaderState]
    nodes: Sequence[str]

    def by_name(self) -> dict[str, list[VerdictReason]]:
        """Reasons for the verdict of each device, of the host, and of telemetry itself; empty lists: fit."""
        found = {one.label: one.reasons for look in self.looks for one in look.items}
        for look in self.looks:
            silent = self._silent(look)
            found[f"telemetry of {look.name}"] = look.reasons + silent
        return found

    def _silent(self, look: ReaderState) -> list[VerdictReason]:
        """Devices are there, and NVML shows none."""
        if look.name != "devices" or not look.absent or not self.nodes:
            return []
        text = f"{', '.join(self.nodes)} in /dev, but {look.absent}"
        return [VerdictReason(DeviceVerdict.DEGRADED, look.name, text, "check the driver: dmesg, nvidia-smi", OURS)]

    @property
    def verdict(self) -> DeviceVerdict:
        """The worst of all."""
        return worst(one for reasons in self.by_name().values() for one in reasons)

    @property
    def exit_code(self) -> int:
        """0: nothing is unfit."""
        return LaunchError.exit_code if self.verdict == DeviceVerdict.UNFIT else 0

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "host": self.host,
            "verdict": self.verdict.label,
            "exit_code": self.exit_code,
            "reasons": {name: [one.as_dict() for one in some] for name, some in self.by_name().items() if some},
            "readings": [look.as_dict() for look in self.looks],
        }
