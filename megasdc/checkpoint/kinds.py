"""Kinds of folders, for messages about a folder of another kind than the one that a command needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import (
    MANIFEST_FILE,
    UNIVERSAL_FILE,
    UNIVERSAL_STEP,
    WEIGHTS_FILE,
    list_steps,
    step_folder,
)
from megasdc.checkpoint.formats.deepspeed_names import stage_file

CHECKPOINT = "a checkpoint"
CHECKPOINTS = "a folder of checkpoints"
UNIVERSAL = "a universal checkpoint"
UNIVERSALS = "a folder of universal checkpoints"
INITIAL = "initial weights, made by import-hf"
DATA = "prepared data"
MODEL = "a Hugging Face model"
ZERO = "a checkpoint of DeepSpeed without a manifest of megasdc"
ZEROS = "a folder of checkpoints of DeepSpeed"
DCP = "a folder of torch.distributed.checkpoint"
RUN = "a run folder"
ONE_CHECKPOINT = "one checkpoint or one model"
"""What is needed to compare or look at tensors."""


def is_universal(folder: Path | str) -> bool:
    """Whether a folder is a universal checkpoint, complete or not."""
    return (Path(folder) / UNIVERSAL_FILE).exists()


def list_universal(folder: Path | str) -> list[Path]:
    """Universal checkpoints in a folder, complete or not, in order of name; empty if the folder does not exist."""
    path = Path(folder)
    if not path.is_dir():
        return []
    entries = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [entry for entry in entries if is_universal(entry) or entry.name.startswith(UNIVERSAL_STEP)]


def is_initial_weights(folder: Path | str) -> bool:
    """Whether a folder was made by ``megasdc import-hf``."""
    return (Path(folder) / WEIGHTS_FILE).is_file()


_REMEDIES = {
    CHECKPOINT: "give it to eval, generate, export-hf or megasdc.model.initial_weights, or convert it with megasdc "
    "convert-checkpoint {path} --to universal",
    CHECKPOINTS: "give it to eval, generate, export-hf or megasdc.model.initial_weights, or convert the newest in it "
    "with megasdc convert-checkpoint {path} --to universal",
    UNIVERSAL: "start a run from it with megasdc.checkpoint.universal={path}; eval, generate and export-hf read the "
    "checkpoint that it was made from",
    UNIVERSALS: "start a run from one of them with megasdc.checkpoint.universal; eval, generate and export-hf read the "
    "checkpoints that they were made from",
    INITIAL: "train from it with megasdc.model.initial_weights={path}, or give it to eval, generate or export-hf",
    DATA: "name it in megasdc.data.path",
    MODEL: "import it with megasdc import-hf {path} OUT",
    RUN: "its checkpoints are in {path}/checkpoints",
    ZERO: "tools/compare_checkpoints.py reads it; a run cannot start from it",
    ZEROS: "give one of the folders in it, such as that which {path}/latest names, to tools/compare_checkpoints.py",
    DCP: "tools/compare_checkpoints.py reads it; a run cannot start from it",
}
_REMEDIES_FOR_UNIVERSAL = {
    CHECKPOINT: "convert it with megasdc convert-checkpoint {path} --to universal",
    CHECKPOINTS: "convert the newest in it with megasdc convert-checkpoint {path} --to universal",
    RUN: "convert the newest of its checkpoints with megasdc convert-checkpoint {path}/checkpoints --to universal",
}
"""Remedies where a universal checkpoint is needed."""
_SIGNS: dict[str, Callable[[Path], Any]] = {
    UNIVERSAL: is_universal,
    INITIAL: is_initial_weights,
    DATA: lambda path: "splits" in _content(path / MANIFEST_FILE),
    CHECKPOINT: lambda path: (path / MANIFEST_FILE).exists(),
    CHECKPOINTS: list_steps,
    UNIVERSALS: list_universal,
    MODEL: lambda path: "model_type" in _content(path / "config.json"),
    ZERO: lambda path: (path / stage_file()).exists(),
    ZEROS: lambda path: (path / "latest").is_file(),
    DCP: lambda path: any((path / name).exists() for name in (".metadata", "__0_0.distcp")),
    RUN: lambda path: (path / "checkpoints").is_dir() or (path / "resolved.json").is_file(),
}
"""Tests of each kind; the first that holds decides."""


def kind_of(path: Path | str) -> str | None:
    """Kind of a folder, by the files that only such a folder holds; None: unknown."""
    return next((kind for kind, sign in _SIGNS.items() if sign(Path(path))), None)


def explain_folder(path: Path | str, needed: str) -> str | None:
    """A sentence that a folder is of another kind than ``needed``, with a remedy; None if its kind is unknown."""
    kind = kind_of(path)
    if kind is None:
        return None
    remedy = _REMEDIES[kind]
    if needed == UNIVERSAL:
        inside = list_universal(path) or list_universal(Path(path) / "checkpoints")
        remedy = f"give {inside[-1]}, which lies in it" if inside else _REMEDIES_FOR_UNIVERSAL.get(kind, remedy)
    elif needed == ONE_CHECKPOINT and (inside := _checkpoints_in(Path(path))):
        remedy = f"name one of its checkpoints, such as {inside[-1]}"
    return f"{path} is {kind}; needed is {needed}: {remedy.format(path=path)}"


def _checkpoints_in(path: Path) -> list[Path]:
    """Checkpoints in a folder of several or in that of a run, universal ones first, each sort in order."""
    folders = (path, path / "checkpoints")
    found = [one for folder in folders for one in list_universal(folder)]
    return found + [folder / step_folder(step) for folder in folders for step in list_steps(folder)]


def _content(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
