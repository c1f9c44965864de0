"""Weights that no model can have are not exported: the tensor is named, and nothing is left."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import made, tokenizer

from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.interchange.export_hf import export_hf
from megasdc.interchange.import_hf import _record, import_hf


def damaged(tmp_path, name, value):
    """Imported weights in which two elements of a tensor of the last layer are ``value``, as if they were saved so."""
    folder = made(tmp_path / "model", vocab_size=300)
    tokenizer(folder)
    import_hf(folder, weights := tmp_path / "weights")
    file = weights / "layer_03.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3:5] = value
    save_file(tensors, file)
    content = json.loads((weights / "weights.json").read_text())
    content["files"][file.name] = _record(file).model_dump()
    (weights / "weights.json").write_text(json.dumps(content))
    return weights


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_not_exported(tmp_path, value):
    """They are found while they are written, in shards too; an earlier export stays."""
    weights = damaged(tmp_path, "layer.mlp.linear_fc2.weight", value)
    (out := tmp_path / "out").mkdir()
    (out / "README.md").write_text("Exported by megasdc, of a step before.")
    name = r"model.layers.1.mlp.down_proj.weight of .*weights has 2 of 1536 elements that are not finite"
    with pytest.raises(CheckpointError, match=name):
        export_hf(weights, out, max_shard_size="10KB", force=True)
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "weights"]


def test_weights_that_another_type_cannot_hold_are_not_exported(tmp_path):
    """Rounding to bf16 would make them infinite; as saved they are no problem."""
    weights = damaged(tmp_path, "layer.mlp.linear_fc2.weight", torch.finfo(torch.float32).max)
    with pytest.raises(ConfigError, match=r"--dtype: 2 of 1536 .* are too large for bfloat16: give as-saved, which is"):
        export_hf(weights, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()
    assert export_hf(weights, tmp_path / "out").dtype == "float32"
