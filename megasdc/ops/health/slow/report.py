"""What rank 0 tells of stragglers: events, ``health/suspects.json`` for the launch front, ``health/slowness.jsonl``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megasdc.common.durable import append_bounded, write_when_room
from megasdc.common.origin import Origin
from megasdc.ops.health.slow.stragglers import ReplicaStage, Straggler, StragglerChange, Stragglers

HEALTH_FOLDER, SUSPECTS_FILE, SLOWNESS_FILE = "health", "suspects.json", "slowness.jsonl"
LARGEST_BYTES = 4_000_000
"""Size of ``slowness.jsonl`` above which its older half goes."""
Told = tuple[str, dict[str, Any]]
"""Name and fields of an event of kind ``health``."""


@dataclass(frozen=True)
class Where:
    """Ranks of a place, the tensor ranks of one stage of one replica, and the host of the first of them."""

    ranks: tuple[int, ...]
    host: str


class SlowReport:
    """Events and files of one process of rank 0.

    Args:
        slow_ratio: from which a place is slow.
        where: ranks and host of every place.
        every: steps between two lines of ``slowness.jsonl``.
        origin: run and attempt, named in ``suspects.json``.
    """

    def __init__(
        self, run_dir: Path, slow_ratio: float, where: Mapping[ReplicaStage, Where], every: int, origin: Origin
    ) -> None:
        self._folder, self._origin = run_dir / HEALTH_FOLDER, origin
        self._slow_ratio, self._where, self._every = slow_ratio, where, every
        self._written_step = 0
        self._slowest_stage: int | None = None
        self._collecting: set[ReplicaStage] = set()

    # --- events -------------------------------------------------------------------------------------------------

    def events(self, change: StragglerChange, stragglers: Stragglers) -> Iterator[Told]:
        """What a judgement found: stragglers that begin and end, garbage collection, imbalance of stages."""
        yield from self._begun(change, stragglers)
        for one in change.ended:
            where = self._where[one.place]
            message = f"{_named(where)} is as fast as its peers again"
            yield "recovered", {"message": message, **_place(one.place, where), "since_step": one.since_step}
        if stragglers.is_full:
            yield from self._garbage(stragglers)
            yield from self._imbalance(stragglers)

    def _begun(self, change: StragglerChange, stragglers: Stragglers) -> Iterator[Told]:
        peers = stragglers.num_peers
        for one in change.begun:
            where = self._where[one.place]
            whole = self._is_whole_host(where.host, stragglers)
            than = f"its {peers} peers" if peers > 1 else "its one peer, and which of the two is wrong is not known"
            host = f"; all ranks of {where.host} are slow" if whole else ""
            message = f"{_named(where)} takes {one.ratio:.2f} times as long for a micro-batch as {than}{host}"
            yield "straggler", {"message": message, **_fields(one, where), "num_peers": peers, "whole_host": whole}

    def _is_whole_host(self, host: str, stragglers: Stragglers) -> bool:
        """Whether all of several places on a host are slow, and the run has another host."""
        here = [place for place, where in self._where.items() if where.host == host]
        return 1 < len(here) < len(self._where) and all(place in stragglers.named for place in here)

    def _garbage(self, stragglers: Stragglers) -> Iterator[Told]:
        """Places that begin to spend as much time in garbage collection as a straggler would lose."""
        if not stragglers.has_garbage:
            self._collecting = set()
            return
        share, excess = stragglers.garbage_share, self._slow_ratio - 1
        much = {place for place in self._where if share[place] >= (excess / 2 if place in self._collecting else excess)}
        for place in sorted(much - self._collecting):
            where, told = self._where[place], float(share[place])
            message = f"{_named(where)} spends {told:.1%} of its time in Python's garbage collection; it is kept apart"
            yield "garbage", {"message": message, **_place(place, where), "share": told}
        self._collecting = much

    def _imbalance(self, stragglers: Stragglers) -> Iterator[Told]:
        """Once, and again where another stage is the slowest."""
        if stragglers.num_stages == 1:
            return
        stage_s = stragglers.stage_s
        slowest, ratio = int(stage_s.argmax()), stragglers.imbalance
        if ratio < self._slow_ratio or slowest == self._slowest_stage:
            return
        self._slowest_stage = slowest
        replicas = stragglers.num_peers + 1
        by = "all replicas show it" if replicas > 1 else "with one replica a slow rank would look the same"
        message = f"stage {slowest} takes {ratio:.2f} times the mean of all stages, by the layout's design: {by}"
        fields = {"slowest_stage": slowest, "ratio": ratio, "stage_s": stage_s.tolist(), "replicas": replicas}
        yield "imbalance", {"message": message, **fields}

    # --- files --------------------------------------------------------------------------------------------------

    def write_suspects(self, stragglers: Stragglers, step: int) -> None:
        """Write who is slow; at the start nobody, in place of those of the start before.

        Raises:
            OSError: it cannot be written.
        """
        write_when_room(self._folder / SUSPECTS_FILE, json.dumps(self._suspects(stragglers, step), indent=1) + "\n")

    def write(self, change: StragglerChange, stragglers: Stragglers, step: int) -> bool:
        """Write the suspects where they changed, and a line of what was measured where it is due.

        Returns:
            Whether a line was due.

        Raises:
            OSError: a file cannot be written.
        """
        is_due = stragglers.is_full and step >= self._written_step + self._every
        if is_due:
            self._written_step = step
        if change.begun or change.ended:
            self.write_suspects(stragglers, step)
        if is_due:
            self._folder.mkdir(exist_ok=True)
            line = json.dumps(self._line(stragglers, step)) + "\n"
            append_bounded(self._folder / SLOWNESS_FILE, line, LARGEST_BYTES)
        return is_due

    def _suspects(self, stragglers: Stragglers, step: int) -> dict[str, Any]:
        """Slow places, the slowest first."""
        named = sorted(stragglers.named.values(), key=lambda one: -one.ratio)
        rows = [
            {**_fields(one, self._where[one.place]), "whole_host": self._is_whole_host(host, stragglers)}
            for one in named
            for host in (self._where[one.place].host,)
        ]
        return {
            "run": self._origin.run,
            "attempt": self._origin.attempt,
            "step": step,
            "time": time.time(),
            "slow_ratio": self._slow_ratio,
            "num_peers": stragglers.num_peers,
            "suspects": rows,
        }

    def _line(self, stragglers: Stragglers, step: int) -> dict[str, Any]:
        """What lasts, and apart from it what is random, of the long window; ratios by the first rank of each place."""
        found, share = stragglers.recent, stragglers.garbage_share
        line: dict[str, Any] = {
            "step": step,
            "stage_s": [round(one, 6) for one in stragglers.stage_s.tolist()],
            "garbage_share": round(float(share.max()), 6),
        }
        if found is not None:
            line["noise"] = [round(one, 5) for one in found.noise.tolist()]
            line["ratios"] = {
                str(where.ranks[0]): round(float(found.ratio[place]), 5) for place, where in self._where.items()
            }
        return line


def metrics(stragglers: Stragglers) -> dict[str, float]:
    """Metrics of the long window, by name."""
    found = {"health/imbalance_ratio": stragglers.imbalance}
    if (recent := stragglers.recent) is not None:
        found["health/slowest_ratio"] = float(recent.ratio.max())
        found["health/noise_ratio"] = float(np.max(recent.noise))
    return found


def _named(where: Where) -> str:
    ranks = ", ".join(map(str, where.ranks))
    return f"rank{'s' if len(where.ranks) > 1 else ''} {ranks} on {where.host}"


def _place(place: ReplicaStage, where: Where) -> dict[str, Any]:
    return {"host": where.host, "ranks": list(where.ranks), "replica": place[0], "stage": place[1]}


def _fields(one: Straggler, where: Where) -> dict[str, Any]:
    measured = {"ratio": round(one.ratio, 5), "window_steps": one.window, "since_step": one.since_step}
    sigmas = round(one.sigmas, 2) if np.isfinite(one.sigmas) else None
    return {**_place(one.place, where), **measured, "sigmas": sigmas}
