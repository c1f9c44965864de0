"""Lazy access to files of ``torch.save``: tensors are located without reading or mapping them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.formats.allowlist import load_checked
from megasdc.checkpoint.formats.extents import Extent, Stamp, changed_error, place_in_file, read_whole
from megasdc.common.errors import CheckpointError

_SMALL_BYTES = 1 << 12
"""Tensors up to this size, such as counters, are read when the file is loaded."""


class StateFiles:
    """Files of ``torch.save``, each checked against the allow-list and opened once; large tensors are not read."""

    def __init__(self) -> None:
        self._states: dict[Path, Any] = {}
        self._stamps: dict[Path, Stamp] = {}

    def load(self, path: Path) -> Any:
        """The content of a file, with tensors of more than 4 KiB on ``meta``.

        FileNotFoundError if it does not exist, CheckpointError if it is unsafe or damaged.
        """
        if path not in self._states:
            self._stamps[path] = Stamp.of(path)
            try:
                state = load_checked(path, map_location="meta", members=True)
                if (now := Stamp.of(path)) != self._stamps[path]:
                    raise changed_error(path, self._stamps[path], now)
                self._states[path] = self._with_small(path, state)
            except CheckpointError as error:
                self._states[path] = error
        state = self._states[path]
        if isinstance(state, CheckpointError):
            raise state
        return state

    def tensor(self, path: Path, *keys: Any) -> Extent | Tensor:
        """Extent of a tensor in a file; the tensor itself if it is small.

        KeyError if there is none under these keys; other errors as in ``load``.
        """
        value = self.load(path)
        for key in keys:
            if isinstance(value, list) and isinstance(key, int) and key >= len(value):
                raise KeyError(key)
            value = value[key]
        if not isinstance(value, Tensor):
            raise KeyError(keys[-1] if keys else path.name)
        return self.place(path, value)

    def place(self, path: Path, value: Tensor) -> Extent | Tensor:
        """Extent of a tensor of ``load`` in its file; the tensor itself if it is small or not contiguous."""
        if value.device.type != "meta":
            return value.detach()
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(f"{path} holds a tensor of layout {value.layout}, which cannot be compared")
        offset, reach = place_in_file(value)
        if value.is_contiguous():
            return Extent(path, self._stamps[path], offset, value.dtype, tuple(value.shape))
        run = read_whole(Extent(path, self._stamps[path], offset, value.dtype, (reach,)))
        return run.as_strided(value.shape, value.stride())

    def read(self, path: Path, value: Any) -> Any:
        """A value of ``load``, with its elements if it is a tensor; CheckpointError if they cannot be read."""
        if not isinstance(value, Tensor):
            return value
        found = self.place(path, value)
        return read_whole(found) if isinstance(found, Extent) else found

    def _with_small(self, path: Path, value: Any) -> Any:
        """The same value with its small tensors read."""
        if isinstance(value, Tensor) and value.layout is torch.strided and value.nbytes <= _SMALL_BYTES:
            return self.read(path, value)
        if isinstance(value, dict):
            value.update({key: self._with_small(path, item) for key, item in value.items()})
        elif isinstance(value, list):
            value[:] = [self._with_small(path, item) for item in value]
        elif type(value) is tuple:
            return tuple(self._with_small(path, item) for item in value)
        return value
