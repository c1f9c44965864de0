"""Where the ranks of a run are, host by host, as its agents write it into the run folder; reads alone.

Hosts have clocks of their own, so none of their times is compared with the reader's: ages are those of files by the
clock of the file system that holds them, and seconds in a phase are what the agent has measured plus that age.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megasdc.common.durable import parse_json
from megasdc.common.host import GONE
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.shared_folder_heartbeat import LOST_S

LOOK_S = 0.1
LAST_BYTES = 1 << 16
"""Read from the end of a file of lines at first; more where the last line is longer."""

HostState = Literal["watched", "stuck", "ended", "silent"]


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is.

    Args:
        micro_batch: None: in none.
        in_phase_s: seconds since its last change of phase, up to now where its agent gives signs of life.
        process: running, stopped, waiting for a disk, or gone.
    """

    rank: int
    step: int
    micro_batch: int | None
    phase: str
    in_phase_s: float
    process: str

    @property
    def ended(self) -> bool:
        """Whether it has finished, or its process is gone."""
        return self.process == GONE or self.phase == Phase.DONE.label


@dataclass(frozen=True)
class HostPosition:
    """A host as its agent last described it.

    Args:
        name: of the host; ``node N`` where it is not known.
        run: name of the start.
        state: ended: all its ranks have; stuck: none of them moves; silent: its agent gives no sign of life.
        age_s: of this description.
        note: what the agent remarked with it; empty: nothing.
        ranks: ascending.
        devices: and the host itself, each with ``name``, ``verdict`` and ``text``, why it is not fit; empty: not known.
        launch: id of the launch; None: without ``megasdc launch``, or of an earlier version.
    """

    node: int
    name: str
    run: str
    state: HostState
    age_s: float
    note: str
    ranks: tuple[RankPosition, ...]
    devices: tuple[dict[str, Any], ...]
    launch: str | None = None


class FileClock:
    """The clock of the file system that holds a folder; read once, by a file without a name, then this process's own.

    Where no file can be made there, this host's clock is taken, and ``is_local`` is set.
    """

    def __init__(self, folder: Path) -> None:
        self.is_local = False
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b".")
                file.flush()
                now = os.fstat(file.fileno()).st_mtime
        except OSError:
            now, self.is_local = time.time(), True
        self._base = now - time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self._base + time.monotonic()

    def age_s(self, path: Path) -> float | None:
        """Seconds since a file was written; None: there is none."""
        try:
            return max(0.0, self.now - path.stat().st_mtime)
        except OSError:
            return None


def read_hosts(
    run_folder: Path, clock: FileClock, rank_hosts: Mapping[int, str], launch: str | None = None
) -> tuple[tuple[HostPosition, ...], list[str]]:
    """The hosts of a run's last start, by index; empty where no agent has written.

    Args:
        rank_hosts: names of the hosts by rank, as far as they are known.
        launch: id of the launch that the start must be of; None: any.

    Returns:
        The hosts, and a sentence for each thing that was left out.
    """
    folder = run_folder / "health"
    names = sorted({path.stem for ending in ("now", "jsonl") for path in folder.glob(f"node_*.{ending}")})
    hosts, notes = [], []
    for name in names:
        try:
            found = _read_host(folder, name, clock, rank_hosts)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            notes.append(f"health/{name} is left out: {error!r}")
            continue
        hosts += [found] if found and launch in (None, found.launch) else []
    if not hosts:
        return (), notes
    run = min(hosts, key=lambda one: one.age_s).run
    if others := sum(one.run != run for one in hosts):
        notes.append(f"{others} {'host' if others == 1 else 'hosts'} of an earlier start are left out")
    return tuple(sorted((one for one in hosts if one.run == run), key=lambda one: one.node)), notes


def last_step_seen(run_folder: Path, launch: str | None = None, wait_s: float = 0.0) -> int:
    """Last step that a rank of the run's last start had done, by what its agents have seen; 0: none.

    Of a start that has gone on from an earlier one's save this may be the step of that.

    Args:
        launch: id of the launch that this start must be of; None: any.
        wait_s: agents have so long at most to write where their ranks have ended.
    """
    clock, end = FileClock(run_folder), time.monotonic() + wait_s
    while True:
        hosts = read_hosts(run_folder, clock, {}, launch)[0]
        are_running = any(not rank.ended for host in hosts if host.state != "silent" for rank in host.ranks)
        if not are_running or time.monotonic() >= end:
            return max((rank.step - 1 for host in hosts for rank in host.ranks if rank.step), default=0)
        time.sleep(LOOK_S)


def _read_host(folder: Path, name: str, clock: FileClock, rank_hosts: Mapping[int, str]) -> HostPosition | None:
    described = min(_descriptions(folder, name, clock), key=lambda one: one[0], default=None)
    if described is None:
        return None
    age_s, line = described
    state = _state_of(folder / f"{name}.status", str(line["run"]), age_s, clock)
    more_s = 0.0 if state in ("ended", "silent") else age_s
    ranks = [_rank_of(one, more_s) for one in line["ranks"]]
    if ranks and all(one.ended for one in ranks):
        state = "ended"
    node, launch = int(name.rpartition("_")[2]), line.get("launch")
    return HostPosition(
        node=node,
        name=next((rank_hosts[one.rank] for one in ranks if one.rank in rank_hosts), f"node {node}"),
        run=str(line["run"]),
        state=state,
        age_s=age_s,
        note=str(line.get("note", "")),
        ranks=tuple(sorted(ranks, key=lambda one: one.rank)),
        devices=tuple({"name": "?", "verdict": "?", "text": "", **one} for one in line.get("devices", ())),
        launch=launch if isinstance(launch, str) else None,
    )


def _descriptions(folder: Path, name: str, clock: FileClock) -> Iterator[tuple[float, dict[str, Any]]]:
    """Age and content of ``NAME.now``, which is replaced each second, and of the last line of ``NAME.jsonl``."""
    now, lines = folder / f"{name}.now", folder / f"{name}.jsonl"
    for path, read in ((now, Path.read_bytes), (lines, last_line)):
        age_s = clock.age_s(path)
        try:
            content = read(path) if age_s is not None else b""
        except OSError:
            continue  # it has just been removed
        if age_s is not None and content:
            yield age_s, parse_json(content)


def last_line(path: Path) -> bytes:
    """The last complete line of a file; empty: there is none."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = min(size, LAST_BYTES)
        while True:
            file.seek(size - length)
            *lines, _ = file.read(length).split(b"\n")
            if len(lines) > 1 or length == size:
                return lines[-1] if lines else b""
            length = min(size, 4 * length)


def _state_of(sign_file: Path, run: str, age_s: float, clock: FileClock) -> HostState:
    sign_age_s = clock.age_s(sign_file)
    try:
        sign = parse_json(sign_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        sign = {}
    if sign_age_s is None or sign.get("run") != run:
        return "silent" if age_s > LOST_S else "watched"
    if sign["ended"]:
        return "ended"
    if min(age_s, sign_age_s) > LOST_S:
        return "silent"
    return "stuck" if sign["stuck"] else "watched"


def _rank_of(raw: Mapping[str, Any], more_s: float) -> RankPosition:
    batch = int(raw["micro_batch"])
    position = RankPosition(
        rank=int(raw["rank"]),
        step=int(raw["step"]),
        micro_batch=batch if batch >= 0 else None,
        phase=str(raw["phase"]),
        in_phase_s=float(raw["stuck_s"]),
        process=str(raw["process"]),
    )
    if position.ended:
        return position
    return RankPosition(**{**vars(position), "in_phase_s": position.in_phase_s + more_s})
