"""The place of an archive: any address that fsspec reaches, with whole writes and errors that name the place."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasdc.common.credentials import find_credentials, without_credentials
from megasdc.common.durable import TEMPORARY_PREFIX, replacing, sync_path
from megasdc.common.errors import ConfigError, LaunchError, MegasdcError, StorageError

PACKAGES = {
    scheme: package
    for package, schemes in {"s3fs": ("s3", "s3a"), "gcsfs": ("gs", "gcs"), "adlfs": ("abfs", "abfss", "az")}.items()
    for scheme in schemes
}
"""Package of a scheme, each an extra of megasdc: ``s3``, ``gcs``, ``azure``. There, an object appears as a whole."""
_LARGEST_MESSAGE = 300
_REFUSED, _NOT_FOUND, _NO_SUCH_RANGE = (401, 403), 404, 416
_CHECK_CREDENTIALS = "check the credentials (environment, ~/.aws or the like, fsspec's files) and their rights"


class Store:
    """Files below one address, by names with slashes. Safe for several threads.

    Args:
        address: of the store.
        unreadable: the error if a file or folder of this machine cannot be read; of other stores it is a StorageError.

    Raises:
        ConfigError: the address holds credentials, or is none.
        LaunchError: the package for such addresses is not installed.
    """

    def __init__(self, address: str, unreadable: type[MegasdcError] = StorageError) -> None:
        if problem := find_credentials(address):
            raise ConfigError(f"the archive's address is refused and not shown: {problem}")
        if not address or "::" in address:
            raise ConfigError(f'got "{address}" as the address of an archive; needed: one path or one URL')
        self.address = address.rstrip("/") or address
        self._files, self._root = _open(address)
        protocol = self._files.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._unreadable = StorageError if self.local is None else unreadable

    @property
    def local(self) -> Path | None:
        """Its folder, where it is one of this machine's file system; else None."""
        return Path(self._root) if self._protocols & {"file", "local"} else None

    def sizes(self, folder: str) -> dict[str, int]:
        """Names and sizes of all files below a folder, which need not exist; unfinished writes are skipped."""
        return {name: size for name, size in self._find(folder) if not _is_unfinished(name)}

    def list_unfinished(self, folder: str) -> list[str]:
        """Names of what killed writes left below a folder."""
        return [name for name, _ in self._find(folder) if _is_unfinished(name)]

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a file, of at most ``limit`` bytes and one more; None: there is no such file."""
        with self._storage_errors(f"read {name}", self._unreadable):
            try:
                if self.local is not None:
                    with open(self._path(name), "rb") as file:
                        return file.read(limit + 1)
                return self._read_start(self._path(name), limit + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that it is there whole or not at all, also after a kill."""
        path = self._path(name)
        with self._storage_errors(f"write {name}"):
            if self.local is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with replacing(Path(path), "wb") as file:
                    file.write(content)
            elif self._protocols & PACKAGES.keys():
                self._files.pipe_file(path, content)
            else:
                folder, _, last = path.rpartition("/")
                temporary = f"{folder}/{TEMPORARY_PREFIX}{last}.{uuid.uuid4().hex}"
                self._files.makedirs(folder, exist_ok=True)
                self._files.pipe_file(temporary, content)
                self._files.mv(temporary, path)

    def delete(self, names: list[str]) -> None:
        """Delete files; those that are not there any more do not matter."""
        for name in names:
            with self._storage_errors(f"delete {name}"), contextlib.suppress(FileNotFoundError):
                if self.local is None:
                    self._files.rm_file(self._path(name))
                else:
                    os.unlink(self._path(name))
        if self.local is not None:
            for folder in {str(Path(self._path(name)).parent) for name in names}:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    sync_path(folder)

    def modified(self, name: str) -> float | None:
        """When a file was written, in seconds by the store's own clock; None: there is no such file."""
        with self._storage_errors(f"look at {name}"):
            try:
                return float(self._files.modified(self._path(name)).timestamp())
            except FileNotFoundError:
                return None

    def _read_start(self, path: str, count: int) -> bytes:
        try:
            return bytes(self._files.cat_file(path, start=0, end=count))
        except Exception as error:
            if _status_of(error) == _NO_SUCH_RANGE and self._files.size(path) == 0:
                return b""  # an empty object has no ranges
            raise

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _find(self, folder: str) -> Iterator[tuple[str, int]]:
        start = len(self._path(""))
        with self._storage_errors(f"list {folder}", self._unreadable):
            try:
                found: dict[str, Any] = self._files.find(self._path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = {}
        for path, info in sorted(found.items()):
            yield path[start:], int(info["size"] or 0)

    @contextlib.contextmanager
    def _storage_errors(self, doing: str, kind: type[MegasdcError] = StorageError) -> Iterator[None]:
        """Turn whatever a file system raises into an error that names the place; missing files pass."""
        try:
            yield
        except MegasdcError:
            raise
        except Exception as error:  # each package has errors of its own
            raise kind(f"{self.address}: cannot {doing}: {_explain(error)}") from error


def _open(address: str) -> tuple[Any, str]:
    import fsspec

    scheme = address.partition("://")[0] if "://" in address else "file"
    # In zonal buckets gcsfs writes objects that are seen before they are whole, and to find such buckets it asks a
    # service before each operation, with a warning where it does not answer (gcsfs 2026.10). They are not supported.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    for client in ("gcsfs", "azure"):  # they print pages about what they raise, too
        logging.getLogger(client).setLevel(logging.CRITICAL)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = f"pip install '{PACKAGES[scheme]}>=2024.2'" if scheme in PACKAGES else None
        command = package or f"install what fsspec needs: {error}"
        raise LaunchError(f'"{scheme}://" addresses need a package that is not installed: {command}') from error
    except ValueError as error:
        known = "a folder, or a URL of s3://, gs://, abfs:// or another file system of fsspec"
        raise ConfigError(f'got "{address}" as the address of an archive: {error}; needed: {known}') from error
    try:
        return fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
    except ValueError as error:  # adlfs looks for credentials already here
        raise StorageError(f"{address}: cannot be opened: {_first_line(error)}; {_CHECK_CREDENTIALS}") from error
    except Exception as error:
        raise StorageError(f"{address}: cannot be opened: {_explain(error)}") from error


def _explain(error: BaseException) -> str:
    """An error's type and first line, and what to do."""
    causes, status, text = list(_chain(error)), _status_of(error), _first_line(error)
    names = [kind.__name__ for cause in causes for kind in type(cause).__mro__]
    nameless = any("Credential" in name or "Auth" in name for name in names)
    if isinstance(error, PermissionError) or status in _REFUSED or nameless:
        return f"{text}; {_CHECK_CREDENTIALS}"
    if isinstance(error, FileNotFoundError) or status == _NOT_FOUND:
        return f"{text}; check that the bucket, container or folder exists"
    unreachable = any(isinstance(cause, ConnectionError | TimeoutError | socket.gaierror) for cause in causes)
    if isinstance(error, OSError) and error.errno is not None and not unreachable:
        return f"{text}; free space, or check the path and the rights on it"
    return f"{text}; check the address and that this machine reaches it, then do it again: what is there is kept"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {without_credentials(lines[0])[:_LARGEST_MESSAGE]}" if lines else repr(error)


def _status_of(error: BaseException) -> int | None:
    """HTTP's status in the error of a client; None: it has none."""
    for cause in _chain(error):
        if isinstance(response := getattr(cause, "response", None), dict):  # S3
            return int(response["ResponseMetadata"]["HTTPStatusCode"])
        for name in ("status_code", "code"):  # Azure, Google
            if isinstance(status := getattr(cause, name, None), int):
                return status
        if type(cause) is OSError and str(cause).startswith("Forbidden: "):  # gcsfs gives this one no number
            return 403
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_unfinished(name: str) -> bool:
    return name.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
