"""Copies of a rank's state: files of a checkpoint before any byte is copied, and beside training.

``capture_engine``: the files that a rank would write: pickles, and the tensors that they refer to.

``Snapshot``: files of one rank in shared memory, laid out as on the disk. Parameters and moments do not change between
the optimizer's update and the next one. So a thread copies them while the next forward and backward passes run, and the
update waits for it. Before a tensor is copied its checksum is computed in place; whoever uses the snapshot later
compares it with the copy. Each file's tensors are also searched for NaN and Inf. ``why_not``: whether the hosts' memory
has room for it.

While training waits nothing is copied (``NoCopy``), and the rank writes its files itself (``OwnWriter``).
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import shutil
import socket
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.checkpoint.files import layer_of, rank_state_file
from megasdc.checkpoint.manifest import find_wrong_place
from megasdc.checkpoint.ranks import FolderRanks, RankProblem, describe_error
from megasdc.checkpoint.writer_process import (
    Act,
    FileLayout,
    StoreTask,
    TakenFile,
    Task,
    TaskResult,
    act,
    describe_stored,
    directory,
    error_result,
    lay_out,
    local_header,
    write_texts,
)
from megasdc.common.durable import sync_path
from megasdc.common.host import SNAPSHOT_SHARE, free_memory, shared_folder
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bits import are_finite, dtype_name
from megasdc.tensors.checksum import default_algorithm, read_back

_PIECE = 1 << 20
"""Bytes in steps of which memory for a file grows, so that a slightly longer pickle needs no new mapping."""


class _Image:
    """Shared memory for one file, which stays mapped and is filled again for each snapshot.

    Args:
        name: name of the file, for the system.
        path: path in shared memory; None: it has none, and ends with this process.
        on_device: whether a CUDA device copies into it.
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
        """Path by which other processes of this user can open the file."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def fit(self, size: int) -> None:
        """Give the file its size in bytes, and allocate memory that it does not have yet.

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
        """The mapped memory: the file's bytes, and some beyond its end."""
        assert self._map is not None, "fit comes first"
        return self._map

    def _register(self) -> None:
        """Register the memory with the CUDA driver, so that the device copies into it without a buffer in between."""
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
        """Release the memory; a file with a path stays."""
        self._unmap()
        os.close(self._file)


class Snapshot:
    """Shared memory for a rank's snapshot, which is reused for the next one.

    Args:
        device: device of the run's tensors.
        folder: folder of the files in shared memory; None: they have no paths.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self._device, self.folder = device, folder
        self._images: dict[str, _Image] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._copying: Future[list[TakenFile]] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def prepare(self, files: Sequence[CapturedFile]) -> None:
        """Allocate memory for the files of the next snapshot, and release that of others.

        Raises:
            OSError: memory is full.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
            self._threads.submit(int)  # begins its thread now: it would hold the interpreter while training waits
        names = {one.name for one in files}
        for gone in [name for name in self._images if name not in names]:
            self._images.pop(gone).close()
            if self.folder is not None:
                (self.folder / gone).unlink(missing_ok=True)
        for one in files:
            if one.name not in self._images:
                path = None if self.folder is None else self.folder / one.name
                self._images[one.name] = _Image(one.name, path, self._stream is not None)
            self._images[one.name].fit(one.layout.size_bytes)

    def start_copy(self, files: Sequence[CapturedFile]) -> None:
        """Begin to copy files for which ``prepare`` has allocated memory; returns at once.

        Their tensors must not change until ``wait`` has returned.
        """
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        assert self._threads is not None, "prepare comes first"
        self._copying = self._threads.submit(self._copy, list(files), ready)

    def _copy(self, files: list[CapturedFile], ready: Any) -> list[TakenFile]:
        if self._stream is None:
            return self._fill(files)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            return self._fill(files)

    def _fill(self, files: list[CapturedFile]) -> list[TakenFile]:
        algorithm = default_algorithm(self._device)
        found: list[tuple[CapturedFile, list[int | Tensor], bool]] = []
        for one in files:
            memory, sums = self._images[one.name].memory, list[int | Tensor]()
            one.layout.write_contents(memoryview(memory))
            for tensor, member in zip(one.tensors, one.layout.tensors, strict=True):
                if not member.size_bytes:
                    sums.append(0)
                    continue
                sums.append(algorithm.start(tensor))
                place = torch.frombuffer(memory, dtype=torch.uint8, count=member.size_bytes, offset=member.offset)
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            found.append((one, sums, one.finite))
        if self._stream is not None:
            self._stream.synchronize()
        return [
            TakenFile(
                one.name,
                self._images[one.name].path,
                one.layout.without_contents(),
                read_back(sums),
                algorithm.name,
                [tensor.element_size() for tensor in one.tensors],
                list(map(xxhash.xxh3_64_intdigest, one.layout.contents)),
                one.described,
                finite,
            )
            for one, sums, finite in found
        ]

    def wait(self) -> list[TakenFile]:
        """Wait until all files are copied, and return them; their tensors may change then.

        Raises:
            OSError, RuntimeError: they could not be copied.
        """
        assert self._copying is not None, "start_copy comes first"
        copying, self._copying = self._copying, None
        if (failed := copying.exception()) is not None:
            raise failed.with_traceback(None)  # its frames hold the memory
        return copying.result()

    def close(self) -> None:
        """Release all memory, after the end of a copy that still runs."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = self._copying = None
        while self._images:
            self._images.popitem()[1].close()


class NoCopy:
    """In the place of a ``Snapshot``: files with the run's own tensors, which do not change while training waits."""

    folder: Path | None = None

    def prepare(self, files: Sequence[CapturedFile]) -> None:
        """No memory is needed."""

    def start_copy(self, files: Sequence[CapturedFile]) -> None:
        """Keep the files for ``wait``."""
        self._files = list(files)

    def wait(self) -> list[CapturedFile]:
        """The files."""
        return self._files

    def close(self) -> None:
        """Nothing is to be released."""


class OwnWriter:
    """In the place of a ``WriterProcess``: the rank does each task itself, at once; training waits meanwhile."""

    def __init__(self) -> None:
        self._answer = TaskResult()

    def send(self, task: Task) -> None:
        """Write captured files, or act; there is no partner."""
        tasks: dict[type, Callable[[Any], TaskResult]] = {StoreTask: _write, Act: act}
        try:
            self._answer = tasks[type(task)](task)
        except Exception as error:  # whatever it is, this rank must tell the others
            self._answer = error_result(error)

    def poll_result(self) -> TaskResult:
        """Result of the last task."""
        return self._answer

    def start(self) -> None:
        """Nothing is to be started."""

    def hurry(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is to be ended."""


def _write(task: StoreTask) -> TaskResult:
    for file in task.files:
        path = task.target / file.name
        try:
            write_file(path, file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    write_texts(task)
    files = {file.name: file.described for file in task.files} | dict.fromkeys(task.texts)
    return TaskResult(stored=[describe_stored(task.target / name, one) for name, one in files.items()])


def write_file(path: Path, file: CapturedFile) -> None:
    """Write a captured file, and wait until it is on the disk.

    Sync: waits for the device; one tensor at a time is copied from there.
    """
    tensors, checksums = iter(file.tensors), []
    with open(path, "wb") as written:
        for member in file.layout.members:
            content: Any = member.content
            if content is None:
                flat = next(tensors).detach().cpu().contiguous().view(-1)
                content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
            checksums.append(zlib.crc32(content))
            written.write(local_header(member, checksums[-1]))
            written.write(content)
        written.write(directory(file.layout, checksums))
    sync_path(path)


_PROTOCOL = 2
"""Protocol version of pickles, the same as in ``torch.save``."""
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""Class by which a pickle names the data type of a storage."""


@dataclass(frozen=True)
class CapturedFile:
    """A file of a checkpoint that is not written yet.

    Attributes:
        name: name in the checkpoint's folder.
        layout: offsets of its parts, with the pickle.
        tensors: the run's own tensors, not copies, in the order of the layout.
        described: for a layer's file, data type and shape of each tensor, else None.
    """

    name: str
    layout: FileLayout
    tensors: list[Tensor]
    described: dict[str, str] | None

    @property
    def finite(self) -> bool:
        """Whether its tensors hold neither NaN nor Inf."""
        return are_finite(self.tensors)


@dataclass(frozen=True)
class SavedState:
    """State saved beside the engine's own.

    Attributes:
        shared_state: JSON-compatible values, the same on all ranks.
        rank_state: this rank's own values and tensors, in plain containers.
        client_state: further top-level keys of DeepSpeed's file of each stage, the same on all ranks.
    """

    shared_state: dict[str, Any]
    rank_state: dict[str, Any]
    client_state: dict[str, Any] = field(default_factory=dict)

    @property
    def finite_step(self) -> int | None:
        """Last optimizer step with a finite loss and gradient norm; None: not known."""
        return self.shared_state.get("finite_step")

    @property
    def wrong_place(self) -> str | None:
        """Sentence on an error in the replicas' positions in the data; None: no error is known."""
        return find_wrong_place(self.shared_state)


def with_plain_stage(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state with the ZeRO stage as a number.

    DeepSpeed saves it as an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``, which the load
    into an engine refuses.
    """
    optimizer = state_dict.get("optimizer_state_dict")
    if not isinstance(optimizer, dict) or not isinstance(stage := optimizer.get("zero_stage"), Enum):
        return state_dict
    return {**state_dict, "optimizer_state_dict": {**optimizer, "zero_stage": stage.value}}


def describe_tensors(state: dict[str, Any]) -> dict[str, str]:
    """Data type and shape of each tensor of a state dict, such as ``float32[64, 64]``."""
    return {
        name: f"{dtype_name(value.dtype)}{list(value.shape)}"
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def wrapped_writer(engine: Any, writer: CapturingWriter, writes_model: bool, *, every_node: bool) -> Iterator[None]:
    """Context that installs a writer in a PipelineEngine instead of DeepSpeed's and removes it again.

    DeepSpeed writes the weights on the first replica only. With node-local storage (``every_node``), the first rank of
    each stage and tensor rank on a node is made to write them too: ``save_non_zero_checkpoint`` opens the file of the
    stage, and the grid's ``data_parallel_id`` the files of its layers. Its two recovery scripts are not copied: they
    cannot read checkpoints of a pipeline engine. Ranks do not compare the tag, which is always the same.
    """
    grid, module = engine.grid, engine.module
    before = (engine.checkpoint_engine, engine.save_non_zero_checkpoint, grid.data_parallel_id)
    parallel_write = module.checkpoint_parallel_write_pipeline
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda save_path: None
    engine._checkpoint_tag_validation = lambda tag: None
    if every_node:
        engine.save_non_zero_checkpoint = writes_model
        module.checkpoint_parallel_write_pipeline = False
        grid.data_parallel_id = 0 if writes_model else 1
    try:
        yield
    finally:
        engine.checkpoint_engine, engine.save_non_zero_checkpoint, grid.data_parallel_id = before
        module.checkpoint_parallel_write_pipeline = parallel_write
        del engine._copy_recovery_script, engine._checkpoint_tag_validation  # uncovers the methods of the class


class CapturingWriter:
    """Replaces DeepSpeed's checkpoint engine during a capture: files are kept instead of written.

    ``captured``: the files so far, whose tensors must not change before they are copied; ``problem``: the last error of
    a file that cannot be saved; None: there is none.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.problem: RankProblem | None = None
        self.captured: list[CapturedFile] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing is written, so no folder is needed."""

    def preserves_storage_sharing(self) -> bool:
        """Whether a view is saved with the whole memory that it is part of; DeepSpeed then clones views first."""
        return False

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep the content of one file, or store the error."""
        try:
            self.captured.append(capture(with_plain_stage(state_dict), Path(path).name))
        except Exception as error:  # whatever it is, this rank must reach the barrier and report it
            self.problem = describe_error(error, f"save {Path(path).name}")


def capture_engine(
    engine: Any, dims: ParallelDims, place: FolderRanks, state: SavedState
) -> tuple[list[CapturedFile], RankProblem | None]:
    """The files that this rank would write in a save, and the problem if one cannot be saved; None: all can.

    Collective: all ranks of the world.
    """
    writer = CapturingWriter(engine.checkpoint_engine)
    node_local = place.among.storage == "node_local"
    with wrapped_writer(engine, writer, place.writes_model(dims), every_node=node_local):
        engine.save_checkpoint("captured", tag=".", client_state=state.client_state, save_latest=False)
    writer.save(state.rank_state, rank_state_file(place.rank))
    return writer.captured, writer.problem


def capture(state: dict[str, Any], name: str) -> CapturedFile:
    """Pickle a state as ``torch.save`` does, each tensor without the memory around it.

    Args:
        name: name of the file.

    Raises:
        ValueError: a tensor has attributes that would get lost, or a type that is not supported.
        TypeError, pickle.PicklingError: something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(state)
    sizes = [tensor.numel() * tensor.element_size() for tensor in pickler.tensors]
    described = describe_tensors(state) if layer_of(name) is not None else None
    return CapturedFile(name, lay_out(Path(name).stem, buffer.getvalue(), sizes), pickler.tensors, described)


@dataclass(frozen=True)
class _Stored:
    """Placeholder for a tensor's memory while its state is pickled."""

    index: int
    dtype: torch.dtype
    location: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickler that writes references to tensors' memory as ``torch.save``; ``tensors``: the tensors, by number."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, _PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        """Reference to a tensor's memory; None: the object is none."""
        if isinstance(obj, _Stored):
            return "storage", _STORAGES[obj.dtype], str(obj.index), obj.location, obj.numel
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Function and arguments that rebuild a tensor; other objects are pickled as usual."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        if type(obj) not in (Tensor, torch.nn.Parameter) or vars(obj):
            raise ValueError(f"a tensor of type {type(obj).__name__} with attributes {sorted(vars(obj))} is not saved")
        if isinstance(obj, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (obj.data, obj.requires_grad, OrderedDict())
        if obj.dtype not in _STORAGES:
            raise ValueError(f"a tensor of type {obj.dtype} is not saved, only of {', '.join(map(str, _STORAGES))}")
        device = obj.device
        location = device.type if device.index is None else str(device)
        stored = _Stored(len(self.tensors), obj.dtype, location, obj.numel())
        self.tensors.append(obj.detach())
        strides = torch.empty(obj.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (stored, 0, obj.size(), strides, obj.requires_grad, OrderedDict())


GIB, MIB = 1 << 30, 1 << 20
LEAST_BYTES = 64 << 20
"""Size of a rank's state in bytes below which a snapshot saves no time: writing it takes a fraction of a second."""


def why_not(size: int, group: dist.ProcessGroup | None, *, is_asked: bool, with_names: bool = False) -> str | None:
    """Reason why snapshots are not taken, the same on all ranks; None: they are taken.

    Args:
        size: bytes that this rank's snapshots still need.
        group: process group of all ranks, on the host.
        is_asked: whether small states are snapshotted too, as the configuration asks.
        with_names: whether the files have paths in the folder of shared memory, whose size is limited too.

    Collective: the group.
    """
    room = min(free_memory(), shutil.disk_usage(shared_folder()).free) if with_names else free_memory()
    told = gather_objects((socket.gethostname(), size, room), group)
    largest = max(one for _, one, _ in told)
    if largest < LEAST_BYTES and not is_asked:
        return f"the state of a rank has {largest / MIB:,.1f} MiB, which is written faster than it is worth"
    for host in dict.fromkeys(name for name, _, _ in told):
        needed = sum(one for name, one, _ in told if name == host)
        free = min(one for name, _, one in told if name == host)
        if needed > SNAPSHOT_SHARE * free:
            return (
                f"the snapshots of the ranks on {host} need {needed / MIB:,.1f} MiB of memory, and of the "
                f"{free / MIB:,.1f} MiB that are free {f'in {shared_folder()} ' if with_names else ''}there they may "
                f"take {SNAPSHOT_SHARE:.0%}: use fewer ranks a host, or more memory"
                f"{f', or a larger {shared_folder()}' if with_names else ''}"
            )
    return None
