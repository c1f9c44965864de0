"""Is the catalogue of parameters that of the real model, and does it say how tensor ranks divide each?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from tiny import GPT, LLAMA, full_tensors, make_engine

from megasdc.config.model import ModelSection
from megasdc.model.sharding import join_shards, parameter_splits, shard_of

pytestmark = pytest.mark.distributed

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "gated_bias": {**LLAMA, "bias": True},
    "qk_layernorm": {**LLAMA, "qkv_bias": True, "megatron": {"qk_layernorm": True}},
}


def _shards(model: dict[str, Any]) -> Any:
    """The shards of each parameter by name and tensor rank, and the full tensors as tiny.py joins them."""
    engine = make_engine(model, 2, 2)
    with torch.no_grad():  # distinct values in norms and biases too, equal where tensor ranks hold copies
        for key, parameter in engine.module.named_parameters():
            places = torch.arange(parameter.numel()).view_as(parameter) * 1e-3
            if not getattr(parameter, "tensor_model_parallel", False):
                parameter.add_(places + len(key))
            elif parameter.dim() == 1:
                parameter.add_(places + engine.dims.tp_rank)
    full = full_tensors(engine)
    local = {key: value.detach().clone() for key, value in engine.module.named_parameters()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (engine.dims.pp_rank, engine.dims.tp_rank, local))
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for _, tp_rank, tensors in sorted(gathered, key=lambda entry: -entry[0]):
        for key, value in tensors.items():
            shards.setdefault(key, {})[tp_rank] = value
    return shards, full


@pytest.mark.parametrize("name", MODELS)
def test_the_catalogue_is_that_of_the_real_model(name: str) -> None:
    """At 2x2x1 the ranks hold exactly the catalogue's names; joining and cutting by it gives the real tensors."""
    shards, full = run_distributed(_shards, 4, MODELS[name])[0]
    splits = parameter_splits(ModelSection(**MODELS[name]))
    assert splits.keys() == shards.keys()
    for key, split in splits.items():
        pieces = [shards[key][0], shards[key][1]]
        assert torch.equal(join_shards(pieces, split), full[key]), key
        for tp_rank, piece in enumerate(pieces):
            assert torch.equal(shard_of(full[key], split, 2, tp_rank), piece), key
