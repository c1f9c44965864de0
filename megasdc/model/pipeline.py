"""GPT models as DeepSpeed pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megasdc.config.sections.megasdc import ParallelSection
from megasdc.config.sections.model import ModelSection, ffn_width
from megasdc.model.layers import (
    FinalNorm,
    LayerContext,
    OutputLayer,
    PositionEmbedding,
    TransformerBlock,
    WordEmbedding,
    tied_logits,
)
from megasdc.model.loss import TokenLoss
from megasdc.model.randomness import DropoutStreams
from megasdc.model.sharding import LEADING_LAYERS
from megasdc.model.sizes import layers_per_stage, model_sizes
from megasdc.model.transformer_config import build_transformer_config, padded_vocab_size
from megasdc.parallel.dims import ParallelDims

TRAILING_LAYERS = 2
"""Pipeline layers after the last transformer layer: final norm, output."""
TIED_KEY = "embedding"


class GPTPipeline(PipelineModule):
    """A GPT as pipeline stages.

    Differs from DeepSpeed's class in that the caller sets the number of transformer layers of each stage. ``options``
    are passed to ``PipelineModule``.
    """

    def __init__(self, layers: list[Any], layers_per_stage: list[int], **options: Any) -> None:
        self._layers_per_stage = layers_per_stage
        super().__init__(layers, **options)

    def _partition_layers(self, method: str = "uniform") -> None:
        ends = [LEADING_LAYERS + sum(self._layers_per_stage[: i + 1]) for i in range(len(self._layers_per_stage))]
        ends[-1] += TRAILING_LAYERS
        self.parts = [0, *ends]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def destroy_groups(self) -> None:
        """Destroy the process groups that DeepSpeed made for this model; it cannot be used afterwards.

        Collective: all ranks of the world.
        """
        grid = self._grid
        own = [grid.ds_model_proc_group, grid.dp_proc_group, grid.pp_proc_group, grid.slice_proc_group]
        for group in [*own, self.world_group, *(tied["group"] for tied in self.tied_comms.values())]:
            dist.destroy_process_group(group)


def build_pipeline(
    model: ModelSection,
    parallel: ParallelSection,
    dims: ParallelDims,
    *,
    vocab_size: int,
    seed: int,
    dtype: torch.dtype,
) -> tuple[GPTPipeline, DropoutStreams]:
    """Build this rank's stage of the model.

    Args:
        vocab_size: entries of the tokenizer's vocabulary, unpadded.
        seed: seed of initial weights and dropout.
        dtype: type of the parameters while training.

    Returns:
        The stage, and its dropout streams; the engine must call ``DropoutStreams.enter`` for each micro-batch.

    Raises:
        ConfigError: Megatron-core refuses the sizes, or layers cannot be divided over stages.

    Collective: all ranks of the world.
    """
    config = build_transformer_config(model, parallel, dtype)
    padded = padded_vocab_size(vocab_size, model.vocab_multiple)
    streams = DropoutStreams(seed)
    context = LayerContext(
        config=config,
        dims=dims,
        streams=streams,
        seed=seed,
        vocab_size=padded,
        max_positions=model.max_positions,
        learned_positions=model.position_embedding == "learned",
        rotary_base=model.rotary_base,
        backend=model.backend,
        fuse=model.fuse,
    )
    pipeline = GPTPipeline(
        layer_specs(context, tied=model.tie_embeddings),
        layers_per_stage(parallel, model_sizes(model, ffn_width(model), padded)),
        topology=PipeModelDataParallelTopology(num_pp=dims.pipeline, num_mp=dims.tensor, num_dp=dims.data),
        loss_fn=TokenLoss(vocab_size, padded, dims.tp_rank, dims.tensor, model.fuse),
        seed_layers=False,
        checkpointable_layers=[TransformerBlock.__name__],
    )
    return pipeline, streams


def layer_specs(context: LayerContext, tied: bool) -> list[Any]:
    """Specifications of all layers of the pipeline, in order; ``tied``: the output weights are the word embedding."""
    layers = context.config.num_layers
    output = LEADING_LAYERS + layers + 1
    weight = "word_embeddings.weight"
    specs: list[Any] = [
        TiedLayerSpec(TIED_KEY, WordEmbedding, context, 0, tied_weight_attr=weight)
        if tied
        else LayerSpec(WordEmbedding, context, 0),
        LayerSpec(PositionEmbedding, context, 1),
    ]
    specs += [LayerSpec(TransformerBlock, context, LEADING_LAYERS + i, i + 1) for i in range(layers)]
    specs.append(LayerSpec(FinalNorm, context, output - 1))
    specs.append(
        TiedLayerSpec(TIED_KEY, WordEmbedding, context, 0, forward_fn=tied_logits, tied_weight_attr=weight)
        if tied
        else LayerSpec(OutputLayer, context, output)
    )
    return specs
