"""Manifests that say what no checkpoint is, though their own checksum is right: named, and never trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hand_made import write_checkpoint
from typer.testing import CliRunner

from megasdc.checkpoint.manifest import parse_type
from megasdc.checkpoint.verify import read_source
from megasdc.checkpoint.weights import CheckpointWeights
from megasdc.cli import app
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.digest import Digest, digest_path, read_digest
from megasdc.lab.checkpoints.digests import compare_digests
from megasdc.lab.checkpoints.extract import read_extract, write_extracts
from megasdc.lab.checkpoints.views.inspect import inspect_checkpoint
from megasdc.lab.checkpoints.views.open import open_view

Edit = Callable[[dict[str, Any]], Any]


def put(file: Path, content: dict[str, Any]) -> None:
    """Write it with the checksum that it then needs."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    whole = {**content, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}
    file.write_text(json.dumps(whole, sort_keys=True) + "\n")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole checkpoint of four ranks, and what its manifest says."""
    path = write_checkpoint(tmp_path_factory.mktemp("run"), layout=(2, 1, 2))
    content = json.loads((path / "manifest.json").read_text())
    del content["checksum"]
    return path, content


def _layer(content: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in content["files"] if one["tensors"])  # type: ignore[no-any-return]


EDITS: dict[str, tuple[Edit, str]] = {
    "no tensor ranks": (lambda c: c["layout"].update(tensor=0), "layout.tensor"),
    "replicas below zero": (lambda c: c["layout"].update(data=-2), "layout.data"),
    "a layout of more ranks": (lambda c: c["layout"].update(data=10**9), "are not 4 ranks"),
    "a huge world": (lambda c: c.update(world_size=10**9), "are not 1000000000 ranks"),
    "a huge world of a huge layout": (
        lambda c: (c.update(world_size=2 * 10**9), c["layout"].update(data=10**9)),
        "once",
    ),
    "a rank on no node": (lambda c: c["nodes"]["n"].pop(), "once"),
    "a rank on two nodes": (lambda c: c["nodes"].update(m=[3]), "once"),
    "ranks as text": (lambda c: c["nodes"].update(n=["0", "1", "2", "3"]), "nodes.n.0"),
    "of a node that is none": (lambda c: c.update(node="m", storage="node_local"), "node m"),
    "of a node, in shared storage": (lambda c: c.update(node="n"), "node n"),
    "a writer beyond the world": (lambda c: c["files"][0].update(rank=4), "none of 4"),
    "a size below zero": (lambda c: c["files"][0].update(size_bytes=-1), "size_bytes"),
    "a file elsewhere": (lambda c: c["files"][0].update(name="../../secret.pt"), "no path in the folder"),
    "a file anywhere": (lambda c: c["files"][0].update(name="/etc/passwd"), "no path in the folder"),
    "a name with a NUL": (lambda c: c["files"][0].update(name="a\0b"), "no path in the folder"),
    "a file twice": (lambda c: c["files"].append(c["files"][0]), "twice"),
    "no checksum": (lambda c: c["files"][0].update(xxh3_128=""), "xxh3_128"),
    "a type that torch has not": (lambda c: _layer(c)["tensors"].update(x="nosuch[3]"), "no type and shape"),
    "a name of torch's that is no type": (lambda c: _layer(c)["tensors"].update(x="seed[3]"), "no type and shape"),
    "a shape below zero": (lambda c: _layer(c)["tensors"].update(x="float32[-3]"), "no type and shape"),
    "a tensor before the file": (lambda c: _layer(c)["content"]["tensors"][0].update(offset=-8), "offset"),
    "a tensor after the file": (lambda c: _layer(c)["content"]["tensors"][0].update(offset=10**12), "ends after"),
    "blocks of nothing": (lambda c: _layer(c)["content"].update(block_bytes=0), "block_bytes"),
    "blocks of more": (lambda c: _layer(c)["content"].update(block_bytes=1), "not the blocks"),
    "fragments that are no places": (lambda c: _layer(c)["content"].update(fragments=[{"x": "y"}]), "fragments"),
    "a time that no calendar has": (lambda c: c.update(time=1e30), "time"),
    "a time that is no number": (lambda c: c.update(time=float("nan")), "time"),
    "a step below zero": (lambda c: c.update(step=-1), "step"),
    "no step": (lambda c: c.pop("step"), "step"),
    "files that are no list": (lambda c: c.update(files={}), "files"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_no_checkpoint_is_is_refused(checkpoint: tuple[Path, dict[str, Any]], name: str) -> None:
    """Whatever reads it says what is wrong in which manifest; nothing else is raised."""
    path, content = checkpoint
    edit, said = EDITS[name]
    changed = json.loads(json.dumps(content))
    edit(changed)
    put(path / "manifest.json", changed)
    for read in (inspect_checkpoint, open_view, CheckpointWeights, digest_path):
        with pytest.raises(CheckpointError, match=f"manifest.json has content that no checkpoint has: .*{said}"):
            read(path)
    with pytest.raises(CheckpointError, match=said):
        read_digest(path / "manifest.json")
    source, problems = read_source(path)
    assert source is None and said in problems[0]
    done = CliRunner().invoke(app, ["verify-checkpoint", str(path)])
    assert done.exit_code == 72 and "DAMAGED, 1 problem" in done.output


@pytest.mark.parametrize("text", ["[" * 100_000 + "}\n", '{"a": ' * 50_000 + "}\n", "{}}\n", '"}\n'])
def test_what_is_no_json_is_refused(checkpoint: tuple[Path, dict[str, Any]], text: str) -> None:
    """Also what is nested deeper than a program can read."""
    (checkpoint[0] / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_view(checkpoint[0])


def test_an_extract_of_blocks_that_are_none_is_refused(tmp_path: Path) -> None:
    """An index whose blocks lie beyond its tensor, or that is of no tensor, or of another size than its type."""
    (one, two) = (write_checkpoint(tmp_path / name) for name in "ab")
    layer = two / "layer_00-model_00-model_states.pt"
    data = bytearray(layer.read_bytes())
    tensor = next(file for file in digest_path(two).files if file.name == layer.name).tensor("word_embeddings.weight")
    assert tensor is not None
    data[tensor.offset] ^= 1
    layer.write_bytes(data)
    digests: list[Digest] = [digest_path(one), digest_path(two)]
    (extract, *_) = write_extracts(compare_digests(digests), {0: one, 1: two}, tmp_path / "out")
    line, _, blocks = extract.read_bytes().partition(b"\n")
    content = json.loads(line)
    del content["checksum"]
    for change in ({"blocks": [7]}, {"blocks": [-1]}, {"content": {**content["tensors"][0]["content"], "tensors": []}}):
        changed = json.loads(json.dumps(content))
        changed["tensors"][0] |= change
        put(extract, changed)
        extract.write_bytes(extract.read_bytes() + blocks)
        with pytest.raises(CheckpointError, match="has content that no checkpoint has"):
            read_extract(extract)


def test_types_are_those_of_torch() -> None:
    """Data type and shape of a text; a strided one too."""
    assert str(parse_type("bfloat16[2, 3]")) == "(torch.bfloat16, (2, 3))"
    assert str(parse_type("float32[] strided")) == "(torch.float32, ())"
