"""Evaluation on validation data: the same samples at an interval of steps."""

from __future__ import annotations

import logging
import math
import time

from megasdc.data.loader import EvalLoader
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.metrics.writer import MetricsWriter

logger = logging.getLogger(__name__)


class Evaluator(Hook):
    """Evaluates every ``interval`` steps and at the end.

    Args:
        loader: the validation samples.
        writer: where rank 0 writes; None on other ranks.
    """

    def __init__(self, loader: EvalLoader, interval: int, writer: MetricsWriter | None) -> None:
        self.loader = loader
        self.interval = interval
        self.writer = writer

    def after_step(self, run: Run, result: StepResult) -> None:
        """Evaluate when it is due."""
        if run.step % self.interval and run.step < run.steps:
            return
        run.enter("EVALUATION")
        start = time.perf_counter()
        loss = run.engine.evaluate(iter(self.loader), len(self.loader))
        seconds = time.perf_counter() - start
        run.enter("BETWEEN")
        run.paused_s += seconds
        run.results["eval/loss"] = loss
        if self.writer is not None:
            values = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), "time/eval_s": seconds}
            self.writer.write(run.step, values)
            logger.info("step %d | eval loss %.4f | perplexity %.2f", run.step, loss, values["eval/perplexity"])
