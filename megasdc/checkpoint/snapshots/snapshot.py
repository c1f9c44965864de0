"""A snapshot in shared memory: files of one rank, laid out as on the disk, filled beside training.

Parameters and moments do not change between the optimizer's update and the next one. So a thread copies them while the
next forward and backward passes run, and the update waits for it. Before a tensor is copied its checksum is taken where
it lies; whoever uses the snapshot later compares it with the copy. Beside it each file's tensors are looked at for NaN
and Inf.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.snapshots.capture import CapturedFile
from megasdc.checkpoint.snapshots.messages import TakenFile
from megasdc.tensors.bits import are_finite
from megasdc.tensors.checksum import default_algorithm, read_back

_PIECE = 1 << 20
"""Memory for a file grows in steps of this, so that a pickle that got longer needs no new one."""


class _Image:
    """Shared memory for one file, which stays mapped and is filled again for each snapshot.

    Args:
        path: of a file in shared memory; None: it has no name, and goes with this process.
    """

    def __init__(self, name: str, path: Path | None, on_device: bool) -> None:
        self._on_device = on_device
        if path is None:
            self._file = os.memfd_create(name)
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._map: mmap.mmap | None = None
        self._registered = 0

    @property
    def path(self) -> Path:
        """Where other processes of this user can open it."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def fit(self, size: int) -> None:
        """Give the file its size, and allocate all of it that is not there yet.

        Raises:
            OSError: memory is full.
        """
        if self._map is None or len(self._map) < size:
            self._unmap()
            room = -(-size // _PIECE) * _PIECE
            os.posix_fallocate(self._file, 0, room)
            # In the page tables at once: a copy that runs beside training would else stop at each page.
            self._map = mmap.mmap(self._file, room, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            if self._on_device:
                self._register()
        held = os.fstat(self._file).st_size
        if size > held:  # only what is new: the system looks at each page it is asked for, also at one that is there
            os.posix_fallocate(self._file, held, size - held)
        os.ftruncate(self._file, size)

    @property
    def memory(self) -> mmap.mmap:
        """Its bytes, and some that are not in the file."""
        assert self._map is not None, "fit comes first"
        return self._map

    def _register(self) -> None:
        """Tell the driver, so that the device copies into it without a buffer in between."""
        first = torch.frombuffer(self.memory, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(first.data_ptr(), len(self.memory), 0))
        self._registered = first.data_ptr()

    def _unmap(self) -> None:
        if self._registered:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._registered))
            self._registered = 0
        if self._map is not None:
            self._map.close()
            self._map = None

    def close(self) -> None:
        """Release it; a file with a name stays."""
        self._unmap()
        os.close(self._file)


class Snapshot:
    """Shared memory for one snapshot of a rank, taken again and again.

    Args:
        device: of the run's tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._images: dict[str, _Image] = {}
        self._copying: threading.Thread | None = None
        self._files: list[CapturedFile] = []
        self._failed: BaseException | None = None
        self._sums: list[list[int | Tensor]] = []
        self._finite: list[bool] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_copying(self) -> bool:
        """Whether a copy was begun that was not waited for."""
        return self._copying is not None

    def prepare(self, files: Sequence[CapturedFile], folder: Path | None = None) -> None:
        """Allocate memory for files; that of files that are no more is released.

        Args:
            folder: in shared memory, where they lie, the same since they were allocated; None: they have no names.

        Raises:
            OSError: memory is full.
        """
        names = {one.name for one in files}
        for gone in [name for name in self._images if name not in names]:
            self._images.pop(gone).close()
            if folder is not None:
                (folder / gone).unlink(missing_ok=True)
        for one in files:
            if one.name not in self._images:
                path = None if folder is None else folder / one.name
                self._images[one.name] = _Image(one.name, path, self._stream is not None)
            self._images[one.name].fit(one.layout.size_bytes)

    def take(self, files: Sequence[CapturedFile]) -> None:
        """Begin to copy files, which ``prepare`` has seen; returns at once.

        Their tensors must not change until ``wait`` has returned.
        """
        self._files, self._sums, self._failed = list(files), [[] for _ in files], None
        self._finite = []
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        self._copying = threading.Thread(target=self._copy, args=(ready,), name="snapshot", daemon=True)
        self._copying.start()

    def _copy(self, ready: Any) -> None:
        try:
            if self._stream is None:
                self._fill()
            else:
                self._stream.wait_event(ready)
                with torch.cuda.stream(self._stream):
                    self._fill()
                self._stream.synchronize()
        except BaseException as error:  # the rank raises it in ``wait``
            self._failed = error

    def _fill(self) -> None:
        algorithm = default_algorithm(self._device)
        for one, sums in zip(self._files, self._sums, strict=True):
            memory = self._images[one.name].memory
            one.layout.write_contents(memoryview(memory))
            for tensor, member in zip(one.tensors, one.layout.tensors, strict=True):
                if not member.size_bytes:
                    sums.append(0)
                    continue
                sums.append(algorithm.start(tensor))
                place = torch.frombuffer(memory, dtype=torch.uint8, count=member.size_bytes, offset=member.offset)
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            self._finite.append(are_finite(one.tensors))

    def wait(self) -> list[TakenFile]:
        """Wait until all is copied; the tensors may change then.

        Raises:
            OSError, RuntimeError: it could not be copied.
        """
        assert self._copying is not None, "take comes first"
        self._copying.join()
        self._copying = None
        files, self._files = self._files, []
        if self._failed is not None:
            raise self._failed.with_traceback(None)  # its frames hold the memory
        name = default_algorithm(self._device).name
        return [
            TakenFile(
                one.name,
                self._images[one.name].path,
                one.layout.without_contents(),
                read_back(sums),
                name,
                [tensor.element_size() for tensor in one.tensors],
                [
                    xxhash.xxh3_64_intdigest(member.content)
                    for member in one.layout.members
                    if member.content is not None
                ],
                one.described,
                finite,
            )
            for one, sums, finite in zip(files, self._sums, self._finite, strict=True)
        ]

    def close(self) -> None:
        """Release all memory, after a copy that still runs."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        self._failed = None  # its frames hold the memory
        while self._images:
            self._images.popitem()[1].close()
