"""What a save would write, caught before any byte is copied: pickles, and the tensors that they refer to."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.files import layer_of, rank_state_file
from megasdc.checkpoint.ranks import FolderRanks, RankProblem, describe_error
from megasdc.checkpoint.save import SavedState, describe_tensors, with_plain_stage, wrapped_writer
from megasdc.checkpoint.snapshots.torch_file import FileLayout, lay_out
from megasdc.parallel.dims import ParallelDims

_PROTOCOL = 2
"""Of pickles, as ``torch.save`` has it."""
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
    """A file that is not written yet.

    Attributes:
        name: in the checkpoint's folder.
        layout: where the tensors lie in the file.
        tensors: the run's own, in the order of the layout.
        described: for a layer's file, data type and shape of each tensor, else None.
    """

    name: str
    layout: FileLayout
    tensors: list[Tensor]
    described: dict[str, str] | None


class CapturingWriter:
    """Replaces DeepSpeed's checkpoint engine during a capture: it keeps what would be written.

    ``captured``: the files so far, whose tensors must not change before they are copied; ``problem``: why one cannot be
    saved.
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
        """Whether a view is saved with the whole memory that it is part of; asked whether to clone views first."""
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
    """The files that this rank would write in a save, and why they cannot be saved.

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
        name: of the file.

    Raises:
        ValueError: a tensor has attributes that would get lost.
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
    """Stands for a tensor's memory."""

    index: int
    dtype: torch.dtype
    location: str
    numel: int


class _Pickler(pickle.Pickler):
    """Writes references to tensors as ``torch.save`` does to their memory; ``tensors``: those referred to."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, _PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        """The reference to a tensor's memory."""
        if isinstance(obj, _Stored):
            return "storage", _STORAGES[obj.dtype], str(obj.index), obj.location, obj.numel
        return None

    def reducer_override(self, obj: Any) -> Any:
        """How tensors are rebuilt; all else as usual."""
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
