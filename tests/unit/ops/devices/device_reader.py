"""A process that reads the tests' NVML library by the real binding; started by ``test_nvml_devices.py``.

``device_reader.py histories``: cases on standard input as JSON, each a list of states of the library; prints what the
histories and rules made of each. ``device_reader.py hang FOLDER``: a call that never returns after the first reading.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasdc.ops.devices.device_verdict import worst
from megasdc.ops.devices.kernel_log import KernelLog
from megasdc.ops.devices.nvml import Nvml, Unavailable
from megasdc.ops.devices.readings import DeviceHistory
from megasdc.ops.devices.rules import judge_device
from megasdc.ops.devices.survey import Survey
from megasdc.ops.devices.telemetry import Telemetry

STATE = Path(os.environ["NVML_STATE"])
LOG = STATE.with_name("kmsg")
EVENTS_S = 0.03


def set_state(state: Mapping[str, Any]) -> None:
    """What the library answers from now on; ``log`` is added to the kernel's log, None: there is none."""
    lines = [f"{key} {value}\n" for key, value in state.items() if key != "log"]
    part = STATE.with_suffix(".part")
    part.write_text("".join(lines))
    part.replace(STATE)
    if (added := state.get("log", "")) is not None:
        with open(LOG, "a", encoding="utf-8") as file:
            file.write(added)


def read_case(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Read each state in turn, as a reader does."""
    LOG.unlink(missing_ok=True)
    histories: dict[str, DeviceHistory] = {}
    waits = 0
    set_state(states[0])
    try:
        nvml = Nvml(KernelLog(LOG, 0.0))
    except Unavailable as error:
        return {"absent": str(error)}
    for state in states:
        set_state(state)
        until = time.monotonic() + EVENTS_S
        while (left := until - time.monotonic()) > 0:
            nvml.wait(left)
            waits += 1
        for reading in nvml.read():
            if reading.id in histories:
                histories[reading.id].add(reading)
            else:
                histories[reading.id] = DeviceHistory(reading)
    nvml.close()
    return {
        "no_events": nvml.no_events,
        "waits": waits,
        "devices": {
            key: {
                **history.as_dict(),
                "verdict": worst(judge_device(history)).label,
                "reasons": [one.as_dict() for one in judge_device(history)],
            }
            for key, history in histories.items()
        },
    }


def hang(folder: Path) -> dict[str, Any]:
    """Telemetry of which one call hangs; what it shows after that."""
    state = {"count": 1, "driver": "999.1", "0.uuid": "GPU-a", "0.temperature": 41}
    set_state(state)
    telemetry = Telemetry(folder, folder, interval_s=0.02, answer_s=0.5)
    telemetry.start()
    telemetry.wait_for_first(60)
    first = telemetry.survey()
    set_state({**state, "0.hang": "nvmlDeviceGetTemperature"})
    until = time.monotonic() + 30
    while time.monotonic() < until:
        later = telemetry.survey()
        devices, host = later.looks
        if devices.reasons and not host.reasons and _watched_s(later) > _watched_s(first) + devices.answer_s:
            break
        time.sleep(0.02)
    line, note = telemetry.line()
    return {"first": first.as_dict(), "later": later.as_dict(), "line": line, "note": note}


def _watched_s(survey: Survey) -> float:
    """For how long the host has been read."""
    return float(survey.looks[1].items[0].history["watched_s"])


if __name__ == "__main__":
    if sys.argv[1] == "hang":
        print(json.dumps(hang(Path(sys.argv[2]))))
    else:
        print(json.dumps({name: read_case(states) for name, states in json.load(sys.stdin).items()}))
