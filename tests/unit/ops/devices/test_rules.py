"""Rules and the XID table: about values that are read, and in line with NVIDIA's catalog."""

from __future__ import annotations

import pytest
from nvml_states import VALUES

from megasdc.ops.devices.device_verdict import DeviceVerdict
from megasdc.ops.devices.readings import COUNTERS, FROM_ZERO
from megasdc.ops.devices.rules import DEVICE_RULES, HOST_RULES, XIDS, Over, xid_reasons

HOST_VALUES = {
    *("edac_corrected", "edac_uncorrected", "load_1min", "load_per_cpu", "memory_available_bytes", "mce_lines"),
    *("memory_available_share", "disk_free_bytes", "shared_memory_free_bytes", "disk_write_s", "kernel_lines_lost"),
}
RESET = (46, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
"""Whose immediate action is RESET_GPU or RESTART_BM in NVIDIA's Xid catalog, for A100 to GB200."""
PROGRAM = (11, 13, 69)
"""RESTART_APP, then CHECK_APP/CUDA or the workflow of Xid 13."""
IGNORED = (38, 43, 44, 63, 92, 121, 137, 141, 157, 160, 161)
"""Whose immediate action is IGNORE."""


def test_rules_and_counters_are_about_values_that_are_read() -> None:
    """A name that no reading has would never be found; what was added is known of counters alone."""
    assert {rule.value for rule in DEVICE_RULES} <= set(VALUES)
    assert {rule.value for rule in HOST_RULES} <= HOST_VALUES
    assert FROM_ZERO <= COUNTERS <= {*VALUES, *HOST_VALUES}
    rules = [*DEVICE_RULES, *HOST_RULES]
    assert {rule.value for rule in rules if rule.over is Over.RECENT} <= COUNTERS
    assert all(rule.text and rule.remedy and rule.source and rule.verdict > DeviceVerdict.FIT for rule in rules)


@pytest.mark.parametrize("number", RESET)
def test_what_the_catalog_resets_is_unfit(number: int) -> None:
    """Until the run ends: it counts when it is no longer recent."""
    (reason,) = xid_reasons([number], [])
    assert reason.verdict is DeviceVerdict.UNFIT and f"XID {number}:" in reason.text


def test_what_the_catalog_ignores_never_makes_unfit() -> None:
    """At most degraded, and only while it is recent; what the program did leaves the device fit."""
    assert all(XIDS[number].verdict < DeviceVerdict.UNFIT for number in IGNORED)
    assert xid_reasons(IGNORED, []) == [] and xid_reasons(PROGRAM, PROGRAM) == []
    assert [one.verdict for one in xid_reasons([63], [63])] == [DeviceVerdict.DEGRADED]
