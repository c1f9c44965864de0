"""Does a guard know who has saved a checkpoint, and believe no record or mark of files that were replaced?"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.attached.saves import SAVED, Saved, check_makers, forget_save, is_marked, read_saved
from megasdc.checkpoint.files import VERIFIED_BY_GUARD_FILE
from megasdc.checkpoint.ranks import FolderRanks
from megasdc.checkpoint.records import write_record
from megasdc.common.errors import CheckpointError

SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
LAYOUT = "TP1 x PP1 x DP2"


def _save(folder: Path) -> Path:
    path = folder / SHARD
    path.write_bytes(b"moments")
    (folder / VERIFIED_BY_GUARD_FILE).write_text("{}")
    files = {SHARD: [path.stat().st_size, path.stat().st_mtime_ns]}
    nodes = {"a (GPU-1)": [0], "a (GPU-2)": [1]}
    write_record(folder / SAVED, Saved(save_id="x-0", step=3, layout=LAYOUT, zero=True, nodes=nodes, files=files))
    return path


def _replace(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _add(path: Path) -> None:
    path.with_name("mp_rank_00_model_states.pt").write_bytes(b"")


def _damage(path: Path) -> None:
    record = path.with_name(SAVED)
    record.write_text(record.read_text().replace("GPU-2", "GPU-3"))


@pytest.mark.parametrize("change", [_replace, _add, _damage, Path.unlink])
def test_a_record_is_of_the_files_it_was_written_for(tmp_path: Path, change: Any) -> None:
    """Not of those that replace them, nor where some are lost or new, or it was changed; a mark beside it likewise."""
    path = _save(tmp_path)
    assert read_saved(tmp_path).step == 3 and is_marked(tmp_path)
    change(path)
    with pytest.raises(CheckpointError):
        read_saved(tmp_path)
    assert not is_marked(tmp_path)


def test_marks_of_older_versions_count_until_something_is_saved_over_them(tmp_path: Path) -> None:
    """They have no record beside them: files that are newer than the mark are not what was verified."""
    path = _save(tmp_path)
    (tmp_path / SAVED).unlink()
    assert is_marked(tmp_path)
    os.utime(path, ns=(0, (tmp_path / VERIFIED_BY_GUARD_FILE).stat().st_mtime_ns + 1))
    assert not is_marked(tmp_path)
    _save(tmp_path)
    forget_save(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [SHARD]


@pytest.mark.parametrize(
    ("nodes", "layout", "zero", "reason"),
    [
        ({"a (GPU-2)": [0], "a (GPU-1)": [1]}, LAYOUT, True, None),
        ({"a (GPU-1)": [0], "a (GPU-3)": [1]}, LAYOUT, True, r"saved with a \(GPU-2\), of which no rank"),
        ({"b (GPU-1)": [0], "b (GPU-2)": [1]}, LAYOUT, True, r"saved with a \(GPU-1\), a \(GPU-2\)"),
        ({"a (GPU-1)": [0], "a (GPU-2)": [1]}, "TP1 x PP2 x DP1", True, "this training has TP1 x PP2 x DP1 with ZeRO"),
        ({"a (GPU-1)": [0], "a (GPU-2)": [1]}, LAYOUT, False, f"this training has {LAYOUT} without ZeRO"),
    ],
)
def test_all_who_have_saved_take_part_and_all_of_it_is_used(
    tmp_path: Path, nodes: dict[str, list[int]], layout: str, zero: bool, reason: str | None
) -> None:
    """In any order of ranks; another host or device, or what DeepSpeed loads in part, does not do."""
    _save(tmp_path)
    training: Any = SimpleNamespace(dims=layout, engine=SimpleNamespace(zero_optimization=lambda: zero))
    place = FolderRanks(0, "a", nodes, [0, 1], "y")
    if reason is None:
        check_makers(read_saved(tmp_path), training, place)
    else:
        with pytest.raises(CheckpointError, match=reason):
            check_makers(read_saved(tmp_path), training, place)
