"""Files whose tensors are filled in later: torch, zipfile and DeepSpeed's state read them as those of torch.save."""

import io
import mmap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megasdc.checkpoint import allowlist, writer_main, writer_process
from megasdc.checkpoint.manifest import digest_file
from megasdc.checkpoint.snapshot import Snapshot, capture, write_file
from megasdc.checkpoint.tensor_files import Extent, StateFiles, read_whole
from megasdc.checkpoint.writer_main import TornError, store
from megasdc.checkpoint.writer_process import Act, StoreTask, act, lay_out, seal

CPU = torch.device("cpu")
FLAT = torch.arange(100, dtype=torch.float32)
STATE = {
    "view": FLAT[:37],
    "strided": FLAT.view(10, 10).t(),
    "half": torch.randn(7, 3).to(torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "learned": torch.nn.Parameter(torch.ones(5)),
    "grad": torch.ones(2, requires_grad=True),
    "twice": [FLAT, FLAT],
    "numbers": {"step": 7, "lr": 0.1, "name": "x"},
}


def write(state, path):
    """Write a state as a snapshot is written."""
    snapshot = Snapshot(CPU)
    files = [capture(state, path.name)]
    snapshot.prepare(files)
    snapshot.start_copy(files)
    answer = store(StoreTask(snapshot.wait(), path.parent))
    snapshot.close()
    return answer


def same(one, other):
    """Whether two states are equal in types, shapes and bits."""
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_loads_what_was_captured(tmp_path: Path, mapped: bool) -> None:
    """Every tensor and value, read or mapped; nothing of the memory around a view is in the file."""
    write(STATE, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", mmap=mapped, weights_only=True)
    assert same(found, STATE)
    assert found["view"].untyped_storage().nbytes() == 37 * 4


def test_a_rank_writes_the_same_bytes_itself(tmp_path: Path) -> None:
    """As its writer process does from a snapshot."""
    write(STATE, tmp_path / "state.pt")
    (tmp_path / "own").mkdir()
    write_file(tmp_path / "own" / "state.pt", capture(STATE, "state.pt"))
    assert (tmp_path / "own" / "state.pt").read_bytes() == (tmp_path / "state.pt").read_bytes()


def test_the_archive_is_whole(tmp_path: Path) -> None:
    """All members have right checksums, and are those of torch.save but for the one that promises torch's places."""
    write(STATE, tmp_path / "state.pt")
    torch.save(STATE, tmp_path / "torch" / "state.pt") if (tmp_path / "torch").mkdir() else None
    torch.save(STATE, tmp_path / "torch" / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as ours, zipfile.ZipFile(tmp_path / "torch" / "state.pt") as theirs:
        assert ours.testzip() is None
        own = {name for name in ours.namelist() if "/data/" not in name}
        not_ours = {"state/.data/serialization_id", "state/.format_version"}
        assert own == {name for name in theirs.namelist() if "/data/" not in name} - not_ours


def test_structure_is_that_of_a_file_of_torch(tmp_path: Path) -> None:
    """Digests of tensors, their blocks and values do not depend on who wrote the file."""
    state = {"a": torch.randn(300, 300), "b": torch.randn(5).to(torch.bfloat16), "step": 3, "other": [1, "x"]}
    (tmp_path / "torch").mkdir()
    torch.save(state, tmp_path / "torch" / "state.pt")
    answer = write(state, tmp_path / "state.pt")
    theirs = digest_file(tmp_path / "torch" / "state.pt").content
    ours = answer.stored[0].content
    places = [one.model_copy(update={"offset": 0}) for one in theirs.tensors]
    assert [one.model_copy(update={"offset": 0}) for one in ours.tensors] == places
    assert (ours.values, ours.rest) == (theirs.values, theirs.rest)


def test_a_snapshot_is_used_again(tmp_path: Path) -> None:
    """The second one, with another pickle and other values, is right, and the memory is the same."""
    snapshot = Snapshot(CPU)
    for text, value in (("short", 1.0), ("longer" * 100, 2.0), ("x", 3.0)):
        state = {"text": text, "value": torch.full((1000,), value)}
        files = [capture(state, "state.pt")]
        snapshot.prepare(files)
        snapshot.start_copy(files)
        store(StoreTask(snapshot.wait(), tmp_path))
        assert same(torch.load(tmp_path / "state.pt"), state)
    snapshot.close()


def test_memory_is_there_before_it_is_copied_into(tmp_path: Path) -> None:
    """All pages are allocated when a snapshot is prepared, also those that a longer pickle needs again."""
    snapshot = Snapshot(CPU, tmp_path)
    for text in ("long" * 50_000, "short", "longer" * 50_000):
        files = [capture({"text": text, "value": torch.ones(1 << 18)}, "state.pt")]
        snapshot.prepare(files)
        held = (tmp_path / "state.pt").stat()
        assert held.st_size == files[0].layout.size_bytes <= held.st_blocks * 512
    snapshot.close()


@pytest.mark.parametrize("part", ["data/0", "data.pkl"])
@pytest.mark.parametrize("moment", ["copied", "sealed"])
def test_a_changed_bit_is_found(part: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor or a pickle that changes before the digest is taken is refused, also just before it is written."""
    files = [capture({"a": torch.ones(1000)}, "state.pt")]
    in_place = part == "data.pkl"  # elsewhere a broken pickle is refused for its own sake
    snapshot = Snapshot(CPU, tmp_path if in_place else None)
    snapshot.prepare(files)
    snapshot.start_copy(files)
    (taken,) = snapshot.wait()
    member = next(one for one in taken.layout.members if one.name == f"state/{part}")

    def flip() -> None:
        with open(taken.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[member.offset + member.size_bytes // 2] ^= 1

    def seal_and_flip(*args: Any) -> None:
        seal(*args)
        flip()

    if moment == "copied":
        flip()
    else:
        monkeypatch.setattr(writer_main, "seal", seal_and_flip)
    with pytest.raises(TornError, match=f"{part} in the snapshot of state.pt is not what was copied"):
        store(StoreTask([taken], tmp_path, in_place=in_place))
    snapshot.close()


def test_a_tensor_that_would_lose_something_is_refused() -> None:
    """A subclass, or a tensor with attributes."""
    marked = torch.ones(2)
    marked.note = "x"
    with pytest.raises(ValueError, match="attributes \\['note'\\]"):
        capture({"a": marked}, "state.pt")


def test_large_members_have_wide_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of 32 bits sizes and offsets are in 64 bits; here the limit is lowered."""
    monkeypatch.setattr(writer_process, "_is_wide", lambda number: number >= 200)
    tensors = [torch.arange(60, dtype=torch.float32), torch.arange(3, dtype=torch.float32)]
    captured = capture({"a": tensors[0], "b": tensors[1]}, "state.pt")
    layout = lay_out("state", captured.layout.members[0].content, [240, 12])
    file = bytearray(layout.size_bytes)
    layout.write_contents(memoryview(file))
    for member, tensor in zip(layout.tensors, tensors, strict=True):
        file[member.offset : member.offset + member.size_bytes] = tensor.numpy().tobytes()
    seal(memoryview(file), layout)
    assert zipfile.ZipFile(io.BytesIO(file)).testzip() is None
    assert torch.equal(torch.load(io.BytesIO(file))["a"], tensors[0])


def test_names_change_in_order(tmp_path: Path) -> None:
    """Texts, then the rename, then deletions; one that fails is told, the others are done."""
    for name in ("part", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    texts = {tmp_path / "part" / "note": "whole"}
    answer = act(Act(texts, (tmp_path / "part", tmp_path / "new"), lambda: {1: tmp_path / "gone", 2: tmp_path / "old"}))
    assert (tmp_path / "new" / "note").read_text() == "whole"
    assert not (tmp_path / "old").exists() and answer.deleted == [2]
    assert len(answer.failed) == 1
    assert "gone cannot be deleted" in answer.failed[0]


def located(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a state as they are read in place."""
    files = StateFiles()
    found = {}
    for name in files.load(path):
        place = files.tensor(path, name)
        found[name] = read_whole(place) if isinstance(place, Extent) else place
    return found


def test_large_tensors_are_found_behind_small_ones(tmp_path: Path) -> None:
    """Read in place, whoever wrote the file: a snapshot, torch, or one that promises torch's order and breaks it."""
    state = {f"{name}_{size}": torch.randn(size) for size in (1, 300, 5000) for name in ("a", "b")}
    write(state, tmp_path / "snapshot.pt")
    torch.save(state, tmp_path / "torch.pt")
    with zipfile.ZipFile(tmp_path / "torch.pt") as whole, zipfile.ZipFile(tmp_path / "packed.pt", "w") as packed:
        assert any(name.endswith("/.format_version") for name in whole.namelist()), "torch calculates places"
        for one in whole.infolist():
            packed.writestr(one.filename.replace("torch/", "packed/"), whole.read(one))
    for name in ("snapshot", "torch", "packed"):
        assert same(located(tmp_path / f"{name}.pt"), state), name


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_a_file_read_in_pieces_is_the_same(tmp_path: Path, piece: int) -> None:
    """The member that promises torch's places has another name, wherever a piece begins and ends."""
    torch.save({"a": torch.arange(9)}, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    at = raw.index(b"/.format_version", raw.index(b"PK\1\2"))
    with allowlist._WithoutPromise(str(tmp_path / "a.pt")) as file:
        found = b"".join(iter(lambda: file.read(piece), b""))
    assert found == raw[:at] + b"/.format_unknown" + raw[at + 16 :]
