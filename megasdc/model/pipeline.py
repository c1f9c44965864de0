"""GPT models as DeepSpeed pipeline stages; and whole, in one process without an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megasdc.config.model import ModelSection, ffn_width
from megasdc.config.sections import ParallelSection
from megasdc.model.gpt import (
    FinalNorm,
    LayerContext,
    OutputLayer,
    PositionEmbedding,
    TransformerBlock,
    WordEmbedding,
    build_transformer_config,
    tied_logits,
)
from megasdc.model.loss import TokenLoss
from megasdc.model.randomness import DropoutStreams
from megasdc.model.sharding import LEADING_LAYERS
from megasdc.model.sizes import layers_per_stage, model_sizes, padded_vocab_size
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


class WholeModel(nn.Module):
    """All layers of a GPT in this process, in evaluation mode; its weights must be loaded afterwards.

    Args:
        model: the resolved section.
        vocab_size: real entries of the vocabulary.
        dtype: type of the parameters.

    Raises:
        ConfigError: Megatron-core refuses the sizes.

    Collective: none; needs a process group of this process only (``groups.single_process``).
    """

    def __init__(self, model: ModelSection, *, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.max_positions = model.max_positions
        self.vocab_size = vocab_size
        context = _context(model, vocab_size, dtype)
        self.tied = model.tie_embeddings
        specs = layer_specs(context, tied=self.tied)
        built = [None if isinstance(spec, TiedLayerSpec) and spec.forward_fn else spec.build() for spec in specs]
        self.layers = nn.ModuleList(layer for layer in built if layer is not None)
        self.to(dtype)
        self.eval()

    def pipeline_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter with its name in the pipeline."""
        for name, parameter in self.layers.named_parameters():
            tied = self.tied and name.startswith("0.")
            yield (f"tied_modules.{TIED_KEY}.{name.removeprefix('0.')}" if tied else name), parameter

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] -> logits [s, b, v], the padded vocabulary."""
        hidden = tokens
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.tied:
            return hidden
        embedding = self.layers[0]
        assert isinstance(embedding, WordEmbedding), "the first layer of the pipeline"
        return embedding.logits(hidden)


def streamed_outputs(
    model: ModelSection,
    tokens: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    load: Callable[[list[tuple[str, nn.Parameter]]], None],
) -> Generator[Tensor, Tensor | None, None]:
    """The output of each layer of the pipeline in turn, computed as by ``WholeModel``, with one layer in memory.

    What is sent to the generator is the next layer's input in place of the output that was yielded.

    Args:
        model: the resolved section.
        tokens: ids [b, s].
        vocab_size: real entries of the vocabulary.
        dtype: type of the parameters.
        load: function that fills the parameters of a layer, given by their names in the pipeline.

    Yields:
        Hidden states [s, b, h], the embeddings' first; the last are the logits [s, b, v], the padded vocabulary.

    Raises:
        ConfigError: Megatron-core refuses the sizes.

    Collective: none; needs a process group of this process only (``groups.single_process``).
    """
    hidden = tokens
    specs = layer_specs(_context(model, vocab_size, dtype), tied=model.tie_embeddings)
    for index, spec in enumerate(specs):
        layer = spec.build().to(dtype).eval()
        tied = isinstance(spec, TiedLayerSpec)
        place = f"tied_modules.{TIED_KEY}" if tied else str(index)
        load([(f"{place}.{name}", parameter) for name, parameter in layer.named_parameters()])
        with torch.no_grad():
            hidden = layer.logits(hidden) if tied and spec.forward_fn else layer(hidden)
        del layer  # before the next one is built
        given = yield hidden
        hidden = hidden if given is None else given


def _context(model: ModelSection, vocab_size: int, dtype: torch.dtype) -> LayerContext:
    """Context that the layers of a whole model share; their weights are not initialised, since they are loaded."""
    config = build_transformer_config(model, ParallelSection.model_validate({}), dtype)
    config.perform_initialization = False
    return LayerContext(
        config=config,
        dims=ParallelDims(1, 1, 1),
        streams=DropoutStreams(0),
        seed=0,
        vocab_size=padded_vocab_size(vocab_size, model.vocab_multiple),
        max_positions=model.max_positions,
        learned_positions=model.position_embedding == "learned",
        rotary_base=model.rotary_base,
        backend=model.backend,
    )
