"""Memory of a rank, from the configuration alone: lower bounds, by which a run is refused, and the peak of a step.

Bounds: a run refused here cannot be trained; one that passes may still not fit. Counted are weights, gradients, the
shard of master weights and moments, and one tensor for each layer that the backward pass needs; not buckets, buffers,
attention, or the libraries' own memory.

Peak (``predict_step_memory``): the expected peak of allocated tensors of one rank of each stage, for PyTorch's modules.
Summed are: weights; ZeRO-1's fp32 masters and moments; gradients; what autograd keeps of every micro-batch in flight;
logits and loss; temporary memory. The peak is the largest of several moments of a step, and the parts are those of that
moment. Not counted: allocators' own rounding, libraries, samples, and what detection, gradient bounds and snapshots
keep.

No torch here: `check-config` warns by the bounds and prints the peak. Source: Korthikanti et al. 2022 (arXiv
2205.05198), section 4, for the method; the kept tensors are those that PyTorch 2.13 and Megatron-core 0.16.1 save,
counted on the real layers by ``tests/distributed/test_step_memory.py``.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from megasdc.common.errors import ConfigError
from megasdc.common.host import memory_limits
from megasdc.config.checks import BatchLayout
from megasdc.config.load import RunConfig
from megasdc.config.model import ffn_width
from megasdc.model.sizes import ModelSizes, layers_per_stage, model_sizes

GIB = 2**30


@dataclass(frozen=True)
class StageMemory:
    """Lower bounds of the memory of a rank of one pipeline stage, in bytes.

    ``state``: this rank's shard of master weights and both moments; ``activations``: kept from forward to backward of
    one micro-batch; ``parameters``: their number in the stage, over its tensor ranks.
    """

    weights: float
    gradients: float
    state: float
    activations: float
    parameters: int

    @property
    def on_device(self) -> float:
        """Bytes needed at once, without the state: gradients grow while activations shrink."""
        return self.weights + max(self.gradients, self.activations)

    def __str__(self) -> str:
        names = ("weights", "gradients", "state", "activations")
        sizes = ", ".join(f"{name} {getattr(self, name) / GIB:,.2f}" for name in names)
        return f"{sizes.replace('state', 'optimizer state')} GiB"


def memory_of_stages(config: RunConfig, vocab_size: int, data: int | None, micro_batch_size: int) -> list[StageMemory]:
    """Lower bounds of a rank's memory, for each pipeline stage.

    Args:
        vocab_size: number of entries of the vocabulary.
        data: number of replicas that the optimizer's state is divided over; None: unknown, the state is not counted.
        micro_batch_size: number of samples of a micro-batch.
    """
    sections, model = config.megasdc, config.megasdc.model
    vocab = -(-vocab_size // model.vocab_multiple) * model.vocab_multiple
    sizes = model_sizes(model, ffn_width(model), vocab)
    weight_bytes, gradient_bytes, state_bytes = _bytes_of_a_parameter(config)
    tensor, layers = sections.parallel.tensor, layers_per_stage(sections.parallel, sizes)
    token_bytes = micro_batch_size * sections.data.sequence_length * weight_bytes
    found = []
    for stage, count in enumerate(layers):
        last = stage == len(layers) - 1
        parameters = count * sizes.layer
        parameters += sizes.embedding + sizes.positions if stage == 0 else 0
        parameters += sizes.final_norm + (sizes.output or sizes.logits * (stage > 0)) if last else 0
        kept = _kept_layers(config, count) * model.hidden_size + (vocab / tensor if last else 0)
        share = parameters / tensor
        state = share * state_bytes / data if data else 0.0
        found.append(
            StageMemory(share * weight_bytes, share * gradient_bytes, state, token_bytes * kept, int(parameters))
        )
    return found


def _bytes_of_a_parameter(config: RunConfig) -> tuple[int, int, int]:
    """Bytes of a weight, of its gradient, and of its master weight and both moments together."""
    if config.precision == "fp32":
        return 4, 4, 12
    section = config.deepspeed.get(config.precision, {})
    low = section.get(f"{config.precision}_master_weights_and_grads", False)
    gradient = 4 if config.deepspeed["data_types"]["grad_accum_dtype"] == "fp32" else 2
    return 2, gradient, 6 if low else 12


def _kept_layers(config: RunConfig, layers: int) -> float:
    """Number of layer outputs that a rank keeps for the backward pass."""
    interval = config.recompute_interval
    settings = config.deepspeed.get("activation_checkpointing", {})
    if settings.get("cpu_checkpointing"):
        return 0.0
    divided = config.megasdc.parallel.sequence_parallel or settings.get("partition_activations", False)
    return layers / max(interval, 1) / (config.megasdc.parallel.tensor if divided else 1)


def check_memory(
    config: RunConfig, stages: list[StageMemory], stage: int, host_ranks: int, host: float, device: float | None
) -> None:
    """Refuse a model whose ``stages``, from `memory_of_stages`, cannot fit.

    ``host_ranks``: ranks of the run on this host; ``host``: bytes available to it or the container; ``device``: bytes
    of this rank's accelerator, None: it computes on the host.

    Raises:
        ConfigError: the model cannot fit; with the numbers.
    """
    own = stages[stage]
    if device is not None and own.on_device + (0 if _offloads(config) else own.state) > device:
        raise ConfigError(_refusal(own, "its device", device, _offloads(config)), config.source)
    on_host = [0 if device is not None else part.on_device + part.state for part in stages]
    if device is not None and _offloads(config):
        on_host = [part.state for part in stages]
    together = max(on_host[stage], host_ranks * min(on_host))
    if together > host:
        place = f"this host, where {host_ranks} ranks run," if host_ranks > 1 else "this host"
        raise ConfigError(_refusal(own, place, host), config.source)


def memory_warning(config: RunConfig, stages: list[StageMemory], host: float) -> str | None:
    """A warning if a rank of some stage cannot fit into a host like this one; else None.

    A warning only: the file may be for other machines.

    Args:
        stages: from `memory_of_stages`.
        host: bytes available to this host.
    """
    largest = max(stages, key=lambda part: part.on_device + part.state)
    if largest.on_device + largest.state <= host:
        return None
    return f"{_refusal(largest, 'this host', host)} Ranks on this host would refuse to start."


def _offloads(config: RunConfig) -> bool:
    offload = config.deepspeed["zero_optimization"].get("offload_optimizer") or {}
    return offload.get("device", "none") != "none"


def _refusal(stage: StageMemory, place: str, available: float, offloads: bool = False) -> str:
    total = (stage.on_device + (0 if offloads else stage.state)) / GIB
    return (
        f"megasdc.model: a rank with {stage.parameters:,} parameters of its stage needs at least {total:,.2f} GiB "
        f"({stage}), but {place} has {available / GIB:,.2f} GiB in all; make the model or the micro-batches smaller, "
        "or divide it over more ranks (megasdc.parallel.tensor, pipeline) and hosts."
    )


def host_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes available to all processes like this one together: memory, limited by cgroups, and swap.

    Returns:
        Infinity where the system does not report it.

    Source: proc_meminfo(5); Linux, Documentation/admin-guide/cgroup-v2.rst (``memory.max``) and cgroup-v1/memory.rst.
    """
    try:
        lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
        limits = [one.limit for one in memory_limits(proc, cgroups)]
        return min(sizes["MemTotal"], *limits, float("inf")) + sizes.get("SwapTotal", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return float("inf")


HOST_BUCKET_ELEMENTS = 2_000_000
"""``zero_optimization.reduce_bucket_size`` on a machine without an accelerator where the file does not set it.

With DeepSpeed's own default all gradients of a step are copied into newly allocated memory at once.
"""
DEVICE_BUCKET_ELEMENTS = 500_000_000
"""``zero_optimization.reduce_bucket_size`` on a GPU where the file does not set it: DeepSpeed's default."""
BF16_REDUCE_ELEMENTS = 500_000_000
"""Gradients that BF16_Optimizer flattens into one new tensor to reduce (``MEMORY_OPT_ALLREDUCE_SIZE``)."""
FP32 = 4
MIB = 2**20


@dataclass(frozen=True)
class StepMemory:
    """Allocated bytes of one rank at one moment of a step.

    Args:
        masters: fp32 copies of this rank's ZeRO-1 shard.
        moments: both moments of the shard.
        gradients: accumulated ones, and BF16_Optimizer's 16-bit ones.
        activations: kept for the backward pass by all micro-batches in flight.
        logits: logits, their loss and its gradient.
        temporary: working set of a layer, buffers of the reduction, the shard's flat gradient.
        moment: name of the moment.
    """

    weights: float
    masters: float
    moments: float
    gradients: float
    activations: float = 0.0
    logits: float = 0.0
    temporary: float = 0.0
    moment: str = ""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(astuple(self)[:-1]))


def predict_step_memory(
    config: RunConfig, layout: BatchLayout, vocab_size: int, on_gpu: bool = False
) -> list[StepMemory]:
    """Peak memory of a step after the first, for each pipeline stage.

    Args:
        config: a checked configuration for which ``unpredicted_because`` is None.
        layout: sizes that depend on the number of ranks.
        vocab_size: entries of the tokenizer's vocabulary.
        on_gpu: whether buffers have the sizes of a run on GPUs; modules are still taken as they run on a CPU.
    """
    model = config.megasdc.model
    vocab = -(-vocab_size // model.vocab_multiple) * model.vocab_multiple
    sizes = model_sizes(model, ffn_width(model), vocab)
    counts = layers_per_stage(config.megasdc.parallel, sizes)
    stages = (_Stage(config, layout, sizes, vocab, vocab_size, i, counts, on_gpu) for i in range(len(counts)))
    return [max(stage.moments(), key=lambda moment: moment.total) for stage in stages]


class _Stage:
    """Memory of a rank of one stage at the moments that may be the peak."""

    def __init__(
        self,
        config: RunConfig,
        layout: BatchLayout,
        sizes: ModelSizes,
        vocab: int,
        real: int,
        stage: int,
        counts: list[int],
        on_gpu: bool,
    ) -> None:
        sections, self.config, self.layout, self.model = config.megasdc, config, layout, config.megasdc.model
        self.first, self.last, self.layers = stage == 0, stage == len(counts) - 1, counts[stage]
        self.element = FP32 if config.precision == "fp32" else 2
        self.tokens = layout.micro_batch_size * sections.data.sequence_length
        self.columns, self.padded = vocab / layout.tensor, real < vocab
        self.whole_bf16 = config.precision == "bf16" and config.deepspeed["data_types"]["grad_accum_dtype"] == "fp32"
        parameters = self.layers * sizes.layer
        parameters += sizes.embedding + sizes.positions if self.first else 0
        parameters += sizes.final_norm + (sizes.output or sizes.logits * (not self.first)) if self.last else 0
        self.parameters = parameters / layout.tensor
        self.shard = self.parameters / layout.data
        # DeepSpeed copies the flat gradients once more into the type of the reduction, by default that of the model.
        type_of_sum = config.deepspeed.get("communication_data_type") or config.precision
        self.communicated = 0 if type_of_sum == "fp32" else 2
        zero = config.deepspeed["zero_optimization"]
        copies = not self.whole_bf16 and zero.get("contiguous_gradients", True)
        # DeepSpeedZeroOptimizer allocates it in the first backward of a step and frees it after the reduction.
        bucket = zero.get("reduce_bucket_size", DEVICE_BUCKET_ELEMENTS if on_gpu else HOST_BUCKET_ELEMENTS)
        self.bucket = self.element * bucket if copies else 0
        # A stage has at least two pipeline buffers, and the last stage's keep their logits until they are reused.
        one = self.element * self.tokens * self.columns if self.last else 0.0
        self.held_logits = min(2, layout.accumulation_steps) * one
        self.in_flight = min(len(counts) - stage, layout.accumulation_steps)
        self.table = sizes.logits / layout.tensor if self.first or self.last else 0
        self.matrix = self.model.hidden_size * ffn_width(self.model) / layout.tensor
        self.matrix *= 2 if self.model.gated_mlp else 1
        # Hidden states between layers are divided over tensor ranks only with sequence parallelism.
        self.hidden = self.model.hidden_size / (layout.tensor if sections.parallel.sequence_parallel else 1)
        self.ffn = ffn_width(self.model) / layout.tensor

    def moments(self) -> list[StepMemory]:
        """The moments of a step that may be its peak."""
        found = [self._layer_backward(), *self._optimizer()]
        if self.last:
            found += self._loss()
        return found

    def _resident_bytes(self, in_backward: bool) -> StepMemory:
        """Memory held through all micro-batches, with the gradients of those before."""
        gradient = (FP32 if self.whole_bf16 else self.element) * self.parameters
        if self.whole_bf16:  # the 16-bit gradients are kept beside the fp32 ones: set to zero, not freed
            gradient += self.element * self.parameters * (self.layout.accumulation_steps > 1 or not in_backward)
        elif in_backward and self.layout.accumulation_steps == 1:
            gradient = 0.0
        held = StepMemory(self.element * self.parameters, FP32 * self.shard, 2 * FP32 * self.shard, gradient)
        return replace(held, logits=self.held_logits, temporary=self.bucket)

    def layer_kept(self) -> float:
        """Bytes that autograd keeps of one layer and micro-batch, its input included.

        Input, both norms' results and the input of the second are hidden states. RMSNorm on a CPU is made of single
        operations: it keeps its input in fp32 and the normalised input in fp32. Attention keeps queries, keys and
        values as one tensor and its result; rotated queries and keys are new tensors beside that one. The MLP keeps
        input and result of the activation; a gated one keeps both halves in one tensor, the activated half, the other
        half after the offset that Megatron-core adds to it, and the product. Fused functions keep only their arguments:
        of RMSNorm the input, of a gated activation input and result, of a residual sum with a bias the branch.
        """
        model, tensor = self.model, self.layout.tensor
        head = model.kv_channels or model.hidden_size // model.num_attention_heads
        width = head * model.num_attention_heads / tensor
        kv_width = head * (model.num_query_groups or model.num_attention_heads) / tensor
        attention = 2 * width + 2 * kv_width
        attention += width + kv_width if model.position_embedding == "rope" else 0
        inner = (3 if model.fuse else 5) if model.gated_mlp else 2
        kept = self.element * (2 * self.hidden + attention + inner * self.ffn)
        kept += self.element * 2 * self.hidden * (model.fuse and model.bias)
        kept += 2 * self._norm_kept()
        return self.tokens * (kept + FP32 * model.num_attention_heads / tensor)

    def _norm_kept(self) -> float:
        """Bytes per token that a norm keeps: its input; an unfused RMSNorm that and the normalised input in fp32."""
        open_rms = self.model.normalization == "RMSNorm" and not self.model.fuse
        return 2 * FP32 * self.hidden if open_rms else self.element * self.hidden

    def activations(self) -> float:
        """Bytes that autograd keeps of all micro-batches in flight; with recomputation, the intervals' inputs."""
        interval = self.config.recompute_interval
        if interval:
            layers = -(-self.layers // interval) * self.tokens * self.element * self.hidden
        else:
            layers = self.layers * self.layer_kept()
        ends = self.tokens * (self._norm_kept() + self.element * self.hidden) if self.last else 0.0
        return self.in_flight * (layers + ends)

    def _layer_backward(self) -> StepMemory:
        """Backward of the last layer's MLP: gradients of its result, of its inner tensors, and of its largest matrix.

        With recomputation everything that an interval's layers keep has been recomputed before.
        """
        interval = self.config.recompute_interval
        inner = ((2 if self.model.fuse else 4) if self.model.gated_mlp else 1) * self.ffn
        temporary = self.element * (self.tokens * (2 * self.hidden + inner) + self.matrix)
        temporary += self.bucket + min(interval, self.layers) * self.layer_kept()
        held = self._resident_bytes(in_backward=True)
        return replace(held, activations=self.activations(), temporary=temporary, moment="backward of a layer")

    def _loss(self) -> list[StepMemory]:
        """Backward of the loss, then of the output layer.

        Where the vocabulary is not divided, the loss keeps the log softmax in fp32, and its backward allocates one
        gradient of that and one of the logits. Where it is divided, the softmax becomes the gradient in place; the
        forward needs an fp32 copy of the logits beside it, and one more for columns that pad the vocabulary.
        """
        held = replace(self._resident_bytes(in_backward=True), activations=self.activations())
        output = self.bucket + self.element * (self.table + self.tokens * self.hidden)
        if self.model.fuse:  # the gradient overwrites the logits
            return [replace(held, temporary=output, moment="backward of the output")]
        one = self.tokens * self.columns
        copied = self.element != FP32
        loss = FP32 * one * (3 if self.layout.tensor == 1 else 1 + copied + self.padded)
        gradient = FP32 * one + self.element * one * copied
        return [
            replace(held, logits=self.held_logits + loss, moment="loss"),
            replace(held, logits=self.held_logits + gradient, temporary=output, moment="backward of the output"),
        ]

    def _optimizer(self) -> list[StepMemory]:
        """The reduction, the norm, and the copy of the shard's gradient that the optimizer reads."""
        held = self._resident_bytes(in_backward=False)
        if self.whole_bf16:
            summed = min(self.parameters, BF16_REDUCE_ELEMENTS) * (FP32 + self.communicated)
            return [replace(held, temporary=summed, moment="gradient reduction")]
        flat = self.element * self.shard + (FP32 * self.shard if self.element != FP32 else 0)
        # Gradients that belong to other replicas are freed before a shard is copied.
        own = replace(held, gradients=self.element * self.shard, temporary=flat, moment="optimizer step")
        summed = min(self.bucket, self.element * self.parameters)  # a copy of what the bucket holds
        norm = 8 * max(self.table, self.matrix)  # DeepSpeed takes the norm in float64, tensor by tensor
        return [
            replace(held, temporary=self.bucket + summed + self.element * self.shard, moment="gradient reduction"),
            replace(held, temporary=norm, moment="gradient norm"),
            own,
        ]


def unpredicted_because(config: RunConfig) -> str | None:
    """A setting of a checked configuration whose memory cannot be predicted, or None."""
    model, settings = config.megasdc.model, config.deepspeed.get("activation_checkpointing", {})
    offload = config.deepspeed["zero_optimization"].get("offload_optimizer") or {}
    optimizer = config.deepspeed.get("optimizer", {}).get("params", {})
    single = [name for name in ("fused", "foreach") if optimizer.get(name) is False]
    for field, is_set in (
        ("megasdc.model.backend", model.backend != "torch"),
        *((f"megasdc.model.megatron.{name}", True) for name in model.megatron),
        ("optimizer.params.fused and foreach, both false,", len(single) == 2),
        ("megasdc.model.hidden_dropout", model.hidden_dropout > 0),
        ("megasdc.model.attention_dropout", model.attention_dropout > 0),
        ("zero_optimization.offload_optimizer", offload.get("device", "none") != "none"),
        ("activation_checkpointing.cpu_checkpointing", settings.get("cpu_checkpointing", False)),
        ("activation_checkpointing.partition_activations", settings.get("partition_activations", False)),
    ):
        if is_set:
            return field
    return None


def memory_table(stages: list[StepMemory]) -> str:
    """The parts of each stage's peak, from `predict_step_memory`, in MiB, a line each."""
    parts = [part.name for part in fields(StepMemory)][:-1]
    rows = [["stage", *parts, "total", "peak at"]]
    for stage, memory in enumerate(stages):
        sizes = [getattr(memory, part) for part in parts] + [memory.total]
        rows.append([str(stage), *(f"{size / MIB:,.1f}" for size in sizes), memory.moment])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows)
