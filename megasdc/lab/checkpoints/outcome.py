"""Base of the reports of comparisons: of checkpoints, of manifests with digests, and of runs over their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class ComparisonOutcome:
    """Result of a comparison; ``problems``: what could not be read and was not compared; ``notes``: further remarks."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether everything that was compared is equal, or within the tolerance."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """Results of this kind of comparison, as JSON-compatible values."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        found = {"same": self.same and not self.problems, **self.details()}
        return found | {"not_compared": self.problems, "notes": self.notes}
