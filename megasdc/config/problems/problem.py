"""A problem of a configuration: one message, and the fields that it concerns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        paths: dotted paths of the fields that it concerns, the one at fault first. A contradiction is not reported
            while one of its fields is wrong by itself.
        what: what is wrong there: value got, value needed, remedy.
    """

    paths: tuple[str, ...]
    what: str

    @property
    def text(self) -> str:
        """The message."""
        return f"{self.paths[0]}: {self.what}"
