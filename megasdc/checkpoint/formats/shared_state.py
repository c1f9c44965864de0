"""Shared state of a checkpoint: ``megasdc.json``, plain values that are the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megasdc.common.durable import parse_json
from megasdc.common.errors import CheckpointError
from megasdc.config.sections.model import ModelSection
from megasdc.data.position import num_passed

SHARED_STATE_FILE = "megasdc.json"
_COUNTERS = ("step", "tokens", "samples", "skipped_steps", "vocab_size", "tokenizer_checksum", "loader")


def read_shared_state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``megasdc.json``.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    file = folder / SHARED_STATE_FILE
    try:
        state = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} cannot be read: it is a {type(state).__name__}, needed is an object")
    return state


def counters_of(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a shared state that tells how far training has come; the rest is configuration and hooks."""
    return {key: state[key] for key in _COUNTERS if key in state}


def uncounted_samples(state: dict[str, Any]) -> int:
    """How many samples the places in the data of a shared state are past, beyond the samples that its steps counted.

    Raises:
        CheckpointError: it does not hold the places of all replicas, or something that is no such state.
    """
    try:
        skip = [range(first, end) for first, end in state["config"]["megasdc"]["data"].get("skip", [])]
        return num_passed(state["loader"], skip) - int(state["samples"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{SHARED_STATE_FILE} does not hold the places in the data: {error!r}") from error


def find_wrong_place(state: dict[str, Any]) -> str | None:
    """What is wrong with the places in the data that a shared state holds, as a sentence; None: nothing is known to be.

    Steps count what they take: whole batches, without micro-batches that were dropped, and one that replicas share
    once. So their count, and the samples that were given up, say how far all replicas together are in the stream.
    What cancels out between replicas is not seen here: checks of every step compare each of them before it is saved.
    Nothing is known of a state that an earlier version saved, which does not say what was given up.
    """
    if state.get("uncounted_samples") is None:
        return None
    try:
        wrong = uncounted_samples(state) - state["uncounted_samples"]
    except CheckpointError as error:
        return str(error)
    if not wrong:
        return None
    right = state["samples"] + state["uncounted_samples"]
    return (
        f"{SHARED_STATE_FILE}: replicas have consumed {right + wrong} samples of the stream, {right} follow from its "
        "steps and decisions"
    )


def model_of(state: dict[str, Any], folder: Path) -> ModelSection:
    """The model section in a shared state; CheckpointError, with the file in ``folder``, if missing or invalid."""
    try:
        return ModelSection.model_validate(state["config"]["megasdc"]["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / SHARED_STATE_FILE} does not hold the model's section: {error!r}") from error
