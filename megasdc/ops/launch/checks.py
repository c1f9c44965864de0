"""Checks of all hosts before a start, in parallel; every problem is reported with its host and remedy."""

from __future__ import annotations

import ipaddress
import logging
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError, LaunchError, MegasdcError, StorageError
from megasdc.common.versions import check_range
from megasdc.ops.launch.hosts import Placement, without_user
from megasdc.ops.launch.on_host import probe
from megasdc.ops.launch.remote import HostWatch, Transport

logger = logging.getLogger(__name__)

DISTRIBUTIONS = ("megasdc", "torch", "deepspeed", "megatron-core")
PROBE_TIMEOUT_S = 60.0
LOCKS_TIMEOUT_S = 20.0
"""After ranks were stuck, perhaps since a host hangs."""
LONGEST_BUILD_S = 1800.0
"""A lock of a compiled extension that is older is that of no build."""
CPU_EXTENSIONS = ("cpu_adam", "fused_adam", "deepspeed_shm_comm", "deepspeed_ccl_comm")
"""What DeepSpeed (0.19.8) compiles for an optimizer and for communication on CPUs; Source: its ``op_builder/cpu``."""
LOOPBACK = "127."
STORAGE = StorageError.exit_code


@dataclass(frozen=True)
class HostNeeds:
    """Requirements of a run on every host.

    ``python_path``: folders of PYTHONPATH; ``path``: folders put before PATH; ``readable``: paths, each with the remedy
    where it cannot be read; ``data``: folders of prepared data, and ``code``: files, the same on all; ``master_port``
    None: the launch reserves a free one; ``compilers``: needed on hosts without an accelerator, each with the setting
    that needs it; ``cpu_only``: DeepSpeed is set to use no accelerator; ``gloo_interface``: GLOO_SOCKET_IFNAME is set
    for the ranks; ``always_gloo``: they have groups of gloo with an accelerator too, as a program of others may not;
    ``extensions``: folder of compiled extensions, None: not known.
    """

    cwd: str
    python_path: list[str]
    path: list[str]
    readable: Mapping[str, str]
    data: list[str]
    code: list[str]
    writable: list[str]
    master_port: int | None
    compilers: Mapping[str, str]
    cpu_only: bool
    gloo_interface: bool
    always_gloo: bool
    extensions: str | None = None


@dataclass(frozen=True)
class HostProblem:
    """What prevents a start.

    Args:
        hosts: that have it; empty: it is not known which ones, this one alone, or it is no fault of theirs.
        text: a sentence that names them, with the remedy.
        code: exit code of the error that a rank there would end with, or LaunchError's.
        silent: the host gave no answer.
    """

    hosts: tuple[str, ...]
    text: str
    code: int = LaunchError.exit_code
    silent: bool = False


@dataclass(frozen=True)
class HostReport:
    """Results of all hosts: facts by host, and problems that prevent a start."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: list[HostProblem] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Their sentences."""
        return [one.text for one in self.found]

    def error(self, text: str) -> MegasdcError:
        """The error of all problems together: where they are of one kind that of a rank, else LaunchError."""
        codes = {one.code for one in self.found}
        kinds = [kind for kind in (StorageError, DataError) if codes == {kind.exit_code}]
        return (kinds[0] if kinds else LaunchError)(text)


def inspect_hosts(
    placement: Placement,
    transport: Transport,
    needs: HostNeeds,
    *,
    trusted: Collection[str] = (),
    among_others: bool = False,
    watch: HostWatch | None = None,
) -> HostReport:
    """Probe every host, and this one to compare versions; returns facts and problems of all hosts.

    Args:
        placement: the first host is that of rank 0.
        trusted: hosts whose data and code are right where others differ from them; empty: what most of them have is.
        among_others: the run has further hosts.
        watch: what is done meanwhile; where it says nothing of busy hosts, that is logged. None: nothing.
    """
    watch = replace(watch or HostWatch(), say=(watch and watch.say) or logger.warning)
    request = {
        "cwd": needs.cwd,
        "python_path": needs.python_path,
        "path": needs.path,
        "distributions": DISTRIBUTIONS,
        "readable": list(needs.readable),
        "data": needs.data,
        "code": needs.code,
        "writable": needs.writable,
        "master_port": None,
        "extensions": needs.extensions,
    }
    program = Path(probe.__file__)
    first, *others = placement.hosts
    of_first = {**request, "master_port": needs.master_port}
    answers = transport.run([first], program, of_first, timeout_s=PROBE_TIMEOUT_S, watch=watch)
    if others:
        answers += transport.run(others, program, request, timeout_s=PROBE_TIMEOUT_S, watch=watch)
    report = HostReport()
    for answer in answers:
        if answer.problem:
            report.found.append(HostProblem((answer.host,), answer.problem, silent=True))
        else:
            report.facts[answer.host] = answer.value
            several = among_others or len(placement.hosts) > 1
            report.found.extend(_host_problems(answer.host, answer.value, needs, several))
    report.found.extend(differing_data({host: found["data"] for host, found in report.facts.items()}, trusted))
    for host, name, text in left_behind({host: found["locks"] for host, found in report.facts.items()}):
        if "ninja" in needs.compilers and has_no_accelerator(report.facts[host], needs) and name in CPU_EXTENSIONS:
            # Of no host: a lock is no fault of one, and no other has to take its place.
            report.found.append(HostProblem((), text))
        else:
            (watch.say or logger.warning)(text)
    report.found.extend(code_problems({host: found["code"] for host, found in report.facts.items()}, trusted))
    if placement.remote:
        (here,) = Transport(remote=False).run(["this host"], program, request, timeout_s=PROBE_TIMEOUT_S, watch=watch)
        versions = {host: found["versions"] for host, found in report.facts.items()}
        if here.problem:
            report.found.append(HostProblem((), here.problem))
        else:
            report.found.extend(version_problems(versions, here.value["versions"]))
    return report


def differing_data(data: Mapping[str, Mapping[str, str | None]], trusted: Collection[str] = ()) -> list[HostProblem]:
    """Folders of prepared data that are not the same on all hosts.

    Args:
        data: digest of each folder's manifest by host; None: there is none, which a rank says where no host has one.
        trusted: see ``inspect_hosts``.
    """
    problems = []
    for folder in dict.fromkeys(name for own in data.values() for name in own):
        found = {host: digest for host, own in data.items() if (digest := own.get(folder)) is not None}
        for host in data.keys() - found.keys() if found else ():
            text = f"{host}: there are no prepared data in {folder}, as other hosts have; copy or share them"
            problems.append(HostProblem((host,), text, DataError.exit_code))
        if (odd := _others(found, trusted)) is None:
            continue
        who = f"{', '.join(odd)}: the data in {folder} are others than" if odd else f"the data in {folder} differ"
        rest = "those of the other hosts" if odd else f"between {', '.join(found)}"
        problems.append(HostProblem(odd, f"{who} {rest}; copy them from one host to all", DataError.exit_code))
    return problems


def code_problems(code: Mapping[str, Mapping[str, str | None]], trusted: Collection[str] = ()) -> list[HostProblem]:
    """Files that say what is computed and are not the same on all hosts.

    Args:
        code: digest of each file by host; None: it cannot be read, which is a problem of its own.
        trusted: see ``inspect_hosts``.
    """
    problems = []
    for path in dict.fromkeys(name for own in code.values() for name in own):
        found = {host: digest for host, own in code.items() if (digest := own.get(path)) is not None}
        if (odd := _others(found, trusted)) is None:
            continue
        who = f"{', '.join(odd)}: {path} is another than on the other hosts" if odd else f"{path} differs between hosts"
        problems.append(HostProblem(odd, f"{who}; copy it from one host to all"))
    return problems


def left_behind(locks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, str, str]]:
    """Locks whose writers have gone, for which ranks would wait without end: host, name of the extension and sentence.

    One in a folder that hosts share may be that of a build on a host that is not asked, until it is too old for that,
    as may one whose possible writers are not all seen.

    Args:
        locks: by host, as the probe reports them.
    """
    held = [one for own in locks.values() for one in own if one["held"]]
    return [
        (host, Path(one["path"]).parent.name, f"{host}: {_lock_text(one)}")
        for host, own in locks.items()
        for one in own
        if not one["held"] and (one["age_s"] > LONGEST_BUILD_S or (one["local"] and one["held"] is False))
        # A path on disks of two hosts is that of two files.
        if not any(one["path"] == other["path"] and not (one["local"] and other["local"]) for other in held)
    ]


def left_locks(hosts: Sequence[str], transport: Transport, extensions: str) -> list[str]:
    """What is known of locks of compiled extensions that lie on hosts after ranks were stuck, in sentences."""
    asked = {"extensions": extensions}
    answers = transport.run(hosts, Path(probe.__file__), asked, timeout_s=LOCKS_TIMEOUT_S)
    locks = {answer.host: answer.value["locks"] for answer in answers if not answer.problem}
    return [f"{host}: {_lock_text(one)}" for host, own in locks.items() for one in own]


def _lock_text(lock: Mapping[str, Any]) -> str:
    writer = {
        True: "a process of this host has it open, which may be compiling",
        False: "no process of this host has it open: its writer was killed, or is on another host",
        None: "whether a process has it open is not known, since not all that may are seen",
    }[lock["held"]]
    return (
        f"{lock['path']} locks a compiled extension since {lock['age_s']:.0f} s; {writer}; a rank that needs the "
        f"extension waits until it is gone: if nobody compiles, remove it (rm {shlex.quote(lock['path'])})"
    )


def _others(found: Mapping[str, str], trusted: Collection[str]) -> tuple[str, ...] | None:
    """Hosts that have something else than most, or than those that are trusted.

    Args:
        found: digest by host.

    Returns:
        None: all have the same; empty: it is not known who is right.
    """
    votes = Counter(digest for host, digest in found.items() if not trusted or host in trusted).most_common(2)
    if len(set(found.values())) < 2 or not votes:
        return None
    is_tied = len(votes) == 2 and votes[0][1] == votes[1][1]
    return () if is_tied else tuple(host for host, digest in found.items() if digest != votes[0][0])


def version_problems(
    versions: Mapping[str, Mapping[str, str | None]], here: Mapping[str, str | None]
) -> list[HostProblem]:
    """A problem for every package that is missing (None) or differs between hosts; ``versions`` are by host."""
    problems = []
    for name in DISTRIBUTIONS:
        found = {host: own[name] for host, own in versions.items()}
        usual = Counter([*found.values(), here[name]]).most_common(1)[0][0]
        if set(found.values()) <= {here[name]} and here[name] is not None:
            continue
        hosts = tuple(host for host, version in found.items() if version != usual)
        odd = [f"{host} has {found[host] or 'none'}" for host in hosts]
        odd += [f"this host has {here[name] or 'none'}"] if here[name] != usual else []
        rest = f"; the others have {usual}" if usual is not None else ""
        what = ", ".join(odd) if odd else "not installed on any host"
        text = f"{name}: {what}{rest}; install the same version in {sys.prefix} on every host"
        problems.append(HostProblem(hosts, text))
    return problems


def _host_problems(host: str, found: Mapping[str, Any], needs: HostNeeds, several: bool) -> list[HostProblem]:
    problems = []
    if found["missing_cwd"]:
        problems.append(
            f"{host}: working folder {needs.cwd} does not exist, or may not be entered; share or create it, or start "
            "elsewhere"
        )
    try:
        check_range({"python": found["python"], **found["versions"]})
    except LaunchError as error:
        problems.append(f"{host}: {error}")
    problems += [f"{host}: {path} cannot be read there; {needs.readable[path]}" for path in found["unreadable"]]
    if found["port_problem"]:
        problems.append(
            f"{host}: rank 0 cannot listen on port {needs.master_port} ({found['port_problem']}); "
            "end the other run, or choose another with `-- --master_port N`"
        )
    has_none = has_no_accelerator(found, needs)
    if has_none:
        problems += _missing_compilers(host, found, needs)
    own = found["own_address"]
    binds_to_name = several and not needs.gloo_interface and (has_none or needs.always_gloo)
    if binds_to_name and (own is None or ipaddress.ip_address(own).is_loopback):
        leads = f"resolves to {own}" if own else "does not resolve"
        problems.append(
            f"{host}: its own name {found['hostname']} {leads}, where other hosts cannot reach gloo; "
            "correct /etc/hosts there or set GLOO_SOCKET_IFNAME"
        )
    unwritable = [
        HostProblem((host,), f"{host}: {path} cannot be written to there{why}; mount or create it", STORAGE)
        for path, why in found["unwritable"].items()
    ]
    return [*(HostProblem((host,), text) for text in problems), *unwritable]


def has_no_accelerator(found: Mapping[str, Any], needs: HostNeeds) -> bool:
    """Whether ranks of a host have no accelerator."""
    return needs.cpu_only or not found["has_gpu"]


def _missing_compilers(host: str, found: Mapping[str, Any], needs: HostNeeds) -> list[str]:
    """What ranks without an accelerator compile with, and do not find."""
    return [
        f"{host}: {name} is not on PATH, and for {needs.compilers[name]} code is compiled with it; {remedy}"
        for name, remedy in (("g++", "install g++"), ("ninja", f"pip install ninja into {sys.prefix}"))
        if name in needs.compilers and not found["programs"][name]
    ]


def master_address(first_host: str, found: Mapping[str, Any]) -> str:
    """The address that the first host's name resolves to, if the host has it on a network interface.

    Else the first of its own, as DeepSpeed takes it, which may be that of a container bridge; where it tells none, the
    one that its own name leads it to, or that its name leads to here.

    Args:
        found: what the probe reports of that host.

    Raises:
        LaunchError: it has none that other hosts can reach.
    """
    address, addresses = _resolved(first_host), list(filter(_is_address, found["addresses"]))
    if address is not None and address in addresses:
        return address
    # The last one: as seen from here, where the host itself tells none.
    for own in (*addresses, found["own_address"], address):
        if own is not None and not ipaddress.ip_address(own).is_loopback:
            return str(own)
    raise LaunchError(
        f"{first_host}: none of its addresses is known, at which other ranks could reach rank 0; "
        "give one by `-- --master_addr ADDRESS`"
    )


def _is_address(text: str) -> bool:
    """Whether a word is one; other programs of the name ``hostname`` may print anything."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def address_from_here(host: str) -> str | None:
    """The address that a host's name resolves to on this one; None: to none that another host can reach."""
    address = _resolved(host)
    return None if address is None or address.startswith(LOOPBACK) else address


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(without_user(host))
    except (OSError, UnicodeError):  # the latter: of a name that DNS allows no host
        return None
