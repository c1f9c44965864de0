"""Initial weights are read layer by layer as they were written, and none that were changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from megasdc.checkpoint.files import WEIGHTS_FILE
from megasdc.checkpoint.weights import (
    FORMAT_VERSION,
    MODEL_FILE,
    InitialWeights,
    WeightsFileRecord,
    WeightsManifest,
    weights_file,
)
from megasdc.common.errors import CheckpointError
from megasdc.config.model import ModelSection


def test_a_layer_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With its values, or types and shapes alone, which need no checksum; a changed file is refused once read."""
    layers = [{"weight": torch.randn(3, 4)}, {"weight": torch.randn(2).bfloat16(), "bias": torch.randn(5)}]
    files = {}
    for index, tensors in enumerate(layers):
        save_file(tensors, path := tmp_path / weights_file(index))
        content = path.read_bytes()
        files[path.name] = WeightsFileRecord(size_bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
    manifest = WeightsManifest(
        format_version=FORMAT_VERSION, kind="initial weights", source="a test", vocab_size=3,
        tokenizer_vocab_size=None, end_of_document=None, files=files,
    )  # fmt: skip
    (tmp_path / WEIGHTS_FILE).write_text(manifest.model_dump_json())
    (tmp_path / MODEL_FILE).write_text(ModelSection().model_dump_json())
    weights = InitialWeights(tmp_path)
    weights.verify()
    for index, tensors in enumerate(layers):
        found, shapes = weights.layer(index), weights.layer(index, "meta")
        assert found.keys() == shapes.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor) and found[name].device.type == "cpu"
            assert (shapes[name].shape, shapes[name].dtype) == (tensor.shape, tensor.dtype) and shapes[name].is_meta
    assert weights.layer(2) == {}
    changed = bytearray(content)
    changed[-1] ^= 1
    path.write_bytes(changed)
    again = InitialWeights(tmp_path)
    assert again.layer(1, "meta").keys() == layers[1].keys() and again.layer(0).keys() == layers[0].keys()
    for read in (lambda: again.layer(1), again.verify):
        with pytest.raises(CheckpointError, match=r"layer_01\.safetensors was changed"):
            read()
