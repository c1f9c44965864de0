"""Is a run that stopped and went on the run that did not stop, bit by bit?"""

from __future__ import annotations

from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.part_training import LAYOUTS
from gpu.record import Recorder
from gpu.setting import precision

STEADY = {"determinism__enabled": True, "checkpoint__interval": 3, "checkpoint__keep_last": 0}


KILLED = [{"kind": "sigkill", "phase": "backward", "steps": [5, 5], "rank": 0}]
LAST = "checkpoints/step_00000006"


def checkpoints(recorder: Recorder, crew: Crew) -> None:
    """Six steps against three and three more, in processes of their own; also after a kill without warning.

    One case after the other, the most important first, so that a part whose time is up has shown some.
    """
    bench = Bench(recorder, crew)
    cases: list[tuple[str, dict[str, Any], int]] = [("dp2 bf16", {**precision("bf16"), **LAYOUTS["dp2"]}, 2)]
    if recorder.on_gpu:
        ranks = [(f"one rank {kind}", precision(kind), 1) for kind in ("bf16", "fp32", "fp16")]
        layouts = [(f"{name} bf16", {**precision("bf16"), **LAYOUTS[name]}, 2) for name in ("tp2", "pp2", "dp2")]
        cases = [ranks[0], *layouts, *ranks[1:]]
    for name, changes, count in cases:
        with recorder.attempt(name):
            _resume(bench, name, {**STEADY, **changes}, count)


def _resume(bench: Bench, name: str, changes: dict[str, Any], ranks: int) -> None:
    """One case; of one rank in bf16 also a run that is killed, and goes on."""
    recorder, short = bench.recorder, name.replace(" ", "_")
    whole, parts = (bench.config(f"{short}_{how}", **changes) for how in ("whole", "parts"))
    first = bench.ranks(parts, ranks, "megasdc.training.stop_step=3")
    worlds = {f"{name} whole": bench.ranks(whole, ranks), f"{name} first part": first}
    again = {f"{name} second part": bench.ranks(parts, ranks)}
    pairs = {f"{name}: same bits": (bench.folder / f"{short}_whole" / LAST, bench.folder / f"{short}_parts" / LAST)}
    if name == "one rank bf16":
        # An injected kill comes once, so the second start of the same configuration goes on past it.
        config = bench.config("killed", **changes, process_faults=KILLED)
        (ended,) = bench.crew.run(bench.ranks(config, 1), 100.0)
        recorder.check("a rank is killed in step 5", ended.code == -9, str(ended))
        again["after the kill"] = bench.ranks(config, 1)
        pairs["after a kill: same bits"] = (bench.folder / f"{short}_whole" / LAST, bench.folder / "killed" / LAST)
    bench.train(worlds)
    bench.train(again)
    losses = bench.losses(f"{short}_whole"), bench.losses(f"{short}_parts")
    recorder.check(f"{name}: same losses", len(losses[0]) == 6 and losses[0] == losses[1], f"{losses}")
    bench.compare(pairs)
