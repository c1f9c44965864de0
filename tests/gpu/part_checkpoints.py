"""Is a run that stopped and went on the run that did not stop, bit by bit?"""

from __future__ import annotations

from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.part_training import LAYOUTS
from gpu.record import Recorder
from gpu.setting import precision

STEADY = {"determinism__enabled": True, "checkpoint__interval": 3, "checkpoint__keep_last": 0}


def checkpoints(recorder: Recorder, crew: Crew) -> None:
    """Six steps against three and three more, in processes of their own; also after a kill without warning."""
    bench = Bench(recorder, crew)
    kinds = ("fp32", "bf16", "fp16") if recorder.on_gpu else ()
    cases: dict[str, tuple[dict[str, Any], int]] = {f"one rank {kind}": (precision(kind), 1) for kind in kinds}
    layouts = ("tp2", "pp2", "dp2") if recorder.on_gpu else ("dp2",)
    kind = "bf16"
    cases |= {f"{layout} {kind}": ({**precision(kind), **LAYOUTS[layout]}, 2) for layout in layouts}
    killed = [{"kind": "sigkill", "phase": "backward", "steps": [5, 5], "rank": 0}]
    worlds, first = {}, {}
    for name, (changes, ranks) in cases.items():
        short = name.replace(" ", "_")
        worlds[f"{name} whole"] = bench.ranks(bench.config(f"{short}_whole", **STEADY, **changes), ranks)
        config = bench.config(f"{short}_parts", **STEADY, **changes)
        worlds[f"{name} first part"] = bench.ranks(config, ranks, "megasdc.training.stop_step=3")
        first[name] = (config, ranks)
    bench.train(worlds)
    seconds = {f"{name} second part": bench.ranks(config, ranks) for name, (config, ranks) in first.items()}
    if recorder.on_gpu:
        # An injected kill comes once, so the second start of the same configuration goes on past it.
        config = bench.config("killed", **STEADY, **precision(kind), process_faults=killed)
        (ended,) = bench.crew.run(bench.ranks(config, 1), 100.0)
        recorder.check("a rank is killed in step 5", ended.code == -9, str(ended))
        seconds["after the kill"] = bench.ranks(config, 1)
    bench.train(seconds)
    pairs = {}
    for name in cases:
        short = name.replace(" ", "_")
        losses = bench.losses(f"{short}_whole"), bench.losses(f"{short}_parts")
        recorder.check(f"{name}: same losses", len(losses[0]) == 6 and losses[0] == losses[1], f"{losses}")
        pairs[f"{name}: same bits"] = tuple(
            bench.folder / f"{short}_{how}" / "checkpoints" / "step_00000006" for how in ("whole", "parts")
        )
    if recorder.on_gpu:
        pairs["after a kill: same bits"] = tuple(
            bench.folder / name / "checkpoints" / "step_00000006" for name in (f"one_rank_{kind}_whole", "killed")
        )
    bench.compare(pairs)  # type: ignore[arg-type]
