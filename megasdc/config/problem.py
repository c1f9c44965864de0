"""What is wrong with a configuration? One message, and the fields it is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        paths: dotted paths of the fields it is about, the one at fault first. A contradiction is not reported while
            one of its fields is wrong by itself.
        text: the message.
    """

    paths: tuple[str, ...]
    text: str
