"""State of a host in a stress test: counts, first findings and first values; of bounded size.

A file per host, written atomically after each round, so that a killed test continues after its last complete round.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json, write_durably
from megasdc.common.errors import StorageError, TraceError

COLLECTIVES, GEMM, TRAINING, LINKS = TESTS = ("collectives", "gemm", "training", "links")
ALONE = "alone"
"""In place of a partner: the group of a host's own processes."""
SHOWN = 30
"""Maximum of findings kept for a test of a host."""
FORMAT = "megasdc.stress.host.v1"


@dataclass
class Count:
    """Number of comparisons, and how many were wrong."""

    compared: int = 0
    wrong: int = 0

    def add(self, compared: int, wrong: int) -> None:
        """Adds counts."""
        self.compared += compared
        self.wrong += wrong


@dataclass
class HostState:
    """State of one host, by test: counts, the first findings and how many were dropped; ``meetings`` by partner.

    ``plan``: a test with other settings cannot continue; ``key``: device and versions of its first process, empty: it
    never answered; ``products``: first checksums of each slot, by case; ``runs``: first training run of each slot;
    ``golden``: tests with golden values; ``checked``: products compared with fp64; ``lost``: how and why, None: alive;
    ``links``: last figures of links (``megasdc.ops.health.links.judgement.LinkFigures``) by partner, where this host
    led.
    """

    host: str
    plan: dict[str, Any]
    rounds: int = 0
    key: dict[str, Any] = field(default_factory=dict)
    on_accelerator: bool = False
    slots: int = 0
    tests: dict[str, Count] = field(default_factory=dict)
    meetings: dict[str, Count] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    products: dict[str, dict[str, int]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    golden: list[str] = field(default_factory=list)
    checked: int = 0
    notes: list[str] = field(default_factory=list)
    lost: dict[str, str] | None = None
    links: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add_results(self, test: str, number: int, slot: int, said: dict[str, Any]) -> None:
        """Adds a process's results of a round of a test: its ``compared``, ``wrong`` and ``findings``."""
        self.tests.setdefault(test, Count()).add(said["compared"], said["wrong"])
        for finding in said["findings"]:
            self.add_finding({"test": test, "round": number, "slot": slot, **finding})

    def add_finding(self, finding: dict[str, Any]) -> None:
        """Stores a finding; beyond ``SHOWN`` findings of a test only counts it."""
        if sum(one["test"] == finding["test"] for one in self.findings) < SHOWN:
            self.findings.append(finding)
        else:
            self.dropped += 1

    def add_note(self, text: str) -> None:
        """Stores a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def save_state(folder: Path, state: HostState) -> None:
    """Writes a host's file atomically.

    Raises:
        StorageError: it cannot be written.
    """
    path = folder / f"{state.host}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps({"format": FORMAT, **asdict(state)}) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def load_state(folder: Path, host: str, plan: dict[str, Any]) -> HostState:
    """State of a host from an earlier call; a new one if there is no file.

    A lost host is tried again.

    Raises:
        TraceError: the file is damaged, or of a test of another plan; nothing is overwritten.
    """
    path = folder / f"{host}.json"
    if not path.exists():
        return HostState(host, plan)
    try:
        said = parse_json(path.read_text(encoding="utf-8"))
        if said.pop("format") != FORMAT:
            raise ValueError("it has another format")
        counts = {
            name: {key: Count(**count) for key, count in said.pop(name).items()} for name in ("tests", "meetings")
        }
        state = HostState(**{**said, **counts, "lost": None})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is damaged: {error}; remove it, and the host starts from the beginning") from error
    if state.plan != plan:
        raise TraceError(
            f"{path} is of a test of {state.plan}, this one is of {plan}; remove --resume, or use the same plan"
        )
    return state
