"""Saving checkpoints, the content besides DeepSpeed's part, and resuming a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.checkpoint.aside import leave_behind
from megasdc.checkpoint.load import load_checkpoint
from megasdc.checkpoint.load_universal import OpenUniversal, load_universal, open_universal
from megasdc.checkpoint.manifest import installed_versions
from megasdc.checkpoint.places import Problem, Ranks, raise_together
from megasdc.checkpoint.resume import find_checkpoint
from megasdc.checkpoint.retention import Retention
from megasdc.checkpoint.save import SavedState, save_checkpoint
from megasdc.config import RunConfig, StudySection
from megasdc.data.manifest import Manifest
from megasdc.data.position import Position, merge_positions, position_for
from megasdc.determinism import capture_rng, restore_rng, seed_generators
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, is_stateful
from megasdc.engine.run import Run
from megasdc.errors import CheckpointError
from megasdc.metrics.writer import MetricsWriter, cut_back, set_aside
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.model.universal import UNIVERSAL_INFO_KEY, universal_info
from megasdc.parallel.collectives import gather_objects
from megasdc.train.changed_settings import ChangedSettings

logger = logging.getLogger(__name__)


def checkpoint_folder(config: RunConfig) -> Path:
    """Folder of a run's checkpoints."""
    sections = config.megasdc
    return Path(sections.checkpoint.folder or Path(sections.logging.run_dir) / "checkpoints")


class Saver(Hook):
    """Saves every ``checkpoint.interval`` steps and when the run ends or stops.

    Each checkpoint stores the resolved configuration, and the checksum of the tokenizer that the data were prepared
    with. ``before_save`` is called on all ranks; ``writer`` is None on other ranks than 0, ``study`` without a study.
    """

    def __init__(
        self,
        config: RunConfig,
        writer: MetricsWriter | None,
        tokenizer_checksum: str,
        before_save: Callable[[Run], None] | None = None,
        study: StudySection | None = None,
    ) -> None:
        self.config = config
        self.before_save = before_save
        self.study = study
        self.tokenizer_checksum = tokenizer_checksum
        self.section = config.megasdc.checkpoint
        self.folder = checkpoint_folder(config)
        self.writer = writer

    def after_step(self, run: Run, result: StepResult) -> None:
        """Save when due."""
        due = self.section.interval and run.step % self.section.interval == 0
        if not due and not run.is_last_step:
            return
        run.enter("SAVE")
        if self.before_save is not None:
            self.before_save(run)
        saved = save_checkpoint(
            run.engine,
            self.folder,
            run.step,
            SavedState(self._shared_state(run), {"rng": capture_rng()}, self._client_state(run)),
            run.dims,
            Ranks(self.section.storage, run.host_group, run.events),
            Retention(self.section.keep_last, self.section.keep_every),
        )
        run.enter("BETWEEN")
        run.passed_over.discard(run.step)
        run.paused_s += saved.duration_s
        if self.writer is not None:
            self.writer.write(run.step, {"checkpoint/save_s": saved.duration_s, "checkpoint/bytes": saved.size_bytes})
            logger.info("step %d | saved %s in %.1f s", run.step, saved.path, saved.duration_s)

    def _client_state(self, run: Run) -> dict[str, Any]:
        model = self.config.megasdc.model
        padded = padded_vocab_size(run.loader.dataset.vocab_size, model.vocab_multiple)
        return {UNIVERSAL_INFO_KEY: universal_info(model, padded)}

    def _shared_state(self, run: Run) -> dict[str, Any]:
        # The first stage reads every micro-batch; stages in the middle read none.
        states = gather_objects(run.loader.state_dict() if run.dims.is_first_stage else None, run.host_group)
        return {
            "step": run.step,
            "tokens": run.tokens,
            "samples": run.samples,
            "skipped_steps": run.skipped_steps,
            "loader": merge_positions([state for state in states if state is not None]),
            "vocab_size": run.loader.dataset.vocab_size,
            "tokenizer_checksum": self.tokenizer_checksum,
            "hooks": {type(hook).__name__: hook.state_dict() for hook in run.hooks if is_stateful(hook)},
            "config": self.config.resolved(),
            "study": None if self.study is None else self.study.model_dump(mode="json"),
        }

    def close(self) -> None:
        """Close the metrics file; this is the last hook that writes to it."""
        if self.writer is not None:
            self.writer.close()


def resume(
    run: Run,
    config: RunConfig,
    agree: Callable[[int], int | None] | None = None,
    study: StudySection | None = None,
) -> dict[str, Any]:
    """Resume from the newest usable checkpoint, if there is one and the configuration asks for it.

    Without one the run starts from the universal checkpoint that the configuration names, or from step 0. Changes of
    the configuration since the checkpoint are refused, or applied from the next step on and reported.

    Args:
        run: at step 0; on return at the step that was loaded.
        agree: called with the step of the checkpoint found, 0 for none; returns None, or the newest step to search
            again; None: no agreement needed.
        study: that the run is a replica of; None: none.

    Returns:
        States of the hooks by class name, for hooks that are not built yet; empty at step 0.

    Raises:
        CheckpointError: none is usable, one is of another model, layout or configuration, or the configuration demands
            what is not there.

    Collective: all ranks of the world.
    """
    section = config.megasdc.checkpoint
    folder, ranks = checkpoint_folder(config), Ranks(section.storage, run.host_group, run.events)
    at_most: int | None = None
    while True:
        found = find_checkpoint(
            folder,
            run.dims,
            ranks,
            verify=section.verify,
            resume="auto" if section.universal and section.resume == "must" else section.resume,
            require_verified=section.require_verified,
            at_most=at_most,
        )
        at_most = None if agree is None else agree(0 if found is None else found.step)
        if at_most is None:
            break
    if found is None:
        leave_behind(folder, None, ranks)
        hooks = start_from_universal(run, config, section.universal) if section.universal is not None else {}
        if run.dims.rank == 0 and (kept := set_aside(run.folder)) is not None:
            run.events.emit("start", "metrics_set_aside", path=str(kept))
            logger.warning("no checkpoint in %s, so the run starts at step 1; old metrics are now in %s", folder, kept)
        return hooks
    changed = ChangedSettings(run.engine, config, study)
    data = found.manifest.layout.data
    loaded = load_checkpoint(run.engine, found, run.dims, ranks, check=lambda saved: changed.check(saved, data))
    leave_behind(folder, found, ranks)
    run.passed_over = set(found.skipped) - set(found.candidates)
    state = loaded.shared_state
    _restore_counters(run, state)
    run.loader.position = position_for(state["loader"], run.dims.dp_rank, run.dims.data, run.loader.dataset)
    _prolong_stream(run)
    restore_rng(loaded.rank_state["rng"])
    changed.apply(run)
    if run.dims.rank == 0:
        dropped = cut_back(run.folder, run.step)
        run.events.emit("resume", "metrics_cut_back", step=run.step, lines=dropped)
        logger.info("resumed from %s", found.path)
        tell_other_versions(run, found.manifest.versions)
        tell_quantized(run, found.manifest.quantized_moments_bits)
    return changed.hook_states(state["hooks"])


def tell_other_versions(run: Run, saved: dict[str, str]) -> None:
    """Warn that the checkpoint was saved by other versions, so results may differ in their bits."""
    here = installed_versions()
    other = {
        name: [version, here[name]] for name, version in sorted(saved.items()) if here.get(name, version) != version
    }
    if other:
        text = "; ".join(f"{name} {then}, here {now}" for name, (then, now) in other.items())
        run.events.emit("resume", "other_versions", step=run.step, versions=other)
        logger.warning("saved with %s: from here on results may be rounded differently than with those versions", text)


def tell_quantized(run: Run, bits: int | None) -> None:
    """Warn that the optimizer's moments are not those that were saved; None: they are."""
    if bits is not None:
        run.events.emit("resume", "quantized_moments", step=run.step, bits=bits)
        logger.warning(
            "the optimizer's moments were quantized to %d bits in the archive: the run does not continue bit for bit",
            bits,
        )


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
    position = Position()
    try:
        if "loader" not in section.universal_without:
            position = position_for(state["loader"], dims.dp_rank, dims.data, run.loader.dataset)
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
    _restore_counters(run, state)
    run.loader.position = position
    _prolong_stream(run)
    seed_generators(config.megasdc.training.seed, run.step, dims.rank)
    changed.apply(run)
    if dims.rank == 0:
        _tell_universal(run, config, found)
    return {} if "hooks" in section.universal_without else changed.hook_states(state["hooks"])


def _restore_counters(run: Run, state: dict[str, Any]) -> None:
    run.step, run.tokens, run.samples = state["step"], state["tokens"], state["samples"]
    run.skipped_steps = state["skipped_steps"]


def _prolong_stream(run: Run) -> None:
    """Extend the stream to the run's end, also where earlier steps took more samples than this run's do."""
    own = max(0, run.steps - run.step) * run.engine.train_batch_size() // run.dims.data
    run.loader.dataset.prolong(run.loader.position.end_after(own, run.dims.data))


def _tell_universal(run: Run, config: RunConfig, found: OpenUniversal) -> None:
    """Event and log lines of rank 0."""
    manifest, without = found.manifest, config.megasdc.checkpoint.universal_without
    batch, saved_batch = run.engine.train_batch_size(), found.shared_state["config"].get("train_batch_size")
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
