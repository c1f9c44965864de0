"""Shared state of a checkpoint: ``megasdc.json``, plain values that are the same on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megasdc.config import ModelSection
from megasdc.errors import CheckpointError

SHARED_STATE_FILE = "megasdc.json"
_COUNTERS = ("step", "tokens", "samples", "skipped_steps", "vocab_size", "tokenizer_checksum", "loader")


def read_shared_state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``megasdc.json``.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    file = folder / SHARED_STATE_FILE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} cannot be read: it is a {type(state).__name__}, needed is an object")
    return state


def counters_of(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a shared state that tells how far training has come; the rest is configuration and hooks."""
    return {key: state[key] for key in _COUNTERS if key in state}


def model_of(state: dict[str, Any], folder: Path) -> ModelSection:
    """The model section in a shared state; CheckpointError, with the file in ``folder``, if missing or invalid."""
    try:
        return ModelSection.model_validate(state["config"]["megasdc"]["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / SHARED_STATE_FILE} does not hold the model's section: {error!r}") from error
