"""Do manifests say what lies in files, is what differs named, and do its blocks travel to the other side?"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from typer.testing import CliRunner

from megasdc.checkpoint.manifest import BLOCK_BYTES, Layout, Manifest, describe_file, digest_file, write_manifest
from megasdc.checkpoint.records import record_text
from megasdc.cli import app as megasdc_app
from megasdc.cli.compare import checkpoints_script as app
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.digest import digest_path, read_digest
from megasdc.lab.checkpoints.digests import compare_digests
from megasdc.lab.checkpoints.votes import INTACT

LAYER = "layer_03-model_00-model_states.pt"
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def block_digests(content: bytes, block_bytes: int) -> str:
    """What the format says, from bytes that torch has read."""
    return "".join(
        xxhash.xxh3_128_hexdigest(content[start : start + block_bytes]) for start in range(0, len(content), block_bytes)
    )


def write_checkpoint(folder: Path, *, step: int = 4, save_id: str = "s") -> Path:
    """A layer of two blocks, a shard of two groups with DeepSpeed's map, and a manifest."""
    from deepspeed.utils.tensor_fragment import fragment_address

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(1)
    torch.save({"a.weight": torch.randn(1500, 1000, generator=draw), "a.bias": torch.ones(7)}, folder / LAYER)
    optimizer = {
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(100, generator=draw)}},
            "param_groups": [{"lr": 0.1 * step, "betas": (0.9, 0.95)}],
        },
        "single_partition_of_fp32_groups": [torch.randn(100, generator=draw)],
        "param_slice_mappings": [{"3.a.weight": fragment_address(60, 0), "3.a.bias": fragment_address(40, 60)}],
    }
    state = {"optimizer_state_dict": optimizer, "ds_config": {"path": str(folder)}}
    torch.save(state, folder / SHARD)
    (folder / "megasdc.json").write_text(json.dumps({"step": step, "config": {"path": str(folder)}}))
    files = [describe_file(folder, path.name, rank=1, node="n") for path in sorted(folder.iterdir())]
    manifest = Manifest(
        format_version=1,
        state="complete",
        step=step,
        save_id=save_id,
        time=0.0,
        layout=Layout(tensor=1, pipeline=1, data=2),
        world_size=2,
        storage="shared",
        nodes={"n": [0, 1]},
        node=None,
        engine={},
        versions={},
        files=files,
    )
    write_manifest(folder, manifest)
    return folder


def flip(path: Path, *keys: Any, element: int) -> None:
    """Flip bit 20 of one element of a tensor."""
    state = torch.load(path, weights_only=False)
    tensor = state
    for key in keys:
        tensor = tensor[key]
    tensor.view(-1).view(torch.int32)[element] ^= 1 << 20
    torch.save(state, path)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two saves of equal content in folders of their own."""
    return write_checkpoint(tmp_path / "one", save_id="s1"), write_checkpoint(tmp_path / "two", save_id="s2")


def test_tensors_and_blocks_are_those_that_torch_reads(tmp_path: Path) -> None:
    """Each tensor's blocks are the digests of its bits, wherever it lies in the file; each byte is read once."""
    storage = torch.arange(1000, dtype=torch.float32)
    state = {
        "whole": storage,
        "part": storage[100:300],
        "half": torch.randn(33, 5).bfloat16(),
        "none": torch.zeros(0),
        "deep": {"list": [torch.randint(0, 9, (70,), dtype=torch.int64)]},
        "param": torch.nn.Parameter(torch.randn(64)),
    }
    torch.save(state, tmp_path / "a.pt")
    plain = {"x": torch.randn(9, 50), "y": torch.randn(3).half()}
    save_file(plain, tmp_path / "b.safetensors")
    wanted = {**state, **plain, "deep/list/0": state["deep"]["list"][0]}  # type: ignore[index]
    seen = set()
    for path in (tmp_path / "a.pt", tmp_path / "b.safetensors"):
        counted: list[int] = []
        found = digest_file(path, block_bytes=256, progress=counted.append)
        assert found.xxh3_128 == xxhash.xxh3_128_hexdigest(path.read_bytes())
        assert sum(counted) == found.size_bytes == path.stat().st_size
        for one in found.content.tensors:
            tensor = wanted[one.name]
            assert one.blocks == block_digests(bits(tensor), 256), one.name
            assert one.type == f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
            seen.add(one.name)
    assert seen == set(wanted) - {"deep"}


def test_tensors_of_other_types_than_training_writes(tmp_path: Path) -> None:
    """Files of other programs have masks and positions; their bytes count, and the format's own name of the type."""
    others = {"mask": torch.tensor([True, False, True]), "positions": torch.arange(40)}
    save_file(others, tmp_path / "a.safetensors")
    found = {one.name: one for one in digest_file(tmp_path / "a.safetensors", block_bytes=256).content.tensors}
    assert {name: one.type for name, one in found.items()} == {"mask": "BOOL [3]", "positions": "I64 [40]"}
    for name, one in found.items():
        assert (one.dtype, one.shape) == (None, tuple(others[name].shape))
        assert one.blocks == block_digests(bits(others[name]), 256)
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data.replace(b"[0,320]", b"[9,  1]").replace(b"[320,323]", b"[320,  3]"))
    assert "lies from byte" in str(digest_file(tmp_path / "b.safetensors").problem)


def test_values_do_not_depend_on_the_configuration(pair: tuple[Path, Path]) -> None:
    """Two saves of equal content are the same though their paths are in the files; a counter and a rate are named."""
    report = compare_digests([digest_path(path) for path in pair])
    assert report.same and report.num_files == 3
    other = write_checkpoint(pair[0].parent / "three", step=5)
    found = {one.name: one.detail for one in compare_digests([digest_path(pair[0]), digest_path(other)]).differences}
    assert found == {
        "step": "5, expected 4",
        "optimizer_state_dict/base_optimizer_state/state/0/step": "5.0, expected 4.0",
        "optimizer_state_dict/base_optimizer_state/param_groups/0/lr": "0.5, expected 0.4",
    }


def test_the_manifest_of_the_save_is_the_same_thing(pair: tuple[Path, Path]) -> None:
    """What is written at save has the blocks that are read later, and tells which side has changed since."""
    one, two = pair
    saved, read = read_digest(one / "manifest.json"), digest_path(one)
    assert [(file.name, file.content) for file in saved.files] == [(file.name, file.content) for file in read.files]
    assert compare_digests([saved, read]).same
    flip(two / LAYER, "a.weight", element=BLOCK_BYTES // 4 + 5)
    (only,) = compare_digests([read_digest(two / "manifest.json"), digest_path(two)]).differences
    assert (only.unchanged, only.digest, only.num_blocks) == (False, digest_path(two).label, 1)
    assert only.basis == INTACT


@pytest.mark.parametrize("first", [0, 1, 2])
def test_one_flip_is_one_block_of_the_odd_one(pair: tuple[Path, Path], first: int) -> None:
    """Tensor, block, elements, parameter, rank and node are told; of three the odd one is named, in any order."""
    one, two = pair
    flip(two / LAYER, "a.weight", element=BLOCK_BYTES // 4 + 5)
    three = write_checkpoint(one.parent / "three", save_id="s3")
    order = [one, two, three][first:] + [one, two, three][:first]
    report = compare_digests([digest_path(path) for path in order])
    (only,) = report.differences
    assert report.odd == [digest_path(two).label] == [only.digest]
    assert (only.file, only.name, only.what, only.rank, only.node) == (LAYER, "a.weight", "blocks", 1, "n")
    (part,) = only.ranges
    assert part.elements == (BLOCK_BYTES // 4, 1_500_000 - 1)
    assert part.bytes[1] - part.bytes[0] == 6_000_000 - BLOCK_BYTES - 1
    assert part.parameters == ["3.a.weight/weight"]
    assert only.basis == "what most checkpoints hold"


@pytest.mark.slow
def test_elements_of_a_shard_are_those_of_parameters(pair: tuple[Path, Path]) -> None:
    """In a rank's flat tensor the parameters are named that lie in the blocks which differ."""
    keys = ("optimizer_state_dict", "base_optimizer_state", "state", 0, "exp_avg")
    flip(pair[1] / SHARD, *keys, element=70)
    (only,) = compare_digests([digest_path(path, block_bytes=80) for path in pair]).differences
    assert only.name == "/".join(map(str, keys))
    assert [(part.elements, part.parameters) for part in only.ranges] == [((60, 79), ["3.a.bias/exp_avg"])]


def test_other_differences(pair: tuple[Path, Path]) -> None:
    """A missing file, another type, another state of a rank, a file that cannot be opened: each is named."""
    one, two = pair
    torch.save({"a.weight": torch.ones(3), "a.bias": torch.ones(7).half()}, two / LAYER)
    torch.save({"rng": [5], "hooks": [1, 2, 3]}, one / "rank_00000_state.pt")
    torch.save({"rng": [6], "hooks": [1, 2, 4]}, two / "rank_00000_state.pt")
    (two / SHARD).write_bytes((two / SHARD).read_bytes()[:-100])
    (two / "megasdc.json").unlink()
    found = compare_digests([digest_path(one), digest_path(two)]).differences
    kinds = {(one.file, one.what) for one in found}
    assert {("megasdc.json", "missing"), (LAYER, "type"), ("rank_00000_state.pt", "values")} <= kinds
    assert "float32[3], expected float32[1500, 1000]" in [one.detail for one in found]
    assert any("is not a complete file of torch.save" in one.detail for one in found if one.file == SHARD)


def test_bytes_of_no_tensor_count_within_one_save(tmp_path: Path) -> None:
    """A changed byte in a header is a difference between copies of one save, and a note between two saves."""
    one, two = write_checkpoint(tmp_path / "one", save_id="s1"), write_checkpoint(tmp_path / "two", save_id="s2")
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    first = min(tensor.offset for tensor in digest_file(one / LAYER).content.tensors)
    for folder in (copy, two):
        content = bytearray((folder / LAYER).read_bytes())
        content[first - 1] ^= 1  # padding before the first tensor
        (folder / LAYER).write_bytes(content)
    of_one_save, of_two = (compare_digests([digest_path(one), digest_path(other)]) for other in (copy, two))
    assert [(found.what, found.file) for found in of_one_save.differences] == [("outside", LAYER)]
    assert of_two.same
    assert any("3 files differ in headers" in note for note in of_two.notes)


def test_an_old_manifest_says_that_blocks_are_not_known(pair: tuple[Path, Path]) -> None:
    """Without blocks equal files are equal, and of different ones it is told why no block is named."""
    one, two = pair
    old = read_digest(one / "manifest.json").model_copy()
    files = [file.model_copy(update={"content": None}) for file in old.files if file.name == LAYER]
    old = old.model_copy(update={"checkpoints": [old.checkpoints[0].model_copy(update={"files": files})]})
    (two / SHARD).unlink()
    (two / "megasdc.json").unlink()
    assert compare_digests([old, digest_path(two)]).same
    flip(two / LAYER, "a.weight", element=5)
    (only,) = compare_digests([old, digest_path(two)]).differences
    assert (only.what, only.file) == ("bytes", LAYER) and "blocks are not known" in only.detail


def test_steps_are_compared_by_name(tmp_path: Path) -> None:
    """Of folders of several, each step is the same or not, the first that differs is named, and lone ones are told."""
    for side in ("a", "b"):
        for step in (2, 4, 6):
            write_checkpoint(tmp_path / side / f"step_{step:08d}", step=step, save_id=f"{side}{step}")
    for step in (4, 6):
        flip(tmp_path / "b" / f"step_{step:08d}" / LAYER, "a.bias", element=3)
    write_checkpoint(tmp_path / "b" / "step_00000008", step=8)
    report = compare_digests([digest_path(tmp_path / side) for side in ("a", "b")])
    assert report.checkpoints == {"step_00000002": True, "step_00000004": False, "step_00000006": False}
    assert report.first_different == "step_00000004"
    assert any(note.startswith("step_00000008 is not on") for note in report.notes)


def test_files_of_a_nodes_own_ranks_are_not_missing(tmp_path: Path) -> None:
    """With a folder on each node, what only one has belongs there, if it is one save; else it is missing."""
    one = write_checkpoint(tmp_path / "one", save_id="s")
    copy, other = Path(shutil.copytree(one, tmp_path / "copy")), write_checkpoint(tmp_path / "other", save_id="t")
    digests = []
    for number, folder in enumerate((one, copy, other)):
        (folder / SHARD).rename(folder / SHARD.replace("rank_1", f"rank_{number}"))
        digest = digest_path(folder)
        content = digest.checkpoints[0].model_copy(update={"per_node": True})
        digests.append(digest.model_copy(update={"checkpoints": [content]}))
    assert compare_digests(digests[:2]).same
    assert [found.what for found in compare_digests(digests[1:]).differences] == ["missing", "missing"]


def test_a_file_that_gets_shorter_is_an_error(tmp_path: Path) -> None:
    """Cut while it is read: an error that names it, no manifest of half a file."""
    path = tmp_path / "a.pt"
    torch.save({"x": torch.zeros(5_000_000)}, path)
    with pytest.raises(CheckpointError, match=r"a\.pt got shorter"):
        digest_file(path, progress=lambda count: os.truncate(path, 6_000_000))


class _Code:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("executed",))


def test_nothing_of_a_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that would run code has digests of its bytes, and is told."""
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(3), "y": _Code()}, tmp_path / "bad.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(_Code()))
    done = CliRunner().invoke(megasdc_app, ["manifest", "bad.pt", "--out", "bad.manifest", "--json"])
    assert done.exit_code == 0 and "mkdir" in json.loads(done.stdout)["problems"][0]
    assert digest_file(tmp_path / "raw.pt").problem
    assert not (tmp_path / "executed").exists()


def test_commands_on_manifests(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A manifest is small and one line; compared alone, or with a folder, the codes are 0, 1 and 2."""
    two = pair[1]
    made = [tmp_path / name for name in ("a.manifest", "b.manifest")]
    for path, out in zip(pair, made, strict=True):
        done = CliRunner().invoke(megasdc_app, ["manifest", str(path), "--out", str(out), "--jobs", "2", "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["manifest_bytes"] == out.stat().st_size < 3000
    assert made[0].read_text() == record_text(read_digest(made[0]), None)

    def compare(*arguments: object) -> Any:
        return CliRunner().invoke(megasdc_app, ["compare", *map(str, arguments)])

    assert compare(made[0], made[1]).exit_code == 0
    flip(two / LAYER, "a.weight", element=5)
    assert compare(made[0], made[1]).exit_code == 0  # it says what was read
    mixed = compare(made[0], two, "--json")
    assert mixed.exit_code == 1 and json.loads(mixed.stdout)["differences"][0]["name"] == "a.weight"
    assert compare(made[0], two, "--ulp", "1").exit_code == 2
    made[1].write_text(made[1].read_text().replace('"n"', '"m"'))
    damaged = compare(made[0], made[1])
    assert damaged.exit_code == 2 and "b.manifest was changed" in damaged.stderr


def test_blocks_that_travel_give_the_answer_of_elements(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """From a manifest and a folder here to an extract and the other folder there: which bit of which element."""
    one, two = pair
    flip(two / LAYER, "a.weight", element=BLOCK_BYTES // 4 + 5)
    (tmp_path / "two.manifest").write_text(record_text(digest_path(two), None))

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(megasdc_app, ["compare", *map(str, arguments)])

    done = run(one, tmp_path / "two.manifest", "--extract", tmp_path / "out", "--json")
    assert done.exit_code == 1, done.output
    (extract,) = map(Path, json.loads(done.stdout)["extracts"])
    assert extract.stat().st_size < 6_000_000 - BLOCK_BYTES + 4000
    run(two, one, "--extract", tmp_path / "both")
    for side in (two, min((tmp_path / "both").iterdir())):
        found = run(extract, side, "--json")
        assert found.exit_code == 1, found.output
        (only,) = json.loads(found.stdout)["findings"]
        assert (only["pattern"], only["detail"], only["slot"]) == ("bit", "bit 20", "weight")
        assert only["fqn"] == f"3.a.weight ({LAYER})"
        assert only["measure"]["first"] == [(BLOCK_BYTES // 4 + 5) // 1000, (BLOCK_BYTES // 4 + 5) % 1000]
        assert only["pieces"][0]["rank"] == 1
    assert run(extract, one).exit_code == 0


def test_an_extract_that_is_not_enough_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Against another folder than it was made against, or damaged on its way: exit code 2, and why."""
    one, two = pair
    flip(two / LAYER, "a.weight", element=5)
    run = CliRunner().invoke
    assert run(app, [str(one), str(two), "--extract", str(tmp_path / "out")]).exit_code == 1
    extract = min((tmp_path / "out").iterdir())
    flip(two / LAYER, "a.weight", element=1_499_999)
    refused = run(app, [str(extract), str(two)])
    assert refused.exit_code == 2 and "does not hold block 1" in refused.stderr
    content = bytearray(extract.read_bytes())
    content[-3] ^= 1
    extract.write_bytes(content)
    refused = run(app, [str(extract), str(one)])
    assert refused.exit_code == 0  # nothing differs, so no block is needed
    flip(two / LAYER, "a.weight", element=1_499_999)
    refused = run(app, [str(extract), str(two)])
    assert refused.exit_code == 2 and "was changed at bytes" in refused.stderr
    only_manifests = run(app, [str(one / "manifest.json"), str(two / "manifest.json"), "--extract", "x"])
    assert only_manifests.exit_code == 2
