"""Documented errors behind exceptions of PyTorch, of the system or of a collective."""

from __future__ import annotations

import errno
import os

from megasdc.common.errors import (
    ConfigError,
    HangError,
    LaunchError,
    MegasdcError,
    NonFiniteError,
    PeerError,
    StorageError,
)

HANG_SIGNS = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""Messages of a collective that timed out (gloo, NCCL; torch 2.13)."""
STORE_SIGNS = ("Wait timeout", "Timeout waiting for key")
"""Of the store of ranks that meet in a folder, whose errors are no DistStoreError (torch 2.13)."""
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
        return PeerError(f"a collective failed because another rank has ended: {first_line}")
    return None


def out_of_memory(error: Exception) -> bool:
    """Whether an exception means that an allocation failed."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)
