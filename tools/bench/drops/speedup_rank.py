"""One rank of the speed-up benchmark.

The first run has no threshold; from its steps come the thresholds of others. Those, one without a threshold and one
that chooses its own then take steps in turn.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megasdc.engine.run import Run
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.run_ranks import Messages
from megasdc.train.main import set_up_logging
from tools.bench.drops.run import build_drop_run, drop_compute_of, end_rank, start_rank, train_in_turn
from tools.bench.drops.speedup import AUTO, NEVER, options_of
from tools.bench.drops.speedup_scores import choose_thresholds, recorded_steps


def measure(request: dict[str, Any], messages: Messages) -> None:
    """Make all runs, and report folder, threshold and seconds of steps of each.

    Args:
        request: options, and where runs write.
        messages: where to report.
    """
    options, folder = options_of(request), Path(request["folder"])
    dims = start_rank()
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        messages.send(done=done)

    def build(name: str, threshold: float | str, **changes: Any) -> Run:
        return build_drop_run(options.config(folder / name, threshold, **changes), dims, options.gpt.vocab)

    before = build("before", NEVER, steps=options.first.stop, seed=options.seed + 1)
    train_in_turn([before], count)
    steps = recorded_steps(before.folder, options.first) if dims.rank == 0 else None
    taus = gather_objects(None if steps is None else choose_thresholds(steps, options.drop_rates, options.sigmas))[0]
    assert taus is not None, "rank 0 chose them"
    runs = [build(NEVER, NEVER), *(build(f"tau_{number}", tau) for number, tau in enumerate(taus)), build(AUTO, AUTO)]
    for run, walls_s in zip(runs, train_in_turn(runs, count), strict=True):
        tau_s = drop_compute_of(run).state_dict()["tau_s"]
        messages.send(done=done, folder=str(run.folder), walls_s=walls_s, tau_s=tau_s)
    end_rank()


def main() -> None:
    """Run the request of the command line."""
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    measure(json.loads(sys.argv[1]), messages)


if __name__ == "__main__":
    main()
