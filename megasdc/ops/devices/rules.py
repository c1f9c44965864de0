"""Rules by which readings become a verdict, each with its source; none of them proves silent data corruption.

What the XIDs of NVIDIA's driver mean, and what to do about each.

Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (``SOURCE``), its columns of immediate and investigatory
actions for A100 to GB200; in our words. Numbers that mean nothing to training (video, confidential computing, test
messages) are left out, and reported as unknown.

Difference: the catalog has actions, not verdicts. Here a device whose action is a reset, a reboot or the vendor is
``unfit``, one that keeps working and needs one later is ``degraded``, and an error of the program leaves it ``fit``.
Where the action depends on the rest of the message (74, 144 to 150, 154) it is ``degraded``, and so are commands that
arrived damaged (32, 80): the link may be at fault. Where the catalog names no action (167 to 172) the verdict is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from megasdc.ops.devices.device_verdict import DeviceVerdict, VerdictReason
from megasdc.ops.devices.readings import HOST, DeviceHistory

SOURCE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
PROGRAM = "restart the run; if it recurs, check the program with compute-sanitizer, then the device"
RESET = "reset the device or reboot the host before it trains again; if it recurs, ask the vendor"
LATER = "reset the device at the next break"
LINK = "reset the device; if it recurs, check the NVLink connections and the devices at their other ends"
FOLLOW = "follow the recovery action that the driver names in the same message"


@dataclass(frozen=True)
class Xid:
    """An XID: what it means, what to do, and what it says of the device."""

    meaning: str
    remedy: str
    verdict: DeviceVerdict


_FIT, _DEGRADED, _UNFIT = DeviceVerdict.FIT, DeviceVerdict.DEGRADED, DeviceVerdict.UNFIT
_COPY = Xid("a copy engine met an error", "restart the run; if it recurs, ask the vendor", _DEGRADED)
_NVLINK5 = Xid("an error in the device's NVLink unit", LINK, _DEGRADED)

XIDS: dict[int, Xid] = {
    8: Xid("the device stopped working on a task", "restart the run; if it recurs, ask the vendor", _DEGRADED),
    11: Xid("a damaged or invalid stream of commands", PROGRAM, _FIT),
    13: Xid("an exception in a kernel, mostly an access out of bounds or an illegal instruction", PROGRAM, _FIT),
    31: Xid("a kernel accessed memory that it may not, mostly an error of the program", PROGRAM, _FIT),
    32: Xid("damaged commands reached the device, by the program, the driver or the PCIe link", PROGRAM, _DEGRADED),
    38: Xid("an error in the driver's firmware", "if it recurs, ask the vendor", _DEGRADED),
    39: _COPY,
    40: _COPY,
    41: _COPY,
    43: Xid("a program met an error of its own and ended; the device is well", PROGRAM, _FIT),
    44: Xid("an error while the device changed programs", "if it recurs, ask the vendor", _DEGRADED),
    45: Xid("a program was torn down, mostly because of Ctrl-C, a kill, or another XID", "see the other XIDs", _FIT),
    46: Xid("the device stopped working", RESET, _UNFIT),
    48: Xid("an uncorrectable ECC error", RESET, _UNFIT),
    54: Xid("auxiliary power is not connected", "check the power cables of the device", _UNFIT),
    62: Xid("a controller in the device halted", RESET, _UNFIT),
    63: Xid("a row of memory was marked to be remapped at the next reset", LATER, _DEGRADED),
    64: Xid("a row of memory could not be remapped", RESET, _UNFIT),
    69: Xid("a kernel or the driver used the device's class interface wrongly", PROGRAM, _FIT),
    70: _COPY,
    71: _COPY,
    72: _COPY,
    74: Xid("an error of an NVLink connection, here or at its other end", LINK, _DEGRADED),
    75: _COPY,
    76: _COPY,
    77: _COPY,
    79: Xid(
        "the device has fallen off the PCIe bus",
        "reboot the host; if it recurs, check slot, cables and power, then ask the vendor",
        _UNFIT,
    ),
    80: Xid("commands arrived damaged at the device", PROGRAM, _DEGRADED),
    85: _COPY,
    92: Xid("many corrected ECC errors", "watch the device; ask the vendor if it goes on", _DEGRADED),
    94: Xid("an uncorrectable memory error that was contained to one program", LATER, _DEGRADED),
    95: Xid("an uncorrectable memory error that was not contained", RESET, _UNFIT),
    109: Xid("the device did not change programs in time", RESET, _UNFIT),
    110: Xid(
        "a security fault, rare without a hardware failure", "power the host off and on, then ask the vendor", _UNFIT
    ),
    119: Xid("the device's system processor (GSP) did not answer in time", RESET, _UNFIT),
    120: Xid("an error in the code of the device's system processor (GSP)", RESET, _UNFIT),
    121: Xid("corrected errors of the connection between CPU and GPU", LATER, _DEGRADED),
    **dict.fromkeys(range(126, 136), _COPY),
    136: Xid("an NVLink connection could not be trained", LINK, _UNFIT),
    137: Xid("an access over NVLink that is not allowed, mostly an error of the program", PROGRAM, _FIT),
    140: Xid("an uncorrectable memory error that the driver could not handle", RESET, _UNFIT),
    141: Xid("an error in CUDA's fast path", "if it recurs, ask the vendor", _DEGRADED),
    143: Xid("the device could not be initialised", RESET, _UNFIT),
    **dict.fromkeys(range(144, 151), _NVLINK5),
    154: Xid("the action that recovers the device has changed", FOLLOW, _DEGRADED),
    155: Xid("an NVLink connection went down as software defines it", LINK, _UNFIT),
    156: Xid("a part of the device is retired at the next reset", RESET, _UNFIT),
    157: Xid("a part of the device could not be retired: none is spare", "expect it again; ask the vendor", _DEGRADED),
    158: Xid("the device met a fatal timeout", RESET, _UNFIT),
    160: Xid("a memory channel was retired", "if it recurs, ask the vendor", _DEGRADED),
    161: Xid("a memory channel could not be retired", "ask the vendor", _DEGRADED),
    167: Xid("a fatal timeout of the PCIe link", RESET, _UNFIT),
    168: Xid("memory errors in the protected region; only without ECC", "turn ECC on, or reboot the host", _DEGRADED),
    169: Xid("the device's security controller halted", RESET, _UNFIT),
    171: Xid("an uncorrectable error in DRAM, beside XID 48", RESET, _UNFIT),
    172: Xid("an uncorrectable error in SRAM, beside XID 48", RESET, _UNFIT),
}
UNKNOWN = Xid("not in the table of this version", f"look it up: {SOURCE}", DeviceVerdict.DEGRADED)


def xid_reasons(since_start: Iterable[int], recent: Iterable[int]) -> list[VerdictReason]:
    """Reasons by XIDs, one a number.

    A device cannot be reset while a run holds it, so what makes it unfit counts until the run ends; what degrades it
    counts while it is recent.
    """
    unfit = {number for number in since_start if _look_up(number).verdict == DeviceVerdict.UNFIT}
    degraded = {number for number in recent if _look_up(number).verdict == DeviceVerdict.DEGRADED}
    return [_reason(number) for number in sorted(unfit | degraded)]


def _look_up(number: int) -> Xid:
    return XIDS.get(number, UNKNOWN)


def _reason(number: int) -> VerdictReason:
    found = _look_up(number)
    return VerdictReason(found.verdict, "xid", f"XID {number}: {found.meaning}", found.remedy, SOURCE)


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
class DeviceRule:
    """A verdict on a device whose value fulfils a condition.

    Args:
        condition: on the value, or on what was added to the counter.
        text: what that means.
    """

    value: str
    over: Over
    condition: Callable[[float], bool]
    verdict: DeviceVerdict
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


_D, _U, _NOW, _RECENT = DeviceVerdict.DEGRADED, DeviceVerdict.UNFIT, Over.NOW, Over.RECENT
_WATCH = "watch it; test the host with megasdc stress when the run has ended"
_COOL = "check cooling, dust and the temperature of the inlet"
_POWER = "check power supplies and cables"
_SERVICE = "reset the device when convenient, and plan its service"
_REPLACE = "take the device out of service and ask the vendor for a replacement"
_DIMM = "drain the host, find the memory module by EDAC's labels, and replace it"

DEVICE_RULES: Sequence[DeviceRule] = (
    DeviceRule("lost", _NOW, at_least(1), _U, "the device is lost", "reboot the host; check slot and power", NVML),
    DeviceRule("reset_required", _NOW, at_least(1), _U, "the driver asks for a reset", RESET, NVML),
    DeviceRule("recovery_action", _NOW, one_of(1, 2, 6, 7), _U, "the driver asks for a reset or a reboot", RESET, NVML),
    DeviceRule("recovery_action", _NOW, one_of(3, 4, 5), _D, "the driver asks for a recovery", _SERVICE, NVML),
    DeviceRule("remap_failure", _NOW, at_least(1), _U, "a row of memory could not be remapped", _REPLACE, MEMORY),
    DeviceRule(
        "remap_pending", _NOW, at_least(1), _D, "rows of memory wait for a reset to be remapped", _SERVICE, MEMORY
    ),
    DeviceRule(
        "sram_threshold_exceeded", _NOW, at_least(1), _U, "too many uncorrectable errors in SRAM", _REPLACE, MEMORY
    ),
    DeviceRule("ecc_uncorrected_volatile", _RECENT, at_least(1), _U, "new uncorrectable ECC errors", RESET, MEMORY),
    DeviceRule(
        "ecc_uncorrected_volatile", _NOW, at_least(1), _D, "uncorrectable ECC errors since load", _SERVICE, MEMORY
    ),
    DeviceRule("ecc_corrected_volatile", _RECENT, at_least(100), _D, "many corrected ECC errors", _WATCH, OURS),
    DeviceRule(
        "clock_reasons", _NOW, any_bit(0x20 | 0x40), _D, "clocks are lowered: the device is too hot", _COOL, NVML
    ),
    DeviceRule("clock_reasons", _NOW, any_bit(0x80), _D, "clocks are lowered: power brake", _POWER, NVML),
    DeviceRule("clock_reasons", _NOW, any_bit(0x08), _D, "clocks are lowered by hardware: heat or power", _COOL, NVML),
    DeviceRule("thermal_violation_s", _RECENT, at_least(60), _D, "slowed by heat for a tenth of the time", _COOL, OURS),
    DeviceRule("nvlink_recoveries", _RECENT, at_least(1), _D, "an NVLink connection had to recover", _WATCH, OURS),
    DeviceRule("nvlink_flit_crc_errors", _RECENT, at_least(100), _D, "many CRC errors on NVLink", _WATCH, OURS),
    DeviceRule("nvlink_data_crc_errors", _RECENT, at_least(100), _D, "many CRC errors on NVLink", _WATCH, OURS),
)
HOST_RULES: Sequence[DeviceRule] = (
    DeviceRule("edac_uncorrected", _RECENT, at_least(1), _U, "new uncorrectable errors of main memory", _DIMM, EDAC),
    DeviceRule(
        "edac_uncorrected", _NOW, at_least(1), _D, "uncorrectable errors of main memory since load", _DIMM, EDAC
    ),
    DeviceRule("edac_corrected", _RECENT, at_least(100), _D, "many corrected errors of main memory", _DIMM, OURS),
    DeviceRule("mce_lines", _RECENT, at_least(1), _D, "the kernel reports hardware errors", "read them: dmesg", OURS),
    DeviceRule("load_per_cpu", _NOW, at_least(4), _D, "far more processes than CPUs", "look for other programs", OURS),
    DeviceRule("memory_available_share", _NOW, below(0.03), _D, "memory is nearly used up", "free memory", OURS),
    DeviceRule(
        "disk_free_bytes", _NOW, below(2**30), _D, "less than 1 GiB of disk for the run folder", "free space", OURS
    ),
    DeviceRule(
        "shared_memory_free_bytes", _NOW, below(2**26), _D, "less than 64 MiB in /dev/shm", "free space there", OURS
    ),
    DeviceRule(
        "disk_write_s", _NOW, at_least(1), _D, "a block of 4 KiB took long to the disk", "check the storage", OURS
    ),
)


def judge_device(history: DeviceHistory) -> list[VerdictReason]:
    """Why a device or a host is not fit, the worst first; empty: it is."""
    rules = HOST_RULES if history.latest.id == HOST else DEVICE_RULES
    recent = history.recent
    reasons = []
    for rule in rules:
        value = history.latest.values.get(rule.value) if rule.over is Over.NOW else recent.get(rule.value)
        if value is not None and rule.condition(value):
            text = f"{rule.text} ({rule.value} {_shown(rule.value, value)}{_when(rule.over)})"
            reasons.append(VerdictReason(rule.verdict, rule.value, text, rule.remedy, rule.source))
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
