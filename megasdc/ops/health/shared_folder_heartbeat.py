"""Where the agents of a run's hosts learn of each other without a front: files in the run folder that they share.

Each host's files begin with its name: ``node_00000.status``, its last sign of life, and ``stalls/node_00000.json``,
what it knows of its ranks while they do not move. Clocks of hosts are not compared: a host is lost when its sign has
not changed for a while by the reader's own clock.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json, replacing

SIGN_S = 5.0
"""Seconds between signs of life; a host that has given none for three times that is lost."""
LOST_S = 3 * SIGN_S
SIGN, STALL_FOLDER = "status", "stalls"


def node_name(node: int) -> str:
    """How the files of a host begin."""
    return f"node_{node:05d}"


@dataclass(frozen=True)
class OwnState:
    """What a host tells the others.

    Args:
        report: what it knows of its ranks; None: they move.
        ended: its ranks have ended.
        problem: that its agent has; empty: none.
        unwatched: its agent has ended for good, its ranks have not: nothing more is heard of it, and it is not lost.
    """

    report: Mapping[str, Any] | None = None
    ended: bool = False
    problem: str = ""
    unwatched: bool = False


class SharedFolderHeartbeat:
    """Signs and reports of all hosts in ``health/`` of the run folder.

    Args:
        health: the folder; created if absent.
        run: name of this start; files of others are not read.
        node: index of this host.
        num_nodes: of all hosts.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, health: Path, run: str, node: int, num_nodes: int) -> None:
        self._health, self._run, self._node, self._num_nodes = health, run, node, num_nodes
        (health / STALL_FOLDER).mkdir(parents=True, exist_ok=True)
        self.own = OwnState()
        self.is_read = True
        """Whether others are looked at: not while the front decides."""
        self._written: OwnState | None = None
        self._sign_at, self._number = 0.0, 0
        self._signs: dict[int, tuple[dict[str, Any], float]] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._read_at = -math.inf

    def exchange(self) -> None:
        """Write what this host tells, and read what others do; may wait for the disk.

        Raises:
            OSError: the folder cannot be written.
        """
        own = self.own
        if own != self._written or time.monotonic() >= self._sign_at:
            self._write(own)
        now = time.monotonic()
        if not self.is_read or (own.report is None and now < self._read_at + SIGN_S):
            return
        for node, sign in self._read(self._health, SIGN).items():
            if node not in self._signs or self._signs[node][0] != sign:
                self._signs[node] = sign, now
        self._reports = self._read(self._health / STALL_FOLDER, "json")
        self._read_at = now

    def _write(self, own: OwnState) -> None:
        path = self._health / STALL_FOLDER / f"{node_name(self._node)}.json"
        if own.report is None:
            path.unlink(missing_ok=True)
        elif self._written is None or own.report != self._written.report:
            with replacing(path) as file:
                json.dump(own.report, file)
        number = self._number + 1
        sign = {"run": self._run, "number": number, "ended": own.ended, "stuck": own.report is not None}
        sign |= {"unwatched": own.unwatched}
        with replacing(self._health / f"{node_name(self._node)}.{SIGN}") as file:
            json.dump(sign, file)
        self._written, self._number, self._sign_at = own, number, time.monotonic() + SIGN_S

    @property
    def answers(self) -> bool:
        """Whether the folder could be read lately; else nothing is known of other hosts."""
        return time.monotonic() - self._read_at < LOST_S

    def all_stuck(self) -> bool:
        """Whether every other host that shows signs of life is stuck, too, with its report written.

        Where the folder does not answer, nothing speaks against it.
        """
        if not self.answers:
            return True
        lost = self.lost()
        return all(
            sign["ended"] or sign["unwatched"] or node in lost or (sign["stuck"] and node in self._reports)
            for node, (sign, _) in self._signs.items()
            if node != self._node
        )

    def lost(self) -> list[int]:
        """Hosts that have given signs of life in this start, and do no more."""
        if not self.answers:
            return []
        return [
            node
            for node, (sign, changed_at) in self._signs.items()
            if node != self._node
            and not sign["ended"]
            and not sign["unwatched"]
            and self._read_at - changed_at > LOST_S
        ]

    def reports(self) -> list[Mapping[str, Any]]:
        """What hosts know of their ranks, those that are stuck; this one's own among them."""
        others = self._reports if self.answers else {}
        own = [] if self.own.report is None else [self.own.report]
        return [*own, *(report for node, report in others.items() if node != self._node)]

    def _read(self, folder: Path, ending: str) -> dict[int, dict[str, Any]]:
        """What the agents of this start have written under this ending, by node."""
        found = {}
        for node in range(self._num_nodes):
            try:
                content = parse_json((folder / f"{node_name(node)}.{ending}").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(content, dict) and content.get("run") == self._run:
                found[node] = content
        return found
