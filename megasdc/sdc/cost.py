"""Cost of checks: what they read in a step against its arithmetic, and how often they look to stay within a budget.

Pure formulas: what traces and checks of a step read (``reads_of_step``), what that takes at the measured rates of a
rank (``Asked``), and the cadence whose time is within a share of the step's (``choose_cadence``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    BACKWARD,
    FORWARD,
    PARAMETER,
    RECOMPUTE,
    REDUCED_GRAD,
    UPDATE,
    WEIGHT_GRAD,
)
from megasdc.config.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.model.kinds import (
    ACTIVATION,
    BLOCK,
    CORE_ATTENTION,
    EMBEDDING,
    FC1,
    FC2,
    FINAL_NORM,
    GRANULARITIES,
    HEAD,
    LOSS,
    NORM,
    POSITIONS,
    PROJECTION,
    QKV,
    RESIDUAL,
)
from megasdc.model.sizes import model_sizes

FP32_BYTES = 4
_OF_A_LAYER = {NORM: 2, QKV: 1, CORE_ATTENTION: 1, PROJECTION: 1, RESIDUAL: 1, FC1: 1, ACTIVATION: 1, FC2: 1, BLOCK: 1}
"""Number of submodules of each kind in a transformer layer."""


@dataclass(frozen=True)
class RankWork:
    """Work of one rank in a step, without pipeline parallelism.

    Args:
        model: sizes of the model; for a pipeline stage, with the stage's number of layers.
        vocab: padded vocabulary size v.
        sequence: number of tokens s of a sample.
        micro_batch: number of samples b of a micro-batch.
        accumulation: number of micro-batches of a step.
        tensor: tensor-parallel size.
        width_bytes: bytes of one value of the model, 4 or 2.
        recompute: whether transformer layers are recomputed in the backward pass.
    """

    model: ModelSection
    vocab: int
    sequence: int
    micro_batch: int
    accumulation: int
    tensor: int = 1
    data: int = 1
    width_bytes: int = FP32_BYTES
    recompute: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of one micro-batch."""
        return self.sequence * self.micro_batch

    @property
    def flops(self) -> float:
        """Number of floating-point operations of a step on this rank; recomputation adds a third."""
        sizes = model_sizes(self.model, ffn_width(self.model), self.vocab)
        per_token = sizes.flops_per_token(self.sequence) * (4 / 3 if self.recompute else 1)
        return per_token * self.tokens * self.accumulation / self.tensor


@dataclass(frozen=True)
class Accelerator:
    """Speeds and work for which costs on an accelerator are predicted.

    Args:
        bytes_per_s: rate at which a checksum reads device memory, 0.8 of an H100 SXM's 3.35 TB/s (NVIDIA's data sheet).
        flop_per_s: rate of arithmetic that training reaches, 40 % of the same GPU's 989 TFLOP/s in bf16.
        call_s: time of launching one checksum.
        layers: number of layers of the rank's stage.
        sequence: number of tokens of a sample.
        accumulation: number of micro-batches of a step, one sample each.
    """

    bytes_per_s: float = 0.8 * 3.35e12
    flop_per_s: float = 0.4 * 989e12
    call_s: float = 10e-6
    tensor: int = 8
    data: int = 64
    layers: int = 8
    sequence: int = 4096
    accumulation: int = 16
    vocab: int = 32000

    def work(self, hidden: int) -> RankWork:
        """Work of a rank in bf16, GPT style with an MLP of 4 h and heads of 128, with embedding and output."""
        heads = hidden // 128
        model = ModelSection(
            num_layers=self.layers, hidden_size=hidden, num_attention_heads=heads, max_positions=self.sequence
        )
        return RankWork(model, self.vocab, self.sequence, 1, self.accumulation, self.tensor, self.data, width_bytes=2)


@dataclass(frozen=True)
class Reads:
    """Number of checksums and the bytes that they read."""

    count: float
    bytes: float

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.count + other.count, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Reads:
        return Reads(self.count * factor, self.bytes * factor)


def reads_of_step(work: RankWork, granularity: str) -> dict[str, Reads]:
    """Reads of one step's checksums on one rank, by phase.

    Of a shard over replicas the count is an upper bound: a rank owns at most so many parameters. Gradients are taken to
    accumulate in fp32, the default without `fp16` and `data_types.grad_accum_dtype`.

    Args:
        granularity: a key of ``GRANULARITIES``.
    """
    number = {kind: count * work.model.num_layers for kind, count in _OF_A_LAYER.items()}
    number |= dict.fromkeys((EMBEDDING, POSITIONS, FINAL_NORM, HEAD, LOSS), 1)
    forward, backward, recompute = (Reads(0, 0) for _ in range(3))
    parameters = Reads(0, 0)
    for kind in GRANULARITIES[granularity]:
        outputs, inputs = _outputs(kind, work), _input_gradients(kind, work)
        width = FP32_BYTES if kind == LOSS else work.width_bytes
        forward += _reads(outputs, work.tokens * width) * number[kind]
        if work.recompute and kind in _OF_A_LAYER:
            recompute += _reads(outputs, work.tokens * width) * number[kind]
        backward += _reads(inputs, work.tokens * work.width_bytes) * number[kind]
        parameters += _reads(_parameters(kind, work), 1) * number[kind]
    micro_batches = work.accumulation
    owned = replace(parameters, bytes=parameters.bytes / work.data)
    return {
        FORWARD: forward * micro_batches,
        RECOMPUTE: recompute * micro_batches,
        BACKWARD: backward * micro_batches,
        WEIGHT_GRAD: Reads(parameters.count, parameters.bytes * work.width_bytes) * micro_batches,
        ACCUMULATED_GRAD: Reads(parameters.count, parameters.bytes * FP32_BYTES),
        REDUCED_GRAD: Reads(owned.count, owned.bytes * FP32_BYTES),
        UPDATE: Reads(3 * owned.count, 3 * owned.bytes * FP32_BYTES),  # master weights and both moments
        PARAMETER: Reads(parameters.count, parameters.bytes * work.width_bytes),
    }


def reads_of_row_sums(work: RankWork) -> Reads:
    """Reads of the sums of rows of one product, in the mean over a layer's linear submodules.

    Each factor and the result are read twice, in ten operations.
    """
    widths = [(_input_gradients(kind, work)[0], _outputs(kind, work)[0]) for kind in (QKV, PROJECTION, FC1, FC2)]
    elements = sum(work.tokens * (inner + outer) + inner * outer for inner, outer in widths) / len(widths)
    return Reads(10, 2 * elements * work.width_bytes)


def total(reads: dict[str, Reads]) -> Reads:
    """The sum over phases."""
    return sum(reads.values(), Reads(0, 0))


def predicted_share(
    work: RankWork, granularity: str, *, bytes_per_s: float, flop_per_s: float, call_s: float, interval: int = 1
) -> float:
    """Time of the checksums over the time of the step without them.

    Args:
        granularity: a key of ``GRANULARITIES``.
        bytes_per_s: rate at which a checksum reads.
        flop_per_s: rate of arithmetic that the step reaches.
        call_s: seconds that each checksum costs whatever its size.
        interval: number of steps between recorded steps.
    """
    reads = total(reads_of_step(work, granularity))
    cost_s = reads.bytes / bytes_per_s + reads.count * call_s
    return cost_s / interval / (work.flops / flop_per_s)


def _reads(sizes: list[float], width: float) -> Reads:
    return Reads(len(sizes), sum(sizes) * width)


def _widths(work: RankWork) -> tuple[int, float, float, float]:
    """(h, query width, key width, MLP width) of this rank."""
    model, tensor = work.model, work.tensor
    head = head_width(model)
    return (
        model.hidden_size,
        head * model.num_attention_heads / tensor,
        head * query_groups(model) / tensor,
        ffn_width(model) / tensor,
    )


def _outputs(kind: str, work: RankWork) -> list[float]:
    """Number of values per token of each forward result."""
    h, query, key, ffn = _widths(work)
    gated = 2 if work.model.gated_mlp else 1
    by_kind = {QKV: [query + 2 * key], CORE_ATTENTION: [query], FC1: [gated * ffn], ACTIVATION: [ffn]}
    terms = 4 if work.tensor > 1 else 1  # with TP also maximum, predicted logit and sum of each rank's part
    by_kind |= {HEAD: [work.vocab / work.tensor], LOSS: [1.0] * terms}
    return by_kind.get(kind, [float(h)])


def _input_gradients(kind: str, work: RankWork) -> list[float]:
    """Number of values per token of each input gradient."""
    h, query, key, ffn = _widths(work)
    gated = 2 if work.model.gated_mlp else 1
    by_kind = {EMBEDDING: [], CORE_ATTENTION: [query, key, key], PROJECTION: [query]}
    by_kind |= {ACTIVATION: [gated * ffn], FC2: [ffn], LOSS: [work.vocab / work.tensor]}
    return by_kind.get(kind, [float(h)])


def _parameters(kind: str, work: RankWork) -> list[float]:
    """Number of values of each parameter of one submodule."""
    h, query, key, ffn = _widths(work)
    model, vocab = work.model, work.vocab / work.tensor
    qkv, fc1 = query + 2 * key, ffn * (2 if model.gated_mlp else 1)
    norm = [float(h)] * (2 if model.normalization == "LayerNorm" else 1)
    bias = [float(h)] if model.bias else []
    by_kind: dict[str, list[float]] = {
        EMBEDDING: [vocab * h],
        POSITIONS: [float(model.max_positions * h)] if model.position_embedding == "learned" else [],
        NORM: norm,
        QKV: [h * qkv] + ([qkv] if model.bias or model.qkv_bias else []),
        PROJECTION: [query * h, *bias],
        FC1: [h * fc1] + ([fc1] if model.bias else []),
        FC2: [ffn * h, *bias],
        FINAL_NORM: norm,
        HEAD: [] if model.tie_embeddings else [vocab * h],
    }
    return by_kind.get(kind, [])


@dataclass(frozen=True)
class Rates:
    """Speed of a rank at the operations of checks.

    Args:
        checksum_bytes_per_s: rate of a large checksum.
        extremes_bytes_per_s: rate of a check for NaN and Inf in a large tensor.
        checksum_s: time of recording and comparing one checksum of a tiny tensor, between arithmetic.
        extremes_s: time of a check for NaN and Inf, likewise.
        exchange_s: time of one reduction of constant size over all ranks.
        sent_bytes_per_s: rate at which each rank sends to the next, while it receives as much.
    """

    checksum_bytes_per_s: float
    extremes_bytes_per_s: float
    checksum_s: float
    extremes_s: float
    exchange_s: float
    sent_bytes_per_s: float


def median_rates(measured: Sequence[Rates]) -> Rates:
    """The median of each rate, so that one slow measurement has no effect; of at least one measurement."""
    return Rates(*(statistics.median(values) for values in zip(*map(astuple, measured), strict=True)))


@dataclass(frozen=True)
class Asked:
    """Operations of one step's checks.

    Args:
        extremes: reads of results checked for NaN and Inf.
        exchanges: number of reductions over all ranks, and of messages to the next.
        sent_bytes: size of these messages.
    """

    checksums: Reads
    extremes: Reads
    exchanges: float
    sent_bytes: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """Time of these operations."""
        return (
            self.checksums.bytes / rates.checksum_bytes_per_s
            + self.checksums.count * rates.checksum_s
            + self.extremes.bytes / rates.extremes_bytes_per_s
            + self.extremes.count * rates.extremes_s
            + self.exchanges * rates.exchange_s
            + self.sent_bytes / rates.sent_bytes_per_s
        )


MOST_EVERY = 50
"""Largest number of steps from one look to the next: a lasting fault must be seen while a run can go back before it."""
APART = tuple(number for number in range(2, MOST_EVERY + 1) if MOST_EVERY % number == 0)
"""Numbers of steps from one comparison over ranks to the next, where not each step can have one."""


@dataclass(frozen=True)
class TimeShares:
    """Time of checks, each as a share of a step.

    Args:
        fixed: time of comparing over ranks what each step has, whatever is looked at: parameters, settings, norms.
        audits: time of audits, in the mean over all steps.
        look: time of a look at results of one micro-batch.
        slice: time of a look at one slice of the optimizer.
    """

    fixed: float
    audits: float
    look: float
    slice: float


@dataclass(frozen=True)
class Cadence:
    """Cadence of looks: which steps look at results, and at how many micro-batches.

    Args:
        micro_batches: number of micro-batches that such a step looks at, others each time.
        every: number of steps from one such step to the next.
        apart: number of steps from one comparison over ranks to the next; those that look, and those after them, have
            one besides. More than 1 only where looks are as rare as they may be.
    """

    micro_batches: int
    every: int = 1
    apart: int = 1

    def looked_at(self, step: int, of: int) -> Collection[int]:
        """Numbers of the micro-batches that a step looks at, ``of`` all that it has; empty: none."""
        first = self.turn(step) * self.micro_batches
        return (
            frozenset((first + one) % of for one in range(self.micro_batches))
            if step % self.every == 0
            else frozenset()
        )

    def turn(self, step: int) -> int:
        """Number of the look in a step, by which places are looked at in turn."""
        return step // self.every

    def slices(self, step: int) -> bool:
        """Whether a step looks at a slice of the optimizer: between two looks at results, so that both are short."""
        return step % self.every == self.every // 2

    def compares(self, step: int) -> bool:
        """Whether ranks compare in a step what each step has."""
        return step % self.apart == 0 or step % self.every in (0, 1)

    @property
    def compare_rate(self) -> float:
        """Mean number of comparisons in a step."""
        return 1.0 if self.apart == 1 else 1 / self.apart + 1 / self.every

    @property
    def rate(self) -> float:
        """Mean number of micro-batches that are looked at in a step."""
        return self.micro_batches / self.every

    def period(self, of: int) -> int:
        """Number of steps in which results of each of a step's micro-batches have been looked at."""
        return math.ceil(of / self.micro_batches) * self.every

    def share(self, shares: TimeShares) -> float:
        """Time of all checks, as a share of the time of all steps."""
        return (
            shares.fixed * self.compare_rate
            + shares.audits
            + (shares.look * self.micro_batches + shares.slice) / self.every
        )


def choose_cadence(shares: TimeShares, budget: float, micro_batches: int, *, thins: bool = False) -> Cadence:
    """Cadence with as many looks as fit into a share ``budget`` of a step, at most all ``micro_batches`` of every step.

    One look in ``MOST_EVERY`` steps is made even where that is more than the budget.

    Args:
        thins: whether ranks may compare only in some steps what each step has, where even the rarest looks do not fit
            beside a comparison in each.
    """
    room = budget - shares.fixed - shares.audits
    once = shares.look + shares.slice
    if thins and once / MOST_EVERY > room:
        rarer = (Cadence(1, MOST_EVERY, apart) for apart in APART)
        return next((one for one in rarer if one.share(shares) <= budget), Cadence(1, MOST_EVERY, APART[-1]))
    if once > room:
        return Cadence(1, MOST_EVERY if room <= once / MOST_EVERY else math.ceil(once / room))
    more = (room - once) / shares.look if shares.look else math.inf
    return Cadence(micro_batches if more >= micro_batches - 1 else 1 + int(more))
