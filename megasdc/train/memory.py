"""Lower bounds of a rank's memory, and the check against its host or device.

A run refused here cannot be trained; one that passes may still not fit. Counted are weights, gradients, the shard of
master weights and moments, and one tensor for each layer that the backward pass needs; not buckets, buffers,
attention, or the libraries' own memory. No torch here: `check-config` warns by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasdc.common.errors import ConfigError
from megasdc.common.host import memory_limits
from megasdc.config.load import RunConfig
from megasdc.config.sections.model import ffn_width
from megasdc.model.sizes import layers_per_stage, model_sizes

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
        """Needed at once, without the state: gradients grow while activations shrink."""
        return self.weights + max(self.gradients, self.activations)

    def __str__(self) -> str:
        names = ("weights", "gradients", "state", "activations")
        sizes = ", ".join(f"{name} {getattr(self, name) / GIB:,.2f}" for name in names)
        return f"{sizes.replace('state', 'optimizer state')} GiB"


def memory_of_stages(config: RunConfig, vocab_size: int, data: int | None, micro_batch_size: int) -> list[StageMemory]:
    """Lower bounds of a rank's memory, for each pipeline stage.

    Args:
        vocab_size: entries of the vocabulary.
        data: replicas that the optimizer's state is divided over; None: unknown, the state is not counted.
        micro_batch_size: samples of a micro-batch.
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
    interval = config.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", 0)
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
        ConfigError: with the numbers.
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
