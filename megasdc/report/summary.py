"""What did a run come to? A short summary from its folder, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megasdc.config import parse_config
from megasdc.data.manifest import Manifest
from megasdc.errors import MegasdcError
from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from megasdc.study.log import STUDY_FOLDER


@dataclass(frozen=True)
class RunSummary:
    """Where a run began and ended.

    Args:
        run_dir: its folder.
        steps: last step reported.
        planned_steps: steps of the whole run.
        first_loss: mean loss of the first reported window, nats.
        last_loss: mean loss of the last reported window, nats.
        eval_loss: last evaluation; null if there was none.
        unigram_entropy: entropy of the training tokens without context, nats; what a model that knows only how
            frequent each token is would reach. Null for a blend, whose frequencies no manifest holds, and if the data
            have gone.
        tokens: tokens used.
        tokens_per_s: median over the reported windows, all ranks.
        skipped_steps: steps that the optimizer did not take.
        resumed_from: steps that the run resumed from.
        checkpoints: folders of the checkpoints that are kept.
    """

    run_dir: str
    steps: int
    planned_steps: int
    first_loss: float
    last_loss: float
    eval_loss: float | None
    unigram_entropy: float | None
    tokens: int
    tokens_per_s: float
    skipped_steps: int
    resumed_from: list[int]
    checkpoints: list[str]


def summarize(run_dir: Path | str) -> RunSummary:
    """Read a run folder.

    Raises:
        MegasdcError: the folder holds no run, or nothing was reported yet.
    """
    folder = Path(run_dir)
    resolved = folder / "resolved.json"
    rows = read_metrics(folder)
    trained = [row for row in rows if "train/loss" in row]
    if (folder / STUDY_FOLDER).is_dir():
        raise MegasdcError(f"{folder} holds a study; give one of its folders replica_K, or use megasdc study")
    if not resolved.exists() or not trained:
        raise MegasdcError(f"{folder} holds no run that has reported a step; train one with megasdc launch")
    sections = parse_config(json.loads(resolved.read_text(encoding="utf-8")), source=str(resolved)).megasdc
    evals = [row["eval/loss"] for row in rows if "eval/loss" in row]
    rates = sorted(row["speed/tokens_per_s"] for row in trained)
    checkpoints = Path(sections.checkpoint.folder or folder / "checkpoints")
    resumed = {event.step for event in read_events(folder, kind="resume", name="checkpoint") if event.step is not None}
    return RunSummary(
        run_dir=str(folder),
        steps=trained[-1]["step"],
        planned_steps=sections.training.steps,
        first_loss=trained[0]["train/loss"],
        last_loss=trained[-1]["train/loss"],
        eval_loss=evals[-1] if evals else None,
        unigram_entropy=None if sections.data.blend else _unigram_entropy(Path(sections.data.path)),
        tokens=trained[-1]["train/tokens"],
        tokens_per_s=rates[len(rates) // 2],
        skipped_steps=trained[-1]["train/skipped_steps"],
        resumed_from=sorted(resumed),
        checkpoints=sorted(str(path) for path in checkpoints.glob("step_*")),
    )


def _unigram_entropy(data: Path) -> float | None:
    try:
        return Manifest.load(data).unigram_entropy_nats
    except MegasdcError:
        return None


def render(summary: RunSummary) -> str:
    """The summary as text for a terminal."""
    lines = [
        f"run folder        {summary.run_dir}",
        f"steps             {summary.steps} of {summary.planned_steps}"
        + (f" ({summary.skipped_steps} skipped)" if summary.skipped_steps else ""),
        f"training loss     {summary.first_loss:.3f} -> {summary.last_loss:.3f} nats per token",
    ]
    if summary.eval_loss is not None:
        lines.append(f"validation loss   {summary.eval_loss:.3f} nats per token")
    if summary.unigram_entropy is not None:
        reached = summary.eval_loss if summary.eval_loss is not None else summary.last_loss
        better = summary.unigram_entropy - reached
        lines.append(
            f"against frequency {abs(better):.3f} nats {'better' if better >= 0 else 'worse'} than knowing token "
            f"frequencies alone ({summary.unigram_entropy:.3f})"
        )
    lines.append(f"speed             {summary.tokens_per_s:,.0f} tokens/s, {summary.tokens:,} tokens in all")
    if summary.resumed_from:
        lines.append(f"resumed from step {', '.join(map(str, summary.resumed_from))}")
    lines.append(f"checkpoints       {', '.join(summary.checkpoints) or 'none'}")
    return "\n".join(lines)
