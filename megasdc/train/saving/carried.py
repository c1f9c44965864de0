"""What every resume carries over besides the engine, whatever it goes on from."""

from __future__ import annotations

import logging
from typing import Any

from megasdc.checkpoint.formats.shared_state import uncounted_samples
from megasdc.checkpoint.manifest import installed_versions
from megasdc.common.errors import CheckpointError
from megasdc.config import RunConfig
from megasdc.data.position import stream_end
from megasdc.engine.run import Run

logger = logging.getLogger(__name__)


def restore_counters(run: Run, state: dict[str, Any]) -> None:
    """Restore step, tokens, samples, skipped steps and the last finite step from a shared state."""
    run.step, run.tokens, run.samples = state["step"], state["tokens"], state["samples"]
    run.uncounted_samples = _uncounted(run, state)
    run.skipped_steps = state["skipped_steps"]
    run.finite_step = state.get("finite_step", run.step)  # a checkpoint of an earlier version has none


def _uncounted(run: Run, state: dict[str, Any]) -> int:
    """Samples that were given up; where an earlier version saved, which does not say it, the places are believed."""
    known = state.get("uncounted_samples")
    if known is None:
        known = uncounted_samples(state)
        if run.dims.rank == 0:
            run.events.emit("resume", "place_not_known", step=state["step"], samples=state["samples"], uncounted=known)
            logger.info("an earlier version saved step %d: its place in the data cannot be compared", state["step"])
    return int(known)


def prolong_stream(run: Run) -> None:
    """Extend the stream to the run's end, also where earlier steps took more samples than this run's do."""
    own = max(0, run.steps - run.step) * run.engine.train_batch_size() // run.dims.data
    run.loader.prolong(own)


def check_skipped_samples(saved: dict[str, Any], config: RunConfig) -> None:
    """Refuse ranges of samples to skip that have changed before the position of a checkpoint.

    Args:
        saved: shared state of the checkpoint.

    Raises:
        CheckpointError: some have.
    """
    then, now = saved["config"]["megasdc"]["data"].get("skip", []), config.megasdc.data.skip
    end = stream_end(saved["loader"])
    before = [[[first, min(last, end)] for first, last in ranges if first < end] for ranges in (then, now)]
    if before[0] != before[1]:
        raise CheckpointError(
            f"megasdc.data.skip is {now}, and was {then} when the checkpoint of step {saved['step']} was saved, which "
            f"is past all samples before {end}: set what was before {end} again, or resume from an earlier checkpoint "
            "with megasdc.checkpoint.resume_at_most"
        )


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
