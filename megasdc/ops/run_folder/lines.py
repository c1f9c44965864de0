"""Reader of JSON lines that may be damaged or still be written: every complete line; the others are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError

T = TypeVar("T")


@dataclass
class Lines(Generic[T]):
    """Contents of one file: the rows of its valid lines, and numbers of complete and of damaged lines, the first is 1.

    ``torn``: whether the last line is incomplete; it is not in ``total``.
    """

    name: str
    rows: list[T] = field(default_factory=list)
    total: int = 0
    damaged: list[int] = field(default_factory=list)
    torn: bool = False

    @property
    def notes(self) -> list[str]:
        """What was ignored, a sentence each."""
        found = []
        if self.damaged:
            more = f", the first is line {self.damaged[0]}" if len(self.damaged) > 1 else f": line {self.damaged[0]}"
            found.append(
                f"{self.name}: {len(self.damaged)} of {self.total} lines cannot be read and are left out{more}"
            )
        if self.torn:
            found.append(
                f"{self.name}: the last line has no end and is left out; it is being written, or its writer was killed"
            )
        return found


def read_lines(path: Path, parse: Callable[[dict[str, Any]], T]) -> Lines[T]:
    """Reads a file of JSON objects, one per line; ``parse`` converts an object to a row.

    A line is damaged where ``parse`` raises ``ValueError``, ``TypeError`` or ``KeyError``. Raises ``DataError`` where
    the file cannot be read at all.
    """
    try:
        pieces = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; look at its permissions, or copy it again"
        ) from error
    found: Lines[T] = Lines(path.name, total=len(pieces) - 1, torn=bool(pieces[-1]))
    for number, line in enumerate(pieces[:-1], 1):
        try:
            value = parse_json(line)
            if not isinstance(value, dict):
                raise TypeError("no object")
            found.rows.append(parse(value))
        except (ValueError, TypeError, KeyError):
            found.damaged.append(number)
    return found
