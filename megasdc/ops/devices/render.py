"""What telemetry knows of a host, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasdc.ops.devices.device_verdict import DeviceVerdict
from megasdc.ops.devices.reader import Judged
from megasdc.ops.devices.survey import Survey

NO_PROOF = "Telemetry proves no silent data corruption, nor its absence: megasdc stress, audits and traces test that."
_STYLES = {DeviceVerdict.FIT: "green", DeviceVerdict.DEGRADED: "bold yellow", DeviceVerdict.UNFIT: "bold red"}
_COLUMNS = {
    "temperature_c": "deg C",
    "power_w": "W",
    "load_per_cpu": "load/CPU",
    "memory_available_share": "memory",
    "disk_write_s": "disk s",
}


def render_survey(survey: Survey, console: Console) -> None:
    """Write the verdict, a table of devices, and each reason with what to do and its source."""
    items = [one for look in survey.looks for one in look.items]
    for look in survey.looks:
        if look.absent:
            _line(console, f"{look.name}: {look.absent}")
    if items:
        table = Table("", "verdict", *_COLUMNS.values(), "XIDs", box=None, pad_edge=False)
        for one in items:
            table.add_row(*_row(one))
        console.print(table)
    for name, reasons in survey.by_name().items():
        for reason in reasons:
            _line(console, Text.assemble(_styled(reason.verdict), f" {name}: {reason.text}"))
            _line(console, f"  {reason.remedy} [{reason.source}]")
    for one in items:
        if missing := len(one.history["unavailable"]):
            _line(console, f"{one.name}: {missing} values are not available, see --json for the reasons")
    _line(console, Text.assemble(f"{survey.host}: ", _styled(survey.verdict)))
    _line(console, NO_PROOF)


def _line(console: Console, text: str | Text) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _styled(verdict: DeviceVerdict) -> Text:
    return Text(verdict.label, _STYLES[verdict])


def _row(one: Judged) -> list[str | Text]:
    values = one.history["values"]
    shown = ["-" if values.get(name) is None else f"{values[name]:.3g}" for name in _COLUMNS]
    xids = ", ".join(f"{number} x{count}" for number, count in one.history["xid_counts"].items())
    return [one.name, _styled(one.verdict), *shown, xids or "-"]
