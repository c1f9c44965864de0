"""Does a comparison read in bounded memory, with any number of threads, and survive files that change under it?"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megasdc.lab.checkpoints.checkpoints import compare_checkpoints
from megasdc.lab.checkpoints.views.open import open_view

COUNT = 400
"""Tensors of a file; many more than are read ahead."""


def _tensors(changed: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors too large to be read when a file is opened, one of them with a flipped bit."""
    draw = torch.Generator().manual_seed(1)
    found = {f"t{number:03d}": torch.randn(40, 50, generator=draw) for number in range(COUNT)}
    if changed is not None:
        found[f"t{changed:03d}"].view(torch.int32)[7, 9] ^= 1 << 5
    return found


def _write(path: Path, changed: int | None = None) -> Path:
    if path.suffix == ".safetensors":
        save_file(_tensors(changed), path)
    else:
        torch.save(_tensors(changed), path)
    return path


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace(file: Path) -> None:
    spare = _write(file.with_name(f"spare{file.suffix}"))
    spare.replace(file)


def _overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_truncate, "was written to while it was being compared"),
        (_replace, "was replaced by another while it was being compared"),
        (_overwrite, "was written to while it was being compared"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_a_file_that_changes_is_named(tmp_path: Path, suffix: str, change: Callable[[Path], None], text: str) -> None:
    """Truncated, replaced, written to or removed under way: a problem that names it; what was found before is kept."""
    good, other = _write(tmp_path / f"good{suffix}"), _write(tmp_path / f"other{suffix}", changed=2)
    views, calls = [open_view(good), open_view(other)], []

    def progress(count: int) -> None:
        calls.append(count)
        if len(calls) == 100:
            change(other)

    report = compare_checkpoints(views, progress=progress, jobs=1)
    assert [one.fqn for one in report.findings] == ["t002"]
    assert report.problems
    assert all(str(other) in problem and text in problem for problem in report.problems)
    assert len(calls) == 2 * COUNT
    assert not report.as_dict()["same"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_threads_change_nothing(tmp_path: Path, suffix: str) -> None:
    """One thread and eight find the same, in the same order."""
    good, other = _write(tmp_path / f"good{suffix}"), _write(tmp_path / f"other{suffix}", changed=COUNT - 3)
    found = [compare_checkpoints([open_view(good), open_view(other)], jobs=jobs).as_dict() for jobs in (1, 8)]
    assert found[0] == found[1]
    assert [one["fqn"] for one in found[0]["findings"]] == [f"t{COUNT - 3}"]
    assert found[0]["num_compared"] == COUNT


def test_tensors_with_gaps_and_shared_elements_are_read(tmp_path: Path) -> None:
    """A transposed tensor, a part of another one, one without elements, one of booleans: as torch loads them."""
    base = torch.randn(60, 70)
    state = {"whole": base, "turned": base.T, "part": base[7:50], "empty": base[:0], "bools": base > 0}
    torch.save(state, tmp_path / "one.pt")
    torch.save({name: tensor.clone().contiguous() for name, tensor in state.items()}, tmp_path / "other.pt")
    report = compare_checkpoints([open_view(tmp_path / name) for name in ("one.pt", "other.pt")])
    assert (report.findings, report.problems, report.num_compared) == ([], [], 5)
    state["turned"] = state["turned"].clone()
    state["turned"][3, 4] += 1
    torch.save(state, tmp_path / "other.pt")
    (found,) = compare_checkpoints([open_view(tmp_path / name) for name in ("one.pt", "other.pt")]).findings
    assert found.measure is not None
    assert (found.fqn, found.measure.first) == ("turned", [3, 4])


def _peak_growth(folder: str, names: tuple[str, str]) -> int:
    """KiB that a comparison adds to the most memory that the process ever held."""
    torch.save({"a": torch.zeros(3000)}, Path(folder) / "small.pt")
    compare_checkpoints([open_view(Path(folder) / "small.pt")] * 2, jobs=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = compare_checkpoints([open_view(Path(folder) / name) for name in names], jobs=2)
    assert len(report.findings) == (names[0] != names[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.slow
@pytest.mark.parametrize("other", ["one.pt", "other.pt"])
def test_a_large_tensor_is_never_held(tmp_path: Path, other: str) -> None:
    """Comparing a tensor of 96 MiB with an equal or a wholly different one takes less than 64 MiB more."""
    tensor = torch.arange(24 << 20, dtype=torch.int32).view(torch.float32)
    torch.save({"a": tensor.view(1, -1)}, tmp_path / "one.pt")
    tensor.view(torch.int32).bitwise_xor_(0x00123456)
    torch.save({"a": tensor.view(1, -1)}, tmp_path / "other.pt")
    del tensor
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_peak_growth, (str(tmp_path), ("one.pt", other))) < 64 << 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(8), torch.zeros(8).index_fill_(0, torch.tensor([3]), -0.0)),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    ],
    ids=["the sign of a zero", "an integer beyond fp64"],
)
def test_bits_that_differ_by_no_distance_are_a_difference(
    tmp_path: Path, one: torch.Tensor, other: torch.Tensor
) -> None:
    """Without --ulp and --rtol nothing is tolerated, whatever two values are as numbers."""
    files = [tmp_path / "one.pt", tmp_path / "other.pt"]
    for file, tensor in zip(files, (one, other), strict=True):
        torch.save({"a": tensor}, file)
    report = compare_checkpoints([open_view(file) for file in files])
    assert (len(report.findings), report.num_tolerated) == (1, 0)
