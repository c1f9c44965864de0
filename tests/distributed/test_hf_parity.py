"""Does our GPT compute what Hugging Face's computes? Logits with the same weights, over TP and PP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from tiny import GPT, LLAMA, SEQUENCE, make_engine, tokens_of_step

pytestmark = pytest.mark.distributed

VOCAB = 250


def _gpt2_weights(seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A GPT2LMHeadModel with random weights, and the same weights by the names of our pipeline."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = _spread(GPT2LMHeadModel(config))
    state = model.state_dict()
    ours = {
        "tied_modules.embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "1.positions.weight": state["transformer.wpe.weight"],
        "6.norm.weight": state["transformer.ln_f.weight"],
        "6.norm.bias": state["transformer.ln_f.bias"],
    }
    for i in range(4):
        theirs, mine = f"transformer.h.{i}", f"{i + 2}.layer"
        qkv_weight = torch.stack(state[f"{theirs}.attn.c_attn.weight"].T.chunk(3)).view(3, 4, 16, 64)
        qkv_bias = torch.stack(state[f"{theirs}.attn.c_attn.bias"].chunk(3)).view(3, 4, 16)
        ours |= {
            f"{mine}.input_layernorm.weight": state[f"{theirs}.ln_1.weight"],
            f"{mine}.input_layernorm.bias": state[f"{theirs}.ln_1.bias"],
            f"{mine}.self_attention.linear_qkv.weight": qkv_weight.transpose(0, 1).reshape(192, 64),
            f"{mine}.self_attention.linear_qkv.bias": qkv_bias.transpose(0, 1).reshape(192),
            f"{mine}.self_attention.linear_proj.weight": state[f"{theirs}.attn.c_proj.weight"].T,
            f"{mine}.self_attention.linear_proj.bias": state[f"{theirs}.attn.c_proj.bias"],
            f"{mine}.pre_mlp_layernorm.weight": state[f"{theirs}.ln_2.weight"],
            f"{mine}.pre_mlp_layernorm.bias": state[f"{theirs}.ln_2.bias"],
            f"{mine}.mlp.linear_fc1.weight": state[f"{theirs}.mlp.c_fc.weight"].T,
            f"{mine}.mlp.linear_fc1.bias": state[f"{theirs}.mlp.c_fc.bias"],
            f"{mine}.mlp.linear_fc2.weight": state[f"{theirs}.mlp.c_proj.weight"].T,
            f"{mine}.mlp.linear_fc2.bias": state[f"{theirs}.mlp.c_proj.bias"],
        }
    return model, ours


def _llama_weights(seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A LlamaForCausalLM with grouped-query attention, and the same weights by the names of our pipeline."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = _spread(LlamaForCausalLM(config))
    state = model.state_dict()
    ours = {
        "0.word_embeddings.weight": state["model.embed_tokens.weight"],
        "6.norm.weight": state["model.norm.weight"],
        "7.output.weight": state["lm_head.weight"],
    }
    for i in range(4):
        theirs, mine = f"model.layers.{i}", f"{i + 2}.layer"
        query = state[f"{theirs}.self_attn.q_proj.weight"].view(2, 2, 16, 64)
        key = state[f"{theirs}.self_attn.k_proj.weight"].view(2, 1, 16, 64)
        value = state[f"{theirs}.self_attn.v_proj.weight"].view(2, 1, 16, 64)
        gate_up = (state[f"{theirs}.mlp.gate_proj.weight"], state[f"{theirs}.mlp.up_proj.weight"])
        ours |= {
            f"{mine}.input_layernorm.weight": state[f"{theirs}.input_layernorm.weight"],
            f"{mine}.self_attention.linear_qkv.weight": torch.cat((query, key, value), 1).reshape(-1, 64),
            f"{mine}.self_attention.linear_proj.weight": state[f"{theirs}.self_attn.o_proj.weight"],
            f"{mine}.pre_mlp_layernorm.weight": state[f"{theirs}.post_attention_layernorm.weight"],
            f"{mine}.mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{mine}.mlp.linear_fc2.weight": state[f"{theirs}.mlp.down_proj.weight"],
        }
    return model, ours


def _spread(model: Any) -> Any:
    """Give every parameter, norms and biases included, values that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and "weight" in name else 0.0
            parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    return model.eval()


def _shard(full: torch.Tensor, parameter: torch.nn.Parameter, tp_rank: int, tensor: int) -> torch.Tensor:
    """Cut out this tensor rank's part of a full weight; the vocabulary is padded with zeros."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    dim = parameter.partition_dim
    missing = parameter.shape[dim] * tensor - full.shape[dim]
    if missing:
        full = torch.cat((full, torch.zeros(missing, *full.shape[1:])), dim)
    blocks = full.chunk(parameter.partition_stride, dim)
    return torch.cat([block.chunk(tensor, dim)[tp_rank] for block in blocks], dim)


def _logit_error(style: str, tensor: int, pipeline: int) -> tuple[float, float]:
    """Largest absolute error of the logits and the largest logit; NaN except on the last stage."""
    reference, weights = _gpt2_weights(3) if style == "gpt2" else _llama_weights(3)
    model = {**(GPT if style == "gpt2" else LLAMA), "ffn_hidden_size": 256 if style == "gpt2" else 192}
    engine = make_engine(model, tensor, pipeline, vocab=VOCAB)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(_shard(weights[name], parameter, engine.dims.tp_rank, tensor))
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
