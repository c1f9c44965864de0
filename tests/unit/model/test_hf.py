"""The mapping to Hugging Face: each tensor goes where transformers has it, comes back bit for bit, or is refused."""

import json

import pytest
import torch

from megasdc.common.errors import ConfigError
from megasdc.config.model import ModelSection
from megasdc.interchange.import_hf import import_hf
from megasdc.model.hf.classes import hf_class, hf_config
from megasdc.model.hf.fields import model_fields
from megasdc.model.hf.tensors import from_hf, hf_shapes, join_qkv, num_pipeline_layers, rules, split_qkv, to_hf

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


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_transformers(name):
    """Every tensor of transformers' class has the shape that an import expects."""
    model = section(name)
    theirs = {key: list(value.shape) for key, value in hf_model(model).named_parameters()}
    assert hf_shapes(model, 50) == theirs


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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"num_attention_heads": 0}, "num_attention_heads: got 0; needed is a whole number above 0"),
        ("llama", {"num_key_value_heads": 2}, "num_key_value_heads: got 2; needed is a divisor of .* 3"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters: got \[1\]; needed is an object"),
        ("llama", {"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling: got 'linear'; needed is"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta: got None; needed is a number"),
        ("llama", {"rope_parameters": None, "rope_theta": None}, "rope_theta: got None; needed is a number"),
        ("llama", {"rope_parameters": {"rope_theta": 0.5}}, "rope_theta: got 0.5; supported are whole numbers"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act: got \['silu'\]; needed is one of gelu"),
        ("llama", {"mlp_bias": "yes"}, "mlp_bias: got 'yes'; needed is true or false"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan; needed is a number"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures: got 'LlamaForCausalLM'; needed is a list"),
        ("gpt", {"n_embd": "48"}, "n_embd: got '48'; needed is a whole number"),
        ("gpt", {"n_layer": True}, "n_layer: got True; needed is a whole number"),
        ("gpt", {"add_cross_attention": True}, "add_cross_attention: got True; supported is False"),
        ("gpt", {"model_type": ["gpt2"]}, r"model_type: got \['gpt2'\]"),
    ],
)
def test_odd_values_of_a_configuration_are_named(name, change, message):
    """A value of a wrong type or range is a problem with its key, the value got and what is needed."""
    with pytest.raises(ConfigError, match=message):
        model_fields({**hf_config(section(name), 50, 1, "float32"), **change})


def test_several_odd_values_are_named_at_once():
    """All problems of a file are in one message."""
    with pytest.raises(ConfigError) as caught:
        model_fields({"model_type": "llama", "num_attention_heads": -1, "rope_theta": "x", "tie_word_embeddings": 3})
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt", {"n_inner": 100}, r"mlp.c_fc.weight: has shape \[48, 192\]; config.json needs \[48, 100\]"),
        ("gpt", {"n_positions": 64}, r"wpe.weight: has shape \[32, 48\]; config.json needs \[64, 48\]"),
        ("gpt", {"vocab_size": 60}, r"wte.weight: has shape \[50, 48\]; config.json needs \[60, 48\]"),
        ("llama_gqa", {"num_key_value_heads": 2}, r"k_proj.weight: has shape \[48, 96\]; config.json needs \[32, 96\]"),
        ("llama_gqa", {"head_dim": 8}, r"o_proj.weight: has shape \[96, 96\]; config.json needs \[96, 48\]"),
        ("llama_gqa", {"vocab_size": [50]}, r"vocab_size: got \[50\]"),
    ],
)
def test_tensors_that_do_not_fit_their_configuration(tmp_path, name, change, message):
    """Before anything is written, an import names the tensor, its shape and the one that config.json means."""
    hf_model(section(name)).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        import_hf(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_import_says_what_became_of_the_tokenizer(tmp_path):
    """Without a usable tokenizer there is a note; all files of one are copied, those for added tokens too."""
    hf_model(section("gpt")).save_pretrained(tmp_path / "model")
    assert "no tokenizer came with the model" in import_hf(tmp_path / "model", tmp_path / "without").note
    for file in ("added_tokens.json", "tokenizer_config.json", "vocab.json"):
        (tmp_path / "model" / file).write_text("{}")
    result = import_hf(tmp_path / "model", tmp_path / "unusable")
    assert "cannot be used" in result.note
    copied = sorted(path.name for path in (tmp_path / "unusable" / "tokenizer").iterdir())
    assert copied == ["added_tokens.json", "tokenizer_config.json", "vocab.json"]
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    (tmp_path / "model" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "model" / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "model" / "added_tokens.json").write_text(json.dumps({"<extra>": 3}))
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    result = import_hf(tmp_path / "model", tmp_path / "with")
    assert result.note is None
    assert result.tokenizer_vocab_size >= 3
