"""Exceptions of megasdc and their exit codes, and their recognition in exceptions of PyTorch and of the system.

Every failure that a user can cause or meet has one class here. The exit code of a class is the protocol between a
training rank, the launcher and whatever restarts the run, so a number is never used twice and never changes meaning.
0 is success, 1 an unexpected exception or a comparison that failed, 2 wrong command-line usage, 3 a setting found by
``megasdc check-determinism``; Megatron-core's rerun machinery uses 16 and 17; 64 to 78 overlap with ``sysexits.h`` only
in spirit. Codes above 128 stay free for signals.
"""

from __future__ import annotations

import errno
import os
import re


class MegasdcError(Exception):
    """Base of every error that megasdc raises on purpose.

    The message states what is wrong, the value got, the value needed, the place, and what to do about it.
    """

    exit_code = 1


_MESSAGE = re.compile(r"\d+ problems?(?: in (.+))?:\n  - ")


class ConfigError(MegasdcError):
    """The configuration file, an override or the layout it asks for is wrong.

    Args:
        problems: every problem, each one a complete sentence that starts with its dotted path.
        source: the file that was read, for the first line of the message.
    """

    exit_code = 70

    def __init__(self, problems: list[str] | str, source: str | None = None) -> None:
        if isinstance(problems, str) and (whole := _MESSAGE.match(problems)):
            # The message of a ConfigError from another process: split it into its problems again.
            problems, source = problems[whole.end() :].split("\n  - "), source or whole[1]
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        where = f" in {source}" if source else ""
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''}{where}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class DataError(MegasdcError):
    """Training data is missing, damaged, or does not fit the model or the tokenizer."""

    exit_code = 71


class CheckpointError(MegasdcError):
    """A checkpoint is incomplete, damaged, or belongs to another model, and no usable one is left."""

    exit_code = 72


class CorruptionError(MegasdcError):
    """Silent data corruption was detected."""

    exit_code = 73


class NonFiniteError(MegasdcError):
    """Training met NaN or Inf more often than the configuration allows."""

    exit_code = 74


class HangError(MegasdcError):
    """A rank made no progress within the time that the configuration allows."""

    exit_code = 75


class ExcludedNodeError(MegasdcError):
    """The node that a rank runs on is on the list of excluded nodes."""

    exit_code = 76


class StorageError(MegasdcError):
    """A folder is not writable, or the disk is full.

    Args:
        no_room: the disk is full, a quota is used up, or a file system has become read-only: there may be room later.
    """

    exit_code = 77

    def __init__(self, *message: object, no_room: bool = False) -> None:
        super().__init__(*message)
        self.no_room = no_room


class LaunchError(MegasdcError):
    """Hosts, versions or environment are not fit to start a run, its folder is in use, or a rank left no record."""

    exit_code = 78


class PeerError(MegasdcError):
    """Another rank failed or left, so that this one cannot go on; the cause is in that rank's log."""

    exit_code = 79


class TraceError(MegasdcError):
    """A trace or golden trace is missing, damaged, or was not made for what it is compared with."""

    exit_code = 80


ERRORS_BY_EXIT_CODE: dict[int, type[MegasdcError]] = {kind.exit_code: kind for kind in MegasdcError.__subclasses__()}
"""Meaning of each documented exit code."""


def error_of_rank(exit_code: int) -> type[MegasdcError]:
    """Error class of a rank's exit code; LaunchError for any other code, as the rank left no record of its end."""
    return ERRORS_BY_EXIT_CODE.get(exit_code, LaunchError)


HANG_SIGNS = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""Messages of a collective that timed out (gloo, NCCL; torch 2.13)."""
STORE_SIGNS = ("Wait timeout", "Timeout waiting for key")
"""Messages of the store of ranks that meet in a folder, whose errors are no DistStoreError (torch 2.13)."""
PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "NCCL communicator was aborted",
    "ncclRemoteError",
)
"""Messages of a collective when another rank has gone (gloo, NCCL; torch 2.13)."""
MEMORY_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
)
"""Messages of an allocation that failed or whose size overflows (torch 2.13)."""
SCALE_SIGN = "Current loss scale already at minimum"
"""Message of a dynamic loss scale that cannot get lower (DeepSpeed 0.19)."""
STORAGE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR, errno.EISDIR}
    | {errno.ENXIO}  # a pipe instead of a file
    | {errno.ENAMETOOLONG, errno.ELOOP}  # a path of the configuration that none can be
)


def as_known_error(error: Exception) -> MegasdcError | None:
    """The documented error that corresponds to an exception; None if there is none."""
    if isinstance(error, MegasdcError):
        return error
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return StorageError(f"{error.filename or 'a file of the run'} cannot be written or read: {error.strerror}")
    text = str(error)
    first_line = text.splitlines()[0] if text else ""
    if out_of_memory(error):
        return ConfigError(
            f"megasdc.model: this rank could not get the memory it asked for: {first_line or 'MemoryError'}; make the "
            "model or the micro-batches smaller, divide it over more ranks (megasdc.parallel.tensor, pipeline) and "
            "hosts, or see what else takes memory here, and which limits are set (ulimit, cgroups)."
        )
    if any(sign in text for sign in HANG_SIGNS):
        return HangError(
            f"a collective timed out after megasdc.parallel.timeout_s: some rank did not join it: {first_line}"
        )
    if SCALE_SIGN in text:
        return NonFiniteError(
            f"gradients overflow at the lowest loss scale too, so that NaN or Inf is not the scale's: {first_line}"
        )
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if ("DistStoreError" in kinds and "timeout" in text) or text.startswith(STORE_SIGNS):
        return HangError(f"a rank did not respond within megasdc.parallel.timeout_s: {first_line}")
    if "EADDRINUSE" in text:
        address, port = os.environ.get("MASTER_ADDR", "this host"), os.environ.get("MASTER_PORT", "of the rendezvous")
        return LaunchError(
            f"port {port} on {address} is in use by another program, so the rendezvous cannot use it; choose another "
            f"with --master_port: {first_line}"
        )
    if kinds & {"DistBackendError", "DistNetworkError"} or any(sign in text for sign in PEER_SIGNS):
        return PeerError(f"a collective failed because another rank has ended: {_without_source(first_line)}")
    return None


def _without_source(line: str) -> str:
    """A message of PyTorch's C++ code without its file and the advice of its authors."""
    return re.sub(r"^\[[^]]*\.(cc|cpp|hpp|h):\d+\] ", "", line).partition(" This is typically caused by")[0]


def out_of_memory(error: Exception) -> bool:
    """Whether an exception means that an allocation failed."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)
