"""A problem of a configuration: one message, and the fields that it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megasdc.common.credentials import REMEDY, SECRET_REMEDY, find_secrets


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        paths: dotted paths of the fields that it concerns, the one at fault first. A contradiction is not reported
            while one of its fields is wrong by itself.
        what: what is wrong there: value got, value needed, remedy.
        of_host: it is about files that this host lacks; a stored configuration is read where they need not be.
    """

    paths: tuple[str, ...]
    what: str
    of_host: bool = False

    @property
    def text(self) -> str:
        """The message."""
        return f"{self.paths[0]}: {self.what}"


_HIDDEN = "a secret is refused in the file, and not shown here"
OWN_PLACES: dict[tuple[str | int, ...], str] = {
    ("comet", "api_key"): f"{_HIDDEN}; set COMET_API_KEY in the environment, or write ~/.comet.config (mode 0600).",
    ("megasdc", "checkpoint", "archive", "address"): f"{_HIDDEN}; {REMEDY}.",
}
"""What to do with the secrets for which there is a key."""


def secret_problems(raw: Mapping[str, Any]) -> dict[tuple[str | int, ...], Problem]:
    """Refusals of secrets in a file, by path; none repeats one."""
    return {
        path: Problem(
            (".".join(map(str, path)),),
            OWN_PLACES.get(path, f"{_HIDDEN}: {SECRET_REMEDY}."),
        )
        for path in find_secrets(raw)
    }
