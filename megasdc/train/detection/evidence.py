"""Evidence of one rank in a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from megasdc.engine.engine import TrainingEngine
from megasdc.sdc.audits import PermutedResult
from megasdc.sdc.finding import Finding
from megasdc.sdc.trace import Trace, trace_digest
from megasdc.sdc.verdict import Repeats
from megasdc.train.detection.place import WrongPlace
from megasdc.train.detection.rows import Rows
from megasdc.train.detection.settings import NONE
from megasdc.train.detection.tokens import Given

Rehearse = Callable[[TrainingEngine, int | None], tuple[Trace, Trace]]
"""Recomputes a micro-batch of the step, None: the audited one; returns the records of the audit and of the check of
recomputations."""
PARAMETERS, AUDITED, PART = "parameters", "audited", "part of the norm"
"""Names of values that replicas are to have alike, in the agreement of a step; besides ``settings.SETTINGS``."""
COPIES = "copies"
"""Name of the value that the ranks of a stage are to have alike."""
REPEATS, ELSEWHERE, ROWS, TOKENS, PLACE = "repeats", "elsewhere", "rows", "tokens", "place"
"""Names of flags of what a rank finds alone, of this step."""
PLACES = "places"
"""Name of the value of places in the data that all ranks are to have alike."""
NORM, CLIPPING, STATE, COPY = "norm", "clipping", "state", "copy"
"""Names of flags of what a rank finds alone, of the step before; the first two also of values of all ranks."""
NO_RECORDS = "no records"
"""Name of the flag of a rank that has no results of an audit."""
NOT_FINITE, LOSS = "not finite", "loss"
"""Names of flags of what a rank has seen of NaN and Inf, in results and in its loss."""


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
        copy: gathers parameters that are not the cast of their masters again, and rules on them, from the devices found
            wrong before; None: that is not compared.
        wrong_place: this rank's place in the data, where it does not follow.
        places: digest of those of all replicas, as this rank has followed them.
    """

    parameters: Trace
    audited: Trace
    repeats: Repeats
    moved: PermutedResult | None = None
    rows: Rows | None = None
    given: Given | None = None
    settings: int = NONE
    copy: Callable[[Collection[int]], Finding] | None = None
    wrong_place: WrongPlace | None = None
    places: int = NONE

    @property
    def place_matters(self) -> bool:
        """Whether a result of this rank changed when elements were in other places."""
        return self.moved is not None and trace_digest(self.moved.trace) != trace_digest(self.audited)
