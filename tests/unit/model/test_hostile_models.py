"""A model from anybody is imported without running its code, without reading beside it, and without a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megasdc.checkpoint.manifest import read_shared_state
from megasdc.checkpoint.weights import same_tokenizer
from megasdc.common.errors import CheckpointError, DataError
from megasdc.config.model import ModelSection
from megasdc.data.tokenizer import load_tokenizer
from megasdc.interchange.import_hf import import_hf
from megasdc.lab.checkpoints.views.inspect import _model
from megasdc.lab.checkpoints.views.open import open_hf_view
from megasdc.model.hf.classes import hf_config
from megasdc.model.hf.tensors import hf_shapes

SIZES = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "max_positions": 16}
LLAMA = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
}
INDEX = "model.safetensors.index.json"
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"<e>": 0, "a": 1}, "unk_token": "<e>"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model with a tokenizer."""
    model = ModelSection.model_validate({**SIZES, **LLAMA, "tie_embeddings": False})
    (folder := tmp_path / "model").mkdir()
    save_file({name: torch.zeros(shape) for name, shape in hf_shapes(model, 32).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(model, 32, 0, "float32")))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"})
    )
    return folder


def test_code_of_a_model_is_never_run_nor_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that names a class of its own is not loaded, also on a terminal whose user says yes to everything."""
    trap = folder / "trap"
    (folder / "own.py").write_text(f"open({str(trap)!r}, 'w')\nclass Own: pass\n")
    content = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [f"{folder}--own.Own", f"{folder}--own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(str(text)) or "y")
    found = import_hf(folder, folder.parent / "out")
    with pytest.raises(DataError):
        load_tokenizer("huggingface", folder)
    assert not trap.exists() and not asked and found.note is not None


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tokenizer.pem", "tokenizer", "merges.txt", "config.json", "model.safetensors"]
)
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    """What it leads to is not in the output, which may go to others."""
    (secret := folder.parent / "secret").write_text("precious")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of the model's folder"):
        import_hf(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


def test_a_link_to_weights_elsewhere_is_refused_by_any_name(folder: Path) -> None:
    """An index may name a file that does not end as others do."""
    (folder / "model.safetensors").rename(secret := folder.parent / "secret")
    (folder / "weights").symlink_to(secret)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(["lm_head.weight"], "weights")}))
    with pytest.raises(CheckpointError, match="weights is a link that leads out of the model's folder"):
        import_hf(folder, folder.parent / "out")


def test_a_link_to_itself_ends_as_a_damaged_model(folder: Path) -> None:
    """It leads nowhere, so that nothing of others is read."""
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        import_hf(folder, folder.parent / "out")


def test_the_hubs_cache_and_links_inside_are_read(folder: Path) -> None:
    """Its snapshots are links to blobs beside them."""
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    (snapshot / "tokenizer_extra.json").symlink_to(snapshot / "tokenizer.json")
    assert import_hf(snapshot, folder.parent / "out").num_parameters > 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[" * 100_000),
        (INDEX, '{"a":' * 100_000),
        (INDEX, {"weight_map": None}),
        (INDEX, {"weight_map": ["model.safetensors"]}),
        (INDEX, {"weight_map": {"a": None}}),
        (INDEX, {"weight_map": {"a": "model.safetensors", "b": None}}),
        (INDEX, {}),
    ],
)
def test_hostile_json_is_refused_by_its_name(folder: Path, name: str, content: Any) -> None:
    """As a damaged model, which has an exit code."""
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=name):
        import_hf(folder, folder.parent / "out")


def test_json_that_is_too_large_is_not_read(folder: Path) -> None:
    """A sparse file takes no disk, and would take all memory."""
    os.truncate(folder / "config.json", 1 << 40)
    with pytest.raises(CheckpointError, match="at most"):
        import_hf(folder, folder.parent / "out")


def _header(content: bytes, length: int | None = None) -> bytes:
    return (len(content) if length is None else length).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_header(b'{"a":' * 100_000), "nested too deeply"),
        (_header(b"{}", 1 << 39), "at most"),
        (_header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}'), "shape"),
        (_header(b'{"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}') + b"\0" * 16, "shape"),
        (_header(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}'), "bytes"),
    ],
)
def test_hostile_headers_of_weights_are_refused(folder: Path, content: bytes, words: str) -> None:
    """As a damaged model; nothing is read of a header that is larger than the format allows."""
    path = folder / "model.safetensors"
    path.write_bytes(content)
    if words == "at most":
        os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is not a whole safetensors file: .*{words}"):
        import_hf(folder, folder.parent / "out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_opened(folder: Path, name: str) -> None:
    """It would keep the reader waiting for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a file|model\.safetensors"):
        import_hf(folder, folder.parent / "out")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"model": []}'])
def test_hostile_json_beside_weights_ends_no_comparison(folder: Path, content: str) -> None:
    """Other readers of such folders name the file too, or take it for none."""
    for name in ("config.json", "tokenizer.json", "megasdc.json"):
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_hf_view(folder)
    assert _model(folder) == {}
    assert same_tokenizer("huggingface", folder, folder)
    if content.startswith("["):
        with pytest.raises(CheckpointError, match=r"megasdc\.json"):
            read_shared_state(folder)
