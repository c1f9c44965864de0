"""One rank of the campaign on gradient bounds.

Groups are made once; each run builds its engine anew. The first argument is the request as JSON, the second, on rank 0
alone, the file descriptor that messages go to.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasdc.config import check_layout
from megasdc.config.sections.optimizer_hooks import BOUNDS
from megasdc.data.dataset import build_datasets
from megasdc.data.loader import EvalLoader, MicroBatchLoader
from megasdc.data.manifest import Manifest
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.errors import NonFiniteError
from megasdc.events import EventLog
from megasdc.faults.stored import StateFaults
from megasdc.metrics.writer import MetricsWriter, read_metrics
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.run_ranks import Messages
from megasdc.train.build import prepare_cpu, prepare_run_folder
from megasdc.train.build_engine import build_training_engine
from megasdc.train.evaluate import Evaluator
from megasdc.train.faults import build_injector
from megasdc.train.gradient_bounds import GradientBounds
from megasdc.train.loop import train
from megasdc.train.main import set_up_logging
from megasdc.train.process.startup import StartClock
from megasdc.train.stop import SkipWatch
from tools.bench.bounds.gradient_sizes import GradientSizes
from tools.bench.bounds.training_scores import BoundRun
from tools.bench.bounds.training_setup import GRACE_STEPS, REPLICAS, SHARES, Setting, from_request, run_config

MEASURED_INTERVAL = 5
"""Steps from one healthy gradient whose elements are counted to the next."""


class BoundCampaign:
    """One rank's side of all runs.

    Args:
        request: see ``tools.bench.bounds.training_setup.as_request``.
        messages: gets each run as it ends.

    Collective: all ranks of the world.
    """

    def __init__(self, request: dict[str, Any], messages: Messages) -> None:
        self._options, self._data, self._folder = from_request(request)
        self._messages = messages
        self._manifest = Manifest.load(self._data)
        prepare_cpu(1)
        groups.init_process_group(600.0)
        self._dims = groups.init_model_parallel(1, 1, 600.0)
        self._sizes = GradientSizes(GRACE_STEPS + 1, MEASURED_INTERVAL)
        self._done = 0

    def run_all(self) -> None:
        """Make all runs; the healthy ones without a bound come first, since thresholds are chosen by them."""
        seeds = range(1, self._options.seeds + 1)
        for seed in seeds:
            self._run(Setting(), seed, faulty=False, measured=True)
        self._sizes.reduce()
        self._messages.send(sizes=self._quantiles())
        for seed in seeds:
            self._run(Setting(), seed, faulty=True)
        for setting in self._settings():
            for faulty in (False, True):
                for seed in seeds:
                    self._run(setting, seed, faulty=faulty)

    def _quantiles(self) -> dict[str, dict[str, float]]:
        return {
            kind: {name: self._sizes.of[kind].exceeded_by(share) for name, share in SHARES.items()} for kind in BOUNDS
        }

    def _settings(self) -> list[Setting]:
        """All bounds, with the thresholds that were given or those that healthy gradients suggest."""
        found = []
        for kind, suggested in self._quantiles().items():
            given = self._options.thetas(kind)
            chosen = suggested.items() if given is None else [("", theta) for theta in given]
            found += [Setting(kind, theta, name) for name, theta in chosen]
        return found

    def _run(self, setting: Setting, seed: int, *, faulty: bool, measured: bool = False) -> None:
        """Train once from new weights, evaluate, and send what came out."""
        self._done += 1
        start = time.monotonic()
        run, harmed = self._train(self._folder / f"run_{self._done}", setting, seed, faulty, measured)
        rows = read_metrics(run.folder) if self._dims.rank == 0 else []
        shares = [row["bounds/share"] for row in rows if "bounds/share" in row]
        found = BoundRun(
            setting=setting,
            seed=seed,
            faulty=faulty,
            loss=run.results.get("eval/loss", math.nan),
            steps=run.step,
            skipped=run.skipped_steps,
            share=shares[-1] if shares else None,
            faults=harmed,
            seconds=time.monotonic() - start,
        )
        self._messages.send(run=asdict(found))
        del run
        gc.collect()  # an engine and its hooks hold each other

    def _train(self, folder: Path, setting: Setting, seed: int, faulty: bool, measured: bool) -> tuple[Run, int]:
        """The run, ended, and how many times a gradient was harmed."""
        config = run_config(self._options, self._data, prepare_run_folder(folder), setting, seed, faulty=faulty)
        sections, dims = config.megasdc, self._dims
        layout = check_layout(config, REPLICAS)
        vocab = self._manifest.tokenizer.vocab_size
        engine = build_training_engine(config, layout, dims, vocab, StartClock(0.0))
        samples, steps = sections.training.eval_samples, sections.training.steps
        training, validation = build_datasets(sections.data, vocab, steps * layout.train_batch_size, samples)
        assert validation is not None, "validation samples were asked for"
        loader = MicroBatchLoader(training, layout.micro_batch_size, dims.dp_rank, dims.data)
        events = EventLog(folder, dims.rank)
        run = Run(folder, dims, engine, loader, loader, events, steps, dist.group.WORLD)
        injector = build_injector(sections, run)  # of phase collective alone: nothing to observe
        faults: list[Hook] = [] if injector is None else [StateFaults(engine, injector)]
        sizes: list[Hook] = [self._sizes] if measured else []
        writer = MetricsWriter(folder) if dims.rank == 0 else None
        bounds = sections.optimizer_hooks
        bounding: list[Hook] = [GradientBounds(bounds, run, steps, writer)] if bounds else []
        eval_loader = EvalLoader(validation, layout.micro_batch_size, dims.dp_rank, dims.data, samples)
        ending = [SkipWatch(sections.training.max_skipped_steps), Evaluator(eval_loader, steps, writer)]
        run.hooks = [*faults, *sizes, *bounding, *ending]
        try:
            train(run)
        except NonFiniteError:
            run.results.clear()  # all ranks end a run that only skips steps; it has no loss
        finally:
            events.close()
            if writer is not None:
                writer.close()
        own = 0 if injector is None else sum(firing.changed > 0 for firing in injector.firings)
        return run, sum(gather_objects(own))


def main() -> None:
    """Run as a rank."""
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    BoundCampaign(json.loads(sys.argv[1]), messages).run_all()
    dist.barrier()
    groups.shutdown()


if __name__ == "__main__":
    main()
