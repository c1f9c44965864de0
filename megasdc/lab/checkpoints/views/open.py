"""Opening a checkpoint of any format as a view, without an engine."""

from __future__ import annotations

from pathlib import Path

from megasdc.checkpoint.files import MANIFEST_FILE
from megasdc.checkpoint.formats.deepspeed_names import stage_file
from megasdc.checkpoint.kinds import CHECKPOINT, DCP, MODEL, ONE_CHECKPOINT, UNIVERSAL, ZERO, explain_folder, kind_of
from megasdc.checkpoint.views.deepspeed import open_deepspeed
from megasdc.checkpoint.views.view import View
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.views.dcp import open_dcp
from megasdc.lab.checkpoints.views.whole import open_file_view, open_hf_view, open_universal_view
from megasdc.lab.checkpoints.views.zero1 import open_zero1

_OPENERS = {
    CHECKPOINT: open_deepspeed,
    UNIVERSAL: open_universal_view,
    MODEL: open_hf_view,
    ZERO: open_zero1,
    DCP: open_dcp,
}


def open_view(path: Path) -> View:
    """Detect the format at a path and locate its tensors; tensors are not read, and nothing is written.

    Links that lead out of a folder are followed, which model caches require, and reported in ``notes``.

    Args:
        path: a checkpoint of any layout, a universal checkpoint, a folder of a Hugging Face model, of DeepSpeed with
            ZeRO-1 or 2 or of ``torch.distributed.checkpoint``, or one file.

    Raises:
        CheckpointError: the path is none of these, or its metadata cannot be read.
    """
    try:
        if path.is_file():
            return open_file_view(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} is {'no file or folder' if path.exists() else 'not there'}")
        kind = kind_of(path)
        if kind not in _OPENERS:
            raise CheckpointError(
                explain_folder(path, ONE_CHECKPOINT)
                or f"{path} is no checkpoint: it has no {MANIFEST_FILE}, universal.json, config.json of a model, "
                f"{stage_file()} or .metadata"
            )
        view = _OPENERS[kind](path)
        view.notes += _links_out(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return view


def _links_out(folder: Path) -> list[str]:
    """The note on links in a folder that lead out of it; empty if there are none."""
    root = folder.resolve()
    links = [file for file in sorted(folder.rglob("*")) if file.is_symlink()]
    out = [file for file in links if not file.resolve().is_relative_to(root)]
    if not out:
        return []
    first = f"{out[0].relative_to(folder)} -> {out[0].resolve()}"
    return [f"{folder} has {len(out)} links that lead out of it, the first {first}: what they lead to was compared"]
