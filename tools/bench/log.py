"""The log of a campaign: finished runs in a file of JSON lines, from which a campaign that was ended goes on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from megasdc.common.errors import ConfigError, StorageError

R = TypeVar("R")


class RunLog(Generic[R]):
    """Keeps finished runs, in a file where one is given.

    Args:
        path: the file; None keeps them in memory.
        kind: dataclass of a run.

    Raises:
        ConfigError: the file is of other options.
        StorageError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, options: Any, kind: type[R]) -> None:
        self._path = path
        self.runs: list[R] = []
        if path is None:
            return
        head, lines = json.loads(json.dumps(asdict(options))), []
        try:
            if path.exists() and path.stat().st_size:
                whole = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
                found, *lines = [json.loads(line) for line in whole]
                if found != head:
                    raise ConfigError(f"--log: {path} has runs of other options, {found}; name another, or remove it")
            self.runs = [TypeAdapter(kind).validate_python(line) for line in lines]
            kept = "".join(json.dumps(line) + "\n" for line in (head, *lines))
            path.write_text(kept, encoding="utf-8")  # without a line that was not written whole
        except (OSError, ValueError) as error:
            raise StorageError(f"--log: {path} cannot be used ({error}); name another file, or remove it") from error

    def add(self, run: R) -> None:
        """Keep a run."""
        self.runs.append(run)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")  # type: ignore[call-overload]
