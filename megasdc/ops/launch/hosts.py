"""Hosts of a launch and their ranks: hostfile, include and exclude, read as by DeepSpeed, with all errors reported.

DeepSpeed 0.19.8 (``deepspeed/launcher/runner.py``) only warns about a missing hostfile and then runs locally; here a
given hostfile must be valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasdc.common.errors import LaunchError
from megasdc.common.program import why_unreadable
from megasdc.ops.launch.environment import text_problem

# Host names reach a shell (pdsh) and ssh's command line, so no other characters are allowed.
HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
HOSTFILE_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\S+)(?:\s+#.*)?")
LOCAL_HOST = "localhost"


@dataclass(frozen=True)
class Placement:
    """Hosts and slots of a launch, in rank order.

    ``remote`` is false if the ranks run on this host without SSH.
    """

    slots: dict[str, list[int]]
    remote: bool

    @property
    def hosts(self) -> list[str]:
        """Hosts in the order of the hostfile."""
        return list(self.slots)

    @property
    def host_of_rank(self) -> list[str]:
        """Host of each global rank: hosts in the order of the hostfile, slots in ascending order."""
        return [host for host, slots in self.slots.items() for _ in slots]


def read_hostfile(path: Path | str) -> dict[str, int]:
    """Read a hostfile: one ``NAME slots=N`` per line, ``#`` starts a comment line.

    Returns:
        Number of slots of each host, in the order of the file.

    Raises:
        LaunchError: the file is missing, empty, or has invalid lines; lists them all by number.
    """
    if problem := why_unreadable(path):  # a device may never end
        raise LaunchError(f"hostfile {path} {problem}")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise LaunchError(
            f"hostfile {path} cannot be read: {error}; write one line `NAME slots=N` for each host, "
            "or omit --hostfile to run on this host alone"
        ) from error
    if problem := text_problem(content, Path(path)):
        raise LaunchError(f"hostfile {path} {problem}")
    lines = content.decode().splitlines()
    line_of_host: dict[str, int] = {}
    slots: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        problem = _line_problem(text, line_of_host)
        if problem:
            problems.append(f"{path}:{number}: {problem}")
            continue
        match = HOSTFILE_LINE.fullmatch(text)
        assert match, "a line without a problem matches"
        slots[match["host"]] = int(match["slots"])
        line_of_host[match["host"]] = number
    if not slots and not problems:
        problems.append(f"{path} names no host; write one line `NAME slots=N` for each host")
    if problems:
        raise LaunchError("\n".join(problems))
    return slots


def hostfile_text(slots: Mapping[str, int]) -> str:
    """The lines of hosts as ``read_hostfile`` reads them."""
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def without_user(host: str) -> str:
    """Name under which other hosts reach a host of a hostfile, which may contain ``user@``."""
    return host.rpartition("@")[2]


def _line_problem(text: str, line_of_host: Mapping[str, int]) -> str | None:
    """Problem of one line of a hostfile, or None."""
    match = HOSTFILE_LINE.fullmatch(text)
    if not match:
        return f"got `{text}`, need `NAME slots=N`"
    host, slots = match["host"], match["slots"]
    if not HOST_NAME.fullmatch(host):
        return f"got host name `{host}`, need letters, digits, `.`, `-`, `_` (and an optional `user@`)"
    if not (slots.isascii() and slots.isdigit() and int(slots) > 0):
        return f"got slots={slots}, need a whole number above 0"
    if host in line_of_host:
        return f"host {host} is already on line {line_of_host[host]}; give its slots once"
    return None


def place_on_hosts(
    pool: Mapping[str, int], *, include: str = "", exclude: str = "", num_gpus: int | None = None
) -> Placement:
    """Apply include or exclude, or the number of accelerators, to the hosts of a hostfile, which have ``pool`` slots.

    ``include`` is ``NAME[:SLOT[,SLOT...]][@NAME...]``, empty means all; ``exclude`` has the same form; ``num_gpus``:
    slots used on every host, None means all of them.

    Raises:
        LaunchError: a host or slot does not exist, nothing is left, or the filters contradict each other.
    """
    if include and exclude:
        raise LaunchError(f"got --include {include} and --exclude {exclude}; give one of them")
    if num_gpus is not None and (include or exclude):
        raise LaunchError("--num-ranks cannot be combined with --include or --exclude; name the slots, as in node1:0,1")
    problems = []
    slots = {host: list(range(count)) for host, count in pool.items()}
    if num_gpus is not None:
        problems = [
            f"--num-ranks {num_gpus}: {host} has {count} slots in the hostfile; need 1 to {count}"
            for host, count in pool.items()
            if not 0 < num_gpus <= count
        ]
        slots = {host: list(range(num_gpus)) for host in pool}
    else:
        chosen = _parse_filter(include or exclude, slots, problems)
        if include:
            slots = {host: chosen[host] for host in slots if host in chosen}
        elif exclude:
            slots = {host: [slot for slot in own if slot not in chosen.get(host, [])] for host, own in slots.items()}
            slots = {host: own for host, own in slots.items() if own}
    if not slots and not problems:
        problems.append(f"--exclude {exclude} leaves no host of {', '.join(pool)}")
    if problems:
        raise LaunchError("\n".join(problems))
    return Placement(slots, remote=True)


def _parse_filter(text: str, slots: Mapping[str, Sequence[int]], problems: list[str]) -> dict[str, list[int]]:
    """Parse an include or exclude string; problems are appended to ``problems``."""
    chosen: dict[str, set[int]] = {}
    for part in text.split("@") if text else []:
        host, _, listed = part.partition(":")
        if host not in slots:
            problems.append(f"`{part}` names host `{host}`; the hostfile has {', '.join(slots)}")
        elif not listed:
            chosen.setdefault(host, set()).update(slots[host])
        else:
            known = {str(slot): slot for slot in slots[host]}
            for slot in listed.split(","):
                if slot not in known:
                    problems.append(f"`{part}` names slot `{slot}`; {host} has {', '.join(known)}")
            chosen.setdefault(host, set()).update(known[slot] for slot in listed.split(",") if slot in known)
    return {host: sorted(own) for host, own in chosen.items()}


def place_on_this_host(num_gpus: int | None, visible_devices: str | None = None) -> Placement:
    """Place ranks on this host only: ``num_gpus``, or one for each visible device.

    ``visible_devices``: value of CUDA_VISIBLE_DEVICES, which DeepSpeed ignores beside ``--num_gpus``.

    Raises:
        LaunchError: the number of ranks is not given, below 1, or above that of the visible devices.
    """
    if visible_devices:
        devices = visible_devices.split(",")
        if not all(device.isascii() and device.isdigit() for device in devices):
            raise LaunchError(f"got CUDA_VISIBLE_DEVICES={visible_devices}; DeepSpeed needs plain device numbers")
        if num_gpus is not None and not 0 < num_gpus <= len(devices):
            raise LaunchError(f"got --num-ranks {num_gpus} with CUDA_VISIBLE_DEVICES={visible_devices}")
        return Placement({LOCAL_HOST: [int(device) for device in devices[:num_gpus]]}, remote=False)
    if num_gpus is None or num_gpus < 1:
        given = "--num-ranks is missing" if num_gpus is None else f"got --num-ranks {num_gpus}"
        raise LaunchError(f"{given}; without a hostfile give the number of ranks of this host, at least 1")
    return Placement({LOCAL_HOST: list(range(num_gpus))}, remote=False)


def place_program_here(include: str, exclude: str, num_gpus: int | None, environ: Mapping[str, str]) -> Placement:
    """Place ranks of a program on this host as DeepSpeed's launcher does: on slots of ``localhost``, or on all devices.

    Args:
        include: ``localhost:SLOT[,SLOT...]``.
        exclude: the same form.
        environ: with CUDA_VISIBLE_DEVICES, where that is set.

    Raises:
        LaunchError: another host is named, or the number of ranks is not known.
    """
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if include or exclude:
        named = re.findall(r"\d+", f"{include},{exclude}".replace(LOCAL_HOST, ""))
        most = max([devices - 1, *map(int, named)])
        found = place_on_hosts({LOCAL_HOST: most + 1}, include=include, exclude=exclude, num_gpus=num_gpus)
        return Placement(found.slots, remote=False)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if num_gpus is None and not visible and devices == 0:
        raise LaunchError("how many ranks? this host has no GPU, and no hostfile is named; give deepspeed --num_gpus N")
    return place_on_this_host(num_gpus if num_gpus is not None or visible else devices, visible)
