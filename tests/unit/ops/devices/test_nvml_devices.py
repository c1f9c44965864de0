"""NVML by the real binding and a library of the tests: what is read, what is missing and why, what follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvml_states import HEALTHY, HERE, ROOT, VALUES, build

pytestmark = pytest.mark.slow
SECOND = {key.replace("0.", "1.", 1): value for key, value in HEALTHY.items() if key.startswith("0.")}
TWO = {**HEALTHY, **SECOND, "count": 2, "1.uuid": "GPU-b"}
XID_LINE = "4,{n},{us},-;NVRM: Xid (PCI:0000:c0:00): {xid}, pid=77, name=python, Ch 8\n"


def xid_line(number: int, xid: int) -> str:
    """A record of the kernel's log about the first device."""
    return XID_LINE.format(n=number, us=number * 1_000_000, xid=xid)


CASES: dict[str, list[dict[str, Any]]] = {
    "healthy": [HEALTHY, HEALTHY],
    "lost": [TWO, {**TWO, "0.lost": 1}],
    "lost before": [{**TWO, "0.lost_at_start": 1}],
    "reset required": [HEALTHY, {**HEALTHY, "0.reset": 1}],
    "xid": [TWO, {**TWO, "event.0": "1:79", "event.1": "0:13", "log": xid_line(1, 13)}],
    "xid of a program": [HEALTHY, {**HEALTHY, "event.0": "0:13", "event.1": "0:31"}],
    "xid unknown": [HEALTHY, {**HEALTHY, "event.0": "0:999"}],
    "xid by log": [
        {**TWO, "0.no_events": 1, "1.no_events": 1},
        {**TWO, "0.no_events": 1, "1.no_events": 1, "log": xid_line(1, 119) + xid_line(2, 45)},
    ],
    "xid of nobody": [{**HEALTHY, "0.no_events": 1, "log": None}],
    "ecc": [HEALTHY, {**HEALTHY, "0.ecc.1.0": 2, "0.ecc.1.1": 4}, {**HEALTHY, "0.ecc.1.0": 3, "0.ecc.1.1": 5}],
    "counters back": [{**HEALTHY, "0.ecc.0.0": 50}, {**HEALTHY, "0.ecc.0.0": 2}, {**HEALTHY, "0.ecc.0.0": 5}],
    "hot": [HEALTHY, {**HEALTHY, "0.clock_reasons": "0x64"}],
    "power brake": [{**HEALTHY, "0.clock_reasons": "0x80"}],
    "throttled long": [HEALTHY, {**HEALTHY, "0.violation.1": 62_000_000_000}],
    "remap pending": [{**HEALTHY, "0.remapped.pending": 1}],
    "remap failed": [{**HEALTHY, "0.remapped.failed": 1}],
    "sram": [{**HEALTHY, "0.sram.exceeded": 1}],
    "recovery": [{**HEALTHY, "0.field.230": 2}],
    "drain": [{**HEALTHY, "0.field.230": 4}],
    "nvlink": [HEALTHY, {**HEALTHY, "0.field.59": 16}],
    "no ecc": [{key: value for key, value in HEALTHY.items() if ".ecc." not in key}],
    "no device": [{"count": 0, "driver": "999.1"}],
    "mismatch": [{**HEALTHY, "init": 18}],
}


def read(tmp: Path, library: Path | None, *arguments: str, cases: Any = None) -> Any:
    """What the reading process prints; the library comes first on its path, or none is there."""
    environment = {**os.environ, "NVML_STATE": str(tmp / "state"), "PYTHONPATH": str(ROOT)}
    environment.pop("LD_LIBRARY_PATH", None)
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    done = subprocess.run(
        [sys.executable, str(HERE / "device_reader.py"), *arguments],
        input=json.dumps(cases),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a driver of today."""
    return build(tmp_path_factory.mktemp("nvml") / "today")


@pytest.fixture(scope="module")
def found(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases, read by one process."""
    result: dict[str, Any] = read(tmp_path_factory.mktemp("cases"), library, "histories", cases=CASES)
    return result


def test_every_value_of_a_healthy_device_is_read(found: dict[str, Any]) -> None:
    """Each value is the one of the library, in its unit; nothing is missing, nothing has grown, and it is fit."""
    device = found["healthy"]["devices"]["GPU-a"]
    assert device["values"] == VALUES and device["unavailable"] == {}
    assert (device["name"], device["verdict"], device["since_start"]) == ("GPU 0 Test GPU", "fit", {})
    assert found["healthy"]["no_events"] == {}


@pytest.mark.parametrize(
    ("case", "verdict", "value", "text"),
    [
        ("reset required", "unfit", "reset_required", "asks for a reset"),
        ("ecc", "unfit", "ecc_uncorrected_volatile", "new uncorrectable ECC errors (ecc_uncorrected_volatile 3 in the"),
        ("hot", "degraded", "clock_reasons", "too hot, slowed by the driver, too hot, slowed by hardware"),
        ("power brake", "degraded", "clock_reasons", "power brake"),
        ("throttled long", "degraded", "thermal_violation_s", "60.5 in the last 10 minutes"),
        ("remap pending", "degraded", "remap_pending", "wait for a reset"),
        ("remap failed", "unfit", "remap_failure", "could not be remapped"),
        ("sram", "unfit", "sram_threshold_exceeded", "SRAM"),
        ("recovery", "unfit", "recovery_action", "reboot the host"),
        ("drain", "degraded", "recovery_action", "drain and reset"),
        ("nvlink", "degraded", "nvlink_recoveries", "(nvlink_recoveries 2 in"),
        ("xid unknown", "degraded", "xid", "XID 999: not in the table"),
    ],
)
def test_a_rule_gives_its_verdict_with_text_remedy_and_source(
    found: dict[str, Any], case: str, verdict: str, value: str, text: str
) -> None:
    """A state that a rule is about has that rule as its first reason."""
    device = found[case]["devices"]["GPU-a"]
    first = device["reasons"][0]
    assert (device["verdict"], first["verdict"], first["value"]) == (verdict, verdict, value)
    assert text in first["text"] and first["remedy"] and first["source"]


def test_a_lost_device_is_unfit_and_the_other_is_read_on(found: dict[str, Any]) -> None:
    """Its values are None with the reason, never 0; what it had counted before stays; the other one is fit."""
    devices = found["lost"]["devices"]
    lost = devices["GPU-a"]
    assert lost["verdict"] == "unfit" and lost["reasons"][0]["value"] == "lost"
    assert lost["values"] == {**dict.fromkeys(VALUES), "lost": 1, "reset_required": 0}
    assert lost["unavailable"]["temperature_c"] == "GPU is lost" and len(lost["unavailable"]) == len(VALUES) - 2
    assert devices["GPU-b"]["values"] == VALUES and devices["GPU-b"]["verdict"] == "fit"
    assert lost["resets"] == [] and lost["since_start"] == {}


def test_a_device_that_was_lost_before_is_named_by_its_index(found: dict[str, Any]) -> None:
    """Nobody knows its UUID any more; it is unfit, sends no events, and the other one is fit."""
    devices = found["lost before"]["devices"]
    assert devices["index 0"]["verdict"] == "unfit" and devices["index 0"]["values"]["power_w"] is None
    assert devices["index 0"]["unavailable"]["power_w"] == "GPU is lost"
    assert devices["GPU-b"]["verdict"] == "fit" and set(found["lost before"]["no_events"]) == {"index 0"}


def test_an_xid_is_counted_once_for_its_device(found: dict[str, Any]) -> None:
    """By the driver's events, though the kernel's log has it too; what is the program's fault leaves the device fit."""
    devices = found["xid"]["devices"]
    assert devices["GPU-b"]["xid_counts"] == {"79": 1} and devices["GPU-b"]["verdict"] == "unfit"
    assert "fallen off the PCIe bus" in devices["GPU-b"]["reasons"][0]["text"]
    assert "reboot" in devices["GPU-b"]["reasons"][0]["remedy"]
    assert devices["GPU-a"]["xid_counts"] == {"13": 1} and devices["GPU-a"]["verdict"] == "fit"
    program = found["xid of a program"]["devices"]["GPU-a"]
    assert [one["xid"] for one in program["xids"]] == [13, 31] and program["verdict"] == "fit"


def test_without_events_xids_are_those_of_the_kernel_log(found: dict[str, Any]) -> None:
    """By PCI address, however it is written; the reason why there are no events is kept."""
    case = found["xid by log"]
    assert case["devices"]["GPU-a"]["xid_counts"] == {"119": 1, "45": 1}
    assert case["devices"]["GPU-a"]["verdict"] == "unfit" and case["devices"]["GPU-b"]["xid_counts"] == {}
    assert case["no_events"] == {"GPU-a": "Not Supported", "GPU-b": "Not Supported"}
    unread = found["xid of nobody"]["devices"]["GPU-a"]["unavailable"]
    assert set(unread) == {"xids"} and "kmsg cannot be read: No such file" in unread["xids"]


def test_counters_are_told_as_what_was_added(found: dict[str, Any]) -> None:
    """Since the run began; a counter that goes back began again at 0, and the step back is kept."""
    assert found["ecc"]["devices"]["GPU-a"]["since_start"] == {
        "ecc_uncorrected_volatile": 3,
        "ecc_uncorrected_aggregate": 3,
    }
    device = found["counters back"]["devices"]["GPU-a"]
    assert device["since_start"] == {"ecc_corrected_volatile": 5} and device["verdict"] == "fit"
    (reset,) = device["resets"]
    assert (reset["value"], reset["before"], reset["after"]) == ("ecc_corrected_volatile", 50, 2)


def test_what_a_device_does_not_have_is_none_with_the_reason(found: dict[str, Any]) -> None:
    """A device without ECC has no counters of it, and is fit."""
    device = found["no ecc"]["devices"]["GPU-a"]
    missing = {name for name, value in device["values"].items() if value is None}
    assert missing == set(device["unavailable"]) == {name for name in VALUES if name.startswith("ecc_")}
    assert set(device["unavailable"].values()) == {"Not Supported"} and device["verdict"] == "fit"


def test_a_driver_that_does_not_start_is_told(found: dict[str, Any]) -> None:
    """A library and a driver of different versions; a driver without a device."""
    assert found["no device"] == {"absent": "NVIDIA's driver lists no device"}
    assert found["mismatch"] == {
        "absent": "NVIDIA's driver does not start: RM has detected an NVML/RM version mismatch."
    }


def test_an_old_driver_lacks_functions_and_all_else_is_read(tmp_path: Path) -> None:
    """Newer functions have older ones in their place, or are None with the driver's version; XIDs come by the log."""
    old = build(tmp_path / "old", "-DOLD_DRIVER")
    states = [{**HEALTHY, "driver": "470.57"}, {**HEALTHY, "driver": "470.57", "log": xid_line(1, 79)}]
    case = read(tmp_path, old, "histories", cases={"old": states})["old"]
    device = case["devices"]["GPU-a"]
    gone = {name for name in VALUES if name.startswith(("sram_", "remap"))}
    lacks = "driver 470.57 has no such function"
    assert device["unavailable"] == {**dict.fromkeys(gone, lacks), "recovery_action": "Invalid Argument"}
    assert {name: value for name, value in device["values"].items() if value is not None} == {
        name: value for name, value in VALUES.items() if name not in {*gone, "recovery_action"}
    }
    assert device["xid_counts"] == {"79": 1} and case["no_events"] == {"GPU-a": "Function Not Found"}
    assert case["waits"] < 10, "without events the thread sleeps"


def test_without_a_driver_that_is_what_is_told(tmp_path: Path) -> None:
    """The binding is there, the library is not."""
    assert read(tmp_path, None, "histories", cases={"none": [HEALTHY]})["none"] == {
        "absent": "there is no NVIDIA driver: libnvidia-ml.so.1 was not found"
    }


def test_a_call_that_never_returns_stops_nobody(library: Path, tmp_path: Path) -> None:
    """The last good reading stays with its age, telemetry is told not to answer, the host is read on, and it ends."""
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    told = read(tmp_path, library, "hang", str(tmp_path))
    before, (devices, host) = told["first"]["readings"], told["later"]["readings"]
    assert devices["items"][0]["values"]["temperature_c"] == 41 and devices["age_s"] >= 0.5
    assert host["items"][0]["watched_s"] > before[1]["items"][0]["watched_s"] and host["reasons"] == []
    assert "does not answer" in devices["reasons"][0]["text"] and told["later"]["verdict"] == "degraded"
    assert "telemetry of devices: fit -> degraded" in told["note"]
    assert next(one for one in told["line"] if "GPU-a" in one["name"])["temperature_c"] == 41
