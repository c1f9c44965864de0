"""Parameter counts and FLOPs per token of a model, as pure formulas over the ``model`` section; layers per stage."""

from __future__ import annotations

from dataclasses import dataclass

from megasdc.common.errors import ConfigError
from megasdc.config.model import ModelSection
from megasdc.config.sections import ParallelSection


@dataclass(frozen=True)
class ModelSizes:
    """Parameter counts of a model's parts.

    Args:
        positions: learned position table.
        layer_matrices: parameters of ``layer`` that are in matrix products.
        final_norm: the norm before the output.
        output: output weights; 0 if tied to the embedding.
        attention_width: query heads times width of a head.
        logits: parameters of the output product, also if tied.
    """

    embedding: int
    positions: int
    layer: int
    layer_matrices: int
    final_norm: int
    output: int
    num_layers: int
    attention_width: int
    logits: int

    @property
    def total(self) -> int:
        """Number of parameters of the whole model, tied ones counted once."""
        return self.embedding + self.positions + self.layer * self.num_layers + self.final_norm + self.output

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of forward and backward for one token, without recomputation.

        6 per parameter in a matrix product, and 6 s (n d) per layer for the causal half of the attention scores and
        their product with the values.

        Source: Narayanan et al. 2021 (arXiv 2104.04473), section 5.1; half of the score matrix, as it is causal.
        """
        matrices = self.layer_matrices * self.num_layers + self.logits
        return 6.0 * matrices + 6.0 * self.num_layers * sequence_length * self.attention_width


def model_sizes(section: ModelSection, ffn: int, vocab_size: int) -> ModelSizes:
    """Count parameters.

    Args:
        ffn: width of the MLP.
        vocab_size: padded vocabulary size v.
    """
    h = section.hidden_size
    head = section.kv_channels or h // section.num_attention_heads
    width = head * section.num_attention_heads
    kv_width = head * (section.num_query_groups or section.num_attention_heads)
    matrices = h * (width + 2 * kv_width) + width * h + h * ffn * (2 if section.gated_mlp else 1) + ffn * h
    biases = 0
    if section.bias or section.qkv_bias:
        biases += width + 2 * kv_width
    if section.bias:
        biases += h + ffn * (2 if section.gated_mlp else 1) + h
    norm = h * (2 if section.normalization == "LayerNorm" else 1)
    return ModelSizes(
        embedding=vocab_size * h,
        positions=section.max_positions * h if section.position_embedding == "learned" else 0,
        layer=matrices + biases + 2 * norm,
        layer_matrices=matrices,
        final_norm=norm,
        output=0 if section.tie_embeddings else vocab_size * h,
        num_layers=section.num_layers,
        attention_width=width,
        logits=vocab_size * h,
    )


def layers_per_stage(parallel: ParallelSection, sizes: ModelSizes) -> list[int]:
    """Number of transformer layers of each stage.

    Args:
        sizes: parameter counts, for partition by parameters.

    Raises:
        ConfigError: the layers cannot be divided as configured.
    """
    stages, layers = parallel.pipeline, sizes.num_layers
    if isinstance(parallel.partition, list):
        if len(parallel.partition) != stages or sum(parallel.partition) != layers:
            raise ConfigError(
                f"megasdc.parallel.partition: {parallel.partition} must hold {stages} counts that add up to {layers}"
            )
        return list(parallel.partition)
    if layers < stages:
        raise ConfigError(f"megasdc.parallel.pipeline: {stages} stages need at least as many layers, got {layers}")
    if parallel.partition == "uniform":
        if layers % stages:
            raise ConfigError(
                f"megasdc.model.num_layers: {layers} layers do not divide by {stages} stages; "
                'choose other numbers, or parallel.partition "parameters" or a list of counts'
            )
        return [layers // stages] * stages
    return _balance(sizes, stages)


def _balance(sizes: ModelSizes, stages: int) -> list[int]:
    """Layer counts that minimise the parameters of the largest stage."""
    weights = [sizes.layer] * sizes.num_layers
    weights[0] += sizes.embedding + sizes.positions
    weights[-1] += sizes.final_norm + (sizes.output or sizes.logits)
    low, high = max(weights), sum(weights)
    while low < high:  # binary search: what fits under a limit fits under a larger one
        limit = (low + high) // 2
        if _filled(weights, stages, limit) is None:
            low = limit + 1
        else:
            high = limit
    counts = _filled(weights, stages, low)
    assert counts is not None, f"{sizes.num_layers} layers always divide into {stages} stages"
    return counts


def _filled(weights: list[int], stages: int, limit: int) -> list[int] | None:
    """Fill stages up to a limit, leaving a layer for each that follows; None: more stages are needed."""
    counts: list[int] = []
    load = count = 0
    for position, weight in enumerate(weights):
        stages_left = stages - len(counts) - 1
        if count and (load + weight > limit or len(weights) - position <= stages_left):
            if len(counts) + 1 == stages:
                return None
            counts.append(count)
            load = count = 0
        load, count = load + weight, count + 1
    return [*counts, count]


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The vocabulary padded to a multiple; does not depend on the layout."""
    return -(-vocab_size // multiple) * multiple
