"""What the XIDs of NVIDIA's driver mean, and what to do about each.

Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (``SOURCE``), its columns of immediate and investigatory
actions for A100 to GB200; in our words. Numbers that mean nothing to training (video, confidential computing, test
messages) are left out, and reported as unknown.

Difference: the catalog has actions, not verdicts. Here a device whose action is a reset, a reboot or the vendor is
``unfit``, one that keeps working and needs one later is ``degraded``, and an error of the program leaves it ``fit``.
Where the action depends on the rest of the message (74, 144 to 150, 154) it is ``degraded``, and so are commands that
arrived damaged (32, 80): the link may be at fault. Where the catalog names no action (167 to 172) the verdict is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megasdc.ops.devices.verdict import Reason, Verdict

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
    verdict: Verdict


_FIT, _DEGRADED, _UNFIT = Verdict.FIT, Verdict.DEGRADED, Verdict.UNFIT
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
UNKNOWN = Xid("not in the table of this version", f"look it up: {SOURCE}", Verdict.DEGRADED)


def xid_reasons(since_start: Iterable[int], recent: Iterable[int]) -> list[Reason]:
    """Reasons by XIDs, one a number.

    A device cannot be reset while a run holds it, so what makes it unfit counts until the run ends; what degrades it
    counts while it is recent.
    """
    unfit = {number for number in since_start if _look_up(number).verdict == Verdict.UNFIT}
    degraded = {number for number in recent if _look_up(number).verdict == Verdict.DEGRADED}
    return [_reason(number) for number in sorted(unfit | degraded)]


def _look_up(number: int) -> Xid:
    return XIDS.get(number, UNKNOWN)


def _reason(number: int) -> Reason:
    found = _look_up(number)
    return Reason(found.verdict, "xid", f"XID {number}: {found.meaning}", found.remedy, SOURCE)
