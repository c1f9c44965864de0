"""How what ends in fit or not fit has ended: one class for tests of hosts, verifications, checks before and of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megasdc.common.words import number_of
from megasdc.output.page import Page

Verdict = TypeVar("Verdict")


@dataclass(frozen=True)
class Outcome(Generic[Verdict]):
    """What a test, a verification or a check has come to.

    Args:
        exit_code: as documented; 0: fit.
        contents: plain values, which ``--json`` prints and files keep beside the exit code.
        page: what people see.
        verdicts: on each host, rank or check.
    """

    exit_code: int
    contents: Mapping[str, Any]
    page: Page
    verdicts: Sequence[Verdict] = ()

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"exit_code": self.exit_code, **self.contents}


def code_of(statuses: Iterable[str], codes: Mapping[str, int]) -> int:
    """Exit code of the first status in the order of ``codes`` that is among these; 0: none is."""
    found = set(statuses)
    return next((code for status, code in codes.items() if status in found), 0)


def count_statuses(statuses: Sequence[str], known: Iterable[str] = ()) -> dict[str, int]:
    """How many there are of each status, of the ``known`` ones too where there is none; empty: those that are there."""
    counts = Counter(statuses)
    return {status: counts[status] for status in (known or sorted(counts))}


def counted(what: str, counts: Mapping[str, int]) -> str:
    """``3 hosts: 2 healthy, 1 unhealthy``."""
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{number_of(sum(counts.values()), what)}: {told}"
