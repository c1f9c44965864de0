"""Safe wrapper of DeepSpeed's file writer during a save.

``engine.save_checkpoint`` (0.19.8) waits for all ranks at its end. A rank whose write fails must reach that barrier, or
the others wait until their timeout; so the wrapper stores the first error instead of raising it, and writes nothing
after it. It also records which files the rank has written, and waits until each is on the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

from megasdc.checkpoint.files import layer_of
from megasdc.checkpoint.places import RankProblem, describe_error
from megasdc.common.durable import sync_path
from megasdc.tensors.bits import are_finite, dtype_name

Writer = TypeVar("Writer")


class RecordingWriter:
    """Replaces DeepSpeed's checkpoint engine during one save; ``problem`` is its first error.

    ``written``: by path, data types and shapes for files of layers, None for other files; ``not_finite``: names of
    those with NaN or Inf in a tensor.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.problem: RankProblem | None = None
        self.written: dict[Path, dict[str, str] | None] = {}
        self.not_finite: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder, or store the error."""
        if self.problem is None:
            try:
                self._inner.makedirs(path, exist_ok=exist_ok)
            except OSError as error:
                self.problem = describe_error(error, f"create {path}")

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write one file and wait for the disk, or store the error; after an error nothing is written."""
        if self.problem is not None:
            return
        target = Path(path)
        try:
            self._inner.save(with_plain_stage(state_dict), path)
            sync_path(target)
            if not are_finite(state_tensors(state_dict)):
                self.not_finite.append(target.name)
        except Exception as error:  # whatever it is, this rank must reach the barrier and report it
            self.problem = describe_error(error, f"write {target}")
            return
        self.written[target] = describe_tensors(state_dict) if layer_of(target.name) is not None else None


def with_plain_stage(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state with the ZeRO stage as a number.

    DeepSpeed saves it as an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``, which the load
    into an engine refuses.
    """
    optimizer = state_dict.get("optimizer_state_dict")
    if not isinstance(optimizer, dict) or not isinstance(stage := optimizer.get("zero_stage"), Enum):
        return state_dict
    return {**state_dict, "optimizer_state_dict": {**optimizer, "zero_stage": stage.value}}


def state_tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state, in dicts, lists and tuples of any depth."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from state_tensors(value)


def describe_tensors(state: dict[str, Any]) -> dict[str, str]:
    """Data type and shape of each tensor of a state dict, such as ``float32[64, 64]``."""
    return {
        name: f"{dtype_name(value.dtype)}{list(value.shape)}"
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def wrapped_writer(engine: Any, writer: Writer, writes_model: bool, *, every_node: bool) -> Iterator[Writer]:
    """Context that installs a writer in a PipelineEngine instead of DeepSpeed's and removes it again.

    DeepSpeed writes the weights on the first replica only. With node-local storage (``every_node``), the first rank of
    each stage and tensor rank on a node is made to write them too: ``save_non_zero_checkpoint`` opens the file of the
    stage, and the grid's ``data_parallel_id`` the files of its layers. Its two recovery scripts are not copied: they
    cannot read checkpoints of a pipeline engine.
    """
    grid, module = engine.grid, engine.module
    before = (engine.checkpoint_engine, engine.save_non_zero_checkpoint, grid.data_parallel_id)
    parallel_write = module.checkpoint_parallel_write_pipeline
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda save_path: None
    if every_node:
        engine.save_non_zero_checkpoint = writes_model
        module.checkpoint_parallel_write_pipeline = False
        grid.data_parallel_id = 0 if writes_model else 1
    try:
        yield writer
    finally:
        engine.checkpoint_engine, engine.save_non_zero_checkpoint, grid.data_parallel_id = before
        module.checkpoint_parallel_write_pipeline = parallel_write
        del engine._copy_recovery_script  # uncovers the method of the class
