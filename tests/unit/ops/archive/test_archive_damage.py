"""Is every damage to an archive found by verify, and does none give a checkpoint?"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from run_to_archive import RUN

from megasdc.common.errors import CheckpointError
from megasdc.ops.archive.block import encode_block
from megasdc.ops.archive.entries import read_part
from megasdc.ops.archive.pull import pull_checkpoint
from megasdc.ops.archive.push import push_checkpoint
from megasdc.ops.archive.record import block_file, open_archive, part_file, receipt_file
from megasdc.ops.archive.verify import verify_archive

TRIALS = 100


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def _remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def _swap(path: Path, chance: random.Random) -> None:
    others = [one for one in path.parents[1].rglob("*") if one.is_file() and one.name != path.name]
    if path.suffix:
        others = [one for one in path.parents[1].rglob("*.json") if one != path]
    other = chance.choice(sorted(others))
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


HARMS: list[Callable[[Path, random.Random], None]] = [_flip, _truncate, _remove, _swap]


@pytest.mark.slow
def test_every_damage_is_found_and_none_gives_a_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    """100 times: a flipped bit, a cut, a removal, two files swapped; in blocks, records and receipts."""
    address, out = tmp_path / "archive", tmp_path / "out"
    for step in (2, 4):
        push_checkpoint(checkpoints / f"step_{step:08d}", str(address))
    healthy = {path: path.read_bytes() for path in sorted(address.rglob("*")) if path.is_file()}
    kinds = {
        "blocks": [path for path in healthy if "blocks" in path.parts],
        "records": [path for path in healthy if path.suffix and path.name != "archive.json"],
    }
    chance = random.Random(7)
    for trial in range(TRIALS):
        harm, path = HARMS[trial % len(HARMS)], chance.choice(kinds["blocks" if trial // len(HARMS) % 2 else "records"])
        harm(path, chance)
        report = verify_archive(str(address))
        assert not report.ok, f"trial {trial}: {harm.__name__} of {path} was not found"
        named = {who for damage in report.damages for who in damage.needed_by} | set(report.problems)
        assert named, f"trial {trial}: no step is named"
        refused = 0
        for step in (2, 4):
            try:
                found = Path(pull_checkpoint(str(address), out, step=step).path)
            except CheckpointError:
                refused += 1
                assert not (out / f"step_{step:08d}").exists()
                assert f"step {step} of {RUN}" in named
                continue
            for file in found.iterdir():
                assert file.read_bytes() == (checkpoints / found.name / file.name).read_bytes()
        assert refused, f"trial {trial}: {harm.__name__} of {path} gave both checkpoints"
        shutil.rmtree(out, ignore_errors=True)
        for file, content in healthy.items():
            if not file.exists() or file.read_bytes() != content:
                file.write_bytes(content)
    assert verify_archive(str(address)).ok


def test_a_lost_mark_of_the_archive_is_found(checkpoints: Path, tmp_path: Path) -> None:
    """``archive.json`` is missing or damaged: nothing is pulled, and the next push mends only a missing one."""
    address = tmp_path / "archive"
    push_checkpoint(checkpoints, str(address))
    _flip(address / "archive.json", random.Random(1))
    for use in (lambda: verify_archive(str(address)), lambda: pull_checkpoint(str(address), tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"archive\.json"):
            use()
    (address / "archive.json").unlink()
    with pytest.raises(CheckpointError, match="is no archive"):
        verify_archive(str(address))
    assert push_checkpoint(checkpoints, str(address)).already and verify_archive(str(address)).ok


def test_deleted_damages_are_mended_by_a_push(checkpoints: Path, tmp_path: Path) -> None:
    """A push trusts a block by its name; ``delete_damaged`` makes it store it again."""
    address = tmp_path / "archive"
    push_checkpoint(checkpoints, str(address))
    blocks = sorted(path for path in address.glob("blocks/*/*"))
    for path in blocks[:3]:
        _flip(path, random.Random(3))
    assert push_checkpoint(checkpoints, str(address)).already, "it does not read what is there"
    report = verify_archive(str(address), delete_damaged=True)
    assert report.deleted == 3 and len(report.damages) == 3
    assert len(verify_archive(str(address)).damages) == 3, "now they are missing"
    assert push_checkpoint(checkpoints, str(address)).new_blocks == 3
    assert verify_archive(str(address)).ok and pull_checkpoint(str(address), tmp_path / "out").step == 4


def _forge(address: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a record and make its checksum and receipt right again, as an attacker would."""
    key = (RUN, 4, "all")
    content = json.loads((address / part_file(*key)).read_text())
    content.pop("checksum")
    change(content)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    stored = json.dumps({**content, "checksum": xxhash.xxh3_128_hexdigest(canonical.encode())}) + "\n"
    (address / part_file(*key)).write_text(stored)
    receipt = json.loads((address / receipt_file(*key)).read_text())
    receipt.pop("checksum")
    receipt["record"] = xxhash.xxh3_128_hexdigest(stored.encode())
    canonical = json.dumps(receipt, sort_keys=True, separators=(",", ":"))
    receipt["checksum"] = xxhash.xxh3_128_hexdigest(canonical.encode())
    (address / receipt_file(*key)).write_text(json.dumps(receipt) + "\n")


@pytest.mark.parametrize(
    "field, value",
    [
        ("name", "../escaped"),
        ("name", "/tmp/escaped"),
        ("name", "a/../../escaped"),
        ("size_bytes", 1 << 60),
        ("size_bytes", -1),
        ("blocks", "00" * 16),
        ("spans", [{"offset": 0, "size_bytes": 1 << 60}]),
        ("spans", [{"offset": 5, "size_bytes": 5}, {"offset": 0, "size_bytes": 5}]),
    ],
)
def test_hostile_records_are_refused(checkpoints: Path, tmp_path: Path, field: str, value: Any) -> None:
    """Names outside the folder, sizes that no blocks have: refused when the record is read, nothing is written."""
    address, out = tmp_path / "archive", tmp_path / "out"
    push_checkpoint(checkpoints, str(address))
    _forge(address, lambda content: content["files"][0].update({field: value}))
    with pytest.raises(CheckpointError):
        pull_checkpoint(str(address), out)
    assert not out.exists() and not (tmp_path / "escaped").exists() and not verify_archive(str(address)).ok


def test_a_save_id_that_is_a_path_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    """It is part of the temporary name of a pull."""
    push_checkpoint(checkpoints, str(tmp_path / "archive"))
    _forge(tmp_path / "archive", lambda content: content.update(save_id="../../escaped"))
    with pytest.raises(CheckpointError, match="save_id"):
        pull_checkpoint(str(tmp_path / "archive"), tmp_path / "out")


def test_pickles_are_checked_before_a_checkpoint_gets_its_name(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push refuses a pickle that runs code; a pull too, from an archive whose digests are all right."""
    import importlib
    import os

    import torch

    from megasdc.checkpoint.manifest import read_manifest, write_manifest

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch '{tmp_path / 'ran'}'",))

    step = checkpoints / "step_00000004"
    torch.save({"rng": Malicious()}, step / "rank_00000_state.pt")
    manifest = read_manifest(step)
    files = [
        record.model_copy(update={"size_bytes": (step / record.name).stat().st_size, "xxh3_128": _digest(step, record)})
        if record.name == "rank_00000_state.pt"
        else record
        for record in manifest.files
    ]
    files = [one.model_copy(update={"content": None}) if one.name == "rank_00000_state.pt" else one for one in files]
    write_manifest(step, manifest.model_copy(update={"files": files}))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        push_checkpoint(checkpoints, str(tmp_path / "archive"))
    with monkeypatch.context() as attacker:
        attacker.setattr(importlib.import_module("megasdc.ops.archive.push"), "check_file", lambda *_, **__: [])
        push_checkpoint(checkpoints, str(tmp_path / "archive"))
    assert verify_archive(str(tmp_path / "archive")).ok, "the archive itself is whole"
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        pull_checkpoint(str(tmp_path / "archive"), tmp_path / "out")
    assert not (tmp_path / "ran").exists() and list((tmp_path / "out").iterdir()) == []


def _digest(step: Path, record: Any) -> str:
    from megasdc.checkpoint.files import hash_file

    return hash_file(step / record.name)


def test_a_block_of_another_size_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    """The size comes from the record, and nothing larger is unpacked."""
    address = tmp_path / "archive"
    push_checkpoint(checkpoints, str(address))
    part = read_part(open_archive(str(address)), (RUN, 4, "all"))
    digest, size = next(iter(part.blocks().items()))
    (address / block_file(digest)).write_bytes(encode_block(bytes(size + 1)))
    report = verify_archive(str(address))
    assert [damage.name for damage in report.damages] == [block_file(digest)]
    with pytest.raises(CheckpointError, match=rf"needed are {size} bytes"):
        pull_checkpoint(str(address), tmp_path / "out")
