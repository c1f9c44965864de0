"""What devices and hosts of a run reported when it took a step, as the agents of its hosts wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIT = "fit"


@dataclass(frozen=True)
class DeviceReport:
    """One device, or the host itself, that was not fit or whose counters had grown.

    Args:
        node: index of the host.
        ranks: that ran there.
        text: why it was not fit; empty: it was.
        counters: what was added to them since the start, by name.
    """

    node: int
    ranks: list[int]
    name: str
    verdict: str
    text: str
    counters: dict[str, Any]


def devices_at(run: Path, step: int) -> list[DeviceReport]:
    """Reports of all hosts, from the first line at the step or after it; of the last time that the step was taken.

    Empty where no agent wrote, or nothing was amiss.
    """
    found: list[DeviceReport] = []
    for path in sorted((run / "health").glob("node_*.jsonl")):
        chosen, reached = None, False
        for line in _lines(path):
            now = max((int(rank["step"]) for rank in line["ranks"]), default=0) >= step
            if now and not reached:
                chosen = line
            reached = now
        if chosen is not None:
            found += _reports(int(path.stem.rpartition("_")[2]), chosen)
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines that can be read; a torn or damaged one tells nothing."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("ranks"), list):
            yield line


def _reports(node: int, line: dict[str, Any]) -> Iterator[DeviceReport]:
    ranks = sorted(int(rank["rank"]) for rank in line["ranks"])
    for device in line.get("devices", ()):
        xids = {f"XID {number}": count for number, count in device.get("xid_counts", {}).items()}
        counters = {**device.get("since_start", {}), **xids}
        if device["verdict"] != FIT or counters:
            yield DeviceReport(node, ranks, device["name"], device["verdict"], device["text"], counters)
