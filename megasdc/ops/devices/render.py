"""What telemetry knows of a host, for people."""

from __future__ import annotations

from typing import Any

from megasdc.ops.devices.device_verdict import DeviceVerdict
from megasdc.ops.devices.reader import Judged
from megasdc.ops.devices.survey import Survey
from megasdc.output.outcome import Outcome
from megasdc.output.page import Cell, Page, PageSection, State, Table

NO_PROOF = "Telemetry proves no silent data corruption, nor its absence: megasdc stress, audits and traces test that."
_STATES: dict[DeviceVerdict, State] = {
    DeviceVerdict.FIT: "same",
    DeviceVerdict.DEGRADED: "unsure",
    DeviceVerdict.UNFIT: "different",
}
_LOOKS = {DeviceVerdict.FIT: "good", DeviceVerdict.UNFIT: "bad"}
_COLUMNS = {
    "temperature_c": "deg C",
    "power_w": "W",
    "load_per_cpu": "load/CPU",
    "memory_available_share": "memory",
    "disk_write_s": "disk s",
}


def survey_outcome(survey: Survey) -> Outcome[Any]:
    """The verdict, each reason with what to do and its source, and a table of devices."""
    items = [one for look in survey.looks for one in look.items]
    told = [f"{look.name}: {look.absent}" for look in survey.looks if look.absent]
    for name, reasons in survey.by_name().items():
        for reason in reasons:
            told += [f"{reason.verdict.label} {name}: {reason.text}", f"  {reason.remedy} [{reason.source}]"]
    for one in items:
        if missing := len(one.history["unavailable"]):
            told.append(f"{one.name}: {missing} values are not available, see --json for the reasons")
    table = Table("devices", ("", "verdict", *_COLUMNS.values(), "XIDs"), [_row(one) for one in items])
    page = Page(
        f"Devices of {survey.host}",
        f"{survey.host}: {survey.verdict.label}",
        _STATES[survey.verdict],
        sections=[PageSection(items=told, tables=[table]), PageSection(sentences=[NO_PROOF])],
    )
    return Outcome(survey.exit_code, survey.as_dict(), page)


def _row(one: Judged) -> list[Any]:
    values = one.history["values"]
    shown = ["-" if values.get(name) is None else f"{values[name]:.3g}" for name in _COLUMNS]
    xids = ", ".join(f"{number} x{count}" for number, count in one.history["xid_counts"].items())
    return [one.name, Cell(one.verdict.label, look=_LOOKS.get(one.verdict, "")), *shown, xids or "-"]
