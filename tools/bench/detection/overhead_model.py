"""Predicted cost of each check: bytes read, results recorded and reductions against a step's arithmetic."""

from __future__ import annotations

from megasdc.common.addresses import BACKWARD, FORWARD, MICRO_BATCH_PHASES, PARAMETER, RECOMPUTE
from megasdc.config.detection import AlwaysOnSection, AuditSection
from megasdc.sdc.cost import Asked, RankWork, Rates, Reads, reads_of_step

OFF, ALWAYS_ON, ALWAYS_ON_ALL = "off", "always on", "always on, all micro-batches"
AUDIT, BETWEEN, AMORTISED = "audited step", "step between audits", "audit"
PERMUTED, SLICES = "permuted audit", "slices of the optimizer"
ROWS, KEPT = "sums of rows", "all, within the budget"
CHAIN, TOKENS = "links of the update", "tokens"
STEPS = (OFF, ALWAYS_ON, ALWAYS_ON_ALL, AUDIT, BETWEEN, PERMUTED, ROWS, SLICES, CHAIN, TOKENS)
"""Kinds of steps that are measured; the cost of audits is that of one audited step and those up to the next."""
_ALL_PARAMETERS = "gemm"
"""Granularity whose submodules hold every parameter."""


def asked_by(work: RankWork, step: str) -> Asked:
    """Operations of the checks of a kind of step, one of ``STEPS``, each section at its default, with recompute.

    ValueError for permuted audits, which compute, sums of rows, of another product each step, slices, which are of one
    size whatever the model, links of the update, which read shards, and tokens, which are read from a file: they have
    no such model.
    """
    nothing = Reads(0, 0)
    parameters = reads_of_step(work, _ALL_PARAMETERS)[PARAMETER]
    if step in (ALWAYS_ON, ALWAYS_ON_ALL):
        phases = reads_of_step(work, AlwaysOnSection.model_fields["granularity"].default)
        part = 1 if step == ALWAYS_ON_ALL else 1 / work.accumulation
        checked = (phases[FORWARD] + phases[RECOMPUTE]) * part
        return Asked(checked + parameters, (phases[FORWARD] + phases[BACKWARD]) * part, 1)
    if step == AUDIT:
        phases = reads_of_step(work, AuditSection.model_fields["granularity"].default)
        audited = sum((phases[phase] for phase in MICRO_BATCH_PHASES), nothing) * (1 / work.accumulation)
        return Asked(audited + parameters, nothing, 3)  # whose samples, do all agree, is an audit asked for
    if step == BETWEEN:
        return Asked(nothing, nothing, 1)
    if step == OFF:
        return Asked(nothing, nothing, 0)
    raise ValueError(f"{step!r} has no model")


def amortised(audited: float, between: float, interval: int) -> float:
    """The mean over the ``interval`` steps from one audit to the next."""
    return (audited + (interval - 1) * between) / interval


def predict(work: RankWork, rates: Rates, flop_per_s: float, interval: int) -> dict[str, float]:
    """Time of the checks over that of a step without them, by kind of step and for audits every ``interval`` steps.

    ``work`` is of the rank, with recompute; ``flop_per_s`` is that of the step, recomputation counted.
    """
    step_s = work.flops / flop_per_s
    shares = {step: asked_by(work, step).seconds(rates) / step_s for step in (ALWAYS_ON, ALWAYS_ON_ALL, AUDIT, BETWEEN)}
    shares[PERMUTED] = 2 * shares[AUDIT] + 1 / work.accumulation  # one more micro-batch, with its checksums
    return shares | {AMORTISED: amortised(shares[AUDIT], shares[BETWEEN], interval)}
