"""Which format has a checkpoint, and what is in it? For tools that look at checkpoints without an engine."""

from __future__ import annotations

from pathlib import Path

from megasdc.checkpoint.files import MANIFEST_FILE
from megasdc.checkpoint.kinds import CHECKPOINT, MODEL, UNIVERSAL, explain_folder, kind_of
from megasdc.checkpoint.view import View
from megasdc.checkpoint.view_deepspeed import open_deepspeed
from megasdc.checkpoint.view_whole import open_file_view, open_hf_view, open_universal_view
from megasdc.errors import CheckpointError

_OPENERS = {CHECKPOINT: open_deepspeed, UNIVERSAL: open_universal_view, MODEL: open_hf_view}


def open_view(path: Path) -> View:
    """Find out what a path is, and where its tensors lie; tensors are not read.

    Args:
        path: a checkpoint of any layout, a universal checkpoint, a folder of a Hugging Face model, or one file.

    Raises:
        CheckpointError: it is nothing of these, or what says where tensors lie cannot be read.
    """
    if path.is_file():
        return open_file_view(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there")
    kind = kind_of(path)
    if kind in _OPENERS:
        return _OPENERS[kind](path)
    raise CheckpointError(
        explain_folder(path, "one checkpoint or one model")
        or f"{path} is no checkpoint: it has no {MANIFEST_FILE}, universal.json or config.json of a model"
    )
