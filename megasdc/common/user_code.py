"""Classes of the user's own, by the names that a configuration gives them."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megasdc.common.errors import ConfigError


def file_of(reference: str) -> str | None:
    """The Python file of a reference such as ``hooks.py:MyHook``; None: it names a module, as ``my_module:MyHook``."""
    source = reference.rpartition(":")[0]
    return source if source.endswith(".py") else None


def is_found(reference: str) -> bool:
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
        base: what it must be a subclass of.
        place: where it is configured, for messages.

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
