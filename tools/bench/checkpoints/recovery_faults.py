"""What a campaign of recoveries does to a run that trains, by kind."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megasdc.checkpoint.files import list_steps, step_folder
from tools.bench.checkpoints.recovery_holdings import find_holdings, lose_memory, slots
from tools.bench.checkpoints.recovery_kinds import Strike
from tools.bench.checkpoints.recovery_start import Place, Start, agent_of, send
from tools.bench.small.drill import flip_bit

DISK_BYTES = 24 << 20
_START_S = 6.0
_PAUSE_S = (0.2, 1.5)
_WAIT_S = 60.0
_FILLING = "filling"


@dataclass
class Run:
    """A drill's run.

    Args:
        checkpoints: folder of the checkpoints.
        hosts: names of its hosts by index, which a fault may replace.
    """

    place: Place
    checkpoints: Path
    hosts: list[str]
    strike: Strike
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.strike.seed)

    def pause(self) -> None:
        """Let training go on for a while."""
        time.sleep(self.chance.uniform(*_PAUSE_S))


Fault = Callable[[Run, Start], None]
"""Harms a start; it has ended one of its ranks when it returns."""


def _wait(run: Run, start: Start, step: int) -> None:
    """Wait for the moment of a fault."""
    if start.wait_for_step(step, time.monotonic() + _WAIT_S):
        time.sleep(run.strike.delay_s)


def _kill_rank(run: Run, start: Start) -> None:
    start.kill([run.strike.rank])


def _kill_later(run: Run, start: Start) -> None:
    """Kill a rank some time after the start, whatever it is doing."""
    time.sleep(run.chance.uniform(0, _START_S))
    start.kill([run.chance.randrange(run.place.ranks)])


def _kill_host(run: Run, start: Start) -> None:
    start.kill(run.place.ranks_of(run.place.host_of(run.strike.rank)))


def _lose_host(run: Run, start: Start, host: int | None = None) -> None:
    """End all that runs on a host, and forget what is in its memory; another one takes its place."""
    host = run.place.host_of(run.strike.rank) if host is None else host
    agents = agent_of(run.place, host)
    start.kill(run.place.ranks_of(host))
    send(agents, signal.SIGKILL)
    for rank in run.place.ranks_of(host):
        start.processes[rank].wait()
    lose_memory(run.place.run, run.hosts[host])
    run.hosts[host] += "s"


def _lose_another(run: Run, start: Start) -> None:
    """Lose another host once the run has gone on some steps."""
    start.wait_for_step(run.place.last_step() + run.chance.randrange(1, 6), time.monotonic() + _WAIT_S)
    first = run.place.host_of(run.strike.rank)
    _lose_host(run, start, run.chance.choice([one for one in range(run.place.num_hosts) if one != first]))


def _kill_writer(run: Run, start: Start) -> None:
    if writers := start.writers(run.strike.rank):
        send([run.chance.choice(writers)], signal.SIGKILL)
    run.pause()
    _kill_rank(run, start)


def _kill_agent(run: Run, start: Start) -> None:
    send(agent_of(run.place, run.place.host_of(run.strike.rank)), signal.SIGKILL)
    run.pause()
    _kill_rank(run, start)


def _stop_writer(run: Run, start: Start) -> None:
    writers = start.writers(run.strike.rank)[-run.chance.choice([1, 2]) :][:1]
    send(writers, signal.SIGSTOP)
    run.pause()
    send(writers, signal.SIGCONT)
    time.sleep(run.chance.uniform(0, _PAUSE_S[0]))
    _kill_rank(run, start)


def _slow_partner(run: Run, start: Start) -> None:
    """Stop the writer of a rank's memory, which keeps another rank's copies; that one's host is lost."""
    host = run.place.host_of(run.strike.rank)
    send(start.writers(run.strike.rank)[:1], signal.SIGSTOP)
    run.pause()
    _lose_host(run, start, (host - 1) % run.place.num_hosts)


def _end(run: Run, start: Start) -> None:
    """End all ranks, and wait until they have ended."""
    start.kill(range(run.place.ranks))
    for process in start.processes:
        process.wait()


def _flip_slot(run: Run, start: Start) -> None:
    """Flip a bit in a rank's own slot: while it trains, or in the step that a restart would take."""
    if run.chance.random() < 0.5:
        _flip_in_slot(run, guests=False, step=0)
        _kill_rank(run, start)
    else:
        _end(run, start)
        _flip_in_slot(run, guests=False, step=_newest(run))


def _flip_guest(run: Run, start: Start) -> None:
    """Lose a host, and flip a bit in what a restart would take from its partner."""
    _lose_host(run, start)
    _end(run, start)
    _flip_in_slot(run, guests=True, step=_newest(run))


def _newest(run: Run) -> int:
    return find_holdings(run.place.run, run.checkpoints, run.hosts, run.place.ranks).memory


def _flip_in_slot(run: Run, *, guests: bool, step: int) -> None:
    """Flip a bit of a slot; ``step``: that it holds, 0: the newest."""
    found = slots(run.place.run, run.hosts, run.strike.rank, guests=guests)
    held = max(found, key=lambda one: (one.record.step == step, one.record.step), default=None)
    if held is not None:
        flip_bit(held.folder / run.chance.choice(held.record.files).name, run.chance)


def _flip_on_disk(run: Run, start: Start) -> None:
    """Flip a bit of the newest checkpoint."""
    _end(run, start)
    if steps := list_steps(run.checkpoints):
        files = sorted((run.checkpoints / step_folder(steps[-1])).glob("*.pt"))
        flip_bit(run.chance.choice(files), run.chance)


def _flip_arena(run: Run, start: Start) -> None:
    """Flip bits in the memory that a checkpoint is written from."""
    number = start.processes[run.strike.rank].pid
    for path in Path(f"/proc/{number}/fd").iterdir():
        with suppress(OSError):
            if re.match(r"/memfd:.*\.pt", str(path.readlink())):
                flip_bit(path, run.chance)
    run.pause()
    _kill_rank(run, start)


def _fill_disk(run: Run, start: Start) -> None:
    """Fill the disk of the checkpoints, all but a little; it is free again for the next start."""
    filling = run.checkpoints.parent / _FILLING
    left = run.chance.randrange(4096, 1 << 20)
    with open(filling, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with open(filling, "r+b") as file:
        file.truncate(max(0, filling.stat().st_size - left))
    run.pause()
    _end(run, start)
    filling.unlink()


FAULTS: dict[str, tuple[Fault, ...]] = {
    "rank": (_kill_rank,),
    "again": (_kill_rank, _kill_later),
    "host": (_kill_host,),
    "writer": (_kill_writer,),
    "agent": (_kill_agent,),
    "stopped": (_stop_writer,),
    "host_lost": (_lose_host,),
    "hosts_lost": (_lose_host, _lose_another),
    "slot": (_flip_slot,),
    "guest": (_flip_guest,),
    "file": (_flip_on_disk,),
    "arena": (_flip_arena,),
    "disk_full": (_fill_disk,),
    "slow": (_slow_partner,),
}
"""What happens to the first start, the second, and so on; the last one ends by itself."""


def strike(run: Run, start: Start, number: int) -> None:
    """Bring about the fault of a start; only the first one waits for its step."""
    if number == 0:
        _wait(run, start, run.strike.step)
    FAULTS[run.strike.kind][number](run, start)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A small file system in a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
