"""Readings of NVIDIA's devices by NVML (``nvidia-ml-py``, imported as ``pynvml``).

What a device or a driver does not have is None with the reason, never 0. Calls may block for long on a broken driver,
so that only ``megasdc.ops.devices.reader`` calls this, in a thread.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/; numbers of fields from ``nvml.h``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megasdc.ops.devices.kernel_log import KernelLog
from megasdc.ops.devices.readings import DeviceReading

FIELDS = {
    "nvlink_flit_crc_errors": 38,
    "nvlink_data_crc_errors": 45,
    "nvlink_replays": 52,
    "nvlink_recoveries": 59,
    "recovery_action": 230,
}
"""Numbers of NVML's fields; those of NVLink are totals over all links of a device."""
Read = Callable[[Any, Any], Mapping[str, Any]]


class Unavailable(Exception):
    """There is nothing to read, for this reason."""


def _first(nvml: Any, *calls: Callable[[], Any]) -> Any:
    """Result of the first of these that the driver has; older drivers have the later ones."""
    for call in calls[:-1]:
        try:
            return call()
        except nvml.NVMLError_FunctionNotFound:
            continue
    return calls[-1]()


def _temperature(nvml: Any, handle: Any) -> dict[str, Any]:
    sensor = nvml.NVML_TEMPERATURE_GPU
    value = _first(
        nvml,
        lambda: nvml.nvmlDeviceGetTemperatureV(handle, sensor),
        lambda: nvml.nvmlDeviceGetTemperature(handle, sensor),
    )
    return {"temperature_c": value}


def _power(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _clock_reasons(nvml: Any, handle: Any) -> dict[str, Any]:
    value = _first(
        nvml,
        lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )
    return {"clock_reasons": value}


def _violation(name: str, policy: str) -> Read:
    def read(nvml: Any, handle: Any) -> dict[str, Any]:
        return {name: nvml.nvmlDeviceGetViolationStatus(handle, getattr(nvml, policy)).violationTime / 1e9}

    return read


def _ecc(name: str, error: str, counter: str) -> Read:
    def read(nvml: Any, handle: Any) -> dict[str, Any]:
        return {name: nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, error), getattr(nvml, counter))}

    return read


def _sram(nvml: Any, handle: Any) -> dict[str, Any]:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return {
        "sram_corrected": status.aggregateCor,
        "sram_uncorrected": status.aggregateUncParity + status.aggregateUncSecDed,
        "sram_threshold_exceeded": status.bThresholdExceeded,
    }


def _remapped_rows(nvml: Any, handle: Any) -> dict[str, Any]:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "remapped_rows_corrected": corrected,
        "remapped_rows_uncorrected": uncorrected,
        "remap_pending": pending,
        "remap_failure": failed,
    }


def _pcie(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"pcie_replays": nvml.nvmlDeviceGetPcieReplayCounter(handle)}


def _fields(nvml: Any, handle: Any) -> dict[str, Any]:
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by type of the value
    found = nvml.nvmlDeviceGetFieldValues(handle, list(FIELDS.values()))
    return {
        name: nvml.NVMLError(one.nvmlReturn) if one.nvmlReturn else getattr(one.value, members[one.valueType])
        for name, one in zip(FIELDS, found, strict=True)
    }


_CORRECTED, _UNCORRECTED = "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"
_VOLATILE, _AGGREGATE = "NVML_VOLATILE_ECC", "NVML_AGGREGATE_ECC"
READS: Sequence[tuple[tuple[str, ...], Read]] = (
    (("temperature_c",), _temperature),
    (("power_w",), _power),
    (("clock_reasons",), _clock_reasons),
    (("thermal_violation_s",), _violation("thermal_violation_s", "NVML_PERF_POLICY_THERMAL")),
    (("power_violation_s",), _violation("power_violation_s", "NVML_PERF_POLICY_POWER")),
    (("ecc_corrected_volatile",), _ecc("ecc_corrected_volatile", _CORRECTED, _VOLATILE)),
    (("ecc_uncorrected_volatile",), _ecc("ecc_uncorrected_volatile", _UNCORRECTED, _VOLATILE)),
    (("ecc_corrected_aggregate",), _ecc("ecc_corrected_aggregate", _CORRECTED, _AGGREGATE)),
    (("ecc_uncorrected_aggregate",), _ecc("ecc_uncorrected_aggregate", _UNCORRECTED, _AGGREGATE)),
    (("sram_corrected", "sram_uncorrected", "sram_threshold_exceeded"), _sram),
    (("remapped_rows_corrected", "remapped_rows_uncorrected", "remap_pending", "remap_failure"), _remapped_rows),
    (("pcie_replays",), _pcie),
    (tuple(FIELDS), _fields),
)
"""Names of values, and what reads them."""


class Device:
    """One device.

    Args:
        driver: version, for reasons.
    """

    def __init__(self, nvml: Any, index: int, driver: str) -> None:
        self._nvml, self._index, self._driver = nvml, index, driver
        self.id, self.name, self.bus, self.handle = f"index {index}", "", "", None
        self._unopened = ""
        try:
            self.handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self.id = _text(nvml.nvmlDeviceGetUUID(self.handle))
            self.name = _text(nvml.nvmlDeviceGetName(self.handle))
            self.bus = _text(nvml.nvmlDeviceGetPciInfo(self.handle).busId)
        except nvml.NVMLError as error:
            self._unopened = str(error)
            self._failed_with = error.value

    @property
    def address(self) -> int | None:
        """Of its handle, by which events name it."""
        return None if self.handle is None else ctypes.cast(self.handle, ctypes.c_void_p).value

    def read(self, xids: Sequence[int], no_xids: str) -> DeviceReading:
        """Read all values; what follows a lost device's first answer is not asked for.

        Args:
            xids: since the last reading.
            no_xids: why they are not known; empty: they are.
        """
        values: dict[str, float | None] = {"lost": 0, "reset_required": 0}
        unavailable = {"xids": no_xids} if no_xids else {}
        if self._unopened:
            self._note_failure(values, self._failed_with)
        for names, read in READS:
            if values["lost"] or self.handle is None:
                found: Mapping[str, Any] = dict.fromkeys(names, self._unopened or "the device is lost")
            else:
                found = self._try(names, read)
            for name in names:
                value = found[name]
                if isinstance(value, self._nvml.NVMLError):
                    self._note_failure(values, value.value)
                    value = self._why(value)
                values[name] = None if isinstance(value, str) else value
                if isinstance(value, str):
                    unavailable[name] = value
        return DeviceReading(
            self.id, f"GPU {self._index} {self.name}".strip(), time.monotonic(), values, unavailable, xids
        )

    def _try(self, names: Sequence[str], read: Read) -> Mapping[str, Any]:
        try:
            return read(self._nvml, self.handle)
        except self._nvml.NVMLError as error:
            return dict.fromkeys(names, error)

    def _note_failure(self, values: dict[str, float | None], code: int) -> None:
        if code == self._nvml.NVML_ERROR_GPU_IS_LOST:
            values["lost"] = 1
        elif code == self._nvml.NVML_ERROR_RESET_REQUIRED:
            values["reset_required"] = 1

    def _why(self, error: Any) -> str:
        if error.value == self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            return f"driver {self._driver} has no such function"
        return str(error)


class Nvml:
    """All devices of this host.

    Args:
        log: kernel log, from which XIDs are read where the driver does not send them as events.
        events: whether to ask the driver for them.

    Raises:
        Unavailable: there is no driver, it does not start, or it has no device.
    """

    def __init__(self, log: KernelLog, *, events: bool = True) -> None:
        self._nvml = _initialised()
        self._log = log
        try:
            self.driver = _text(self._nvml.nvmlSystemGetDriverVersion())
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVIDIA's driver does not list its devices: {error}") from error
        if not count:
            raise Unavailable("NVIDIA's driver lists no device")
        self.devices = [Device(self._nvml, index, self.driver) for index in range(count)]
        self._xids: dict[str, list[int]] = {device.id: [] for device in self.devices}
        self.no_events: dict[str, str] = {}
        """Why a device sends no events, by its identifier."""
        self._set = self._register() if events else None

    def _register(self) -> Any:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self.no_events = {device.id: str(error) for device in self.devices}
            return None
        for device in self.devices:
            try:
                nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError as error:
                self.no_events[device.id] = str(error)
        return events if len(self.no_events) < len(self.devices) else None

    def read(self) -> list[DeviceReading]:
        """Read all devices."""
        log = self._log.read()
        for bus, number in log.xids:
            for device in self.devices:
                if _same_bus(bus, device.bus) and self._by_log(device):
                    self._xids[device.id].append(number)
        taken, self._xids = self._xids, {device.id: [] for device in self.devices}
        return [device.read(taken[device.id], log.problem if self._by_log(device) else "") for device in self.devices]

    def _by_log(self, device: Device) -> bool:
        """Whether XIDs of this device are those of the kernel's log."""
        return self._set is None or device.id in self.no_events

    def wait(self, seconds: float) -> bool:
        """Wait for an event, at most so long; whether one came."""
        if self._set is None:
            time.sleep(seconds)
            return False
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait(self._set, int(1000 * seconds) + 1)
        except nvml.NVMLError_Timeout:
            return False
        except nvml.NVMLError as error:  # of a lost device, for good: the kernel's log has what follows
            self.no_events = {device.id: str(error) for device in self.devices}
            self._set = None
            return False
        address = ctypes.cast(event.device, ctypes.c_void_p).value
        for device in self.devices:
            if device.address == address and event.eventType == nvml.nvmlEventTypeXidCriticalError:
                self._xids[device.id].append(event.eventData)
        return True

    def close(self) -> None:
        """Release the driver."""
        self._nvml.nvmlShutdown()


def _initialised() -> Any:
    """The binding, with the driver's library loaded."""
    try:
        import pynvml
    except ImportError as error:
        raise Unavailable(f"nvidia-ml-py is not installed ({error})") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise Unavailable("there is no NVIDIA driver: libnvidia-ml.so.1 was not found") from error
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVIDIA's driver does not start: {error}") from error
    return pynvml


def _text(value: str | bytes) -> str:
    """Text of the binding, which gives bytes in some releases."""
    return value.decode() if isinstance(value, bytes) else value


def _same_bus(left: str, right: str) -> bool:
    """Whether two PCI addresses are of one device: ``0000:cb:00`` of the log, ``00000000:CB:00.0`` of NVML."""

    def parts(text: str) -> list[int]:
        return [int(one, 16) for one in text.partition(".")[0].split(":")]

    return bool(left and right) and parts(left) == parts(right)
