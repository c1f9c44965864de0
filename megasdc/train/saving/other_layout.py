"""Going on from a checkpoint of another layout: a universal one that the configuration names, or the run's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.formats.shared_state import find_wrong_place, read_shared_state
from megasdc.checkpoint.load_universal import OpenUniversal, load_universal, open_universal
from megasdc.checkpoint.manifest import Layout
from megasdc.checkpoint.places import Place, Problem, Ranks, describe_error, find_place, raise_together
from megasdc.checkpoint.resume import Chosen
from megasdc.checkpoint.views.load_states import load_states
from megasdc.common.errors import CheckpointError
from megasdc.config import RunConfig, precision_of
from megasdc.data.manifest import Manifest
from megasdc.determinism import seed_generators
from megasdc.engine.run import Run
from megasdc.train.changed_settings import ChangedSettings
from megasdc.train.saving.carried import check_skipped_samples, prolong_stream, restore_counters, tell_quantized

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """What a run goes on from.

    Args:
        state: shared state of the checkpoint.
        load: loads weights, moments, learning rate schedule and counters into the engine.
    """

    path: Path
    layout: Layout
    state: dict[str, Any]
    place: Place
    load: Callable[[], None]


def load_other_layout(run: Run, config: RunConfig, found: Chosen, leave: Callable[[], object]) -> dict[str, Any]:
    """Go on from a checkpoint of another layout; returns states of the hooks by class name.

    Each rank reads what it needs of the files. What is carried over is what ``start_from_universal`` does.

    Args:
        found: the files that this rank needs are on its host.
        leave: called once it is loaded.

    Raises:
        CheckpointError: it is of another model, or cannot be read; on all ranks.

    Collective: all ranks of the world.
    """
    place, started = find_place(Ranks("shared", run.host_group)), time.monotonic()
    state: dict[str, Any] = {}
    problem: Problem | None = None
    try:
        state = read_shared_state(found.path)
    except (CheckpointError, ValueError, OSError) as error:
        problem = describe_error(error, f"read {found.path}")
    raise_together(problem, place, f"{found.path} has another layout, and cannot be used")
    precision = precision_of(state["config"])

    def load() -> None:
        load_states(run.engine, found.path, found.manifest, precision, place)

    hooks = _go_on(run, config, _Source(found.path, found.manifest.layout, state, place, load))
    leave()
    if place.rank == 0:
        seconds = time.monotonic() - started
        logger.info("resumed from %s, saved with %s; read in %.1f s", found.path, found.manifest.layout, seconds)
        tell_quantized(run, found.manifest.quantized_moments_bits)
        run.events.emit(
            "resume",
            "other_layout",
            step=run.step,
            path=str(found.path),
            saved_layout=str(found.manifest.layout),
            layout=str(run.dims),
            seconds=seconds,
        )
    return hooks


def start_from_universal(run: Run, config: RunConfig, folder: str) -> dict[str, Any]:
    """Continue a run that was saved at any layout; returns states of the hooks by class name.

    Weights, moments, learning rate schedule and counters are restored. The data continue with any number of replicas,
    micro-batch and global batch: first the samples that only some replicas had consumed, then the rest of the stream.
    The random generators are seeded by ``seed_generators``. The run is at step 0, on return at the step loaded.

    Raises:
        CheckpointError: it is damaged or of another model, or something in it cannot be carried over and is not named
            in ``checkpoint.universal_without``; on all ranks.

    Collective: all ranks of the world.
    """
    section = config.megasdc.checkpoint
    found = open_universal(folder, Ranks(section.storage, run.host_group), verify=section.verify)

    def load() -> None:
        load_universal(run.engine, found)

    source = _Source(found.path, found.manifest.source_layout, found.shared_state, found.place, load)
    hooks = _go_on(run, config, source, section.universal_without)
    if run.dims.rank == 0:
        _tell_universal(run, config, found)
    return {} if "hooks" in section.universal_without else hooks


def _go_on(run: Run, config: RunConfig, source: _Source, without: Collection[str] = ()) -> dict[str, Any]:
    """Carry over everything, except what is named in ``without``; returns states of the hooks by class name."""
    dims, state = run.dims, source.state
    changed = ChangedSettings(run.engine, config, None)
    problem = changed.problem_of(state, source.layout.data)
    raise_together(problem, source.place, f"{source.path} cannot be used, nothing was changed")
    try:
        if "loader" not in without:
            if wrong := find_wrong_place(state):
                raise CheckpointError(wrong)
            run.loader.move_to(state["loader"])
            check_skipped_samples(state, config)
    except CheckpointError as error:
        hint = 'or name "loader" in megasdc.checkpoint.universal_without to start again at the first sample'
        problem = Problem(f"{error}; {hint}", storage=False)
    data = config.megasdc.data.path
    saved, now = state.get("tokenizer_checksum"), Manifest.load(data).tokenizer.checksum
    if saved not in (None, now):
        text = f"it was trained with a tokenizer of checksum {saved}, {data} was prepared with {now}"
        problem = Problem(f"{text}; give data of the same tokenizer", storage=False)
    what = f"{source.path} cannot continue with this data, nothing was changed"
    raise_together(problem, source.place, what)
    source.load()
    begun_again = {"uncounted_samples": -state["samples"]} if "loader" in without else {}
    restore_counters(run, {**state, **begun_again})
    prolong_stream(run)
    seed_generators(config.megasdc.training.seed, run.step, dims.rank)
    changed.apply(run)
    return changed.hook_states(state["hooks"])


def _tell_universal(run: Run, config: RunConfig, found: OpenUniversal) -> None:
    """Event and log lines of rank 0."""
    manifest, without = found.manifest, config.megasdc.checkpoint.universal_without
    batch, saved_batch = run.engine.samples_per_step, found.shared_state["config"].get("train_batch_size")
    run.events.emit(
        "resume",
        "universal",
        step=run.step,
        path=str(found.path),
        source=manifest.source,
        saved_layout=str(manifest.source_layout),
        layout=str(run.dims),
        without=list(without),
        precision=manifest.precision,
        global_batch=batch,
        saved_global_batch=saved_batch,
    )
    logger.info("continuing from step %d of %s, saved at %s", run.step, found.path, manifest.source_layout)
    tell_quantized(run, manifest.quantized_moments_bits)
    if run.step >= run.steps:
        run.events.emit("resume", "no_steps_left", step=run.step, steps=run.steps)
        logger.warning(
            "no steps are left: %s is at step %d, megasdc.training.steps is %d; nothing is trained, and no checkpoint "
            "is written at this layout; raise megasdc.training.steps to continue",
            found.path,
            run.step,
            run.steps,
        )
    if "loader" in without:
        logger.warning("the data starts again at its first sample: megasdc.checkpoint.universal_without has loader")
    if "hooks" in without:
        logger.warning("hooks start without their states: megasdc.checkpoint.universal_without has hooks")
    if saved_batch not in (None, "auto", batch):
        logger.warning("the global batch was %s samples and is %d now; the schedule counts steps", saved_batch, batch)
