"""The whole model in one process, for evaluation and generation: the pipeline's layers without an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from megasdc.config.sections.megasdc import ParallelSection
from megasdc.config.sections.model import ModelSection
from megasdc.model.layers import LayerContext, WordEmbedding
from megasdc.model.pipeline import TIED_KEY, layer_specs
from megasdc.model.randomness import DropoutStreams
from megasdc.model.transformer_config import build_transformer_config, padded_vocab_size
from megasdc.parallel.dims import ParallelDims


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
        load: called with the parameters of a layer, by their names in the pipeline, to fill them.

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
    """What the layers of a whole model need; their weights are not initialised, since they are loaded."""
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
