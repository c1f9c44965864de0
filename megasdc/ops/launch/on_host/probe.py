"""Probe of one host of a launch; needs only Python's standard library.

The text of this file is sent to the hosts (``megasdc.ops.launch.remote``), so it must not import from megasdc.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

WRITTEN_BYTES = 1 << 16
LOCK = "lock"
"""Name of a lock in the folder of an extension; Source: ``torch.utils.cpp_extension``."""
ON_THIS_HOST = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"}
"""File systems of one host alone."""
FIRST_PIDS = "pid:[4026531836]"
"""Namespace in which all processes of a host are seen; Source: ``PROC_PID_INIT_INO`` of the kernel's proc_ns.h."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Inspect this host.

    Args:
        request: ``cwd``, ``python_path`` (list), ``path`` (list, put before PATH), ``distributions``, ``readable``
            (files and folders), ``data`` (folders with a manifest), ``code`` (files), ``writable`` (folders),
            ``master_port`` (None: not checked), ``extensions`` (folder of compiled extensions, None: not known); with
            this one alone only its locks are looked at.

    Returns:
        The facts, by name; JSON types only.
    """
    if list(request) == ["extensions"]:
        return {"locks": _locks(request["extensions"])}
    missing_cwd = not _enters(request["cwd"])
    sys.path[:0] = request["python_path"]
    os.environ["PATH"] = os.pathsep.join([*request["path"], os.environ.get("PATH", os.defpath)])
    return {
        "hostname": socket.gethostname(),
        "missing_cwd": missing_cwd,
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: _version(name) for name in request["distributions"]},
        "unreadable": [path for path in request["readable"] if not _readable(path)],
        "data": {folder: _digest(pathlib.Path(folder) / "manifest.json") for folder in request["data"]},
        "code": {path: _digest(pathlib.Path(path)) for path in request["code"]},
        "unwritable": {path: why for path in request["writable"] if (why := _why_unwritable(path)) is not None},
        "own_address": _own_address(),
        "addresses": _addresses(),
        "port_problem": _port_problem(request["master_port"]),
        "has_gpu": bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*"))) or os.path.exists("/dev/kfd"),
        "locks": _locks(request["extensions"]),
        "programs": {name: shutil.which(name) for name in ("g++", "ninja")},
    }


def _enters(folder: str) -> bool:
    """Go to a folder; returns whether that could be."""
    try:
        os.chdir(folder)
    except OSError:
        return False
    return True


def _version(name: str) -> str | None:
    """A distribution's version; for megasdc a checksum of its sources, which change without the version."""
    if name == "megasdc":
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return None
        root = pathlib.Path(spec.origin).parent
        total = hashlib.sha256()
        for path in sorted(root.rglob("*.py")):
            if path.is_file():  # an editor may lock one by a link that leads nowhere
                total.update(str(path.relative_to(root)).encode() + b"\0" + (_bytes_of(path) or b""))
        return f"sources {total.hexdigest()[:12]}"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _readable(path: str) -> bool:
    return os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0))


def _digest(path: pathlib.Path) -> str | None:
    """Of a file's bytes; None: it cannot be read."""
    content = _bytes_of(path)
    return None if content is None else hashlib.sha256(content).hexdigest()


def _bytes_of(path: pathlib.Path) -> bytes | None:
    """Content of a file; None: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _why_unwritable(folder: str) -> str | None:
    """Why nothing can be written to a folder, or it cannot be created in its nearest existing parent; None: it can.

    A folder that is there gets a file without a name, since a full disk or a quota is not seen otherwise.
    """
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        return ""
    if path != os.path.abspath(folder):
        return None
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f" ({error.strerror})"
    return None


def _own_address() -> str | None:
    """The first address that this host's own name resolves to; gloo binds to it."""
    try:
        first = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):  # the latter: of a name that DNS allows no host
        return None
    return str(first[4][0]).partition("%")[0]  # without the zone of an IPv6 address


def _addresses() -> list[str]:
    return _output("hostname", "-I").split()


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, check=False).stdout.decode(errors="replace").strip()
    except OSError:
        return ""


def _port_problem(port: int | None) -> str | None:
    """The reason why rank 0 could not listen on a port here; None if it could."""
    if port is None:
        return None
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
    return None


def _locks(folder: str | None) -> list[dict[str, Any]]:
    """Locks of extensions that are being compiled, or whose compilation was killed: PyTorch then waits without end.

    Each with its ``path``, its age ``age_s``, ``held``: whether a process of this host has it open, as who compiles
    does (``torch.utils.file_baton``), None: not all that may have are seen; and ``local``: whether its file system is
    that of one host.
    """
    found = []
    for path in sorted(pathlib.Path(folder).glob(f"*/{LOCK}")) if folder is not None else ():
        try:
            seen = path.stat()
            held = _is_open(seen)
            now = path.stat()
        except OSError:
            continue  # it was released
        if (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino):
            continue  # it was released meanwhile, and somebody else compiles
        age_s = max(0.0, time.time() - now.st_mtime)
        found.append({"path": str(path), "age_s": age_s, "held": held, "local": _file_system(path) in ON_THIS_HOST})
    return found


def _is_open(seen: os.stat_result) -> bool | None:
    """Whether a process of this host has a file open; None: not known, since a process may have that is not seen.

    Those of another user are not looked at: its writer is the file's owner. In a container processes of others are not
    seen at all.
    """
    is_unseen = os.getuid() not in (0, seen.st_uid) or _process_namespace() != FIRST_PIDS
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                other = _status_of_lock(f"/proc/{pid}/fd/{name}")
                if other is not None and (other.st_dev, other.st_ino) == (seen.st_dev, seen.st_ino):
                    return True
        except PermissionError:
            is_unseen = is_unseen or _user_of(pid) in (None, seen.st_uid)
        except OSError:
            continue  # it has ended
    return None if is_unseen else False


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _status_of_lock(path: str) -> os.stat_result | None:
    """Of what a link leads to, if it has the name of a lock; None: it has not, or is gone.

    Others are not looked at: they may lie where a server does not answer, and this would wait for it.
    """
    try:
        return os.stat(path) if os.path.basename(os.readlink(path)) == LOCK else None
    except PermissionError:
        raise
    except OSError:
        return None


def _user_of(pid: str) -> int | None:
    """The user who runs a process; None: not known, or it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)
    except OSError:
        return None


def _file_system(path: pathlib.Path) -> str:
    r"""Type of the file system that holds a path; empty: not known.

    Source: proc_pid_mountinfo(5): the mount point is field 5, with blanks and the like as ``\040``; the type comes
    after a dash.
    """
    best = "", ""
    whole = path.resolve()
    try:
        lines = pathlib.Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        point, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)
        if whole.is_relative_to(point) and len(point) >= len(best[0]):
            best = point, kind
    return best[1]
