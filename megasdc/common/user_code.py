"""Code of the user's own that megasdc runs: classes named in a configuration, and a command for alerts.

The command gets an incident as JSON on its standard input, once for each incident. It is started without a shell, has a
time limit, and nothing that it does stops a run. Who writes an incident alerts of it; of several hosts that write the
same one in a shared folder, the first.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from megasdc.common.credentials import without_credentials
from megasdc.common.errors import ConfigError
from megasdc.common.origin import LAUNCH_ID_VARIABLE


def file_of(reference: str) -> str | None:
    """The Python file of a reference such as ``hooks.py:MyHook``; None: it names a module, as ``my_module:MyHook``."""
    source = reference.rpartition(":")[0]
    return source if source.endswith(".py") else None


def can_be_loaded(reference: str) -> bool:
    """Whether Python finds the file or the package of a reference; nothing of it is run."""
    if (file := file_of(reference)) is not None:
        return Path(file).is_file()
    package = reference.partition(":")[0].partition(".")[0]
    if package in sys.modules:
        return True
    return importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is not None


def load_class(reference: str, base: type, place: str) -> type:
    """Load a class: its file or module is executed.

    Args:
        reference: ``file.py:Class``, or ``module:Class`` of a module in the working folder or where Python looks.
        base: required base class.
        place: path of the setting in the configuration, for messages.

    Raises:
        ConfigError: the file or module cannot be run, or has no such class.
    """
    source, _, name = reference.rpartition(":")
    try:
        module = _load_module(source)
    except Exception as error:  # whatever the user's code does
        raise ConfigError(f"{place}: {source} cannot be run: {type(error).__name__}: {error}") from error
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{place}: {source} has no subclass of {base.__module__}.{base.__name__} named {name!r}")
    return kind


def create(kind: type, options: dict[str, Any], place: str) -> Any:
    """Create an object of a user's class.

    Raises:
        ConfigError: the class rejects the options.
    """
    try:
        return kind(**options)
    except Exception as error:  # whatever the user's class does
        raise ConfigError(f"{place}: {kind.__name__} cannot be created: {type(error).__name__}: {error}") from error


def _load_module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        return importlib.import_module(source)
    spec = importlib.util.spec_from_file_location(f"megasdc_user_{Path(source).stem}", source)
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import would; dataclasses look the module up there
    spec.loader.exec_module(module)
    return module


LIMIT_S = 10.0
KILLED_S = 2.0
"""Seconds that a killed process has to end; it does not if it waits for a disk or is another user's."""
_SHOWN_BYTES = 500


def alert(command: Sequence[str], incident: Path, text: str) -> str:
    """Run the command for an incident without an alert so far; returns a message on an error, empty: none.

    If the mark of the alert cannot be written, it is run nevertheless: perhaps once on each host.

    Args:
        command: program and arguments; empty: there are no alerts.
        incident: the incident's JSON file, beside which the mark lies.
        text: content of that file.
    """
    if not command:
        return ""
    try:
        os.close(os.open(incident.with_suffix(".alerted"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return ""
    except OSError:
        pass
    problem = _run(command, text)
    return f"alert of {incident}: {command[0]} {problem}" if problem else ""


def _run(command: Sequence[str], text: str) -> str:
    """Run the command and return a message on an error, empty: none; its processes are ended at the time limit."""
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE}
    try:
        with _in_memory("incident") as content, _in_memory("errors") as errors:
            content.write(text.encode())
            content.seek(0)
            process = subprocess.Popen(
                list(command),
                stdin=content,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                with suppress(PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILLED_S)
                given_up = (
                    "" if process.poll() is not None else f", does not end, and is given up (process {process.pid})"
                )
                return f"did not end within {LIMIT_S:.0f} s and was killed{given_up}"
            errors.seek(0)
            text = errors.read(_SHOWN_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        return f"could not be run: {error}"
    return "" if code == 0 else f"ended with {code}: {without_credentials(text)}"


def _in_memory(name: str) -> IO[bytes]:
    """A file in memory, which needs no disk."""
    return open(os.memfd_create(name), "w+b")
