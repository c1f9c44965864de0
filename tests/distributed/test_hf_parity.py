"""Does our GPT compute what Hugging Face's computes? Logits with the same weights, over TP and PP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from tiny import GPT, LLAMA, SEQUENCE, make_engine, tokens_of_step

from megasdc.checkpoint.weights import load_weights
from megasdc.config.model import ModelSection
from megasdc.model.hf.classes import hf_class, hf_config
from megasdc.model.hf.tensors import from_hf, num_pipeline_layers

pytestmark = pytest.mark.distributed

VOCAB = 250


@dataclass
class _Weights:
    """Whole weights of ours, by layer, as ``load_weights`` reads them."""

    model: ModelSection
    layers: dict[int, dict[str, torch.Tensor]]
    path: Path = Path("a model of transformers")
    vocab_size: int = VOCAB
    step: int | None = None
    config: dict[str, Any] | None = None

    def layer(self, index: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        return self.layers[index]


def _reference(model: ModelSection, seed: int) -> tuple[Any, _Weights]:
    """A random model of transformers, and the same weights by the names of our pipeline."""
    import transformers

    torch.manual_seed(seed)
    content = hf_config(model, VOCAB, 1, "float32")
    kinds = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}
    config = kinds[content["model_type"]].from_dict(content)
    reference = _spread(getattr(transformers, hf_class(model))(config))
    state = reference.state_dict()
    return reference, _Weights(model, {i: from_hf(model, i, state) for i in range(num_pipeline_layers(model))})


def _spread(model: Any) -> Any:
    """Give every parameter, norms and biases included, values that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and "weight" in name else 0.0
            parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    return model.eval()


def _logit_error(style: str, tensor: int, pipeline: int) -> tuple[float, float]:
    """Largest absolute error of the logits and the largest logit; NaN except on the last stage."""
    fields = {**(GPT if style == "gpt2" else LLAMA), "ffn_hidden_size": 256 if style == "gpt2" else 192}
    model = ModelSection.model_validate(fields)
    reference, weights = _reference(model, 3)
    engine = make_engine(fields, tensor, pipeline, vocab=VOCAB)
    load_weights(
        weights,
        engine.module.named_parameters(),
        model,
        vocab_size=VOCAB,
        tensor=tensor,
        tp_rank=engine.dims.tp_rank,
    )
    tokens = tokens_of_step(1)[:, :-1].contiguous()
    batches = iter([(row[None], (row[None], torch.ones(1, SEQUENCE))) for row in tokens])
    # Without the loss: Megatron-core computes cross-entropy in place of fp32 logits.
    _, logits = engine.eval_batch(batches, return_logits=True, compute_loss=False, num_micro_batches=1)
    if not engine.is_last_stage():
        return float("nan"), float("nan")
    group = engine.grid.get_slice_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(tensor)]
    dist.all_gather(parts, logits.contiguous(), group=group) if tensor > 1 else parts.__setitem__(0, logits)
    ours = torch.cat(parts, -1)[..., :VOCAB].transpose(0, 1)
    with torch.no_grad():
        theirs = reference(tokens[:1]).logits
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda layout: "x".join(map(str, layout)))
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_logits_equal_hugging_face(style: str, layout: tuple[int, int]) -> None:
    """The largest absolute error is at most 1e-5 of the largest logit in fp32."""
    tensor, pipeline = layout
    results = run_distributed(_logit_error, tensor * pipeline, style, tensor, pipeline)
    error, largest = results[-1]
    assert error <= 1e-5 * largest
