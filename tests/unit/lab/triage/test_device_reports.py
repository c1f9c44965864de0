"""What did devices report when a run took a step?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megasdc.lab.triage.triage import DeviceReport, devices_at


def line(step: int, *devices: dict[str, Any]) -> str:
    """A line of a host's agent."""
    ranks = [{"rank": rank, "step": step} for rank in (2, 3)]
    return json.dumps({"run": "r", "ranks": ranks, "devices": list(devices)}) + "\n"


def test_the_line_of_the_last_time_that_the_step_was_taken(tmp_path: Path) -> None:
    """Unfit devices and grown counters of the first line at the step or after it; torn lines tell nothing."""
    host = {"name": "host", "verdict": "fit", "text": "", "load_per_cpu": 1.0}
    lost = {"name": "GPU 1", "verdict": "unfit", "text": "it is lost", "xid_counts": {"79": 1}}
    grown = {"name": "GPU 0", "verdict": "fit", "text": "", "since_start": {"ecc_corrected": 4}}
    (tmp_path / "health").mkdir()
    (tmp_path / "health" / "node_00001.jsonl").write_text(
        line(5, host) + line(12, lost) + '{"torn' + "\n" + line(8, host) + line(11, host, grown) + line(20, lost)
    )
    assert devices_at(tmp_path, 10) == [DeviceReport(1, [2, 3], "GPU 0", "fit", "", {"ecc_corrected": 4})]
    assert devices_at(tmp_path, 20) == [DeviceReport(1, [2, 3], "GPU 1", "unfit", "it is lost", {"XID 79": 1})]
    assert devices_at(tmp_path, 21) == []
