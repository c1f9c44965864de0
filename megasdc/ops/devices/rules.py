"""Rules by which readings become a verdict, each with its source; none of them proves silent data corruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from megasdc.ops.devices.readings import HOST, History
from megasdc.ops.devices.verdict import Reason, Verdict
from megasdc.ops.devices.xid import RESET, xid_reasons

NVML = "NVIDIA, NVML API reference: https://docs.nvidia.com/deploy/nvml-api/"
MEMORY = "NVIDIA, GPU memory error management: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"
EDAC = "Linux, Documentation/ABI/testing/sysfs-devices-edac"
OURS = "no published limit: a choice of this project"
CLOCK_BITS = {
    0x01: "idle",
    0x02: "clocks set by the user",
    0x04: "power cap",
    0x08: "slowdown by hardware",
    0x10: "clocks in step with other devices",
    0x20: "too hot, slowed by the driver",
    0x40: "too hot, slowed by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Reasons for clocks below the highest, by bit; ``nvml.h``."""
RECOVERY = ("none", "reset the device", "reboot the host", "stop peer-to-peer access", "drain and reset the device")
"""What field 230 of NVML asks for, by value."""


class Over(Enum):
    """What of a value a rule is about."""

    NOW = "now"
    RECENT = "in the last 10 minutes"


@dataclass(frozen=True)
class Rule:
    """A verdict on a device whose value fulfils a condition.

    Args:
        condition: on the value, or on what was added to the counter.
        text: what that means.
    """

    value: str
    over: Over
    condition: Callable[[float], bool]
    verdict: Verdict
    text: str
    remedy: str
    source: str


def at_least(limit: float) -> Callable[[float], bool]:
    """Condition: the value is this or more."""
    return lambda value: value >= limit


def below(limit: float) -> Callable[[float], bool]:
    """Condition: the value is less."""
    return lambda value: value < limit


def one_of(*wanted: int) -> Callable[[float], bool]:
    """Condition: the value is one of these."""
    return lambda value: value in wanted


def any_bit(mask: int) -> Callable[[float], bool]:
    """Condition: the value has a bit of these."""
    return lambda value: bool(int(value) & mask)


_D, _U, _NOW, _RECENT = Verdict.DEGRADED, Verdict.UNFIT, Over.NOW, Over.RECENT
_WATCH = "watch it; test the host with megasdc stress when the run has ended"
_COOL = "check cooling, dust and the temperature of the inlet"
_POWER = "check power supplies and cables"
_SERVICE = "reset the device when convenient, and plan its service"
_REPLACE = "take the device out of service and ask the vendor for a replacement"
_DIMM = "drain the host, find the memory module by EDAC's labels, and replace it"

DEVICE_RULES: Sequence[Rule] = (
    Rule("lost", _NOW, at_least(1), _U, "the device is lost", "reboot the host; check slot and power", NVML),
    Rule("reset_required", _NOW, at_least(1), _U, "the driver asks for a reset", RESET, NVML),
    Rule("recovery_action", _NOW, one_of(1, 2, 6, 7), _U, "the driver asks for a reset or a reboot", RESET, NVML),
    Rule("recovery_action", _NOW, one_of(3, 4, 5), _D, "the driver asks for a recovery", _SERVICE, NVML),
    Rule("remap_failure", _NOW, at_least(1), _U, "a row of memory could not be remapped", _REPLACE, MEMORY),
    Rule("remap_pending", _NOW, at_least(1), _D, "rows of memory wait for a reset to be remapped", _SERVICE, MEMORY),
    Rule("sram_threshold_exceeded", _NOW, at_least(1), _U, "too many uncorrectable errors in SRAM", _REPLACE, MEMORY),
    Rule("ecc_uncorrected_volatile", _RECENT, at_least(1), _U, "new uncorrectable ECC errors", RESET, MEMORY),
    Rule("ecc_uncorrected_volatile", _NOW, at_least(1), _D, "uncorrectable ECC errors since load", _SERVICE, MEMORY),
    Rule("ecc_corrected_volatile", _RECENT, at_least(100), _D, "many corrected ECC errors", _WATCH, OURS),
    Rule("clock_reasons", _NOW, any_bit(0x20 | 0x40), _D, "clocks are lowered: the device is too hot", _COOL, NVML),
    Rule("clock_reasons", _NOW, any_bit(0x80), _D, "clocks are lowered: power brake", _POWER, NVML),
    Rule("clock_reasons", _NOW, any_bit(0x08), _D, "clocks are lowered by hardware: heat or power", _COOL, NVML),
    Rule("thermal_violation_s", _RECENT, at_least(60), _D, "slowed by heat for a tenth of the time", _COOL, OURS),
    Rule("nvlink_recoveries", _RECENT, at_least(1), _D, "an NVLink connection had to recover", _WATCH, OURS),
    Rule("nvlink_flit_crc_errors", _RECENT, at_least(100), _D, "many CRC errors on NVLink", _WATCH, OURS),
    Rule("nvlink_data_crc_errors", _RECENT, at_least(100), _D, "many CRC errors on NVLink", _WATCH, OURS),
)
HOST_RULES: Sequence[Rule] = (
    Rule("edac_uncorrected", _RECENT, at_least(1), _U, "new uncorrectable errors of main memory", _DIMM, EDAC),
    Rule("edac_uncorrected", _NOW, at_least(1), _D, "uncorrectable errors of main memory since load", _DIMM, EDAC),
    Rule("edac_corrected", _RECENT, at_least(100), _D, "many corrected errors of main memory", _DIMM, OURS),
    Rule("mce_lines", _RECENT, at_least(1), _D, "the kernel reports hardware errors", "read them: dmesg", OURS),
    Rule("load_per_cpu", _NOW, at_least(4), _D, "far more processes than CPUs", "look for other programs", OURS),
    Rule("memory_available_share", _NOW, below(0.03), _D, "memory is nearly used up", "free memory", OURS),
    Rule("disk_free_bytes", _NOW, below(2**30), _D, "less than 1 GiB of disk for the run folder", "free space", OURS),
    Rule("shared_memory_free_bytes", _NOW, below(2**26), _D, "less than 64 MiB in /dev/shm", "free space there", OURS),
    Rule("disk_write_s", _NOW, at_least(1), _D, "a block of 4 KiB took long to the disk", "check the storage", OURS),
)


def judge(history: History) -> list[Reason]:
    """Why a device or a host is not fit, the worst first; empty: it is."""
    rules = HOST_RULES if history.latest.id == HOST else DEVICE_RULES
    recent = history.recent
    reasons = []
    for rule in rules:
        value = history.latest.values.get(rule.value) if rule.over is Over.NOW else recent.get(rule.value)
        if value is not None and rule.condition(value):
            text = f"{rule.text} ({rule.value} {_shown(rule.value, value)}{_when(rule.over)})"
            reasons.append(Reason(rule.verdict, rule.value, text, rule.remedy, rule.source))
    reasons += xid_reasons(history.xid_counts, history.recent_xids)
    return sorted(reasons, key=lambda one: -one.verdict)


def _when(over: Over) -> str:
    return "" if over is Over.NOW else f" {over.value}"


def _shown(name: str, value: float) -> str:
    if name == "clock_reasons":
        return ", ".join(text for bit, text in CLOCK_BITS.items() if int(value) & bit)
    if name == "recovery_action" and int(value) < len(RECOVERY):
        return RECOVERY[int(value)]
    return f"{value:g}"
