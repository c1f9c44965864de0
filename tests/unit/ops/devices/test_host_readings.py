"""The host's readings, from a folder of files as the kernel has them, and from this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.ops.devices.device_verdict import worst
from megasdc.ops.devices.kernel_log import KernelLog
from megasdc.ops.devices.readings import HOST, DeviceHistory, DeviceReading
from megasdc.ops.devices.rules import judge_device
from megasdc.ops.devices.telemetry import LocalHost, Telemetry, write_latency_s

BOOT = "6,0,0,-;Linux version 6.8.0\n6,1,1000000,-;mce: CPU0: Thermal monitoring enabled (TM1)\n"
MCE = (
    "0,2,5000000,-;mce: [Hardware Error]: Machine check events logged\n"
    "0,3,5000100,-;mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400\n"
    " SUBSYSTEM=cpu\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two memory controllers, two CPUs, half of 64 GiB available."""
    for number, (corrected, uncorrected) in enumerate(((3, 0), (4, 1))):
        folder = tmp_path / "sys/devices/system/edac/mc" / f"mc{number}"
        folder.mkdir(parents=True)
        (folder / "ce_count").write_text(f"{corrected}\n")
        (folder / "ue_count").write_text(f"{uncorrected}\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("3.00 2.11 1.20 4/512 1234\n")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: x\n\nprocessor\t: 1\nmodel name\t: x\n")
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       67108864 kB\nMemFree:         1000000 kB\nMemAvailable:   33554432 kB\n"
    )
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "dev/kmsg").write_text(BOOT)
    return tmp_path


def open_host(root: Path) -> LocalHost:
    """The host below a folder."""
    return LocalHost(root, KernelLog(root / "dev/kmsg", 0.0), root)


def read(host: LocalHost) -> DeviceReading:
    """Its one reading."""
    (reading,) = host.read()
    return reading


def test_files_of_the_kernel_are_read_in_their_units(root: Path) -> None:
    """EDAC is summed over controllers, load is per CPU, memory in bytes, disks as the system reports them."""
    reading = read(open_host(root))
    disk = os.statvfs(root)
    known = {
        **{"edac_corrected": 7, "edac_uncorrected": 1, "load_1min": 3.0, "load_per_cpu": 1.5, "mce_lines": 0},
        **{"memory_available_bytes": 32 * 2**30, "memory_available_share": 0.5, "kernel_lines_lost": 0},
    }
    assert {name: reading.values[name] for name in known} == known and reading.unavailable == {}
    assert abs(reading.values["disk_free_bytes"] - disk.f_bavail * disk.f_frsize) < 2**30
    assert reading.values["disk_write_s"] > 0 and list(root.glob("tmp*")) == []


def test_rules_on_the_host(root: Path) -> None:
    """Old errors of memory degrade it, new ones make it unfit; lines about hardware errors are kept."""
    host = open_host(root)
    history = DeviceHistory(read(host))
    assert [(one.value, one.verdict.label) for one in judge_device(history)] == [("edac_uncorrected", "degraded")]
    (root / "sys/devices/system/edac/mc/mc0/ue_count").write_text("1\n")
    with open(root / "dev/kmsg", "a", encoding="utf-8") as file:
        file.write(MCE)
    history.add(read(host))
    reasons = judge_device(history)
    assert worst(reasons).label == "unfit" and reasons[0].value == "edac_uncorrected"
    assert history.since_start == {"edac_uncorrected": 1, "mce_lines": 2}
    assert "mce_lines" in {one.value for one in reasons} and "CPU 3" in history.as_dict()["lines"][1]


def test_what_is_not_there_is_none_with_the_reason(tmp_path: Path) -> None:
    """No file of the kernel: every value but the disk's is None, and nothing follows from that."""
    reading = read(open_host(tmp_path))
    missing = {name for name, value in reading.values.items() if value is None}
    assert missing == set(reading.unavailable) == set(reading.values) - {"disk_free_bytes", "disk_write_s"}
    assert "EDAC" in reading.unavailable["edac_corrected"] and "kmsg" in reading.unavailable["mce_lines"]
    assert judge_device(DeviceHistory(reading)) == []


def test_a_folder_that_cannot_be_written_has_no_latency(tmp_path: Path) -> None:
    """A file in its place."""
    (tmp_path / "file").write_text("")
    reading = read(LocalHost(tmp_path / "file", KernelLog(tmp_path / "no", 0.0), tmp_path))
    assert reading.values["disk_write_s"] is None and "Not a directory" in reading.unavailable["disk_write_s"]
    with pytest.raises(NotADirectoryError):
        write_latency_s(tmp_path / "file")


def test_the_kernel_log_counts_from_a_time_on_and_counts_what_was_overwritten(tmp_path: Path) -> None:
    """Older records are left out; a gap in their numbers is what was lost."""
    path = tmp_path / "kmsg"
    path.write_text(BOOT + MCE)
    log = KernelLog(path, since=5.00005)
    first = log.read()
    assert len(first.errors) == 1 and "CPU 3" in first.errors[0] and (first.lost, first.problem) == (0, "")
    with open(path, "a", encoding="utf-8") as file:
        file.write("4,9,6000000,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n")
    second = log.read()
    assert (second.xids, second.errors, second.lost) == ([("0000:3b:00", 48)], [], 5)
    assert log.read() == type(second)()


def test_an_agent_sees_only_what_is_added_to_the_kernel_log(tmp_path: Path) -> None:
    """Whatever the stamps are: they drift."""
    path = tmp_path / "kmsg"
    path.write_text(MCE)
    log = KernelLog(path, None)
    with open(path, "a", encoding="utf-8") as file:
        file.write("4,4,1,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n")
    found = log.read()
    assert (found.xids, found.errors) == ([("0000:3b:00", 48)], [])


def test_recent_is_what_was_added_lately() -> None:
    """A counter's growth leaves the window after its length, and stays in what the run added."""
    history = DeviceHistory(DeviceReading(HOST, "host", 0.0, {"edac_corrected": 5}), recent_s=100)
    history.add(DeviceReading(HOST, "host", 10.0, {"edac_corrected": 9}))
    history.add(DeviceReading(HOST, "host", 60.0, {"edac_corrected": None}, {"edac_corrected": "gone"}))
    history.add(DeviceReading(HOST, "host", 105.0, {"edac_corrected": 10}))
    assert (history.recent, history.since_start) == ({"edac_corrected": 5}, {"edac_corrected": 5})
    history.add(DeviceReading(HOST, "host", 120.0, {"edac_corrected": 10}))
    assert (history.recent, history.since_start) == ({"edac_corrected": 1}, {"edac_corrected": 5})


def test_devices_without_an_answering_driver_are_told(root: Path) -> None:
    """A file of a device lies in /dev, and NVML is not there: degraded, where without the file it would be fit."""
    (root / "sys/devices/system/edac/mc/mc1/ue_count").write_text("0\n")
    without = Telemetry(root, root)
    without.start()
    without.wait_for_first(30)
    if not without.survey().looks[0].absent:
        pytest.skip("this host has NVIDIA's driver")
    assert without.survey().verdict.label == "fit"
    (root / "dev/nvidia0").write_text("")
    survey = without.survey()
    without.close()
    (reason,) = survey.by_name()["telemetry of devices"]
    assert reason.verdict.label == "degraded" and "nvidia0 in /dev, but" in reason.text and survey.exit_code == 0


def test_the_command_shows_this_host(tmp_path: Path) -> None:
    """`megasdc devices --json` ends by itself, leaves nothing, and its code is that of its verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "megasdc", "devices", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = json.loads(done.stdout)
    host = found["readings"][1]["items"][0]
    assert done.returncode == found["exit_code"] == (78 if found["verdict"] == "unfit" else 0), done.stderr
    assert host["values"]["load_1min"] >= 0 and 0 < host["values"]["memory_available_share"] <= 1
    assert list(tmp_path.iterdir()) == []
