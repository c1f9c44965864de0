"""What would be imported as another model than that of transformers is refused, and logits are compared."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import TENSORS, change, edit, made

from megasdc.checkpoint.initial import InitialWeights
from megasdc.checkpoint.views.hf_shards import HfShards
from megasdc.checkpoint.views.whole import open_hf_view
from megasdc.errors import CheckpointError, ConfigError
from megasdc.interchange import compare_logits
from megasdc.interchange.import_hf import import_hf
from megasdc.model.hf import hf_shapes, model_fields

INDEX, HEAD = "model.safetensors.index.json", "lm_head.weight"


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
    ],
)
def test_rotary_settings_that_disagree(tmp_path, changes, message):
    """Every key that may count is looked at, beside one with its default too."""
    folder = made(tmp_path / "model")
    edit(folder, **changes)
    refused(folder, ConfigError, message)


def test_rotary_settings_that_agree(tmp_path):
    """Older and newer keys may stand side by side."""
    folder = made(tmp_path / "model", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    edit(folder, rope_theta=500, rope_scaling={"type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0})
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
    refused(folder, CheckpointError, f"{HEAD} is in .*a.safetensors and in .*b.safetensors")


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


@pytest.mark.parametrize(
    ("kind", "name", "first"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight", "model.layers.1 "),
        ("gpt2", "transformer.ln_f.bias", "transformer.ln_f "),
    ],
)
def test_the_first_layer_that_differs_is_named(tmp_path, kind, name, first):
    """A tensor that is another one than was imported is found, with the layer and both numbers."""
    folder = made(tmp_path / "model", kind)
    import_hf(folder, tmp_path / "weights")
    change(folder, **{name: load_file(folder / TENSORS)[name] * 1.5})
    weights, shards = InitialWeights(tmp_path / "weights"), HfShards(folder)
    shards.check(weights.model, hf_shapes(weights.model, 50))
    with pytest.raises(ConfigError, match=f"allowed are 0.0001; first {first}by"):
        compare_logits.compare_logits(weights, shards)


def test_a_setting_that_only_transformers_reads_is_found(tmp_path, monkeypatch):
    """Were the refusal of a scaled rotation not there, the logits would tell, and nothing would be written."""
    folder = made(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    monkeypatch.setattr("megasdc.interchange.import_hf.model_fields", lambda config: model_fields(content))
    refused(folder, ConfigError, r"logits .* differ .* first model.layers.0 by")


def test_without_memory_it_is_said(tmp_path, monkeypatch):
    """What is needed is printed, and the import is made."""
    folder = made(tmp_path / "model")
    monkeypatch.setattr(compare_logits, "free_memory", lambda: 1000)
    found = import_hf(folder, tmp_path / "out").logits
    assert found.difference is None and found.render().startswith("logits: not verified, needs 0.0 GB of memory")
    assert (tmp_path / "out/weights.json").is_file()
