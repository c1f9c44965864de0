"""Evidence of one rank in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megasdc.engine.engine import TrainingEngine
from megasdc.sdc.audits.findings import Moved
from megasdc.sdc.recompute import Repeats
from megasdc.sdc.trace import Trace, digest
from megasdc.train.detection.rows import Rows
from megasdc.train.detection.settings import NONE
from megasdc.train.detection.tokens import Given

Rehearse = Callable[[TrainingEngine, int | None], tuple[Trace, Trace]]
"""Recomputes a micro-batch of the step, None: the audited one; returns the records of the audit and of the check of
recomputations."""


@dataclass(frozen=True)
class Evidence:
    """Evidence of one rank in a step.

    Args:
        parameters: checksums of its parameters before the step; empty where they were not read.
        audited: results of the shared micro-batch; empty outside audits.
        repeats: forward results against their recomputation.
        moved: the shared micro-batch with elements in other places; None: it was not computed so.
        rows: of a product; None: none was looked at.
        given: micro-batches as the model was given them, against the file; None: none is compared.
        settings: digest of those that the last step used.
    """

    parameters: Trace
    audited: Trace
    repeats: Repeats
    moved: Moved | None = None
    rows: Rows | None = None
    given: Given | None = None
    settings: int = NONE

    @property
    def place_matters(self) -> bool:
        """Whether a result of this rank changed when elements were in other places."""
        return self.moved is not None and digest(self.moved.trace) != digest(self.audited)
