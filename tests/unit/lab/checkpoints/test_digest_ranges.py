"""Are ranges that one task reads digested each for itself, also where a file among them changes meanwhile?"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash

from megasdc.checkpoint.tensor_files import Arrangement, Extent, OpenCopy, Part, Stamp
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.checkpoints import BATCH_BYTES, ElementRange, RangeDigester

NUMEL = 6000


def _file(path: Path, seed: int) -> torch.Tensor:
    tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    path.write_bytes(tensor.numpy().tobytes())
    return tensor


def _copy(path: Path) -> OpenCopy:
    extent = Extent(path, Stamp.of(path), 0, torch.float32, (NUMEL,))
    return OpenCopy((NUMEL,), torch.float32, Arrangement(NUMEL, NUMEL, ((NUMEL,),)), [extent])


@dataclass(frozen=True)
class _ChangesFile:
    """Writes to a file when it is asked what lies where."""

    file: Path

    def cut(self, start: int, flat: torch.Tensor) -> Iterator[Part]:
        with self.file.open("r+b") as opened:
            opened.write(b"abc")
        yield 0, start, flat

    def place(self, piece: int, element: int) -> int:
        return element


def test_only_ranges_of_a_file_that_changed_count_as_not_read(tmp_path: Path) -> None:
    """Read whole and then written to, before the task ends: its ranges are errors that name it, others are digests."""
    files = [tmp_path / name for name in ("one.bin", "two.bin")]
    tensors = [_file(file, seed) for seed, file in enumerate(files)]
    copies = [_copy(file) for file in files]
    last = OpenCopy((NUMEL,), torch.float32, _ChangesFile(files[0]), [tensors[1]])
    with ThreadPoolExecutor(1) as pool:
        digester = RangeDigester(pool)
        ranges = [ElementRange(copies[0], 0, NUMEL), ElementRange(copies[1], 10, 5000), ElementRange(last, 0, NUMEL)]
        pending = [digester.digest("checkpoint", one) for one in ranges]
        assert len({id(one.batch) for one in pending}) == 1
        assert pending[1].result() == xxhash.xxh3_128_digest(tensors[1][10:5000].numpy().data)
        assert pending[2].result() == xxhash.xxh3_128_digest(tensors[1].numpy().data)
        with pytest.raises(CheckpointError, match=r"one\.bin was written to while it was being compared"):
            pending[0].result()


def test_a_task_begins_once_it_has_enough_to_read(tmp_path: Path) -> None:
    """Small ranges of a checkpoint are read together up to the size of a task, those of another apart."""
    _file(tmp_path / "one.bin", 1)
    one = ElementRange(_copy(tmp_path / "one.bin"), 0, NUMEL)
    count = -(-BATCH_BYTES // one.cost_bytes)
    with ThreadPoolExecutor(2) as pool:
        digester = RangeDigester(pool)
        pending = [digester.digest(group, one) for _ in range(count + 1) for group in ("a", "b")]
        assert len({id(found.batch) for found in pending}) == 4
        assert [len({id(found.batch) for found in pending[side:-2:2]}) for side in (0, 1)] == [1, 1]
        assert pending[0].batch.future is not None
        assert pending[-1].batch.future is None
        assert len({found.result() for found in pending}) == 1
