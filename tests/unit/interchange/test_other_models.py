"""What would be imported as another model than that of transformers is refused, and logits are compared."""

import json
import os
import re
import shutil

import pytest
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from small_models import TENSORS, change, edit, made
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasdc.checkpoint import hf_shards
from megasdc.checkpoint.hf_shards import HfShards
from megasdc.checkpoint.weights import InitialWeights
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.interchange import compare_logits
from megasdc.interchange.import_hf import import_hf
from megasdc.lab.checkpoints.views.open import open_hf_view
from megasdc.model.hf.fields import model_fields
from megasdc.model.hf.tensors import hf_shapes
from megasdc.parallel import groups

INDEX, HEAD = "model.safetensors.index.json", "lm_head.weight"


def scale(folder, factor, *parts):
    """Multiply the tensors whose names contain one of ``parts``."""
    tensors = load_file(folder / TENSORS)
    change(folder, **{name: value * factor for name, value in tensors.items() if any(part in name for part in parts)})


def opened(weights, folder):
    """Both sides of a comparison."""
    found, shards = InitialWeights(weights), HfShards(folder)
    shards.check(found.model, hf_shapes(found.model, found.vocab_size))
    return found, shards


def refused(folder, error, message):
    """Import a folder: nothing is left of it but the error."""
    with pytest.raises(error, match=message):
        import_hf(folder, folder.parent / "out")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tied_embeddings_with_another_output(tmp_path, kind):
    """Which of both an output has depends on the version of transformers; an equal one is no problem."""
    folder = made(tmp_path / "model", kind, tie_word_embeddings=True)
    (words,) = (
        tensor
        for name, tensor in load_file(folder / TENSORS).items()
        if name.endswith(("wte.weight", "embed_tokens.weight"))
    )
    change(folder, **{HEAD: words + 0.01})
    refused(folder, ConfigError, r"tie_word_embeddings: is true in .*lm_head.weight is another matrix than")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        open_hf_view(folder)
    change(folder, **{HEAD: words.clone()})
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_scaling.rope_type: got 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type: got 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_scaling.type: got 'linear'"),
        ({"rope_theta": 500000.0}, "rope_theta 500000, rope_parameters.rope_theta 10000; needed is one value"),
        ({"rope_scaling": {"rope_theta": 20000.0}}, "rope_parameters.rope_theta 10000, rope_scaling.rope_theta 20000"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention: got"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: got 0.5"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: got 0.5; supported is one rotation of all",
        ),
    ],
)
def test_rotary_settings_that_disagree(tmp_path, changes, message):
    """Every key that may count is looked at, beside one with its default too."""
    folder = made(tmp_path / "model")
    edit(folder, **changes)
    refused(folder, ConfigError, message)


def test_rotary_settings_that_are_null(tmp_path):
    """A key with null is as one that is not there; beside it one that counts is still found."""
    folder = made(tmp_path / "model")
    nulls = {"factor": None, "attention_factor": None, "original_max_position_embeddings": None}
    edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **nulls})
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5
    shutil.rmtree(tmp_path / "out")
    edit(folder, rope_parameters={"rope_type": None, "rope_theta": 10000.0, **nulls, "factor": 4.0})
    refused(folder, ConfigError, "rope_parameters.factor: got 4.0")


def test_rotary_settings_that_agree(tmp_path):
    """Older and newer keys may stand side by side."""
    folder = made(tmp_path / "model", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    neutral = {"type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0, "factor": None}
    edit(folder, rope_theta=500, rope_scaling=neutral)
    found = import_hf(folder, tmp_path / "out")
    assert (found.model["rotary_base"], found.logits.difference < 1e-5) == (500, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path, value):
    """The tensor is named with how many of its elements are not, also in a layer that is read late."""
    folder = made(tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = load_file(folder / TENSORS)[name]
    wrong[3, 5] = wrong[0, 0] = value
    change(folder, **{name: wrong})
    refused(folder, CheckpointError, rf"{name} of .* has 2 of 1536 elements that are not finite")


def test_numbers_that_are_infinite_in_fp32(tmp_path):
    """Training computes in fp32, so finite ones of fp64 are not finite there."""
    folder = made(tmp_path / "model")
    head = load_file(folder / TENSORS)[HEAD].double()
    head[0, 0] = 1e300
    change(folder, **{HEAD: head})
    refused(folder, CheckpointError, rf"{HEAD} of .* has 1 of 1600 elements that are not finite in fp32")


def test_it_is_known_which_file_holds_a_tensor(tmp_path):
    """A tensor in two files, and one file beside an index of others, are refused."""
    folder = made(tmp_path / "model")
    names = list(load_file(folder / TENSORS))
    shutil.copyfile(folder / TENSORS, folder / "a.safetensors")
    save_file({HEAD: torch.zeros(50, 32)}, folder / "b.safetensors")
    weight_map = {name: "b.safetensors" if name == HEAD else "a.safetensors" for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, CheckpointError, f"holds {TENSORS}, which transformers reads, and {INDEX}")
    (folder / TENSORS).unlink()
    refused(folder, CheckpointError, f"{HEAD} is in .*a.safetensors and in .*b.safetensors, and they differ")


def test_tensors_twice_that_change_nothing(tmp_path, monkeypatch):
    """An equal tensor in two files, of several pieces too, and buffers that are never read are no problem."""
    folder = made(tmp_path / "model")
    monkeypatch.setattr(hf_shards, "_ELEMENTS", 100)
    tensors, buffer = load_file(folder / TENSORS), "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, buffer: torch.ones(4)}, folder / "a.safetensors", {"format": "pt"})
    save_file({HEAD: tensors[HEAD], buffer: torch.zeros(4)}, folder / "b.safetensors", {"format": "pt"})
    (folder / TENSORS).unlink()
    weight_map = {name: "b.safetensors" if name == HEAD else "a.safetensors" for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5
    shutil.rmtree(tmp_path / "out")
    other = tensors[HEAD].clone()
    other[-1, -1] = torch.nextafter(other[-1, -1], torch.tensor(9.0))
    save_file({HEAD: other}, folder / "b.safetensors", {"format": "pt"})
    refused(folder, CheckpointError, f"{HEAD} is in .* and they differ")


@pytest.mark.parametrize("rounded", ["words", "head"])
def test_tied_embeddings_of_two_types(tmp_path, rounded):
    """The same matrix with less precision in one of both is no other matrix; one that is another even so is."""
    folder = made(tmp_path / "model", tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    words = load_file(folder / TENSORS)[name]
    pair = {name: words.bfloat16(), HEAD: words} if rounded == "words" else {name: words, HEAD: words.bfloat16()}
    change(folder, **pair)
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5
    shutil.rmtree(tmp_path / "out")
    change(folder, **{HEAD: pair[HEAD] * 1.02})
    refused(folder, ConfigError, f"{HEAD} is another matrix than")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_compared_with_transformers(tmp_path, kind, tied):
    """An import and its export compute what transformers' own reading of the folder does; bf16 as it was rounded."""
    folder = made(tmp_path / "model", kind, tie_word_embeddings=tied)
    found = import_hf(folder, tmp_path / "weights").logits
    assert 0 < found.difference < 1e-5 and found.tokens == 64
    assert f"largest difference {found.difference:.1e}" in found.render()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not any(parameter.is_meta for parameter in model.parameters())

    weights = InitialWeights(tmp_path / "weights")
    shards = HfShards(folder)
    shards.check(weights.model, hf_shapes(weights.model, 50))
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(folder / TENSORS).items()}
    change(folder, **rounded)
    shards = HfShards(folder)
    shards.check(weights.model, hf_shapes(weights.model, 50))
    assert compare_logits.compare_logits(weights, shards, rounded_to=torch.bfloat16).difference < 1e-5
    with pytest.raises(ConfigError, match=r"logits .* differ from those that transformers computes"):
        compare_logits.compare_logits(weights, shards)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_settings_that_change_no_logits(tmp_path, kind):
    """Kernels that are not here, outputs in another form and ids of tokens keep no model from being compared."""
    folder = made(tmp_path / "model", kind)
    edit(folder, attn_implementation="flash_attention_2", _attn_implementation="flash_attention_2", return_dict=False)
    edit(folder, use_return_dict=False, output_attentions=True, pad_token_id=99)
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5


def test_what_transformers_cannot_compute_is_not_verified(tmp_path):
    """The import is made, and the reason is printed."""
    folder = made(tmp_path / "model")
    edit(folder, layer_types=["unknown", "unknown"])
    found = import_hf(folder, tmp_path / "out").logits
    assert found.difference is None
    assert found.render().startswith("logits: not verified, transformers cannot compute it: ")


def test_attention_with_a_buffer(tmp_path, monkeypatch):
    """As GPT-2's of transformers 4, with its causal mask: computed with the folder's weights, without dropout."""
    attention = transformers.models.gpt2.modeling_gpt2.GPT2Attention
    init, forward = attention.__init__, attention.forward

    def with_mask(self, *args, **settings):
        init(self, *args, **settings)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64, dtype=torch.bool)), persistent=False)

    def masked(self, *args, **settings):
        assert not self.training and bool(self.bias.sum() == 64 * 65 / 2)
        return forward(self, *args, **settings)

    monkeypatch.setattr(attention, "__init__", with_mask)
    monkeypatch.setattr(attention, "forward", masked)
    folder = made(tmp_path / "model", "gpt2")
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5


def peaked(folder):
    """A model whose attention chooses few tokens, so that rounding of earlier layers chooses others now and then."""
    made(folder, num_hidden_layers=8)
    scale(folder, 10.0, "q_proj", "k_proj")
    return folder


def test_a_model_that_amplifies_rounding_is_not_refused(tmp_path, monkeypatch):
    """Its logits differ, but no layer does for the same input; one that does within rounding is not verified."""
    folder = peaked(tmp_path / "model")
    found = import_hf(folder, tmp_path / "out").logits
    assert found.layer_difference < 5e-5 < 1e-4 < found.difference
    assert found.render().startswith("logits: each layer computes that of transformers, for the same input layer ")
    assert "together they amplify rounding to a difference of " in found.render()
    monkeypatch.setattr(compare_logits, "MAX_DIFFERENCE", 2e-6)  # as if its layers differed by more
    found = compare_logits.compare_logits(*opened(tmp_path / "out", folder))
    assert (found.difference, found.layer) == (None, None)
    assert re.match(r"logits: not verified, layer \d \(model.layers.\d\) amplifies rounding by ", found.render())


@pytest.mark.parametrize("wrong", ["rotation", "head"])
def test_another_model_is_refused_though_it_amplifies_rounding(tmp_path, monkeypatch, wrong):
    """A wrong rotation shows in every layer, a wrong output in the logits alone, above what rounding explains there."""
    folder = peaked(tmp_path / "model")
    if wrong == "rotation":
        content = json.loads((folder / "config.json").read_text())
        edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
        monkeypatch.setattr("megasdc.interchange.import_hf.model_fields", lambda config: model_fields(content))
        refused(folder, ConfigError, r"layer 0 \(model.layers.0\): relative difference .*; layer 2 .*; and 5 more")
        return
    import_hf(folder, tmp_path / "out")
    change(folder, **{HEAD: load_file(folder / TENSORS)[HEAD].flip(0)})
    with pytest.raises(ConfigError, match=r"is allowed, lm_head: relative difference .*, where rounding explains"):
        compare_logits.compare_logits(*opened(tmp_path / "out", folder))


def test_an_interface_that_is_not_on_this_host(tmp_path, monkeypatch):
    """A variable for hosts that train does not stop a process that is alone, and is as before afterwards."""
    folder = made(tmp_path / "model")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    assert import_hf(folder, tmp_path / "out").logits.difference < 1e-5
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib9"


def test_in_a_process_that_has_a_group(tmp_path):
    """In one of its own Megatron-core's groups are added and taken away; as one of several ranks it is not verified."""
    folder = made(tmp_path / "model")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert import_hf(folder, tmp_path / "one").logits.difference < 1e-5
        assert dist.is_initialized() and not parallel_state.model_parallel_is_initialized()
    finally:
        groups.shutdown()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found = import_hf(folder, tmp_path / "two").logits
    finally:
        groups.shutdown()
    assert found.render() == "logits: not verified, this process is one of 2 ranks, needed is one alone"


@pytest.mark.parametrize(
    ("kind", "names", "wrong"),
    [
        ("llama", ["model.layers.1.self_attn.k_proj.weight"], ["layer 1 (model.layers.1)"]),
        ("gpt2", ["transformer.ln_f.bias"], ["transformer.ln_f"]),
        ("gpt2", ["transformer.wpe.weight"], ["embeddings"]),
        (
            "llama",
            ["model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"],
            ["layer 0 (model.layers.0)", "layer 2 (model.layers.2)"],
        ),
    ],
)
def test_each_layer_that_differs_is_named_and_no_other(tmp_path, kind, names, wrong):
    """Tensors that are others than were imported are found, though layers behind them get other hidden states."""
    folder = made(tmp_path / "model", kind, num_hidden_layers=3)
    import_hf(folder, tmp_path / "weights")
    tensors = load_file(folder / TENSORS)
    change(folder, **{name: tensors[name] * 1.5 for name in names})
    with pytest.raises(ConfigError, match=r"where 0.0001 is allowed, ") as error:
        compare_logits.compare_logits(*opened(tmp_path / "weights", folder))
    named = str(error.value).partition("is allowed, ")[2].partition(". They")[0].split("; ")
    assert [one.partition(": relative difference ")[0] for one in named] == wrong


def faint(folder):
    """A model whose first layer adds little to its input, so that logits hardly depend on it."""
    made(folder)
    scale(folder, 1e-4, "layers.0.self_attn.o_proj", "layers.0.mlp.down_proj")
    return folder


def massive(folder):
    """A model with one channel that is large in all hidden states, and that its norms leave out, as others do too."""
    tensors = load_file(made(folder) / TENSORS)
    changed = {name: value * 2e3 for name, value in tensors.items() if "norm" in name}
    for value in changed.values():
        value[0] = 0.0
    words = tensors["model.embed_tokens.weight"].clone()
    words[:, 0] = 1e4
    change(folder, **changed, **{"model.embed_tokens.weight": words})
    return folder


@pytest.mark.parametrize(("make", "layer"), [(faint, 0), (massive, 1)])
def test_a_wrong_layer_is_not_hidden(tmp_path, make, layer):
    """Neither behind layers that add more, nor beside a large channel: each is measured by what it adds itself."""
    folder = make(tmp_path / "model")
    assert import_hf(folder, tmp_path / "weights").logits.layer_difference < 1e-5
    name = f"model.layers.{layer}.self_attn.v_proj.weight"
    change(folder, **{name: load_file(folder / TENSORS)[name] * 1.1})
    with pytest.raises(ConfigError, match=rf"is allowed, layer {layer} \(model.layers.{layer}\): relative"):
        compare_logits.compare_logits(*opened(tmp_path / "weights", folder))


def test_small_differences_of_all_layers_are_another_model(tmp_path):
    """Each is within the limit, all together are not, and rounding does not explain it: the largest is named."""
    folder = made(tmp_path / "model", num_hidden_layers=8)
    import_hf(folder, tmp_path / "weights")
    scale(folder, 1 + 8e-6, "layers")
    with pytest.raises(ConfigError, match=r"layer \d .*: relative difference \d(\.\d)?e-05, where rounding explains"):
        compare_logits.compare_logits(*opened(tmp_path / "weights", folder))


def test_a_setting_that_only_transformers_reads_is_found(tmp_path, monkeypatch):
    """Were the refusal of a scaled rotation not there, the logits would tell, and nothing would be written."""
    folder = made(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    monkeypatch.setattr("megasdc.interchange.import_hf.model_fields", lambda config: model_fields(content))
    both = f"logits of {tmp_path / 'out'} differ from those that transformers computes from {folder}: "
    refused(folder, ConfigError, f"{both}.*is allowed, layer 0 .*; layer 1 ")


def test_without_memory_it_is_said(tmp_path, monkeypatch):
    """What is needed is printed, and the import is made."""
    folder = made(tmp_path / "model")
    monkeypatch.setattr(compare_logits, "free_memory", lambda: 1000)
    found = import_hf(folder, tmp_path / "out").logits
    assert found.difference is None and found.render().startswith("logits: not verified, needs 0.0 GB of memory")
    assert (tmp_path / "out/weights.json").is_file()
