"""Reasons why armed faults never fired, from the counts of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megasdc.config.sections.faults import FaultSpec
from megasdc.faults.injector import Tally


def why_unfired(spec: FaultSpec, tallies: Sequence[Tally]) -> str | None:
    """The reason why a spec changed nothing in a whole run, as far as it is known, from the tallies of all ranks.

    Returns:
        None if some bit was changed on some rank.
    """
    if any(tally.changed for tally in tallies):
        return None
    here = [tally for tally in tallies if tally.here]
    if not here:
        return "no rank matches its rank, replica, stage, tensor rank and host"
    if not any(tally.wide for tally in here):
        return f"the model is narrower than min_hidden_size {spec.min_hidden_size}"
    seen, due, fired = (sum(getattr(tally, name) for tally in here) for name in ("seen", "due", "fired"))
    if not seen:
        return f"no result of phase {spec.phase} that fits came in its steps and micro-batches on its ranks"
    if not due:
        return f"its probability and bursts never made it fire at {seen} results that fit"
    if fired:
        return f"it fired {fired} times, but the chosen bits already had their values"
    reasons = sum((tally.reasons for tally in here), Counter[str]())
    return f"it was due {due} times: {'; '.join(reasons) or 'no reason was kept'}"
