"""Faults that a campaign brings about in a supervised run between test hosts, from outside of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megasdc.common.errors import ConfigError, DataError, MegasdcError, StorageError
from megasdc.common.host import own_prefix
from megasdc.ops.launch.command import NODE_MODULE
from megasdc.ops.supervise import attempt_process
from megasdc.ops.supervise.journal import FOLDER, JOURNAL_FILE
from megasdc.ops.supervise.slurm import fields_of
from tools.bench.small.drill import flip_bit
from tools.bench.supervised.target import LOCAL, LONG_S, RUN_BYTES, SPARES, SUPERVISOR, Target

SSH, SLURM = "ssh", "slurm"
"""How attempts are started."""
INJECTED, SKIPPED = ("fault", "injected"), ("skip", "optimizer_step")
START_S = 60.0
"""Longest time until ranks of the next start are waited for."""
FULL_S = (15.0, 40.0)
"""For how many seconds the run folder has no room."""
POISON = Path(__file__).with_name("poison.py")
_WRITER, _AGENT = "megasdc.checkpoint.writer_main", "megasdc.ops.health.agent"


def _rank_killed(run: Target) -> None:
    run.kill(run.a_rank())


def _rank_crashed(run: Target) -> None:
    run.kill(run.a_rank(), signal.SIGSEGV)


def _rank_stopped(run: Target) -> None:
    run.kill(run.a_rank(), signal.SIGSTOP)


def _two_ranks_killed(run: Target) -> None:
    _rank_killed(run)
    run.soon()
    _rank_killed(run)


def _host_off(run: Target) -> None:
    run.power_off(run.chance.choice(run.used()))


def _two_hosts_off(run: Target) -> None:
    for host in run.chance.sample(run.used(), min(2, len(run.used()))):  # it may have fewer for a while
        run.power_off(host)
        run.soon()


def _unplugged(run: Target) -> None:
    run.unplug(run.chance.choice(run.used()))


def _two_off(run: Target) -> None:
    """So that hosts are lacking: the run goes on with fewer replicas, and with all of them once one is back."""
    for host in run.chance.sample(run.used(), min(2, len(run.used()))):
        run.power_off(host, LONG_S)


def _split(run: Target) -> None:
    """The supervisor's host is unplugged; somebody takes it for lost, and starts another on a host that is left."""
    run.unplug(run.hosts.names[0])
    run.intrude()


def _supervisor_killed(run: Target) -> None:
    run.kill(run.processes(SUPERVISOR))
    run.soon()
    run.start()


def _supervisor_and_rank_killed(run: Target) -> None:
    run.kill(run.processes(SUPERVISOR))
    _rank_killed(run)
    run.soon()
    run.start()


def _front_killed(run: Target) -> None:
    run.kill(run.processes(attempt_process.MODULE))


def _launchers_killed(run: Target) -> None:
    launchers = run.launchers()
    run.kill([run.chance.choice(launchers)] if launchers else [])


def _agent_killed(run: Target) -> None:
    agents = run.processes(_AGENT)
    run.kill([run.chance.choice(agents)] if agents else [])
    run.soon()
    _rank_killed(run)


def _writers_killed(run: Target) -> None:
    ranks = run.a_rank()
    for one in ranks:
        with suppress(psutil.Error):
            run.kill([child for child in one.children() if _WRITER in " ".join(child.cmdline())])
    run.soon()
    run.kill(ranks)


def _memory_flipped(run: Target) -> None:
    """In one slot of a rank, seen through the root of its process; then that rank is killed."""
    for one in run.a_rank():
        with suppress(OSError):
            slots = sorted(Path(f"/proc/{one.pid}/root/dev/shm").glob(f"{own_prefix()}memory-*/*/*/*optim_states.pt"))
            if slots:
                flip_bit(run.chance.choice(slots), run.chance)
        run.kill([one])


def _file_flipped(run: Target) -> None:
    """In the newest checkpoint on the disk; then a rank is killed."""
    files = sorted(run.run.glob("checkpoints/step_*/*.pt"))
    if files:
        with suppress(OSError):
            flip_bit(run.chance.choice([one for one in files if one.parent == files[-1].parent]), run.chance)
    _rank_killed(run)


def _job_requeued(run: Target) -> None:
    run.scheduler("scontrol", "requeue", run.job)


def _limit_near(run: Target) -> None:
    """As SLURM says so: to the batch script alone."""
    run.scheduler("scancel", "--batch", "--signal=USR1", run.job)


def _step_cancelled(run: Target) -> None:
    """That of the attempt, the only one on more than one node."""
    steps = map(fields_of, run.scheduler("scontrol", "--oneliner", "show", "step", run.job).splitlines())
    for step in [one["StepId"] for one in steps if int(one.get("Nodes", 0)) > 1]:
        run.scheduler("scancel", step)


def _wrong_results(run: Target, sections: dict[str, Any]) -> None:
    """From a random step on, on one of the hosts that the run begins with, the same each time that it is repeated."""
    wrong = {"kind": "scale", "factor": 1.5, "elements": 3, "same_elements": True, "submodule": "*.linear_fc2"}
    first = run.chance.randint(12, 45)
    fault = {**wrong, "host": run.chance.choice(run.first), "steps": [first, None]}
    sections["faults"] = [fault]


def _wrong_but_others_go_on(run: Target, sections: dict[str, Any]) -> None:
    _wrong_results(run, sections)
    sections["sdc"]["policy"] = dict.fromkeys(("persistent", "intermittent", "not_reproduced"), "isolate")
    sections["checkpoint"]["other_layout"] = "convert"


def _wrong_with_fewer(run: Target, sections: dict[str, Any]) -> None:
    """Two of three replicas are enough."""
    _wrong_results(run, sections)
    sections["supervise"]["min_hosts"] = run.num_hosts * 2 // 3


def _wrong_others_with_fewer(run: Target, sections: dict[str, Any]) -> None:
    """Likewise."""
    _wrong_but_others_go_on(run, sections)
    sections["supervise"]["min_hosts"] = run.num_hosts * 2 // 3


def _fewer_hosts(run: Target, sections: dict[str, Any]) -> None:
    sections["supervise"]["min_hosts"] = 1


def _poisoned_samples(run: Target, sections: dict[str, Any]) -> None:
    sections["training"]["max_skipped_steps"] = 2
    sections["supervise"] |= {"rewind_steps": 2, "rewinds": 8}  # each knows of two more steps


def _spare_without_data(run: Target) -> None:
    """Then a host that the run uses is powered off, so that it needs the spare."""
    for host in run.spares():
        data, away = run.data_of(host), run.folder / f"away_{host}"
        if not away.exists() and any(data.iterdir()):
            away.mkdir()
            _move(data, away)
            run.condition(host, lambda data=data, away=away: _move(away, data))  # type: ignore[misc]
    _host_off(run)


def _move(source: Path, target: Path) -> None:
    for one in source.iterdir():
        one.rename(target / one.name)


def _data_flipped(run: Target) -> None:
    """In one host's copy of the tokens; then a rank is killed."""
    host = run.chance.choice(run.used())
    path = run.chance.choice(sorted(run.data_of(host).rglob("*.bin")))
    whole = path.read_bytes()
    flip_bit(path, run.chance)
    run.condition(host, lambda: path.write_bytes(whole))
    _rank_killed(run)


def _read_only(run: Target) -> None:
    """The run's folder, on one host."""
    host, folder = run.chance.choice(run.used()), run.run
    run.on_host(host, f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")
    # A host that was off meanwhile has only the mount below.
    still = f"test $(grep -c ' {folder} ' /proc/self/mounts) -lt 2"
    run.condition(host, lambda: run.on_host(host, f"{still} || umount -l {folder}"))


def _shared_memory_full(run: Target) -> None:
    """On one host; then a rank is killed, so that the run is started again."""
    host = run.chance.choice(run.used())
    used = "$(($(df -k --output=used /dev/shm | tail -n 1) + 4))k"
    # What is written between both commands makes the size too small, which mount refuses.
    run.on_host(host, f"for _ in $(seq 50); do mount -o remount,size={used} /dev/shm && exit; sleep 0.1; done; exit 1")
    run.condition(host, lambda: run.on_host(host, "mount -o remount,size=50% /dev/shm"))
    _rank_killed(run)


def _local_folder_full(run: Target) -> None:
    """The folder of its own checkpoints, on one host."""
    host, folder = run.chance.choice(run.used()), run.folder / LOCAL
    run.on_host(host, f"if mountpoint -q {folder}; then head -c 1G /dev/zero >{folder}/fill 2>/dev/null || true; fi")
    run.condition(host, lambda: run.on_host(host, f"rm -f {folder}/fill"))


def _own_checkpoints(run: Target, sections: dict[str, Any]) -> None:
    """Each host has its own, in a small file system."""
    for host in run.hosts.names[1:]:
        run.on_host(host, f"mount -t tmpfs -o size=32m none {run.folder / LOCAL}")
    sections["checkpoint"] |= {"storage": "node_local", "folder": str(run.folder / LOCAL)}


def _run_folder_full(run: Target) -> None:
    """For a while, on all hosts; what is deleted meanwhile makes no room."""
    seconds = run.chance.uniform(*FULL_S)
    until = time.monotonic() + seconds
    run.told.append(f"the run folder is full for {seconds:.0f} s")

    def fill_disk() -> None:
        if time.monotonic() >= until:
            _resize(run.run, RUN_BYTES)
            return
        problem = ""
        while (file_system := os.statvfs(run.run)).f_bfree:  # somebody may write between this and the next line
            try:
                _resize(run.run, (file_system.f_blocks - file_system.f_bfree) * file_system.f_frsize)
            except subprocess.CalledProcessError as error:
                problem = error.stderr.decode(errors="replace").strip() or str(error)
            if time.monotonic() >= until:
                run.told.append(f"the run folder was not full at the end: {problem or 'what made it so had no effect'}")
                break
        run.later(fill_disk, (0.0, 0.0))

    fill_disk()


def _resize(folder: Path, size_bytes: int) -> None:
    command = ["mount", "-o", f"remount,size={size_bytes}", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def _journal_flipped(run: Target) -> None:
    """A bit of the supervisor's journal; then the supervisor is killed, and started again."""
    run.kill(run.processes(SUPERVISOR))
    with suppress(OSError, ValueError):
        flip_bit(run.run / FOLDER / JOURNAL_FILE, run.chance)
    run.soon()
    run.start()


def _signal(number: int, *more: str) -> Callable[[Target], None]:
    """A signal to a front, a launcher, an agent, a rank, or what has these words in its command line."""

    def strike(run: Target) -> None:
        words = run.chance.choice([attempt_process.MODULE, NODE_MODULE, _AGENT, "", *more])
        found = run.launchers() if words == NODE_MODULE else run.processes(words) if words else run.a_rank()
        found = [one for one in found if "python" in Path(one.info["cmdline"][0]).name]  # not what enters a host
        run.kill([run.chance.choice(found)] if found else [], number)
        run.told.append(f"{signal.Signals(number).name} to {words or 'a rank'}, {min(len(found), 1)} process")

    return strike


def _killed_while_starting(run: Target) -> None:
    """A rank is killed, and then one of each of the next two starts before it trains."""
    _rank_killed(run)
    for _ in range(2):
        before, until = {one.pid for one in run.ranks().values()}, time.monotonic() + START_S
        while run.exit_code() is None and time.monotonic() < until:
            now = {one.pid for one in run.ranks().values()}
            if now and not now & before:
                break
            time.sleep(0.1)
        _rank_killed(run)


OFFSETS_S = (2, 20, 300, 7_200, 259_200)
"""By so much a clock is ahead or behind: seconds to days."""


def _clock_off(run: Target) -> None:
    """By seconds to days, on any host, the supervisor's included; it jumps back later."""
    host = run.chance.choice(run.hosts.names)
    _set_clock(run, host, run.chance.choice(OFFSETS_S) * run.chance.choice((1, -1)))
    run.later(lambda: run.on_host(host, "rm -f /run/clock_off"), LONG_S)


def _set_clock(run: Target, host: str, seconds: int) -> None:
    """A host's date is ahead by so many seconds from now on; behind: a negative number."""
    run.on_host(host, f"echo {seconds} >/run/clock_off.new && mv /run/clock_off.new /run/clock_off")
    run.told.append(f"the date of {host} is {seconds:+d} s off")


def _off_from_start(host_of: Callable[[Target], str]) -> Callable[[Target], None]:
    """Before the run begins a host's date is off."""
    return lambda run: _set_clock(run, host_of(run), run.chance.choice(OFFSETS_S) * run.chance.choice((1, -1)))


def _jump(host_of: Callable[[Target], str]) -> Callable[[Target], None]:
    """In mid-run that date jumps, forward or back, and again soon after."""

    def strike(run: Target) -> None:
        host = host_of(run)
        _set_clock(run, host, run.chance.choice((0, *OFFSETS_S)) * run.chance.choice((1, -1)))
        run.later(lambda: _set_clock(run, host, run.chance.choice((0, *OFFSETS_S)) * run.chance.choice((1, -1))))

    return strike


def _jump_and_fail(host_of: Callable[[Target], str]) -> Callable[[Target], None]:
    """Likewise, and a rank of a known host is killed, crashes or stands still, or that host is powered off."""
    jump = _jump(host_of)

    def strike(run: Target) -> None:
        jump(run)
        time.sleep(run.chance.uniform(0.0, 2.0))
        ranks = run.ranks()
        if not ranks:
            return
        rank = run.chance.choice(sorted(ranks))
        host, how = run.used()[rank // run.slots], run.chance.choice(("SIGKILL", "SIGSEGV", "SIGSTOP", "power"))
        run.blamed.add(host)
        run.told.append(f"{how} to rank {rank} on {host}")
        if how == "power":
            run.power_off(host)
        else:
            run.kill([ranks[rank]], signal.Signals[how])

    return strike


def _wrong_host(run: Target, sections: dict[str, Any]) -> None:
    """Wrong results on a host that must be the one that is blamed."""
    _wrong_results(run, sections)
    run.blamed.add(sections["faults"][0]["host"])


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and what brings it about.

    Args:
        strike: at its moment; None: it comes by itself.
        prepare: changes the configuration's sections; None: nothing.
        event: kind and name of what is reported when it comes by itself; None: it does not.
        replicas: fewest and most of runs that it comes about in.
        spares: hosts that such a run has beside those that it needs.
        engines: of the runs that it can come about in.
        changes_size: the run may have another number of replicas for a while.
        checked: results are checked in every step, instead of by audits.
        may_end: exit codes with which a run may end that has too few hosts left, naming one.
        before: what is done to the hosts before the run begins; None: nothing.
        blames: no other host may be blamed, or not be used, than those that the fault says (``Target.blamed``).
        waited_out: the run waits until it is over: no attempt ends for it.
    """

    title: str
    strike: Callable[[Target], None] | None
    prepare: Callable[[Target, dict[str, Any]], None] | None = None
    event: tuple[str, str] | None = None
    replicas: tuple[int, int] = (1, 99)
    spares: int = SPARES
    engines: tuple[str, ...] = (SSH, SLURM)
    changes_size: bool = False
    checked: bool = False
    may_end: tuple[int, ...] = ()
    before: Callable[[Target], None] | None = None
    blames: bool = False
    waited_out: bool = False


def _checked(title: str, prepare: Callable[[Target, dict[str, Any]], None], **more: Any) -> Kind:
    """Of runs that can leave a replica out: what makes results wrong is found in its first step."""
    return Kind(title, None, prepare, INJECTED, (3, 3), engines=(SSH,), checked=True, **more)


def _condition(title: str, strike: Callable[[Target], None], *may_end: type[MegasdcError], **more: Any) -> Kind:
    """Of one host, or of the supervisor."""
    return Kind(title, strike, engines=(SSH,), may_end=tuple(one.exit_code for one in may_end), **more)


CONDITIONS = {
    "no_data": _condition("a spare has no data, and a host is powered off", _spare_without_data, DataError),
    "bad_data": _condition("a bit flips in a host's copy of the data, then a rank is killed", _data_flipped, DataError),
    "read_only": _condition("the run folder is read-only on one host", _read_only, StorageError),
    "shm_full": _condition(
        "/dev/shm of a host is full, then a rank is killed", _shared_memory_full, ConfigError, StorageError
    ),
    "local_full": _condition(
        "a host's own checkpoint folder is full", _local_folder_full, StorageError, prepare=_own_checkpoints
    ),
    "run_full": _condition("the run folder's file system is full for a while", _run_folder_full, waited_out=True),
    "journal": _condition("a bit flips in the journal, and the supervisor is killed", _journal_flipped),
    "hup": _condition("SIGHUP to one process", _signal(signal.SIGHUP, SUPERVISOR)),
    "int": _condition("SIGINT to one process", _signal(signal.SIGINT)),
    "stop": _condition("SIGSTOP to one process", _signal(signal.SIGSTOP)),
    "starting": _condition("a rank is killed, and one in each of the next two starts", _killed_while_starting),
    "clock": _condition("the clock of a host is off", _clock_off),
}
"""Kinds that are a condition of one host, or of the supervisor."""
_CLOCKS_OF: dict[str, tuple[str, Callable[[Target], str]]] = {
    "first": ("rank 0's host", lambda run: run.first[0]),
    "spare": ("a spare", lambda run: run.hosts.names[-1]),
    "supervisor": ("the supervisor's host", lambda run: run.hosts.names[0]),
}


def _clock_kinds() -> dict[str, Kind]:
    """A date is off from the start and jumps in mid-run, on one host of each role, while another fault comes."""
    found = {}
    for name, (whose, host_of) in _CLOCKS_OF.items():
        more: dict[str, Any] = {"before": _off_from_start(host_of), "blames": True, "engines": (SSH,)}
        found[f"clock_{name}"] = Kind(
            f"the date of {whose} is off and jumps, a rank fails", _jump_and_fail(host_of), **more
        )
        found[f"clock_{name}_wrong"] = Kind(
            f"the date of {whose} is off and jumps, one host computes wrong results",
            _jump(host_of),
            _wrong_host,
            INJECTED,
            (3, 99),
            **more,
        )
    return found


CLOCKS = _clock_kinds()
"""Kinds in which hosts' clocks differ."""
KINDS = {
    "rank": Kind("a rank is killed", _rank_killed),
    "crash": Kind("a rank crashes (SIGSEGV)", _rank_crashed),
    "stuck": Kind("a rank stands still", _rank_stopped),
    "ranks": Kind("a rank is killed, and one soon after", _two_ranks_killed),
    "host": Kind("a host is powered off", _host_off),
    "hosts": Kind("two hosts are powered off, one soon after the other", _two_hosts_off, engines=(SSH,)),
    "cable": Kind("a host is unplugged", _unplugged, engines=(SSH,)),
    "supervisor": Kind("the supervisor is killed", _supervisor_killed, engines=(SSH,)),
    "both": Kind("the supervisor and a rank are killed", _supervisor_and_rank_killed, engines=(SSH,)),
    "front": Kind("the front of the launch is killed", _front_killed),
    "launcher": Kind("DeepSpeed's launcher of a host is killed", _launchers_killed, engines=(SSH,)),
    "agent": Kind("an agent is killed, then a rank", _agent_killed),
    "writers": Kind("the writers of a rank are killed, then the rank", _writers_killed),
    "memory": Kind("a bit flips in a host's memory, then a rank is killed", _memory_flipped),
    "file": Kind("a bit flips on the disk, then a rank is killed", _file_flipped),
    "requeue": Kind("an administrator requeues the job", _job_requeued, engines=(SLURM,)),
    "limit": Kind("the time limit is announced to the job", _limit_near, engines=(SLURM,)),
    "step": Kind("the job step of an attempt is cancelled", _step_cancelled, engines=(SLURM,)),
    "fewer": Kind(
        "two hosts are powered off, and the run may have fewer",
        _two_off,
        _fewer_hosts,
        engines=(SSH,),
        changes_size=True,
    ),
    "split": Kind("the supervisor's host is unplugged, and another one is started", _split, engines=(SSH,)),
    "samples": Kind("some samples give NaN", None, _poisoned_samples, SKIPPED, engines=(SSH,)),
    "wrong": Kind("one host of three replicas computes wrong results", None, _wrong_results, INJECTED, (3, 99)),
    "unsure": Kind("one host of two replicas computes wrong results", None, _wrong_results, INJECTED, (2, 2), 3),
    "halted": _checked("one host is wrong: all halt, and it is replaced", _wrong_results),
    "isolated": _checked(
        "one host is wrong: the others go on until it is replaced", _wrong_but_others_go_on, changes_size=True
    ),
    "halted_alone": _checked("one host is wrong, no spare: all halt", _wrong_with_fewer, spares=0, changes_size=True),
    "isolated_alone": _checked(
        "one host is wrong, no spare: the others go on", _wrong_others_with_fewer, spares=0, changes_size=True
    ),
    **CONDITIONS,
    **CLOCKS,
}
"""All kinds; where nothing of the sort runs at the moment, a fault does nothing."""
LEAVE_OUT = {"isolated", "isolated_alone"}
"""Kinds after which the other replicas go on at once."""
