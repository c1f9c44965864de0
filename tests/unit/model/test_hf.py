"""The mapping to Hugging Face: each tensor goes where transformers has it, comes back bit for bit, or is refused."""

import json

import pytest
import torch

from megasdc.config import ModelSection
from megasdc.errors import ConfigError
from megasdc.model.hf import (
    from_hf,
    hf_class,
    hf_config,
    join_qkv,
    model_fields,
    num_pipeline_layers,
    rules,
    split_qkv,
    to_hf,
)

GPT = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "max_positions": 32}
LLAMA = {
    **GPT,
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
    "tie_embeddings": False,
}
MODELS = {
    "gpt": GPT,
    "gpt_untied": {**GPT, "tie_embeddings": False},
    "gpt_no_bias": {**GPT, "bias": False},
    "gpt_qkv_bias": {**GPT, "bias": False, "qkv_bias": True},
    "gpt_relu": {**GPT, "activation": "relu", "norm_epsilon": 1e-6},
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "tie_embeddings": True},
    "llama_gqa": {**LLAMA, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 3},
    "llama_head_width": {**LLAMA, "kv_channels": 24, "ffn_hidden_size": 100, "rotary_base": 500000},
    "llama_bias": {**LLAMA, "bias": True},
    "llama_qkv_bias": {**LLAMA, "qkv_bias": True, "num_query_groups": 1},
}


def section(name):
    return ModelSection.model_validate(MODELS[name])


def hf_model(model):
    """A random model of transformers, built from our config.json through a file."""
    import transformers

    content = json.loads(json.dumps(hf_config(model, 50, 1, "float32")))
    kinds = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}
    return getattr(transformers, hf_class(model))(kinds[content["model_type"]].from_dict(content))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_transformers_comes_back(name):
    """All parameters of transformers' class are named, have its shapes, and survive there and back bit for bit."""
    model = section(name)
    theirs = {key: torch.randn_like(value) for key, value in hf_model(model).named_parameters()}
    for key, value in theirs.items():
        if key.endswith(".bias") and not model.bias and ("attn" in key or "mlp" in key):
            ours = model.qkv_bias and any(part in key for part in ("q_proj", "k_proj", "v_proj", "c_attn"))
            value.mul_(1.0 if ours else 0.0)
    seen = set()
    for index in range(num_pipeline_layers(model)):
        if not rules(model, index):
            continue
        back = to_hf(model, index, from_hf(model, index, theirs))
        assert {key: value.shape for key, value in back.items()} == {key: theirs[key].shape for key in back}
        assert all(torch.equal(value, theirs[key]) for key, value in back.items())
        seen |= set(back)
    assert seen == set(theirs)


def test_query_key_and_value_of_each_group():
    """Rows of head i of the joined query are those of its group's block: Megatron-core's documented order."""
    model = section("llama_gqa")  # 6 heads of width 16 in 3 groups
    whole = torch.arange(12 * 16, dtype=torch.float32)[:, None].expand(-1, 5)
    query, key, value = split_qkv(model, whole)
    for head in range(6):
        block = (head // 2) * 4 + head % 2  # a group is [q, q, k, v]
        assert torch.equal(query[head * 16 : head * 16 + 16], whole[block * 16 : block * 16 + 16])
    for group in range(3):
        assert key[group * 16, 0] == (group * 4 + 2) * 16
        assert value[group * 16, 0] == (group * 4 + 3) * 16
    assert torch.equal(join_qkv(model, query, key, value), whole)


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_comes_back(name):
    """The section that config.json means describes the same model."""
    model = section(name)
    again = ModelSection.model_validate(model_fields(hf_config(model, 50, 1, "float32")))
    assert hf_config(again, 50, 1, "float32") == hf_config(model, 50, 1, "float32")
    if model.position_embedding == "rope":
        assert (again.bias, again.qkv_bias) == (model.bias, model.qkv_bias)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("gpt", {"normalization": "RMSNorm"}, r"model.normalization: got 'RMSNorm'.*GPT2LMHeadModel needs 'LayerNorm'"),
        ("gpt", {"gated_mlp": True}, r"model.gated_mlp: got True"),
        ("gpt", {"num_query_groups": 1}, r"model.num_query_groups: got 1.*needs 3"),
        ("gpt", {"kv_channels": 32}, r"model.kv_channels: got 96.*needs 48"),
        ("llama", {"normalization": "LayerNorm"}, r"model.normalization: got 'LayerNorm'.*LlamaForCausalLM"),
        ("llama", {"gated_mlp": False}, r"model.gated_mlp: got False"),
        ("llama", {"hidden_size": 64, "kv_channels": 16}, r"num_attention_heads: got 3.*divisor of hidden_size 64"),
        ("llama", {"megatron": {"qk_layernorm": True}}, r"megatron.qk_layernorm: got True"),
    ],
)
def test_what_neither_class_can_express_is_refused(base, change, message):
    """The field, its value and what is supported are named."""
    with pytest.raises(ConfigError, match=rf"(?s){message}.*Supported are"):
        hf_class(ModelSection.model_validate({**MODELS[base], **change}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model_type": "bert", "architectures": ["BertModel"]},
            r"'bert' \(BertModel\).*supported are GPT2LMHeadModel",
        ),
        ({}, r"model_type: got None"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, r"rope_type: got 'llama3'"),
        ({"model_type": "llama", "rope_theta": 10000.5}, r"rope_theta: got 10000.5"),
        ({"model_type": "llama", "mlp_bias": True}, r"mlp_bias"),
        ({"model_type": "llama", "hidden_act": "mish"}, r"hidden_act: got 'mish'"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, r"quantization_config"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx: got True"),
    ],
)
def test_unsupported_architectures_are_named(content, message):
    """What we cannot train is refused with the key, its value and what is supported."""
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        model_fields(content)


def test_a_bias_that_we_have_not_must_be_zero():
    """Llama's attention_bias puts one on the output projection too; a trained one is refused, not dropped."""
    model = section("llama_qkv_bias")
    theirs = dict(hf_model(model).named_parameters())
    theirs["model.layers.0.self_attn.o_proj.bias"] = torch.ones(48)
    with pytest.raises(ConfigError, match=r"o_proj.bias: is not zero"):
        from_hf(model, 2, theirs)
