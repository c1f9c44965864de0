"""Files that are replaced are whole before and after, whatever happens in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megasdc.common.durable import replacing, write_durably


def test_a_failed_atomic_write_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk refuses, the file is as before and no temporary file stays."""
    write_durably(tmp_path / "latest", "old")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "latest", "new")
    assert (tmp_path / "latest").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_an_exception_in_the_block_leaves_the_old_bytes(tmp_path: Path) -> None:
    """Nor is anything left beside them; a name as long as a file system allows is written too."""
    file = tmp_path / ("n" * 250)
    with replacing(file, "wb") as new:
        new.write(b"old")

    def fail_half_way() -> None:
        with replacing(file, "wb") as new:
            new.write(b"ne")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        fail_half_way()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
