"""What is known of a host so far? Counts, the first findings and its first values; bounded, however long a test runs.

A file for each host, written whole after each round, so that a test that was killed goes on after its last whole round.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.errors import StorageError, TraceError

COLLECTIVES, GEMM, TRAINING = TESTS = ("collectives", "gemm", "training")
ALONE = "alone"
"""The group of a host's own processes, in the place of a partner."""
SHOWN = 30
"""Findings of a test that are kept of a host."""
FORMAT = "megasdc.stress.host.v1"


@dataclass
class Count:
    """How often something was compared, and how often it was wrong."""

    compared: int = 0
    wrong: int = 0

    def add(self, compared: int, wrong: int) -> None:
        """Count more."""
        self.compared += compared
        self.wrong += wrong


@dataclass
class HostState:
    """One host.

    Args:
        host: as the hostfile names it.
        plan: what the test is; another one cannot go on from this state.
        rounds: whole ones.
        key: what results of its first process depend on; empty: it never answered.
        on_accelerator: whether it computes on one.
        slots: devices.
        tests: counts by test.
        meetings: counts of collectives by partner.
        findings: the first ones, each with test, round and slot.
        dropped: findings beyond those.
        products: the first checksums of each slot, by case.
        runs: the first training run of each slot: losses, trace and key.
        golden: tests that golden values were there for.
        checked: products compared with fp64.
        notes: for people.
        lost: how and why it no longer answers.
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

    def take(self, test: str, number: int, slot: int, said: dict[str, Any]) -> None:
        """Add what a process said of a round.

        Args:
            test: which.
            number: of the round.
            slot: of the process.
            said: its ``compared``, ``wrong`` and ``findings``.
        """
        self.tests.setdefault(test, Count()).add(said["compared"], said["wrong"])
        for finding in said["findings"]:
            self.find({"test": test, "round": number, "slot": slot, **finding})

    def find(self, finding: dict[str, Any]) -> None:
        """Keep a finding, or count it where there are many."""
        if sum(one["test"] == finding["test"] for one in self.findings) < SHOWN:
            self.findings.append(finding)
        else:
            self.dropped += 1

    def note(self, text: str) -> None:
        """Keep what people should know, once."""
        if text not in self.notes:
            self.notes.append(text)


def save_state(folder: Path, state: HostState) -> None:
    """Write a host's file, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    path = folder / f"{state.host}.json"
    temporary = folder / f".{state.host}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(state)}) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def load_state(folder: Path, host: str, plan: dict[str, Any]) -> HostState:
    """What is known of a host from an earlier call; nothing if there is no file of it.

    A host that was lost gets another chance.

    Raises:
        TraceError: the file is damaged, or of a test of another plan; nothing is overwritten.
    """
    path = folder / f"{host}.json"
    if not path.exists():
        return HostState(host, plan)
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said.pop("format") != FORMAT:
            raise ValueError("its format is another")
        counts = {
            name: {key: Count(**count) for key, count in said.pop(name).items()} for name in ("tests", "meetings")
        }
        state = HostState(**{**said, **counts, "lost": None})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is damaged: {error}; remove it, and the host begins anew") from error
    if state.plan != plan:
        raise TraceError(
            f"{path} is of a test of {state.plan}, this one is of {plan}; leave --resume out, or give them"
        )
    return state
