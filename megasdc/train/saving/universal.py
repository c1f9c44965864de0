"""Going on from a universal checkpoint, which the configuration names, or which is made of another layout's."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from typing import Any

from megasdc.checkpoint.load_universal import OpenUniversal, load_universal, open_universal
from megasdc.checkpoint.places import Problem, Ranks, find_place, raise_together
from megasdc.checkpoint.resume import Chosen
from megasdc.checkpoint.universal import universal_folder
from megasdc.config import RunConfig
from megasdc.data.manifest import Manifest
from megasdc.determinism import seed_generators
from megasdc.durable import TEMPORARY_PREFIX
from megasdc.engine.run import Run
from megasdc.errors import CheckpointError, StorageError
from megasdc.interchange.convert import convert_to_universal
from megasdc.train.changed_settings import ChangedSettings
from megasdc.train.saving.carried import check_skipped_samples, prolong_stream, restore_counters, tell_quantized
from megasdc.train.saving.saver import checkpoint_folder

logger = logging.getLogger(__name__)


def load_other_layout(run: Run, config: RunConfig, found: Chosen, leave: Callable[[], object]) -> dict[str, Any]:
    """Go on from a checkpoint of another layout; returns states of the hooks by class name.

    Rank 0 makes it universal, in the checkpoint folder and under a name that the next start removes; it is removed
    again once it is loaded. What is carried over is what ``start_from_universal`` does.

    Args:
        found: its files are on rank 0's host, all of them.
        leave: called once it is loaded.

    Raises:
        CheckpointError: it cannot be converted, or its universal form not be loaded; on all ranks.
        StorageError: the universal form cannot be written; on all ranks.

    Collective: all ranks of the world.
    """
    place, started = find_place(Ranks("shared", run.host_group)), time.monotonic()
    made = checkpoint_folder(config) / f"{TEMPORARY_PREFIX}other_layout" / universal_folder(found.step)
    problem: Problem | None = None
    if place.rank == 0:
        logger.info(
            "%s was saved with %s, this run has %s: it is converted", found.path, found.manifest.layout, run.dims
        )
        try:
            convert_to_universal(found.path, made)
        except (CheckpointError, StorageError) as error:
            problem = Problem(str(error), storage=isinstance(error, StorageError))
    raise_together(problem, place, f"{found.path} has another layout, and cannot be converted")
    seconds = time.monotonic() - started
    hooks = start_from_universal(run, config, str(made))
    leave()
    if place.rank == 0:
        shutil.rmtree(made.parent, ignore_errors=True)
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
    section, dims = config.megasdc.checkpoint, run.dims
    found = open_universal(folder, Ranks(section.storage, run.host_group), verify=section.verify)
    state = found.shared_state
    changed = ChangedSettings(run.engine, config, None)
    problem = changed.problem_of(state, found.manifest.source_layout.data)
    raise_together(problem, found.place, f"{found.path} cannot be used, nothing was changed")
    try:
        if "loader" not in section.universal_without:
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
    what = f"{found.path} cannot continue with this data, nothing was changed"
    raise_together(problem, found.place, what)
    load_universal(run.engine, found)
    restore_counters(run, state)
    prolong_stream(run)
    seed_generators(config.megasdc.training.seed, run.step, dims.rank)
    changed.apply(run)
    if dims.rank == 0:
        _tell_universal(run, config, found)
    return {} if "hooks" in section.universal_without else changed.hook_states(state["hooks"])


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
