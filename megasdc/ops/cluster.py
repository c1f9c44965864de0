"""Test hosts: several hosts on one machine for as long as a command or a test runs, with real SSH and power cuts.

Each host is a set of its own network, UTS, IPC, PID and mount namespaces whose first process is that host's sshd; a
bridge in one more network namespace is the switch. Nothing is named in /etc, /run or /var, and everything dies with
the Python process that made it, also when that process is killed with SIGKILL. The hosts share the machine's file
system, except for /run, /dev/shm and the folders given as private.

Needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN, and the Debian packages iproute2, openssh-server, openssh-client, pdsh.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from megasdc.common.errors import LaunchError
from megasdc.common.program import echo
from megasdc.train.signals import exiting_on_signals

HOSTS_VARIABLE = "MEGASDC_TEST_HOSTS"
HOSTFILE_VARIABLE = "MEGASDC_TEST_HOSTFILE"
PLACEHOLDER = "{hostfile}"
"""What the hostfile's path takes the place of in a command."""
INTERFACE = "eth0"
SUBNET = "10.77.0"
OWN_FOLDERS = (Path("/dev/shm"), Path("/run"))
"""Memory of each host: nothing in it is seen by another one."""
POLL_S = 0.01
DRAIN_S = 0.1
CLOSE_S = 10.0
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
OF_PROCESS_IDS = 0x20000000
"""Flag of ``clone``: CLONE_NEWPID."""
OF_HOST = OF_PROCESS_IDS | 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000
"""Namespaces of a host: also CLONE_NEWNS, NEWUTS, NEWIPC and NEWNET."""
_LIBC = ctypes.CDLL(None, use_errno=True)
PACKAGE_OF_PROGRAM = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
BOOT_SCRIPT = r"""
set -eu
name=$1 address=$2 cluster=$3 interface=$4
hostname "$name"
for file in hosts passwd resolv.conf; do mount --bind "$cluster/etc/$name/$file" "/etc/$file"; done
mount --bind "$cluster/etc/$name/ssh" /etc/ssh
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mkdir -p /run/sshd
while IFS='|' read -r own shared; do mount --bind "$own" "$shared"; done < "$cluster/etc/$name/private"
ip link set lo up
tries=0
until ip link show "$interface" >/dev/null 2>&1; do tries=$((tries + 1)); [ "$tries" -lt 500 ]; sleep 0.01; done
ip addr add "$address/24" dev "$interface"
ip link set "$interface" up
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$cluster/etc/$name/sshd_config"
"""
SWITCH_SCRIPT = "ip link add br0 type bridge; ip link set br0 up; exec sleep infinity"


def unavailable_reason() -> str | None:
    """Say why this machine cannot make test hosts, and what to do, or return None when it can."""
    if os.geteuid() != 0:
        return (
            "test hosts need root, for namespaces of networks, processes and mounts: "
            'put `sudo env "PATH=$PATH"` before the command'
        )
    missing = sorted({package for name, package in PACKAGE_OF_PROGRAM.items() if not shutil.which(name, path=_path())})
    if missing:
        return f"test hosts need Debian packages that are missing: apt-get install {' '.join(missing)}"
    flags = ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--kill-child", "--fork"]
    attempt = subprocess.run(
        ["unshare", *flags, "sh", "-ec", "ip link add br0 type bridge; mount -t tmpfs none /run"],
        capture_output=True,
        text=True,
        env=_tools_environment(),
        check=False,
    )
    if attempt.returncode == 0:
        return None
    return (
        f"test hosts need namespaces, which are not permitted here: {attempt.stderr.strip()}; "
        "a container needs --cap-add SYS_ADMIN --cap-add NET_ADMIN, or --privileged"
    )


def run_on_hosts(
    command: Sequence[str],
    num_hosts: int,
    slots: int = 1,
    private: Sequence[Path] = (),
    folder: Path | None = None,
) -> int:
    """Run a command on the first of several test hosts, and return its exit code once the hosts are gone.

    The command has this process's environment, streams and working folder, and in addition the names of all hosts
    (``MEGASDC_TEST_HOSTS``, with spaces between) and the path of a hostfile of them (``MEGASDC_TEST_HOSTFILE``). Logins
    over SSH have PATH, PYTHONPATH and the user's cache. SIGINT, SIGTERM and SIGHUP are passed on to the command.

    Args:
        command: program and arguments; in each ``{hostfile}`` becomes the hostfile's path.
        num_hosts: how many hosts.
        slots: ranks of each host in the hostfile.
        private: folders that each host has for itself, empty at first.
        folder: keeps what ``Cluster`` keeps there; None: a temporary one.

    Returns:
        The command's exit code; 128 + signal where one ended it.

    Raises:
        LaunchError: this machine cannot make test hosts, or the command cannot be started.
    """
    if reason := unavailable_reason():
        raise LaunchError(reason)
    if any(Path.cwd().is_relative_to(own) for own in OWN_FOLDERS):
        raise LaunchError(f"{Path.cwd()}: each host has /dev/shm and /run of its own; work in another folder")
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(exiting_on_signals())
        for path in private:
            if not path.exists():  # made, to stand for those of the hosts
                stack.callback(_remove_empty, path)
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megasdc_hosts_")))
        cluster = stack.enter_context(Cluster(folder, num_hosts, _login_environment(), private))
        hostfile = str(cluster.hostfile(slots=slots))
        words = [word.replace(PLACEHOLDER, hostfile) for word in command]
        first, *others = cluster.names
        power_off = f"; to cut the power of one: ssh {others[-1]} kill 1" if others else ""
        echo(f"megasdc test-hosts: {', '.join(cluster.names)}; on {first}: {shlex.join(words)}{power_off}", err=True)
        added = {HOSTS_VARIABLE: " ".join(cluster.names), HOSTFILE_VARIABLE: hostfile}
        # In a terminal the command is stopped, continued and interrupted together with this process.
        in_terminal = os.isatty(0)
        process = cluster.popen(
            first,
            words,
            env={**os.environ, **cluster.env, "HOME": str(cluster.home(first)), **added},
            cwd=os.getcwd(),
            stdin=None,
            process_group=None if in_terminal else 0,
        )
        code = _wait_and_pass_on(process, from_terminal=not in_terminal)
        signals.only_note()
    return code if code >= 0 else 128 - code


def _login_environment() -> dict[str, str]:
    """What a login on a host has in its environment, beside what sshd gives it."""
    programs = os.path.dirname(sys.executable)
    path = os.environ.get("PATH", SYSTEM_PATH)
    return {
        "PATH": path if programs in path.split(os.pathsep) else f"{programs}{os.pathsep}{path}",
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        **({"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}),
    }


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _wait_and_pass_on(process: subprocess.Popen[Any], *, from_terminal: bool) -> int:
    """Wait for a process, which gets the stop signals that this one receives; returns its exit code.

    Args:
        process: a child.
        from_terminal: whether it gets those of the terminal, too; it has them already in this process's group.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    waited = {signal.SIGCHLD, *(one for one in numbers if signal.getsignal(one) != signal.SIG_IGN)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        while process.poll() is None:
            received = signal.sigtimedwait(waited, 1.0)
            if received is None or received.si_signo == signal.SIGCHLD:
                continue
            if from_terminal or received.si_code <= 0:  # sent by a process: SI_USER, SI_QUEUE, SI_TKILL
                process.send_signal(received.si_signo)
                time.sleep(DRAIN_S)  # `timeout` sends it to this process and its group; a second one kills a launch
                signal.sigtimedwait({received.si_signo}, 0)
        return process.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Cluster:
    """Test hosts ``node1``, ``node2``, ... for the time of a ``with`` block.

    Args:
        folder: where keys, logs, home folders and private folders of the hosts are kept; created if absent.
        num_hosts: how many hosts.
        env: environment of every process that starts on a host, also through SSH; in it Python finds the tree of this
            file, unless that is installed among the packages.
        private: absolute paths that each host sees as a folder of its own, empty at first; created if absent.
            ``private_dir`` says where a host's own folder lies.
    """

    def __init__(
        self,
        folder: Path | str,
        num_hosts: int = 2,
        env: Mapping[str, str] | None = None,
        private: Sequence[Path | str] = (),
    ) -> None:
        self.folder = Path(folder).resolve()
        self.env = {**_python_path(), **(env or {})}
        self.names = [f"node{number}" for number in range(1, num_hosts + 1)]
        self.addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(self.names, 11)}
        self.private = [Path(path) for path in private]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._first_pid: dict[str, int] = {}
        self._started: list[tuple[str, subprocess.Popen[Any]]] = []
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> Self:
        """Make the hosts.

        Raises:
            LaunchError: one does not start, or cannot be reached.
        """
        if any(self.folder.is_relative_to(own) for own in OWN_FOLDERS):
            raise LaunchError(f"{self.folder}: each host has /dev/shm and /run of its own; take another folder")
        try:
            self._write_files()
            self._start_switch()
            for name in self.names:
                self.boot(name)
            self.wait_until_reachable()
            self._start_services(self.names)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Power everything off, and wait until no process of a host is left; safe to call twice."""
        for name, process in self._processes.items():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # the kernel takes the host's others down with its first
                    os.kill(self._first_pid.get(name, process.pid), signal.SIGKILL)
        for _, process in self._started:
            process.wait()
        for process in self._processes.values():
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:  # somebody else does not read the exit code of one that he has started
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()
        self._logs.clear()

    def popen(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "/", **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host.

        Args:
            name: the host.
            argv: program and arguments; no shell in between.
            env: added to the cluster's environment.
            cwd: working folder.
            **options: handed to ``subprocess.Popen``; without ``stdin`` nothing can be read.

        Raises:
            LaunchError: the host is off, or has no such folder or program.
        """
        pid = self._first_pid[name]
        whole = {"HOME": str(self.home(name)), **self.env, **(env or {})}
        if not self.is_on(name):
            raise LaunchError(f"{name} is off: {argv[0]} cannot be started there")
        if not Path(f"/proc/{pid}/root{cwd}").is_dir():
            raise LaunchError(f"{cwd}: {name} has no such folder; each host has /dev/shm and /run of its own")
        try:
            process = _popen_within(pid, argv, cwd, {"stdin": subprocess.DEVNULL, "env": whole, **options})
        except FileNotFoundError as error:
            raise LaunchError(f"{error.filename}: there is no such program in the PATH of {name}") from None
        except ProcessLookupError:  # it has lost its power meanwhile
            raise LaunchError(f"{name} is off: {argv[0]} cannot be started there") from None
        self._started.append((name, process))
        return process

    def run(
        self, name: str, argv: Sequence[str], *, timeout_s: float = 120.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a process on a host to its end and return its output as text; options as in ``popen``."""
        process = self.popen(name, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise LaunchError(f"{argv} did not end in {timeout_s} s on {name}:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def hostfile(self, names: Sequence[str] | None = None, slots: int = 1) -> Path:
        """Write a DeepSpeed hostfile of the named hosts (default all) and return its path."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{name} slots={slots}\n" for name in names or self.names), encoding="utf-8")
        return path

    def home(self, name: str) -> Path:
        """Return the home folder of root on a host."""
        return self.folder / "home" / name

    def private_dir(self, name: str, path: Path | str) -> Path:
        """Return where this machine finds the folder that a host sees at a private path."""
        return self.folder / "private" / name / str(self.private.index(Path(path)))

    def is_on(self, name: str) -> bool:
        """Whether a host has power."""
        return self._processes[name].poll() is None

    def power_off(self, name: str) -> None:
        """Cut a host's power: all its processes end at once, nothing is flushed, no connection is closed."""
        if self.is_on(name):
            os.kill(self._first_pid[name], signal.SIGKILL)
            for host, process in self._started:
                if host == name:  # the kernel ends a host's first process when the exit codes of all others are read
                    process.wait()
            self._processes[name].wait()

    def reboot(self, name: str) -> None:
        """Power a host off, if it is on, and on, and wait until it can be reached."""
        self.power_off(name)
        self.boot(name)
        self.wait_until_reachable()
        self._start_services([name])

    def unplug(self, name: str) -> None:
        """Pull a host's network cable."""
        self._switch_port(name, "down")

    def plug_in(self, name: str) -> None:
        """Put a host's network cable back."""
        self._switch_port(name, "up")

    def boot(self, name: str) -> None:
        """Start a host; returns before its sshd answers."""
        number = self.names.index(name) + 1
        flags = ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc"]
        script = ["sh", "-c", BOOT_SCRIPT, "boot", name, self.addresses[name], str(self.folder), INTERFACE]
        pid = self._spawn(name, flags, script)
        self._in_switch("ip", "link", "del", f"p{number}", check=False)  # the port of an earlier life
        cable = ["type", "veth", "peer", "name", INTERFACE, "address", self.mac(name), "netns", str(pid)]
        _run("ip", "link", "add", f"p{number}", "netns", str(self._first_pid["switch"]), *cable)
        self._in_switch("ip", "link", "set", f"p{number}", "master", "br0", "up")

    def wait_until_reachable(self, names: Sequence[str] | None = None, timeout_s: float = 10.0) -> None:
        """Wait until every host that is on, of the named ones (default all), answers over SSH from the first one."""
        for name in names or self.names:
            if self.is_on(name):
                self._wait(name, lambda name=name: self._answers(name), timeout_s, "cannot be reached")  # type: ignore[misc]

    def log(self, name: str) -> str:
        """Return what a host's boot script and sshd have said."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _answers(self, name: str) -> bool:
        return self.is_on(self.names[0]) and self.run(self.names[0], ["ssh", name, "true"]).returncode == 0

    def _wait(self, name: str, condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
        """Wait until something holds of a host or of the switch.

        Raises:
            LaunchError: it does not in time, which is the problem; with what the host has said.
        """
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise LaunchError(f"test host {name} {problem} in {timeout_s:g} s:\n{self.log(name)}")
            time.sleep(POLL_S)

    def in_switch(self, *argv: str) -> list[str]:
        """Return the command that runs a program in the switch's network, where host n has the port ``pn``."""
        return ["nsenter", "-t", str(self._first_pid["switch"]), "--net", *argv]

    def mac(self, name: str) -> str:
        """Return the address of a host's network card, the same after a reboot, or others would send to a stale one."""
        return f"02:00:00:00:00:{11 + self.names.index(name):02x}"

    def _in_switch(self, *argv: str, check: bool = True) -> None:
        _run(*self.in_switch(*argv), check=check)

    def _switch_port(self, name: str, state: str) -> None:
        self._in_switch("ip", "link", "set", f"p{self.names.index(name) + 1}", state)

    def _start_switch(self) -> None:
        self._spawn("switch", ["--net", "--pid"], ["sh", "-ec", SWITCH_SCRIPT])
        self._wait("switch", self._has_bridge, 5.0, "has no bridge")

    def _has_bridge(self) -> bool:
        argv = self.in_switch("ip", "link", "show", "br0")
        return subprocess.run(argv, capture_output=True, check=False, env=_tools_environment()).returncode == 0

    def _spawn(self, name: str, flags: Sequence[str], argv: Sequence[str]) -> int:
        """Start the first process of a set of namespaces and return its id as this machine sees it."""
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115 - open as long as the host is on
        self._logs.append(log)
        process = subprocess.Popen(
            # Dies with the Python process that started it, also when that is killed.
            ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "--kill-child", "--fork", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_tools_environment(),
            start_new_session=True,
        )
        self._processes[name] = process
        self._wait(name, lambda: bool(_children(process.pid)), 5.0, "did not start")
        self._first_pid[name] = _children(process.pid)[0]
        self._wait(name, lambda: _in_other_network(self._first_pid[name]), 5.0, "stayed in this machine's network")
        return self._first_pid[name]

    def _start_services(self, names: Sequence[str]) -> None:
        """Start what hosts that can be reached offer beside SSH: nothing, unless a subclass has something."""

    def _write_files(self) -> None:
        """Write keys, name tables and SSH configuration of all hosts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _make_key(self.folder / "id")
        # A host's own name must lead to its network card, never to 127.x, or gloo binds to the loopback.
        table = "127.0.0.1 localhost\n" + "".join(f"{self.addresses[name]} {name}\n" for name in self.names)
        known_hosts = ""
        for name in self.names:
            etc = self.folder / "etc" / name
            (etc / "ssh").mkdir(parents=True, exist_ok=True)
            self.home(name).mkdir(parents=True, exist_ok=True)
            _make_key(etc / "hostkey")
            key = " ".join((etc / "hostkey.pub").read_text().split()[:2])
            known_hosts += f"{name},{self.addresses[name]} {key}\n"
            (etc / "hosts").write_text(table)
            (etc / "resolv.conf").write_text("")
            (etc / "passwd").write_text(_passwd_with_home(self.home(name)))
            (etc / "sshd_config").write_text(self._sshd_config(name))
            (etc / "ssh" / "ssh_config").write_text(self._ssh_config())
            (etc / "private").write_text(self._make_private(name))
        (self.folder / "known_hosts").write_text(known_hosts)

    def _make_private(self, name: str) -> str:
        lines = []
        for path in self.private:
            own = self.private_dir(name, path)
            own.mkdir(parents=True, exist_ok=True)
            path.mkdir(parents=True, exist_ok=True)
            lines.append(f"{own}|{path}\n")
        return "".join(lines)

    def _sshd_config(self, name: str) -> str:
        # sshd honours only the first SetEnv line.
        environment = " ".join(f'{key}="{value}"' for key, value in self.env.items())
        options = [
            f"ListenAddress {self.addresses[name]}",
            f'HostKey "{self.folder}/etc/{name}/hostkey"',
            f'AuthorizedKeysFile "{self.folder}/id.pub"',
            "PidFile none",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "UseDNS no",
            "MaxStartups 100",
            "MaxSessions 100",
            *([f"SetEnv {environment}"] if environment else []),
        ]
        return "\n".join(options) + "\n"

    def _ssh_config(self) -> str:
        options = [
            "Host *",
            "User root",
            f'IdentityFile "{self.folder}/id"',
            "IdentitiesOnly yes",
            "BatchMode yes",
            f'UserKnownHostsFile "{self.folder}/known_hosts"',
            "StrictHostKeyChecking yes",
            "ConnectTimeout 5",
            "ServerAliveInterval 5",
            "ServerAliveCountMax 3",
            "LogLevel ERROR",
        ]
        return "\n ".join(options) + "\n"


def enter_host(process: int, namespaces: int = OF_HOST) -> None:
    """Enter namespaces of a process on a host: ``os.setns``, which Python 3.11 has not.

    The namespace of process ids is that of children from now on; this process keeps its own.

    Args:
        process: file descriptor of the process (``os.pidfd_open``).
        namespaces: bits of ``clone``'s flags.

    Raises:
        OSError: it has ended, or this process may not.
    """
    if _LIBC.setns(process, namespaces):
        raise OSError(ctypes.get_errno(), "the namespaces of a test host cannot be entered")


def _popen_within(pid: int, argv: Sequence[str], cwd: str, options: Mapping[str, Any]) -> subprocess.Popen[Any]:
    """Start a program in the namespaces of a process, as a child of this one: what is sent to it reaches it.

    ``nsenter`` would stand between: a signal of the terminal's would end it, and leave the program behind.
    """
    with contextlib.ExitStack() as stack:
        first, own = os.pidfd_open(pid), os.pidfd_open(os.getpid())
        stack.callback(os.close, first)
        stack.callback(os.close, own)

        def enter() -> None:
            enter_host(first, OF_HOST & ~OF_PROCESS_IDS)
            os.chdir(cwd)

        enter_host(first, OF_PROCESS_IDS)
        try:
            return subprocess.Popen(list(argv), preexec_fn=enter, **options)  # noqa: PLW1509 - no thread holds a lock
        finally:
            enter_host(own, OF_PROCESS_IDS)


def _python_path() -> dict[str, str]:
    """The variable by which Python finds this package's modules; empty: it is installed among all others."""
    root = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return {} if root in installed else {"PYTHONPATH": str(root)}


def _path() -> str:
    """Where programs of the system are looked for."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), SYSTEM_PATH])


def _tools_environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


def _run(*argv: str, check: bool = True) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=_tools_environment())
    if check and done.returncode != 0:
        raise LaunchError(f"test hosts: {shlex.join(argv)} gave {done.returncode}: {done.stderr.strip()}")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _in_other_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _make_key(path: Path) -> None:
    if not path.exists():
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))


def _passwd_with_home(home: Path) -> str:
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        lines.append(":".join([*fields[:5], str(home), "/bin/bash"]) if fields[0] == "root" else line)
    return "\n".join(lines) + "\n"
