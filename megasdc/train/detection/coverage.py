"""Coverage of a run's checks: what they cover, read and are expected to cost; reported at the start of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megasdc.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, WEIGHT_GRAD
from megasdc.config import RunConfig
from megasdc.config.problems.detection import samples_lost
from megasdc.engine.engine import TrainingEngine
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.sdc.check_cost import Asked, Rates
from megasdc.sdc.cost import FP32_BYTES, Reads, Work, reads_of_step
from megasdc.sdc.covered import Shape, render_coverage
from megasdc.train.build_engine import DTYPES
from megasdc.train.detection.check_rates import measure_products, measure_rates

MOST_COST = 0.01
"""With coverage "auto", every micro-batch is checked if that costs no more than this share of a step."""
PROBE_BYTES = 64 << 20
"""Size of the tensor with which the start measures how fast checks read."""
_NOTHING = Reads(0, 0)
_ALL_PARAMETERS = "gemm"
"""Granularity whose submodules hold every parameter."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of a rank.

    Args:
        rates: at the operations of checks.
        flop_per_s: of a matrix product; a step reaches less, so a cost share computed with it is an upper bound.
    """

    rates: Rates
    flop_per_s: float


@dataclass(frozen=True)
class CheckPlan:
    """Choice of the checked results: of all micro-batches of a step, or of one, another each step.

    ``lines`` describe what is covered, a line for each tier.
    """

    all_micro_batches: bool
    lines: tuple[str, ...]


def measure_speed(config: RunConfig, engine: TrainingEngine) -> Speed:
    """Measure this rank's speed, in less than a second.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    sections = config.megasdc
    tokens = sections.data.sequence_length * engine.train_micro_batch_size_per_gpu()
    dtype = DTYPES[config.precision]
    return Speed(
        measure_rates(engine.device, engine.dims, PROBE_BYTES),
        measure_products(engine.device, dtype, tokens, sections.model.hidden_size),
    )


def plan_checks(
    config: RunConfig, engine: TrainingEngine, vocab_size: int, speed: Speed | None = None, group: Any = None
) -> CheckPlan:
    """Choose what is covered, and describe for each tier what it covers, reads, costs, and its lost samples.

    The reads are those of a rank without pipeline parallelism, divided by the stages.

    Args:
        vocab_size: entries of the tokenizer's vocabulary.
        speed: of this rank; None: costs are not reported, and coverage "auto" is one micro-batch.
        group: a host group of all ranks.

    Collective: all ranks of the world, where ``speed`` is given.
    """
    tiers = _Tiers(config, engine, vocab_size)
    every, one, audit = tiers.always_on(engine.micro_batches), tiers.always_on(1), tiers.audit()
    section = config.megasdc.sdc.always_on
    if speed is None:
        whole = section.coverage == "all"
        return CheckPlan(whole, tuple(tiers.describe(engine.micro_batches if whole else 1)))
    step_s = tiers.flops / speed.flop_per_s
    shares = [asked.seconds(speed.rates) / step_s for asked in (every, one, audit)]
    largest = torch.tensor(shares, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    of_all, of_one, of_audit = largest.tolist()
    whole = section.coverage == "all" or (section.coverage == "auto" and of_all <= MOST_COST)
    told = [f"checks of every step {share_text(of_all if whole else of_one)} of it"] if section.enabled else []
    if config.megasdc.audit.enabled:
        interval = config.megasdc.audit.interval
        told.append(f"an audit {share_text(of_audit)} of its step, {share_text(of_audit / interval)} of all steps")
    lines = tiers.describe(engine.micro_batches if whole else 1)
    if not told:
        return CheckPlan(whole, tuple(lines))
    rates = speed.rates
    cost = (
        f"expected cost (an upper bound, far above the real cost for small models): {'; '.join(told)} "
        f"(measured here: checksums {rates.checksum_bytes_per_s / 1e9:.3g} "
        f"GB/s and {rates.checksum_s * 1e6:.3g} us each, matrix product {speed.flop_per_s / 1e12:.3g} TFLOP/s"
        + ("; without the toleranced checks)" if section.toleranced else ")")
    )
    return CheckPlan(whole, (*lines, cost))


def share_text(share: float) -> str:
    """A cost as a share of a step, with no more digits than an upper bound deserves."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def coverage_table(config: RunConfig, engine: TrainingEngine, plan: CheckPlan) -> list[str]:
    """The phases of a step and their checks in this run, a line for each row, and the conclusions."""
    shape = Shape(
        replicas=engine.dims.data,
        tensor=engine.dims.tensor,
        micro_batches=engine.micro_batches,
        covered=engine.micro_batches if plan.all_micro_batches else 1,
        recomputes=bool(config.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval")),
    )
    return render_coverage(config.megasdc, shape)


class _Tiers:
    """Operations of each tier in a step of this rank."""

    def __init__(self, config: RunConfig, engine: TrainingEngine, vocab_size: int) -> None:
        sections, self._dims = config.megasdc, engine.dims
        self._sections = sections
        self._micro_batches = engine.micro_batches
        recomputes = bool(config.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval"))
        always_on = sections.sdc.always_on
        self._compares_recompute = always_on.enabled and recomputes and always_on.recompute is not False
        work = Work(
            sections.model,
            vocab=padded_vocab_size(vocab_size, sections.model.vocab_multiple),
            sequence=sections.data.sequence_length,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            accumulation=engine.micro_batches,
            tensor=self._dims.tensor,
            data=self._dims.data,
            width_bytes=FP32_BYTES if config.precision == "fp32" else 2,
            recompute=recomputes,
        )
        self.flops = work.flops / self._dims.pipeline
        one = replace(work, accumulation=1)
        self._checked = reads_of_step(one, always_on.granularity)
        self._audited = reads_of_step(one, sections.audit.granularity)
        self._parameters = reads_of_step(one, _ALL_PARAMETERS)[PARAMETER] * (1 / self._dims.pipeline)

    def always_on(self, covered: int) -> Asked:
        """Operations of a step's checks, with results of ``covered`` micro-batches."""
        section = self._sections.sdc.always_on
        checksums = self._recomputed() * covered if self._compares_recompute else _NOTHING
        extremes = self._finite() * covered if section.enabled and section.finite else _NOTHING
        if section.enabled and section.parameters:
            checksums += self._parameters
        return Asked(checksums, extremes, int(section.enabled))

    def audit(self) -> Asked:
        """Operations of an audited step; its exchanges: choice of samples, agreement, request of an audit (shared)."""
        if not self._sections.audit.enabled:
            return Asked(_NOTHING, _NOTHING, 0)
        return Asked(self._audit_reads() + self._parameters, _NOTHING, 3)

    def describe(self, covered: int) -> list[str]:
        """A line for each tier, with results of ``covered`` micro-batches of a step checked."""
        audit, section, total = self._sections.audit, self._sections.sdc.always_on, self._micro_batches
        lines = []
        if audit.enabled:
            lines.append(
                f"audit every {audit.interval} steps: 1 of {total} micro-batches on {self._dims.data} replicas, about "
                f"{_size(self._audit_reads())} a rank; at most {samples_lost(self._sections, total):.2%} of the "
                "independent samples"
            )
        if not section.enabled:
            return lines
        parts = []
        if self._compares_recompute:
            read = self._recomputed() * covered
            parts.append(f"forward against recompute in {covered} of {total} micro-batches ({_size(read)})")
        if section.finite:
            parts.append(f"NaN and Inf in {covered} of {total} micro-batches ({_size(self._finite() * covered)})")
        if section.parameters:
            parts.append(f"parameters of {self._dims.data} replicas ({_size(self._parameters)})")
        if section.toleranced:
            parts.append("toleranced checks that only warn")
        lines.append(f"every step, a rank: {', '.join(parts)}; arithmetic of the step {self.flops / 1e12:.3g} TFLOP")
        return lines

    def _recomputed(self) -> Reads:
        return _sum(self._checked, (FORWARD, RECOMPUTE), self._dims.pipeline)

    def _finite(self) -> Reads:
        return _sum(self._checked, (FORWARD, BACKWARD), self._dims.pipeline)

    def _audit_reads(self) -> Reads:
        return _sum(self._audited, (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD), self._dims.pipeline)


def _sum(reads: dict[str, Reads], phases: tuple[str, ...], stages: int) -> Reads:
    return sum((reads[phase] for phase in phases), _NOTHING) * (1 / stages)


def _size(reads: Reads) -> str:
    return f"{reads.count:.0f} results, {reads.bytes / 1e6:.3g} MB"
