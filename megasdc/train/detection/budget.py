"""What the checks of a run cover, read and are expected to cost, which is reported at its start.

It follows from the speed of a rank at the operations of checks, which is measured apart from any step; what keeps the
cost within its budget while the run goes on is in ``megasdc.sdc.budget``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.config.detection import EXTRA, AlwaysOnSection
from megasdc.config.load import RunConfig
from megasdc.config.sections import OFF, MegasdcSection, TraceSection
from megasdc.engine.engine import TrainingEngine
from megasdc.model.sizes import padded_vocab_size
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import BLOCK, norms_have_equal_bits, owned_fragments
from megasdc.parallel.collectives import TensorExchange, compare_replicas
from megasdc.sdc.budget import AUDITS_OF_BUDGET, AuditPace, CheckPlan
from megasdc.sdc.cost import (
    APART,
    FP32_BYTES,
    MOST_EVERY,
    Asked,
    Cadence,
    RankWork,
    Rates,
    Reads,
    TimeShares,
    choose_cadence,
    reads_of_step,
)
from megasdc.sdc.coverage import Shape, render_coverage
from megasdc.sdc.nonfinite import FiniteRecorder
from megasdc.sdc.referee.recompute import LINEAR
from megasdc.sdc.rows import PRODUCTS
from megasdc.sdc.trace import trace_digest
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.checksum import default_algorithm, read_back
from megasdc.train.build_engine import DTYPES
from megasdc.train.detection.blocks import ring_of, sets_of
from megasdc.train.detection.findings import Evidence, compared

RATE_BYTES = 256 << 20
"""Size of the measured tensor, larger than a processor's caches."""
MOST_TOKENS = 4096
"""Largest number of rows of the matrix product that represents a step's arithmetic."""
CALLS, COLD_CALLS, EXCHANGES, READS = 20, 5, 20, 3
"""Numbers of measured operations; of cold calls, before each of which the caches are filled with something else."""

COMPARED_RARELY = (
    "Where steps are so short that comparing in each of them costs more than sdc.budget, ranks compare settings, "
    f"norms, clip factors, places and parameters in every {APART[0]}. to {MOST_EVERY}. step (event sdc/cadence): what "
    "is wrong in one step between is not seen."
)
"""Conclusion of the table of what is covered, where a preset has turned the checks on."""
PROBE_BYTES = 64 << 20
"""Size of the tensor with which the start measures how fast checks read."""
_NOTHING = Reads(0, 0)
_INT64_BYTES = 8
_MOVES = 5
"""Number of times that a sent element is read or written."""
_STATES = 3
"""Number of values that the optimizer keeps of an element: master and both moments."""
_ALL_PARAMETERS = "gemm"
"""Granularity whose submodules hold every parameter."""


@dataclass(frozen=True)
class RankSpeed:
    """Measured speed of a rank.

    Args:
        rates: rates at the operations of checks.
        flop_per_s: FLOP/s of a matrix product; a step reaches less, so a cost share computed with it is an upper bound.
    """

    rates: Rates
    flop_per_s: float


def measure_speed(config: RunConfig, engine: TrainingEngine) -> RankSpeed:
    """Measure this rank's speed, in less than a second.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    sections = config.megasdc
    tokens = sections.data.sequence_length * engine.train_micro_batch_size_per_gpu()
    dtype = DTYPES[config.precision]
    return RankSpeed(
        measure_rates(engine, PROBE_BYTES),
        measure_products(engine.device, dtype, tokens, sections.model.hidden_size),
    )


def plan_checks(
    config: RunConfig, engine: TrainingEngine, vocab_size: int, speed: RankSpeed | None = None, group: Any = None
) -> CheckPlan:
    """Choose what is covered, and describe for each tier what it covers, reads, costs, and its lost samples.

    The reads are those of a rank without pipeline parallelism, divided by the stages.

    Args:
        vocab_size: entries of the tokenizer's vocabulary.
        speed: speed of this rank; None: costs are not reported, and coverage "auto" is one micro-batch.
        group: a host group of all ranks.

    Collective: all ranks of the world, where ``speed`` is given.
    """
    tiers, number = _Tiers(config, engine, vocab_size), engine.most_micro_batches
    sections, coverage = config.megasdc, config.megasdc.sdc.always_on.coverage
    whole = coverage == "all"
    cadence = Cadence(number if whole else 1)
    if speed is None:
        return CheckPlan(cadence, tuple(tiers.describe(cadence)), whole=whole)
    step_s = tiers.flops / speed.flop_per_s
    shares = [asked.seconds(speed.rates) / step_s for asked in (tiers.fixed(), tiers.audit(), tiers.look())]
    largest = torch.tensor([*shares, *_places(sections.sdc.always_on, engine)], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    fixed, of_audit, look, *places = largest.tolist()
    slices, products, sets = (int(one) or None for one in places)
    of_audit += tiers.extra_share
    interval = sections.audit.interval
    budget: float | None = None
    expected = TimeShares(fixed, of_audit / interval, look, 0.0)
    pace = _pace_of(sections, tiers.extra_share)
    thins = False
    if sections.sdc.always_on.enabled and coverage == "auto":
        budget = sections.sdc.budget_of(engine.dims.data)
        thins = sections.protect != OFF
        if pace is not None:
            factor = pace.factor(of_audit, AUDITS_OF_BUDGET * budget)
            expected = replace(expected, audits=pace.share(of_audit, factor))
        cadence = choose_cadence(expected, budget, number)
    lines, told = tiers.describe(cadence), []
    if sections.sdc.always_on.enabled:
        kept = "" if budget is None else f", kept within {share_text(budget)}, audits included, while the run goes on"
        told.append(f"checks of every step {share_text(cadence.share(replace(expected, audits=0.0)))} of it{kept}")
    if sections.audit.enabled:
        told.append(f"an audit {share_text(of_audit)} of its step, {share_text(expected.audits)} of all steps")
    if not told:
        return CheckPlan(cadence, tuple(lines), budget, expected, slices, products, sets, whole, pace, thins)
    rates = speed.rates
    cost = (
        f"expected cost (an upper bound, far above the real cost for small models): {'; '.join(told)} "
        f"(measured here: checksums {rates.checksum_bytes_per_s / 1e9:.3g} "
        f"GB/s and {rates.checksum_s * 1e6:.3g} us each, matrix product {speed.flop_per_s / 1e12:.3g} TFLOP/s)"
    )
    return CheckPlan(cadence, (*lines, cost), budget, expected, slices, products, sets, whole, pace, thins)


def _pace_of(sections: MegasdcSection, least: float) -> AuditPace | None:
    """Pace of audits whose interval may grow; ``least``: what one costs at least, as a share of a step."""
    audit, saves = sections.audit, sections.checkpoint.interval
    if not audit.enabled or audit.most_interval == audit.interval:
        return None
    return AuditPace(audit.interval, audit.most_interval, saves if audit.verify_checkpoints else 0, least)


def _places(section: AlwaysOnSection, engine: TrainingEngine) -> tuple[int, int, int]:
    """Numbers of this rank's slices, products and sets of blocks that checks look at in turn; 0: not checked."""
    slices = products = sets = 0
    if section.enabled and section.slice_elements:
        slices = -(-sum(one.numel for one in owned_fragments(engine.optimizer)) // section.slice_elements)
    if section.enabled and section.rows:
        products = len(PRODUCTS) * sum(one.kind in LINEAR for one in list_submodules(engine.module))
    if section.enabled and section.chain:
        sets = len(sets_of(engine))
    return slices, products, sets


def share_text(share: float) -> str:
    """Text of a cost as a share of a step, with no more digits than an upper bound deserves."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def coverage_table(
    config: RunConfig,
    engine: TrainingEngine,
    plan: CheckPlan,
    cadence: Cadence,
    within: Mapping[str, str] | None = None,
) -> list[str]:
    """The phases of a step and their checks in this run, a line for each row, and the conclusions.

    Args:
        plan: plan of the start, with the numbers of places that are looked at in turn.
        cadence: present cadence of looks.
        within: texts on exact checks that are within a tolerance now, by phase, and on what audits and golden traces
            still compare, by name of the check.
    """
    shape = Shape(
        replicas=engine.dims.data,
        tensor=engine.dims.tensor,
        micro_batches=engine.most_micro_batches,
        covered=cadence.micro_batches,
        every=cadence.every,
        recomputes=bool(config.recompute_interval),
        pipeline=engine.dims.pipeline,
        within=within or {},
        slices=plan.slices,
        products=plan.products,
        sets=plan.sets,
        offloads=config.offloads_optimizer,
        equal_norms=norms_have_equal_bits(engine.optimizer, engine.device, engine.dims.tensor * engine.dims.pipeline),
    )
    return render_coverage(config.megasdc, shape) + [COMPARED_RARELY] * plan.thins


class _Tiers:
    """Operations of each tier in a step of this rank."""

    def __init__(self, config: RunConfig, engine: TrainingEngine, vocab_size: int) -> None:
        sections, self._dims = config.megasdc, engine.dims
        self._sections = sections
        self._micro_batches = engine.most_micro_batches
        recomputes = bool(config.recompute_interval)
        always_on = sections.sdc.always_on
        self._compares_recompute = always_on.enabled and recomputes and always_on.recompute is not False
        work = RankWork(
            sections.model,
            vocab=padded_vocab_size(vocab_size, sections.model.vocab_multiple),
            sequence=sections.data.sequence_length,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            accumulation=engine.most_micro_batches,
            tensor=self._dims.tensor,
            data=self._dims.data,
            width_bytes=FP32_BYTES if config.precision == "fp32" else 2,
            recompute=recomputes,
        )
        self.flops = work.flops / self._dims.pipeline
        self._tokens, self._width_bytes = work.tokens, work.width_bytes
        one = replace(work, accumulation=1)
        self._checked = reads_of_step(one, always_on.granularity)
        self._audited = reads_of_step(one, sections.audit.granularity)
        self._parameters = reads_of_step(one, _ALL_PARAMETERS)[PARAMETER] * (1 / self._dims.pipeline)
        self._shard = self._parameters.bytes / self._width_bytes / self._dims.data
        self._offloads = config.offloads_optimizer
        self._at_once = engine.most_micro_batches if always_on.coverage == "all" else 1

    def fixed(self) -> Asked:
        """Operations of every step's checks, whatever it looks at."""
        section = self._sections.sdc.always_on
        parameters = self._parameters if section.enabled and section.parameters else _NOTHING
        return Asked(parameters, _NOTHING, int(section.enabled))

    def look(self) -> Asked:
        """Operations of looking at the results of one micro-batch."""
        section = self._sections.sdc.always_on
        checksums = (self._recomputed() if self._compares_recompute else _NOTHING) + self._input_reads() + self._links()
        finite = self._finite() if section.enabled and section.finite else _NOTHING
        elements, messages = self._added_again()
        chained = int(section.enabled and section.chain) / self._at_once
        return Asked(checksums, finite, chained + messages, FP32_BYTES * elements)

    def audit(self) -> Asked:
        """Operations of an audited step; its exchanges: choice of samples, agreement, request of an audit (shared)."""
        if not self._sections.audit.enabled:
            return Asked(_NOTHING, _NOTHING, 0)
        return Asked(self._audit_reads() + self._parameters, _NOTHING, 3)

    @property
    def extra_share(self) -> float:
        """Time that an extra micro-batch adds to an audited step, as a share of it; 0 where audits compute none."""
        audit = self._sections.audit
        return 1 / self._micro_batches if audit.enabled and audit.micro_batch == EXTRA else 0.0

    def describe(self, cadence: Cadence) -> list[str]:
        """A line for each tier."""
        covered = cadence.micro_batches
        audit, section, total = self._sections.audit, self._sections.sdc.always_on, self._micro_batches
        lines = []
        if audit.enabled:
            share = f"{1 / (total * audit.interval):.2%}"
            which, price = f"1 of {total} micro-batches", f"at most {share} of the independent samples"
            if audit.micro_batch == EXTRA:
                which, price = "an extra micro-batch", f"{share} more compute, and no samples"
            lines.append(
                f"audit every {audit.intervals} steps: {which} on {self._dims.data} replicas, about "
                f"{_size(self._audit_reads())} a rank; {price}"
            )
        if not section.enabled:
            return lines
        looks, parts = [], []
        if self._compares_recompute:
            looks.append(f"forward against recompute ({_size(self._recomputed() * covered)})")
        if section.finite:
            looks.append(f"NaN and Inf ({_size(self._finite() * covered)})")
        if section.tokens:
            looks.append(f"tokens ({_size(self._input_reads() * covered)})")
        if section.chain:
            looks.append(f"links from gradient to parameters ({_size(self._links() * covered)})")
            sent = FP32_BYTES * self._added_again()[0] * self._at_once
            looks.append(f"blocks of the gradient sent to be added again ({sent / 1e6:.3g} MB)")
        if looks:
            steps = "step" if cadence.every == 1 else f"{cadence.every} steps"
            lines.append(
                f"every {steps}, results of {covered} of {total} micro-batches on a rank: {', '.join(looks)}; all "
                f"{total} in turn within {cadence.period(total)} steps"
            )
        if section.parameters:
            parts.append(f"parameters of {self._dims.data} replicas ({_size(self._parameters)})")
        said = ", ".join(parts) or "nothing besides"
        lines.append(f"every step, a rank: {said}; arithmetic of the step {self.flops / 1e12:.3g} TFLOP")
        return lines

    def _recomputed(self) -> Reads:
        return _sum(self._checked, (FORWARD, RECOMPUTE), self._dims.pipeline)

    def _finite(self) -> Reads:
        return _sum(self._checked, (FORWARD, BACKWARD), self._dims.pipeline)

    def _input_reads(self) -> Reads:
        """Reads of tokens, labels and mask of a micro-batch, and of the same from the file."""
        section = self._sections.sdc.always_on
        per_token = 2 * (2 * _INT64_BYTES + FP32_BYTES)
        return Reads(3, per_token * self._tokens) if section.enabled and section.tokens else _NOTHING

    def _links(self) -> Reads:
        """Reads of the chain: squares of the shard's gradient; of due blocks the old and new state, masters and copies.

        Looks at one micro-batch have one of as many parts of the blocks, and the whole gradient, unless it is known
        that each step looks at all. Besides what is sent of it: copied twice, and added again where it is received.
        """
        section = self._sections.sdc.always_on
        if not (section.enabled and section.chain):
            return _NOTHING
        due, found = self._shard / self._micro_batches, 2 * _STATES
        per_block = math.ceil(due / BLOCK)
        state, copy = Reads(found * per_block, found * FP32_BYTES * due), (FP32_BYTES + self._width_bytes) * due
        gradient = Reads(max(self._parameters.count, self._shard / BLOCK), FP32_BYTES * self._shard)
        gradient = _NOTHING if self._offloads else gradient
        sent, _ = self._added_again()
        again = Reads(gradient.count * sent / self._shard, _MOVES * FP32_BYTES * sent)
        return state + Reads(per_block, copy) + gradient * (1 / self._at_once) + again

    def _added_again(self) -> tuple[float, float]:
        """Numbers of gradient elements sent to be added again in a look at one micro-batch, and of messages."""
        section = self._sections.sdc.always_on
        if self._offloads or not (section.enabled and section.chain):
            return 0.0, 0.0
        if section.coverage != "all":
            return min(self._shard, BLOCK), 1.0
        return self._shard / self._at_once, (math.ceil(self._shard / BLOCK) + 1) / self._at_once

    def _audit_reads(self) -> Reads:
        return _sum(self._audited, (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD), self._dims.pipeline)


def _sum(reads: dict[str, Reads], phases: tuple[str, ...], stages: int) -> Reads:
    return sum((reads[phase] for phase in phases), _NOTHING) * (1 / stages)


def _size(reads: Reads) -> str:
    return f"{reads.count:.0f} results, {reads.bytes / 1e6:.3g} MB"


def measure_rates(engine: TrainingEngine, num_bytes: int = RATE_BYTES) -> Rates:
    """This rank's rates at the operations of checks, while the others measure too.

    Args:
        num_bytes: size of the large tensor.

    Collective: all ranks of the world.
    """
    device, dims = engine.device, engine.dims
    algorithm = default_algorithm(device)
    large, small = torch.ones(num_bytes // 4, device=device), torch.zeros(1, device=device)
    tracer, finite = Tracer(algorithm, TraceSection()), FiniteRecorder()
    address = Address(1, 0, FORWARD, "loss", "output")

    group, place, size = ring_of(engine)
    message, before, after = large.view(torch.int32)[:BLOCK], (place - 1) % size, (place + 1) % size

    def send() -> None:
        sent, sizes = [message[:0]] * size, [0] * size
        sent[after], sizes[before] = message, message.numel()
        int(TensorExchange(sent, sizes, group).finish()[before][-1])  # waits for the device

    def look() -> None:
        finite(address, large)
        finite.pop_first(dims)

    return Rates(
        checksum_bytes_per_s=num_bytes / _median_s(lambda: read_back([algorithm.start(large)]), READS),
        extremes_bytes_per_s=num_bytes / _median_s(look, READS),
        checksum_s=_recording_s(lambda: tracer(address, small), lambda: trace_digest(tracer.pop_trace()), large),
        extremes_s=_recording_s(lambda: finite(address, small), lambda: finite.pop_first(dims), large),
        exchange_s=_median_s(lambda: compare_replicas(compared(Evidence()), dims, dist.group.WORLD), EXCHANGES),
        sent_bytes_per_s=FP32_BYTES * message.numel() / _median_s(send, READS),
    )


def measure_products(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> float:
    """FLOP/s of the matrix product of an MLP, for a micro-batch of ``tokens``; a whole step reaches less.

    Sync: waits for the device.
    """
    rows = min(tokens, MOST_TOKENS)
    left = torch.ones(rows, hidden, dtype=dtype, device=device)  # not random, which would advance the run's generators
    right = torch.ones(hidden, 4 * hidden, dtype=dtype, device=device)

    def multiply() -> None:
        float((left @ right)[0, 0])

    multiply()
    return 8 * rows * hidden * hidden / _median_s(multiply, READS)


def _recording_s(record: Callable[[], Any], take: Callable[[], Any], large: torch.Tensor) -> float:
    """Seconds of one record, with its share of the time of taking all.

    In a step, arithmetic uses the caches between records. Without the sum that imitates it here, a call would seem to
    take a twentieth of its time.
    """
    times = []
    for _ in range(COLD_CALLS):
        large.sum()
        times.append(_seconds(record))
    for _ in range(CALLS - COLD_CALLS):
        record()
    return statistics.median(times) + _seconds(take) / CALLS


def _median_s(call: Callable[[], Any], count: int) -> float:
    return statistics.median(_seconds(call) for _ in range(count))


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
